"""Real data sets, where they are beside the checkout, through the command line."""

from __future__ import annotations

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
