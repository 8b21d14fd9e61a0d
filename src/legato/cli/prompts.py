"""The prompts of a file, as ``legato generate`` asks them: read as training reads rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.errors import DataError, UsageError

if TYPE_CHECKING:
    from legato.data.examples import Message
    from legato.data.formats import DatasetSpec
    from legato.data.sources import Row
    from legato.generate import Chat


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a file.

    Attributes:
        sample_id: ``prompts.jsonl:17``.
        text: What is to be continued as it stands; empty where ``messages`` are to be answered.
        messages: What is to be answered.
        tools: What the answer may call.
    """

    sample_id: str
    text: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()

    def for_model(self, *, names_calls: bool) -> str | Chat:
        """As the model is asked.

        Args:
            names_calls: The template writes the ids that join a tool's call and its result.

        Returns:
            The text, or the messages that training would show before the answer.
        """
        from legato.data.examples import with_call_ids
        from legato.generate import Chat

        if not self.messages:
            return self.text
        messages = with_call_ids(self.messages) if names_calls else self.messages
        return Chat([message.for_template() for message in messages], self.tools)


def read_prompts(
    path: str,
    *,
    raw: bool,
    type: str | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
) -> list[PromptRow]:
    """The prompts of a file.

    Args:
        path: A ``.txt`` with one prompt a line, or what a data set's ``path`` may be. Of its rows a
            column ``prompt`` is taken; where there is none, what stands before the last answer of
            a row in one of the formats that train.
        raw: Prompts are texts to be continued, not messages.
        type: As a data set's key of that name; not for texts, which are no conversations.
        columns: As a data set's key of that name.
        split: As a data set's key of that name.

    Returns:
        At least one.

    Raises:
        UsageError: What says how rows are read, and nothing that is read by it.
        DataError: No such file, no prompts, or a row that holds none; ``.path``.
    """
    from legato.data.formats import DatasetSpec

    spec = DatasetSpec(path, type=type, columns=columns or {}, split=split)
    is_text = path.endswith(".txt")
    given = {"--type": type, "--columns": columns, "--split": split}
    if unread := [name for name, value in given.items() if value and is_text]:
        raise UsageError(f"{unread[0]}: {Path(path).name} has a prompt a line. Leave it out")
    if raw and type:
        raise UsageError("--type: --raw continues the text of one column. Leave out one")
    if is_text:
        rows = list(_read_lines(Path(path), raw=raw))
    else:
        rows = list(_read_texts(spec) if raw else _read_chats(spec))
    if not rows:
        raise DataError(f"{path}: holds no prompt.", path=path)
    return rows


def _read_lines(file: Path, *, raw: bool) -> Iterator[PromptRow]:
    from legato.data.examples import Message

    try:
        # Not splitlines: U+2028 and others that it breaks at may stand in a prompt.
        lines = file.read_text("utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise DataError(f"{file}: there is no such file.", path=str(file)) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: isn't UTF-8 at byte {error.start}. Save it as UTF-8.", path=str(file)
        ) from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            messages = () if raw else (Message("user", line),)
            yield PromptRow(f"{file.name}:{number}", line if raw else "", messages)


def _read_texts(spec: DatasetSpec) -> Iterator[PromptRow]:
    column = spec.columns.get("prompt", "prompt")
    for row in _read_rows(spec):
        text = row.columns.get(column)
        if not isinstance(text, str):
            raise DataError(
                f"{row.where}: --raw continues texts, and the row has no text called {column}.",
                path=row.where,
            )
        yield PromptRow(row.sample_id, text)


def _read_chats(spec: DatasetSpec) -> Iterator[PromptRow]:
    from legato.data.chunks import settle_type
    from legato.data.formats import convert_row

    rows = _read_rows(spec)
    first = next(rows, None)
    if first is None:
        return
    has_prompt = spec.columns.get("prompt", "prompt") in first.columns
    is_prompt = spec.type == "prompt_completion" or (spec.type is None and has_prompt)
    if is_prompt:
        spec = replace(spec, type="prompt_completion")
    unanswered = functools.partial(_unanswered, spec=spec) if is_prompt else lambda row: row
    name, mapping, _ = settle_type(spec, iter([unanswered(first)]))
    for row in itertools.chain([first], rows):
        example = convert_row(unanswered(row), name, mapping)
        messages = list(example.messages)
        while messages and messages[-1].role == "assistant":
            messages.pop()
        if not messages:
            raise DataError(f"{row.where}: holds no question, only text.", path=row.where)
        tools = _tools(row) if is_prompt else example.tools
        yield PromptRow(row.sample_id, messages=messages, tools=tools)


def _unanswered(row: Row, *, spec: DatasetSpec) -> Row:
    """A row with a prompt, its answer emptied whether it has one or not."""
    answer = spec.columns.get("completion", "completion")
    columns = {name: value for name, value in row.columns.items() if name != "tools"}
    return replace(row, columns={**columns, answer: ""})


def _tools(row: Row) -> Sequence[dict[str, Any]]:
    """The tools beside a prompt: nothing is trained here, so any row may offer them."""
    from legato.data.tools import read_tools

    try:
        return read_tools(row.columns.get("tools"))
    except ValueError as error:
        raise DataError(f"{row.where}: {error}", path=row.where) from None


def _read_rows(spec: DatasetSpec) -> Iterator[Row]:
    from legato.data.sources import BadRow, read_rows

    for row in read_rows(spec.path, split=spec.split):
        if isinstance(row, BadRow):
            raise DataError(f"{row.where}: {row.reason}", path=row.where)
        yield row
