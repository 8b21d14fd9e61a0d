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
STREAMING = ("smollm2/135M_full_streaming_single_device",)
LOW_MEMORY = (
    "llama2/7B_full_low_memory_single_device",
    "llama3/8B_full_low_memory_single_device",
)


def recipe_for(name: str) -> str:
    _, method, devices = name.split("/")[1].split("_", 2)
    devices = devices.removeprefix("streaming_").removeprefix("low_memory_")
    return f"{method.removeprefix('q')}_finetune_{devices}"


def test_every_family_has_full_and_lora_for_one_device_and_for_many_and_qlora() -> None:
    every = [
        f"{family}_{kind}"
        for family in FAMILIES
        for kind in (
            *("full_single_device", "lora_single_device", "qlora_single_device"),
            *("full_distributed", "lora_distributed"),
        )
    ]
    assert hub_names() == sorted([*every, *STREAMING, *LOW_MEMORY])


def test_every_file_is_in_the_catalog() -> None:
    files = [path for path in HUB.rglob("*") if path.is_file()]
    assert len(files) == len(hub_names()) > 0


@pytest.mark.parametrize("name", hub_names())
def test_a_hub_config_is_valid_and_named_for_what_it_does(name: str) -> None:
    loaded = load_config(name)
    assert loaded.config.recipe == recipe_for(name) == recipe_of(name)
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


# A stream has no epochs: its length is max_steps.
@pytest.mark.parametrize("name", [n for n in hub_names() if n not in STREAMING])
def test_the_command_of_torchtunes_users_fits_every_hub_config(name: str) -> None:
    recipe = recipe_for(name)
    words = ["device=cuda:0", "compile=True", "max_steps_per_epoch=10", "epochs=1"]
    config = load_config(name, words, recipe=recipe).config
    assert (config.device, config.compile, config.max_steps_per_epoch) == ("cuda:0", True, 10)


@pytest.mark.parametrize("name", [n for n in hub_names() if "_qlora_" in n])
def test_qlora_is_lora_on_a_quantized_base(name: str) -> None:
    quantized = load_config(name).config
    plain = load_config(name.replace("_qlora_", "_lora_")).config
    assert quantized.quantize_base == "nf4"
    alike = {"quantize_base", "output_dir"}
    assert quantized.model_dump(exclude=alike) == plain.model_dump(exclude=alike)


@pytest.mark.parametrize("name", [n for n in hub_names() if n.endswith("_distributed")])
def test_many_devices_take_the_step_that_one_takes(name: str) -> None:
    """The same rows a step, so that the learning rate fits."""
    many = load_config(name).config
    one = load_config(name.replace("_distributed", "_single_device")).config
    num_devices = 2 if name.startswith("smollm2/") else 8
    rows = one.batch_size * one.gradient_accumulation_steps
    assert many.batch_size * many.gradient_accumulation_steps * num_devices == rows
    text = (HUB / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"# {rows} rows a step on {num_devices} devices" in text
    alike = {"recipe", "batch_size", "gradient_accumulation_steps", "output_dir", "dp_shard"}
    assert many.model_dump(exclude=alike) == one.model_dump(exclude=alike)
