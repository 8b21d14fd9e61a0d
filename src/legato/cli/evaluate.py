"""``legato eval``: a checkpoint on public tasks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.answering import (
    Device,
    Dtype,
    Folder,
    TrustRemoteCode,
    dtype_of,
    refuse_damaged,
    refuse_existing,
)
from legato.cli.errors import write_whole

if TYPE_CHECKING:
    from legato.evaluation.harness import Score

_COLUMNS = ("task", "metric", "value", "standard error", "questions")


def evaluate(
    folder: Folder,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="lm-eval's names, parted by commas; truthfulqa_mc2_local needs no hub.",
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The first N questions of each task only."),
    ] = None,
    truthfulqa_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TruthfulQA.csv, for truthfulqa_mc2_local.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Solved examples before each question.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask through the chat template.")
    ] = False,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at a time.")] = 8,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON too.")
    ] = None,
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a model with lm-eval."""
    from legato.cli.logs import show_log
    from legato.cli.show import show_table

    if output is not None:
        refuse_existing(output)
        output.parent.mkdir(parents=True, exist_ok=True)
    show_log()
    refuse_damaged(folder)
    from legato.evaluation.harness import evaluate_folder
    from legato.parallel.world import pick_device

    scores = evaluate_folder(
        folder,
        tasks=[task.strip() for task in tasks.split(",") if task.strip()],
        truthfulqa_csv=truthfulqa_csv,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        apply_chat_template=apply_chat_template,
        dtype=None if dtype is None else dtype_of(dtype),
        device=pick_device(device),
        trust_remote_code=trust_remote_code,
    )
    show_table(_COLUMNS, [_row(score) for score in scores])
    if output is not None:
        content = {"model": folder, "limit": limit, "scores": [asdict(score) for score in scores]}
        write_whole(output, json.dumps(content, indent=2) + "\n")


def _row(score: Score) -> tuple[str, ...]:
    return (
        score.task,
        score.metric,
        f"{score.value:.4f}",
        "-" if score.standard_error is None else f"{score.standard_error:.4f}",
        "-" if score.num_samples is None else str(score.num_samples),
    )
