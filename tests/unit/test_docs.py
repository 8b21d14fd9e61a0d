"""What the README says is true: its commands run, its keys exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import BaseModel

from legato.cli.main import VERBS, main
from legato.config.schema import DatasetConfig, RunConfig
from legato.parallel.launch import split_options
from tests.helpers import tiny

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)


class Block(NamedTuple):
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]


def commands(text: str) -> list[str]:
    """Lines of blocks without a language that begin like a command, without their comments."""
    lines = [
        line for block in blocks(text) if not block.language for line in block.text.split("\n")
    ]
    known = ("git ", "make ", "source ", "legato ", "pytest ", "pip ")
    return [line.split("  #")[0].strip() for line in lines if line.startswith(known)]


def one_block(text: str, language: str) -> str:
    (found,) = [block.text for block in blocks(text) if block.language == language]
    return found


class Feature(NamedTuple):
    name: str
    keys: list[str]


def features() -> Iterator[Feature]:
    table = README.partition("## Features")[2]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in ("feature", "---"):
            yield Feature(cells[0], re.findall(r"`([\w.]+)`", cells[1]))


def names_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def test_every_key_of_the_features_table_is_in_the_schema() -> None:
    rows = list(features())
    assert len(rows) > 10
    assert all(row.keys for row in rows)
    known = names_of(RunConfig) | names_of(DatasetConfig)
    assert {key for row in rows for key in row.keys} - known == set()


def test_every_key_of_the_schema_is_in_the_features_table() -> None:
    named = {key for row in features() for key in row.keys}
    assert names_of(RunConfig) - named == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_local_link_leads_to_a_file(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    folder = (ROOT / document).parent
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_and_verb_that_is_named_exists(document: str) -> None:
    found = commands((ROOT / document).read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {line.split()[1] for line in found if line.startswith("make ")}
    assert targets >= {"demo", "test"}
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.M)] == []
    verbs = {line.split()[1] for line in found if line.startswith("legato ")}
    assert verbs - set(VERBS) == set()


def test_every_option_in_the_guide_to_several_processes_is_one_of_the_command() -> None:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    # The batch system's own are lines of a script that it reads.
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#SBATCH"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--config", "--debug"}
    assert {"--nproc-per-node", "--max-restarts", "--shutdown-timeout"} <= named
    assert [name for name in named if not split_options([f"{name}=1"])[0]] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in commands(README)
    assert "\nmake check test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_readmes_commands_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # In place of the download, which needs a network: tests/unit/models has it.
    tiny.write_model(tmp_path / "smollm2")
    tiny.write_orders(tmp_path / "orders.jsonl")
    (tmp_path / "my.yaml").write_text(one_block(README, "yaml"), encoding="utf-8")

    lines = [line for line in commands(README) if line.startswith("legato ")]
    assert len(lines) == 12
    for line in lines:
        words = shlex.split(line)[1:]
        if words[0] == "download":
            continue
        code = main(words)
        told = capsys.readouterr()
        assert code == 0, f"{line}\n{told.out}\n{told.err}"

    # 24 rows, batch 8: 3 steps an epoch, 9 at first and 15 with epochs=5.
    steps = {entry.name for entry in Path("out/my").glob("step_*")}
    assert steps == {"step_4", "step_8", "step_9", "step_12", "step_15"}
    assert Path("llama.yaml").is_file()

    names: dict[str, object] = {}
    exec(one_block(README, "python"), names)  # the README's own lines
    assert names["model"].config.num_hidden_layers == 2  # type: ignore[attr-defined]
    assert Path("out/my/latest").resolve().name == "step_15"
