"""``legato generate``: answers to a file of prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
    TemplateKwargs,
    TrustRemoteCode,
    load_to_answer,
    refuse_existing,
)
from legato.cli.errors import append_whole, naming
from legato.cli.prompts import PromptRow, read_prompts
from legato.errors import UsageError
from legato.words import counted

if TYPE_CHECKING:
    from legato.generate import Answer, Chat


Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="A .txt with one prompt a line, or a data file, whose answers are left out.",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="The jsonl to write: sample_id, prompt, answer and finish_reason of each row.",
    ),
]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Prompts at a time.")]
RowFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Format of the rows, such as messages, where their columns don't tell it.",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="OURS=THEIRS: a column by another name, such as prompt=question.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The split to read, of a data set on the hub or a folder that has some.",
    ),
]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Answer the first N only.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue texts as they stand, without a chat template.")
]


def generate(
    folder: Folder,
    prompts: Prompts,
    output: Output,
    batch_size: BatchSize = 8,
    type: RowFormat = None,
    columns: Columns = None,
    split: Split = None,
    limit: Limit = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat_template: ChatTemplate = "auto",
    chat_template_kwargs: TemplateKwargs = None,
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer every prompt of a file, in batches."""
    from legato.cli.logs import show_log

    _refuse_taken(output)
    if raw and chat_template != "auto":
        raise UsageError("--chat-template: --raw uses no chat template. Leave out one")
    show_log()
    rows = read_prompts(prompts, raw=raw, type=type, columns=_columns(columns or []), split=split)
    rows = rows[:limit]
    model, tokenizer = load_to_answer(
        folder,
        chat_template=None if raw else chat_template,
        template_kwargs=chat_template_kwargs,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from legato.data.templates import names_calls

    has_ids = not raw and names_calls(tokenizer.chat_template)
    asked = [row.for_model(names_calls=has_ids) for row in rows]
    with _kept(output, partial(_line, rows, asked), num_asked=len(asked)) as keep:
        answers = _answers(
            model,
            tokenizer,
            asked,
            keep=keep,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            seed=seed,
        )
    num_cut = sum(answer.finish_reason == "length" for answer in answers)
    cut = f"; {num_cut} of them were cut at {max_new_tokens} tokens" if num_cut else ""
    typer.echo(f"{counted(len(rows), 'answer')} in {output}{cut}")


def _refuse_taken(output: Path) -> None:
    """Stop before any work when the file to write, or what came before it, is there already."""
    refuse_existing(output)
    if _partial(output).exists():
        raise UsageError(
            f"{_partial(output)}: holds answers of a call that was cut short. Remove it, or give "
            "it another name"
        )


def _answers(
    model: Any,
    tokenizer: Any,
    asked: Sequence[str | Chat],
    *,
    keep: Callable[[Mapping[int, Answer]], None],
    **options: Any,
) -> list[Answer]:
    """The answers, each batch kept as it is made, with a bar on a terminal meanwhile."""
    from rich.console import Console
    from rich.progress import Progress

    from legato.generate import generate_batch

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=len(asked))

        def on_answers(made: Mapping[int, Answer]) -> None:
            keep(made)
            progress.advance(task, len(made))

        return generate_batch(model, tokenizer, asked, on_answers=on_answers, **options)


def _columns(words: Sequence[str]) -> dict[str, str]:
    """``ours=theirs``, as it is typed, as a data set's ``columns``."""
    columns = {}
    for word in words:
        ours, equals, theirs = word.partition("=")
        if not (ours and equals and theirs):
            raise UsageError(f"--columns {word}: expected OURS=THEIRS, such as prompt=question")
        columns[ours] = theirs
    return columns


@contextmanager
def _kept(
    output: Path, line: Callable[[int, Answer], str], *, num_asked: int
) -> Iterator[Callable[[Mapping[int, Answer]], None]]:
    """Keep answers in ``<output>.partial`` as they are made; give them order and name at the end.

    What ends this before, a full disk or kill -9, leaves what was made so far.
    """
    made_so_far = _partial(output)
    made_so_far.parent.mkdir(parents=True, exist_ok=True)
    lines: dict[int, str] = {}

    def keep(made: Mapping[int, Answer]) -> None:
        written = {number: line(number, answer) for number, answer in made.items()}
        append_whole(made_so_far, "".join(written.values()))
        lines.update(written)

    try:
        yield keep
        ordered = output.with_name(f".{output.name}.partial-{os.getpid()}")
        try:
            with naming(ordered), ordered.open("w", encoding="utf-8") as file:
                file.writelines(lines[number] for number in sorted(lines))
            os.replace(ordered, output)
        finally:
            ordered.unlink(missing_ok=True)
    except BaseException:
        if lines:
            told = f"{len(lines)} of {num_asked} answers are in {made_so_far}"
            typer.echo(f"{told}, in the order in which they were made", err=True)
        raise
    made_so_far.unlink(missing_ok=True)


def _partial(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


def _line(
    rows: Sequence[PromptRow], prompts: Sequence[str | Chat], number: int, answer: Answer
) -> str:
    row, prompt = rows[number], prompts[number]
    asked = prompt if isinstance(prompt, str) else prompt.messages
    values: dict[str, Any] = {"sample_id": row.sample_id, "prompt": asked}
    if row.tools:
        values["tools"] = row.tools
    values |= {"answer": answer.text, "finish_reason": answer.finish_reason}
    return json.dumps(values, ensure_ascii=False) + "\n"
