"""What docs/from-torchtune.md says is what the config and the command line do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from legato.cli.arguments import split_words
from legato.cli.main import build_app
from legato.config.aliases import ADVICE, ALIASES, COMPONENT_ADVICE, RECIPE_ADVICE, TORCHTUNE_ADVICE
from legato.config.explain import schema_keys
from legato.config.load import load_config
from legato.config.schema import RECIPES
from legato.errors import ConfigError
from legato.parallel.launch import split_options
from tests.helpers import documents

PAGE = (documents.ROOT / "docs" / "from-torchtune.md").read_text(encoding="utf-8")
OURS = {key.name for key in schema_keys()}


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    lines = [line for line in documents.section(PAGE, title).splitlines() if line.startswith("| ")]
    cells = [re.split(r" *(?<!\\)\| *", line.strip("| ")) for line in lines]
    return [row for row in cells if row[0] != "torchtune" and set(row[0]) != {"-"}]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def advice_on(theirs: str) -> str:
    """What an error says of a key of torchtune, alone or in a component."""
    section, _, name = theirs.rpartition(".")
    return ADVICE.get(name) or COMPONENT_ADVICE.get(section) or ADVICE[section]


KEYS = [(key, row[1]) for row in rows("Config keys") for key in words(row[0])]


def test_the_table_of_keys_was_read() -> None:
    assert len(KEYS) > 50


@pytest.mark.parametrize(("theirs", "ours"), KEYS)
def test_each_row_of_the_keys_is_what_the_config_does(theirs: str, ours: str) -> None:
    last = theirs.rpartition(".")[2]
    if ours == "the same":
        assert theirs in OURS
        return
    assert theirs not in OURS
    for key in words(ours):
        assert key in OURS
        if last in ALIASES:
            assert ".".join(ALIASES[last]) == key
        elif last != key:  # a key of a component may keep its name
            assert f"`{key}" in advice_on(theirs), f"the advice on {theirs} doesn't name {key}"
    if ours == "-":
        assert "Legato's key" not in advice_on(theirs)


def test_each_key_that_errors_give_advice_on_is_in_the_tables() -> None:
    listed = {key.rpartition(".")[2] for key, _ in KEYS} | {
        key.partition(".")[0] for key, _ in KEYS
    }
    elsewhere = {  # under "What isn't there"
        "tensor_parallel_dim", "tensor_parallel_plan", "context_parallel_dim", "profiler",
        "enable_fp8_training", "mixed_precision", "quantizer", "resize_token_embeddings",
        "log_level",
    }  # fmt: skip
    assert TORCHTUNE_ADVICE.keys() - listed == elsewhere


def test_the_recipes_are_ours_or_have_advice() -> None:
    named = [name for row in rows("Recipes") for name in words(row[0])]
    assert set(named) == {*RECIPES, *RECIPE_ADVICE}
    for row in rows("Recipes"):
        if set(words(row[0])) <= set(RECIPES):
            assert words(row[1])[0] == words(row[0])[0]


@pytest.fixture(scope="module")
def command() -> Any:
    return typer.main.get_command(build_app())


@pytest.mark.parametrize("line", [w for row in rows("Commands") for w in words(row[1])])
def test_each_command_of_ours_fits(line: str, command: Any) -> None:
    if not line.startswith("legato "):  # an option, or a variable
        assert line in ("--full", "HF_TOKEN", "--make-parents", "--no-clobber")
        return
    _, verb, *rest = shlex.split(line)
    context = command.commands[verb].make_context(verb, rest)
    if verb == "run":
        recipe, _ = split_words(split_options(context.params["words"])[1])
        assert recipe in (None, "my_recipe.py", *RECIPES)


def test_the_old_config_is_told_of_line_by_line_and_the_new_one_loads(tmp_path: Path) -> None:
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("recipe: lora_finetune_single_device\n" + theirs)
    with pytest.raises(ConfigError) as caught:
        load_config(str(old))
    told = {
        problem.split(": ")[1].removesuffix("._component_") for problem in caught.value.problems
    }
    written = yaml.safe_load(theirs)
    refused = {key for key, value in written.items() if isinstance(value, dict)}
    refused |= {"save_adapter_weights_only", "seed", "shuffle", "log_peak_memory_stats"}
    inside = {f"model.{key}" for key in written["model"]} | {"dataset.packed"}
    assert told == refused | inside - {"model._component_"}
    new.write_text(ours)
    config = load_config(str(new)).config
    assert (config.lora_rank, config.lora_alpha, config.batch_size) == (64, 128, 4)
    assert config.datasets[0].path == "yahma/alpaca-cleaned"
    # What isn't spoken of has the same meaning in both.
    same = written.keys() - refused - {"output_dir", "resume_from_checkpoint", "device"}
    assert {key: getattr(config, key) for key in same} == {key: written[key] for key in same}
