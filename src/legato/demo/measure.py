"""How many orders a model turns into exactly the right JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from legato.demo.orders import Order, OrderData
from legato.generate import generate_batch, load_for_generation

MAX_ANSWER_TOKENS = 48  # the longest right answer has 31
BATCH_SIZE = 40


@dataclass(frozen=True)
class Answers:
    """A model's answers to the demo's two held-out parts.

    Attributes:
        step: Optimizer steps that the model was trained for; 0 for the base model.
        held_out: Answers to the orders with known names, in their order.
        unseen_names: Answers to the others.
    """

    step: int
    held_out: tuple[str, ...]
    unseen_names: tuple[str, ...]


def is_exact(answer: str, order: Order) -> bool:
    """Whether ``answer`` is one JSON object that says what the order says, and nothing else."""
    try:
        return bool(json.loads(answer) == json.loads(order.answer))
    except ValueError:
        return False


def count_exact(answers: Sequence[str], orders: Sequence[Order]) -> int:
    """Return how many of the answers are exact."""
    return sum(is_exact(*pair) for pair in zip(answers, orders, strict=True))


def answer_orders(
    model_dir: str | Path, data: OrderData, *, step: int, device: torch.device
) -> Answers:
    """Let the model of a folder answer both held-out parts, greedily.

    Args:
        model_dir: A Hugging Face folder, a step folder among them.
        data: The demo's orders.
        step: Which step it is; 0 for the base model.
        device: Where to run.

    Returns:
        The answers.
    """
    model, tokenizer = load_for_generation(model_dir, device=device)
    answers = generate_batch(
        model,
        tokenizer,
        [order.prompt_messages for order in (*data.held_out, *data.unseen_names)],
        max_new_tokens=MAX_ANSWER_TOKENS,
        batch_size=BATCH_SIZE,
    )
    texts = [answer.text for answer in answers]
    return Answers(
        step=step,
        held_out=tuple(texts[: len(data.held_out)]),
        unseen_names=tuple(texts[len(data.held_out) :]),
    )


def write_answers(path: Path, answers: Answers) -> None:
    """Write the answers as JSON, whole or not at all."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(json.dumps(asdict(answers), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_answers(path: Path) -> Answers | None:
    """Read what :func:`write_answers` wrote; None where nothing was written."""
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Answers(
        step=values["step"],
        held_out=tuple(values["held_out"]),
        unseen_names=tuple(values["unseen_names"]),
    )
