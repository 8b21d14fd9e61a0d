"""``legato generate``: answers to a file of prompts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.answering import (
    ChatTemplate,
    Device,
    Dtype,
    Folder,
    MaxNewTokens,
    Seed,
    Temperature,
    TrustRemoteCode,
    load_to_answer,
    refuse_existing,
)
from legato.errors import DataError

if TYPE_CHECKING:
    from legato.generate import Answer


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a file.

    Attributes:
        sample_id: ``prompts.jsonl:17``.
        prompt: A text, or messages.
    """

    sample_id: str
    prompt: str | list[dict[str, str]]


def generate(
    folder: Folder,
    prompts: Annotated[
        str,
        typer.Option(help="A .txt with a prompt a line, or a data file: its rows' prompts."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="The jsonl to write: sample_id, prompt, answer and finish_reason of each row."
        ),
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer the first N only.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue texts as they stand, without a chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat_template: ChatTemplate = "auto",
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer every prompt of a file, in batches."""
    from legato.cli.logs import show_log

    refuse_existing(output)
    show_log()
    rows = read_prompts(prompts, raw=raw)[:limit]
    model, tokenizer = load_to_answer(
        folder,
        chat_template=None if raw else chat_template,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from rich.console import Console
    from rich.progress import Progress

    from legato.generate import generate_batch

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=len(rows))
        answers = generate_batch(
            model,
            tokenizer,
            [row.prompt for row in rows],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            seed=seed,
            on_answers=lambda count: progress.advance(task, count),
        )
    _write(output, rows, answers)
    num_cut = sum(answer.finish_reason == "length" for answer in answers)
    cut = f"; {num_cut} of them were cut at {max_new_tokens} tokens" if num_cut else ""
    typer.echo(f"{len(rows)} answers are in {output}{cut}")


def read_prompts(path: str, *, raw: bool) -> list[PromptRow]:
    """The prompts of a file.

    Args:
        path: A ``.txt`` with one prompt a line, or a data file. Of its rows a column ``prompt``
            is taken; where there is none, what stands before the last answer of a row in one of
            the formats that train.
        raw: Prompts are texts to be continued, not messages.

    Returns:
        At least one.

    Raises:
        DataError: No such file, no prompts, or a row that holds none; ``.path``.
    """
    rows = _read_lines(Path(path)) if path.endswith(".txt") else _read_rows(path, raw=raw)
    if not rows:
        raise DataError(f"{path}: holds no prompt.", path=path)
    if raw:
        return rows
    return [
        PromptRow(row.sample_id, [{"role": "user", "content": row.prompt}])
        if isinstance(row.prompt, str)
        else row
        for row in rows
    ]


def _read_lines(file: Path) -> list[PromptRow]:
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{file}: there is no such file.", path=str(file)) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: isn't UTF-8 at byte {error.start}.", path=str(file)) from None
    return [
        PromptRow(f"{file.name}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _read_rows(path: str, *, raw: bool) -> list[PromptRow]:
    from legato.data.sources import BadRow, read_rows

    rows = []
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise DataError(f"{row.where}: {row.reason}", path=row.where)
        prompt = row.columns.get("prompt")
        if raw and not isinstance(prompt, str):
            raise DataError(
                f"{row.where}: --raw continues texts, and the row has no text called prompt.",
                path=row.where,
            )
        rows.append(
            PromptRow(row.sample_id, prompt)
            if isinstance(prompt, str)
            else PromptRow(row.sample_id, _before_last_answer(row))
        )
    return rows


def _before_last_answer(row: Any) -> list[dict[str, str]]:
    """The messages of a row up to, and without, its last answer."""
    from legato.data.formats import convert_row, detect_format

    columns = row.columns
    if isinstance(columns.get("prompt"), list):  # messages, as preference data has them
        name, mapping = "messages", {"messages": "prompt"}
    else:
        name, mapping = detect_format(columns, where=row.where)
    messages = [message.for_template() for message in convert_row(row, name, mapping).messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{row.where}: holds no question, only text.", path=row.where)
    return messages


def _write(output: Path, rows: list[PromptRow], answers: list[Answer]) -> None:
    """Write all answers, or nothing: the file gets its name when it is whole."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row, answer in zip(rows, answers, strict=True):
                values = {"sample_id": row.sample_id, "prompt": row.prompt}
                values |= {"answer": answer.text, "finish_reason": answer.finish_reason}
                file.write(json.dumps(values, ensure_ascii=False) + "\n")
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
