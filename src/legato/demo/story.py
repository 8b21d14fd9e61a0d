"""What the demo says when it is done: values in, text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from legato.demo.measure import Answers, count_exact
from legato.demo.orders import OrderData
from legato.report.start import human_bytes, human_seconds

NUM_EXAMPLES = 3
MAX_SHOWN_CHARACTERS = 88
TARGET_SHARE = 0.95  # of the held-out orders; 24 steps reach 80 of 80, as README.md shows


@dataclass(frozen=True)
class SavedStep:
    """One checkpoint, as the demo lists it."""

    step: int
    size_bytes: int
    blocked_seconds: float
    committed_seconds: float


def scores(data: OrderData, *, before: Answers, after: Answers) -> str:
    """Return exact answers before and after, on both held-out parts."""
    parts = (
        ("new phrasings and combinations", data.held_out, before.held_out, after.held_out),
        (
            "names that training never said",
            data.unseen_names,
            before.unseen_names,
            after.unseen_names,
        ),
    )
    lines = [f"{'':<38}before     after"]
    for label, orders, first, last in parts:
        columns = [f"{count_exact(texts, orders)} of {len(orders)}" for texts in (first, last)]
        lines.append(f"exact, {label} {columns[0]:<10} {columns[1]}")
    return "\n".join(lines)


def shortfall(
    data: OrderData, *, after: Answers, folder: Path, command: str = "legato"
) -> str | None:
    """Return a warning where the trained model answers too few held-out orders; None: enough.

    Args:
        data: The demo's orders.
        after: The trained model's answers.
        folder: Where the demo keeps what it makes.
        command: What starts legato in the person's shell.

    Returns:
        The warning: what was reached, what is expected, and what to do.
    """
    total, exact = len(data.held_out), count_exact(after.held_out, data.held_out)
    expected = math.ceil(TARGET_SHARE * total)
    if exact >= expected:
        return None
    return (
        f"WARNING: only {exact} of {total} held-out orders are exact after {after.step} steps, and "
        f"{expected} ({TARGET_SHARE:.0%}) were expected. Train on:\n"
        f"    {command} demo{_dir_option(folder)} --steps {after.step + 8}"
    )


def examples(data: OrderData, *, before: Answers, after: Answers) -> str:
    """Return a few held-out orders, each of another phrasing, with both answers."""
    lines = []
    seen: set[str] = set()
    for order, first, last in zip(data.held_out, before.held_out, after.held_out, strict=True):
        if order.phrasing in seen or len(seen) == NUM_EXAMPLES:
            continue
        seen.add(order.phrasing)
        lines += [order.text, f"  before  {_one_line(first)}", f"  after   {_one_line(last)}"]
    return "\n".join(lines)


def saved_steps(steps: Sequence[SavedStep]) -> str:
    """Return the checkpoints as a table: size, time until on disk, time that training waited."""
    lines = ["checkpoint  size      on disk after  training waited"]
    lines += [
        f"step_{save.step:<6} {human_bytes(save.size_bytes):<9} "
        f"{human_seconds(save.committed_seconds):<14} {human_seconds(save.blocked_seconds)}"
        for save in steps
    ]
    return "\n".join(lines)


def what_next(
    *, step_dir: Path, config_path: Path, folder: Path, steps: int, command: str = "legato"
) -> str:
    """Return what a person can do with the result: commands and one line of Python."""
    return "\n".join(
        [
            "Each checkpoint is a Hugging Face model:",
            f'    AutoModelForCausalLM.from_pretrained("{step_dir}")',
            "Ask it:",
            f'    {command} demo{_dir_option(folder)} --ask "Six red mugs to Oslo, please."',
            "Train it further, by its config:",
            f"    {command} run --config {config_path} max_steps={steps + 8}",
        ]
    )


def _dir_option(folder: Path) -> str:
    return "" if folder == Path("out/demo") else f" --dir {folder}"


def _one_line(answer: str) -> str:
    text = " ".join(answer.split())
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text or "(nothing)"
    return text[: MAX_SHOWN_CHARACTERS - 4] + " ..."
