"""A restarted launch goes on from its own newest step, whatever was asked for at its beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from legato.checkpoint import Checkpointer
from tests.helpers.loops import Loop

ANEW: dict[str, Any] = {"resume": False, "start_over": True}


def attempt(out: Path, *steps: int, **options: Any) -> int | None:
    """Save ``steps``; returns the step that the attempt went on from."""
    loop = Loop()
    with Checkpointer(out, **options) as checkpointer:
        checkpointer.restore(loop.state)
        for step in steps:
            checkpointer.save(loop.run_to(step).state, step=step)
        return None if checkpointer.source is None else checkpointer.source.step


def archived(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob(".old-*/step_*"))


def test_a_restart_does_not_start_over_again(tmp_path: Path) -> None:
    attempt(tmp_path, 5)
    assert attempt(tmp_path, 1, 2, launch_id="a", **ANEW) is None
    assert attempt(tmp_path, 3, launch_id="a", attempt=1, **ANEW) == 2
    assert attempt(tmp_path, 4, launch_id="a", attempt=2, **ANEW) == 3
    assert archived(tmp_path) == ["step_5"]


def test_a_restart_before_the_first_step_begins_as_it_was_asked_to(tmp_path: Path) -> None:
    attempt(tmp_path, 5)
    assert attempt(tmp_path, launch_id="a", **ANEW) is None
    assert attempt(tmp_path, 1, launch_id="a", attempt=1, **ANEW) is None
    assert archived(tmp_path) == ["step_5"]


def test_a_restart_does_not_go_back_to_the_path_it_came_from(tmp_path: Path) -> None:
    attempt(tmp_path / "base", 7)
    source = {"resume": tmp_path / "base" / "step_7", "launch_id": "a"}
    assert attempt(tmp_path / "out", **source) == 7
    assert attempt(tmp_path / "out", 8, attempt=1, **source) == 7
    assert attempt(tmp_path / "out", 9, attempt=2, **source) == 8


@pytest.mark.parametrize(
    "launch",
    [
        {"launch_id": "b", "attempt": 1},  # died before it had opened the run
        {"launch_id": "a"},  # a new launch under an old name
        {"attempt": 1},
        {},
    ],
)
def test_another_launch_starts_over_when_it_is_asked_to(
    tmp_path: Path, launch: dict[str, Any]
) -> None:
    attempt(tmp_path, 1, launch_id="a")
    assert attempt(tmp_path, **launch, **ANEW) is None
    assert archived(tmp_path) == ["step_1"]
