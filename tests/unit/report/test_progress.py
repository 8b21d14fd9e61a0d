"""What a run shows, on a terminal and without one."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch
from rich.console import Console

from legato.report.progress import (
    Progress,
    StepFacts,
    facts_line,
    peak_memory_bytes,
    remaining_text,
)


def facts(step: int) -> StepFacts:
    return StepFacts(
        step=step,
        loss=0.51234,
        learning_rate=2e-4,
        grad_norm=1.256,
        tokens_per_second=1234.4,
        memory_bytes=2_100_000_000,
    )


def run_two_steps(console: Console) -> None:
    with Progress(total_steps=4, first_step=2, console=console, clock=lambda: 0.0) as progress:
        progress.step(facts(3), log=False)
        progress.evaluated(3, loss=0.75)
        answer = "one\n" * 40
        progress.sampled(3, sample_id="a.jsonl:7", prompt="x" * 200, expected="1", answer=answer)
        progress.saving(3)
        progress.step(facts(4))
        progress.saved(3, size_bytes=72_040_000, blocked_seconds=0.101, committed_seconds=1.5)
        progress.note("the disk is nearly full")
        progress.save_failed(4)


def test_a_steps_facts_are_one_line_of_at_most_80_columns_with_the_save() -> None:
    line = facts_line(facts(3))
    assert line == "loss 0.5123  lr 2.00e-04  grad norm 1.26  1,234 tokens/s  2.10 GB"
    assert len(line) + len("  saved step_500") <= 81


def test_without_a_terminal_logged_steps_saves_and_notes_are_lines() -> None:
    stream = io.StringIO()
    run_two_steps(Console(file=stream, width=20))
    assert stream.getvalue().splitlines() == [
        "step 3/4  eval loss 0.7500",
        "step 3/4  sample a.jsonl:7",
        "  prompt    ..." + "x" * 97,
        "  expected  1",
        "  answer    " + "one " * 24 + "o...",
        "step 4/4  loss 0.5123  lr 2.00e-04  grad norm 1.26  1,234 tokens/s  2.10 GB",
        "step_3 saved: 72.0 MB on disk after 1.50 s, training waited 0.10 s",
        "the disk is nearly full",
    ]


def test_on_a_terminal_the_bar_shows_the_newest_step_and_the_last_save() -> None:
    stream = io.StringIO()
    run_two_steps(Console(file=stream, force_terminal=True, width=100))
    shown = stream.getvalue()
    assert "step 4/4" in shown
    assert "1,234 tokens/s  2.10 GB  step_4 NOT SAVED" in shown
    assert "step 3/4  eval loss 0.7500" in shown
    assert "step_3 saved: 72.0 MB on disk after 1.50 s, training waited 0.10 s" in shown


def test_on_a_terminal_log_lines_go_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    # As in a program that set up its logging before the bar began.
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler()
    logger = logging.getLogger("legato")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)

    console = Console(stderr=True, force_terminal=True, width=60)
    with Progress(total_steps=2, console=console) as progress:
        progress.step(facts(1))
        before = len(terminal.getvalue())
        logger.warning("step_1 is slow")
        written = terminal.getvalue()[before:]
    assert handler.stream is terminal
    # The line is written first, after the cursor went up over the bar; then the bar again.
    assert written.startswith("\r\x1b[2K\x1b[1A\x1b[2K")
    assert written.index("step_1 is slow") < written.index("/2 ")


def test_an_error_in_the_loop_ends_the_bar_and_is_not_swallowed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ZeroDivisionError), Progress(total_steps=1, console=console):
        raise ZeroDivisionError
    with Progress(total_steps=1, console=console):  # rich allows one live display at a time
        pass


def test_remaining_time_comes_from_the_steps_that_this_process_did() -> None:
    assert remaining_text(done_steps=0, left_steps=8, elapsed_seconds=5.0) == "first step"
    assert remaining_text(done_steps=2, left_steps=40, elapsed_seconds=10.0) == "3 min 20 s left"
    assert remaining_text(done_steps=8, left_steps=0, elapsed_seconds=5.0) == "done"


def test_peak_memory_on_a_cpu_is_the_process_peak_in_bytes() -> None:
    peak = peak_memory_bytes(torch.device("cpu"))
    assert 50_000_000 < peak < 1_000_000_000_000
