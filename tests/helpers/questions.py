"""TruthfulQA in three questions, and lm-eval's settings kept to the tests that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROWS = """Question,Correct Answers,Incorrect Answers
Why?,It is; So,No
When?,Now,Then; Never; Always
Who?,Me,You
"""


def write_questions(path: Path) -> Path:
    """Write the table as TruthfulQA.csv has it; returns it."""
    path.write_text(ROWS, encoding="utf-8")
    return path


def prepare_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where lm-eval isn't installed; its import sets these variables where nobody has."""
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "0")
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "0")
    pytest.importorskip("lm_eval")
