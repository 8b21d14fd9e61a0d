"""legato ls, cat and cp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legato.cli.main import main
from legato.config.catalog import HUB, SCHEMA_FILE
from legato.config.load import load_config
from tests.helpers.faults import no_file_larger_than

NAME = "smollm2/135M_lora_single_device"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ls_shows_recipes_with_their_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "config"]
    assert lines[1].split() == ["full_finetune_distributed", "gemma3/1B_full_distributed"]
    assert lines[8].split() == ["full_finetune_single_device", "gemma3/1B_full_single_device"]
    assert lines[25].split() == ["lora_finetune_single_device", "gemma3/1B_lora_single_device"]
    assert len(lines) == 39


def test_ls_json_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == [
        f"{method}_finetune_{devices}"
        for method in ("full", "lora")
        for devices in ("distributed", "single_device")
    ]
    assert NAME in shown["lora_finetune_single_device"]


def test_cat_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", NAME]) == 0
    assert capsys.readouterr().out == (HUB / f"{NAME}.yaml").read_text(encoding="utf-8")


def test_cat_of_an_unknown_name_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", "smollm2/135M_lora"]) == 2
    hint = "Did you mean smollm2/135M_lora_distributed or smollm2/135M_lora_single_device?"
    assert hint in capsys.readouterr().err


def test_cat_of_a_recipe_lists_the_configs_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", "lora_finetune_single_device"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "error: lora_finetune_single_device: is a recipe, expected a config. Its configs:"
    )
    assert f"  {NAME}" in told
    assert told[-1] == (
        "`legato cp lora_finetune_single_device my.py` makes a script of the recipe itself."
    )


def test_a_copy_is_the_same_config_and_names_the_schema_by_its_place() -> None:
    assert main(["cp", NAME, "my.yaml"]) == 0
    text = Path("my.yaml").read_text(encoding="utf-8")
    assert f"# yaml-language-server: $schema={SCHEMA_FILE}\n" in text
    ours, theirs = load_config("my.yaml").config, load_config(NAME).config
    assert ours.model_copy(update={"output_dir": theirs.output_dir}) == theirs
    assert ours.output_dir == "out/my"


def test_a_copy_into_a_folder_keeps_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").mkdir()
    assert main(["cp", NAME, "configs"]) == 0
    assert Path("configs/135M_lora_single_device.yaml").is_file()
    assert capsys.readouterr().out == "copied to configs/135M_lora_single_device.yaml\n"


def test_nothing_is_overwritten_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("mine")
    assert main(["cp", NAME, "my.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: my.yaml is there already. Choose another name, or -f to replace it\n"
    )
    assert main(["cp", "-n", NAME, "my.yaml"]) == 0
    assert capsys.readouterr().out == "my.yaml is there already; nothing copied\n"
    assert Path("my.yaml").read_text() == "mine"
    assert main(["cp", "-f", NAME, "my.yaml"]) == 0
    assert Path("my.yaml").read_text() != "mine"


def test_half_a_copy_is_none_and_what_was_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("mine")
    for name in ("my.yaml", "mine.yaml"):
        with no_file_larger_than(100):
            assert main(["cp", "-f", NAME, name]) == 1
        assert capsys.readouterr().err.startswith(f"error: {name}: File too large. Choose")
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]
    assert Path("mine.yaml").read_text() == "mine"
    Path("link.yaml").symlink_to("mine.yaml")
    assert main(["cp", "-f", NAME, "link.yaml"]) == 0
    assert Path("link.yaml").is_symlink()
    assert Path("mine.yaml").read_text() != "mine"


def test_folders_are_made_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", NAME, "a/b/my.yaml"]) == 2
    assert capsys.readouterr().err == "error: a/b: no such folder. --make-parents makes it\n"
    assert main(["cp", "--make-parents", NAME, "a/b/my.yaml"]) == 0
    assert Path("a/b/my.yaml").is_file()


def test_a_copy_needs_a_name_that_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", NAME, "my.py"]) == 2
    assert capsys.readouterr().err == "error: my.py: expected a name that ends in .yaml\n"
