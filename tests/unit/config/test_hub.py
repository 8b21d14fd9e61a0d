"""The configs that ship with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.config.catalog import HUB, SCHEMA_FILE, hub_names, recipe_of
from legato.config.load import load_config

FAMILIES = (
    "gemma3/1B",
    "llama2/7B",
    "llama3/8B",
    "llama3_2/1B",
    "mistral/7B",
    "qwen3/0.6B",
    "smollm2/135M",
)


def test_every_family_has_full_and_lora() -> None:
    assert hub_names() == sorted(
        f"{family}_{method}_single_device" for family in FAMILIES for method in ("full", "lora")
    )


def test_every_file_is_in_the_catalog() -> None:
    files = [path for path in HUB.rglob("*") if path.is_file()]
    assert len(files) == len(hub_names()) > 0


@pytest.mark.parametrize("name", hub_names())
def test_a_hub_config_is_valid_and_named_for_what_it_does(name: str) -> None:
    loaded = load_config(name)
    method = "lora" if "_lora_" in name else "full"
    assert loaded.config.recipe == f"{method}_finetune_single_device" == recipe_of(name)
    assert loaded.config.output_dir == f"out/{name}"
    assert loaded.name == name.split("/")[1]


@pytest.mark.parametrize("name", hub_names())
def test_a_hub_config_is_complete_short_and_commented(name: str) -> None:
    text = (HUB / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert "compile: false" in lines
    assert len(lines) <= 40
    assert all(len(line) <= 100 for line in lines)
    assert text.count("#") >= 8
    assert text.isascii()
    (modeline,) = [line for line in lines if line.startswith("# yaml-language-server: $schema=")]
    place = Path(HUB / f"{name}.yaml").parent / modeline.partition("=")[2]
    assert place.resolve() == SCHEMA_FILE


@pytest.mark.parametrize("name", hub_names())
def test_the_command_of_torchtunes_users_fits_every_hub_config(name: str) -> None:
    recipe = "lora_finetune_single_device" if "_lora_" in name else "full_finetune_single_device"
    words = ["device=cuda:0", "compile=True", "max_steps_per_epoch=10", "epochs=1"]
    config = load_config(name, words, recipe=recipe).config
    assert (config.device, config.compile, config.max_steps_per_epoch) == ("cuda:0", True, 10)
