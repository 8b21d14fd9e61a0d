"""``legato data show``, as a person and as a script read it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from legato.cli.main import main

ROWS = [
    {"prompt": "Hi", "completion": "Hello."},
    {"prompt": "Hi", "completion": "Hello."},
    {"prompt": "Bye", "completion": "x" * 90},
]


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = {
        "recipe": "full_finetune_single_device",
        "model": str(tiny_model_dir),
        "datasets": [{"path": str(tmp_path / "rows.jsonl")}],
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
        "max_seq_len": 64,
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def test_the_page_shows_samples_counts_lengths_and_what_was_left_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", str(config), "-n", "1"]) == 0
    shown = capsys.readouterr().out
    rows = str(config.with_name("rows.jsonl"))
    sample, _, account = shown.partition("\n\n")
    first = sample.splitlines()[0]
    assert first in (
        "--- rows.jsonl:1: 28 tokens, 7 trained",
        "--- rows.jsonl:2: 28 tokens, 7 trained",
    )
    assert sample.splitlines()[1:] == [
        "<|im_start|>user",
        "Hi<|im_end|>",
        "<|im_start|>assistant",
        "[[Hello.<|im_end|>]]",
    ]
    assert account.splitlines() == [
        f"{rows}: prompt_completion (detected from its columns), 3 rows, 2 samples, 56 tokens, "
        "25% of them trained",
        f"{rows}: longer than max_seq_len, dropped: 1 (rows.jsonl:3)",
        f"warning: {rows}: 1 of 3 samples longer than max_seq_len, dropped; max_seq_len is 64",
        "duplicates: 1 sample equal to an earlier one (rows.jsonl:2 = rows.jsonl:1)",
        "tokens per slot: 1.00 with one sample in a row, 0.88 packed into 1 row of 64 "
        "(packing is off)",
        "tokens of a sample:",
        *[f"  {n:>2} - {n + 4:>2}          0" for n in range(1, 26, 5)],
        f"  26 - 30          2  {'#' * 40}",
    ]


def test_json_has_the_same_facts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(config), "-n", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_samples"], facts["num_tokens"], facts["num_loss_tokens"]) == (2, 56, 14)
    assert facts["duplicates"] == {"count": 1, "examples": [["rows.jsonl:2", "rows.jsonl:1"]]}
    assert facts["datasets"][0]["counts"] == {"longer than max_seq_len, dropped": 1}
    assert len(facts["samples"]) == 2
    assert facts["samples"][0]["segments"] == [
        {"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "is_trained": False},
        {"text": "Hello.<|im_end|>", "is_trained": True},
    ]


def test_data_to_evaluate_on_is_accounted_for_like_data_to_train_on(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = config.with_name("held_out.jsonl")
    held_out.write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    words = ["data", "show", str(config), f"eval_datasets=[{{path: {held_out}}}]"]
    assert main(words) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval")]
    warning = f"warning: {held_out}: 1 of 2 samples longer than max_seq_len, dropped; "
    assert shown[:4] == [
        f"evaluation: {held_out}: prompt_completion (detected from its columns), 2 rows, 1 "
        "sample, 28 tokens, 25% of them trained",
        f"evaluation: {held_out}: longer than max_seq_len, dropped: 1 (held_out.jsonl:2)",
        f"evaluation: {warning}max_seq_len is 64",
        "evaluation: 1 sample",
    ]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["eval_warnings"] == [f"{warning}max_seq_len is 64"]
    assert facts["eval_datasets"][0]["detected"]


def test_json_says_whether_the_figures_are_of_a_streams_first_block(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = ["streaming=true", "max_steps=1", "shuffle_buffer_size=2"]
    for words, is_part, num_rows in ([], False, 3), (stream, True, 2):
        assert main(["data", "show", str(config), "--json", *words]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["first_block_only"], facts["datasets"][0]["num_rows"]) == (is_part, num_rows)


@pytest.mark.parametrize("words", [[], ["streaming=true", "max_steps=1"]])
def test_a_key_that_the_rows_have_no_use_for_is_refused_once_they_are_read(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config.with_name("rows.jsonl").write_text('{"text": "Hello."}\n')
    assert main(["data", "show", str(config), "turns_to_train=all", *words]) == 0
    assert main(["data", "show", str(config), "turns_to_train=last", *words]) == 2
    found = capsys.readouterr().err
    assert "turns_to_train: segments and plain text have no turns" in found
    assert "and the rows are text. Leave it out" in found


@pytest.mark.parametrize(
    ("words", "shown"), [([], "[[caf\xe9 \\u65e5<|im_end|>]]"), (["--json"], "")]
)
def test_characters_that_standard_output_lacks_are_shown_escaped(
    config: Path, words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "Hi", "completion": "caf\xe9 \u65e5"}
    config.with_name("rows.jsonl").write_text(json.dumps(row))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", stdout)
    assert main(["data", "show", str(config), *words]) == 0
    stdout.seek(0)
    text = stdout.read()
    assert shown in text
    if words:
        [sample] = json.loads(text)["samples"]
        assert sample["segments"][1]["text"] == "caf\xe9 \u65e5<|im_end|>"


def test_overrides_apply_and_nothing_is_written(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(config.parent.iterdir())
    assert main(["data", "show", str(config), "max_seq_len=200", "val_set_size=1"]) == 0
    shown = capsys.readouterr().out
    assert "3 samples" in shown
    assert "evaluation: 1 sample\n" in shown
    assert sorted(config.parent.iterdir()) == before


def test_data_that_is_not_there_is_an_error_by_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.with_name("rows.jsonl").unlink()
    assert main(["data", "show", str(config)]) == 2
    assert "run.yaml:2: datasets.0.path:" in capsys.readouterr().err
