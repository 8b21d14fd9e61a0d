"""Real data sets, where they are beside the checkout, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legato.report.metrics import read_events
from tests.helpers import tiny
from tests.helpers.runs import RECIPES, legato, losses, write_config


@pytest.mark.parametrize(
    ("file", "spec", "num_rows"),
    [
        ("alpaca_en_demo.json", {"type": "alpaca"}, 999),
        ("identity.json", {"type": "alpaca"}, 91),
        (
            "gsm8k_test.jsonl",
            {"columns": {"prompt": "question", "completion": "answer"}},
            1319,
        ),
        (
            "TruthfulQA.csv",
            {"columns": {"prompt": "Question", "completion": "Best Answer"}},
            813,
        ),
    ],
)
def test_real_rows_train_through_the_command_line(
    tmp_path: Path, shared_data: Path, file: str, spec: dict[str, Any], num_rows: int
) -> None:
    config = write_config(
        tmp_path,
        model=tiny.write_model(tmp_path / "model", max_position_embeddings=4096),
        recipe=RECIPES[0],
        datasets=[{"path": str(shared_data / file), **spec}],
        max_seq_len=4096,
        max_steps=1,
        packing=True,
    )
    assert legato("run", "--config", config) == 0
    out = tmp_path / "out"
    start = next(read_events(out / "metrics.jsonl"))
    assert start["num_samples"] == num_rows
    assert start["packing_efficiency"] > 0.9
    assert set(losses(out)) == {1}


def test_question_and_answer_columns_train_by_the_config_alone(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i + 1}\n#### {i + 1}"} for i in range(4)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "question", "completion": "answer"}
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        datasets=[{"path": str(data), "columns": columns}],
    )
    assert legato("run", "--config", config) == 0
    start = next(read_events(tmp_path / "out" / "metrics.jsonl"))
    # One token per byte: the answers and the end-of-turn token after each.
    assert start["num_trained_tokens"] == sum(len(row["answer"]) + 1 for row in rows)
