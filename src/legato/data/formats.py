"""From a row's columns to an ``Example``: a conversation, segments or plain text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from legato.data.examples import Example, Message, Segment
from legato.data.json_text import dump_json
from legato.data.sources import Row
from legato.data.tools import read_tools
from legato.data.turns import are_messages, read_message, read_sharegpt_turn, read_text
from legato.errors import DataError


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One data set of a config.

    Attributes:
        path: A file, a glob, a folder or a hub name.
        type: A key of ``FORMATS``; None: told from the columns.
        columns: Our column name: the file's.
        split: Of a hub data set.
        weight: How many times each row appears in an epoch.
    """

    path: str
    type: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Format:
    """A shape of rows.

    Attributes:
        required: Columns that every row has.
        optional: Columns that a row may have.
        convert: Columns under our names -> messages, segments, or the text.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], tuple[Message, ...] | tuple[Segment, ...] | str]


def detect_format(columns: Mapping[str, Any], *, where: str) -> tuple[str, dict[str, str]]:
    """Tell the format from one row's columns.

    Args:
        columns: The row.
        where: Of the row, for the message.

    Returns:
        A key of ``FORMATS``, and the mapping that goes with it (a ``conversations`` column may hold
        messages with ``role`` and ``content``).

    Raises:
        DataError: Nothing fits; names the columns and what the formats need.
    """
    if {"chosen", "rejected"} <= columns.keys() and "completion" not in columns:
        raise DataError(
            f"{where}: preference pairs ({_listed(columns)}): training on what is chosen over what "
            "is rejected is not in this version of Legato. To train on the chosen answers alone: "
            "type: prompt_completion, columns: {completion: chosen}",
            path=where,
            columns=tuple(columns),
        )
    for column in ("messages", "conversations"):
        turns = columns.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if "role" in turns[0]:
                return "messages", {} if column == "messages" else {"messages": column}
            if "from" in turns[0]:
                return "sharegpt", {} if column == "conversations" else {"conversations": column}
    for name in ("prompt_completion", "alpaca", "segments", "text"):
        if all(column in columns for column in FORMATS[name].required):
            return name, {}
    held = [column for column in ("messages", "conversations") if column in columns]
    seen = (
        f" ({held[0]} is {json.dumps(columns[held[0]], default=str):.60} in this row)"
        if held
        else ""
    )
    needs = "; ".join(f"{name}: {', '.join(each.required)}" for name, each in FORMATS.items())
    raise DataError(
        f"{where}: can't tell the format from the columns {_listed(columns)}{seen}. The formats "
        f"need {needs}. "
        "Set type, and map the columns, for example: "
        "type: prompt_completion, columns: {prompt: question, completion: answer}",
        path=where,
        columns=tuple(columns),
    )


def check_columns(
    name: str, mapping: Mapping[str, str], columns: Mapping[str, Any], *, where: str
) -> None:
    """Refuse a mapping, or a first row, that can't fit the format.

    Args:
        name: A key of ``FORMATS``.
        mapping: Our column name: the file's.
        columns: The first row.
        where: Of that row, for the message.

    Raises:
        DataError: An unknown format, an unknown name in the mapping, a column that isn't there.
    """
    if name not in FORMATS:
        raise DataError(
            f"{where}: unknown format {name!r}. Known: {', '.join(FORMATS)}", path=where
        )
    shape = FORMATS[name]
    known = shape.required + shape.optional
    for ours in mapping:
        if ours not in known:
            raise DataError(
                f"{where}: columns.{ours}: a {name} row has no {ours!r}. It has {', '.join(known)}",
                path=where,
            )
    missing = [mapping.get(ours, ours) for ours in shape.required]
    missing += [theirs for ours, theirs in mapping.items() if ours not in shape.required]
    missing = [theirs for theirs in missing if theirs not in columns]
    if missing:
        near = difflib.get_close_matches(missing[0], list(columns), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        first = next((ours for ours in known if mapping.get(ours, ours) == missing[0]), missing[0])
        raise DataError(
            f"{where}: no column {missing[0]!r}; there are {_listed(columns)}.{hint} "
            f"Map it: columns: {{{first}: <name in the file>}}",
            path=where,
            column=missing[0],
            columns=tuple(columns),
        )


def convert_row(row: Row, name: str, mapping: Mapping[str, str]) -> Example:
    """One row as an example.

    Args:
        row: The row.
        name: A key of ``FORMATS``.
        mapping: Our column name: the file's.

    Returns:
        A conversation, segments, or plain text.

    Raises:
        DataError: The row doesn't fit its format; names the row and what is wrong.
    """
    shape = FORMATS[name]
    values: dict[str, Any] = {}
    for ours in shape.required + shape.optional:
        theirs = mapping.get(ours, ours)
        if theirs in row.columns:
            values[ours] = row.columns[theirs]
        elif ours in shape.required:
            raise DataError(
                f"{row.where}: no column {theirs!r}; there are {_listed(row.columns)}",
                path=row.where,
            )
    try:
        tools = read_tools(values.pop("tools", None))
        if "tools" not in shape.optional and read_tools(row.columns.get("tools")):
            raise ValueError(f"tools: rows of {name} can't call them; messages and sharegpt can")
        example = _as_example(row, shape.convert(values), tools)
    except ValueError as error:
        raise DataError(f"{row.where}: {error}", path=row.where) from None
    return example


def _as_example(
    row: Row,
    made: tuple[Message, ...] | tuple[Segment, ...] | str,
    tools: tuple[dict[str, Any], ...],
) -> Example:
    if isinstance(made, str):
        _check_encodable(made)
        return Example(row.sample_id, row.where, text=made)
    messages = tuple(each for each in made if isinstance(each, Message))
    segments = tuple(each for each in made if isinstance(each, Segment))
    written = [text for message in messages for text in message.texts()]
    for text in [*written, *map(dump_json, tools), *(segment.text for segment in segments)]:
        _check_encodable(text)
    return Example(row.sample_id, row.where, messages=messages, segments=segments, tools=tools)


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"half of a surrogate pair ({text[error.start]!a}) at position {error.start + 1}: not "
            "a character"
        ) from None


def _alpaca(values: Mapping[str, Any]) -> tuple[Message, ...]:
    parts = [
        read_text(values["instruction"], "instruction"),
        read_text(values.get("input") or "", "input"),
    ]
    messages = []
    history = values.get("history") or []
    if not isinstance(history, list):
        raise ValueError(
            f"history is of type {type(history).__name__}; expected a list of pairs "
            "[instruction, answer]"
        )
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"history: entry {number} isn't a pair [instruction, answer]")
        messages.append(Message("user", read_text(pair[0], "history")))
        messages.append(Message("assistant", read_text(pair[1], "history")))
    messages.append(Message("user", "\n\n".join(part for part in parts if part)))
    messages.append(Message("assistant", read_text(values["output"], "output")))
    return _opened(values, messages)


def _prompt_completion(values: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = []
    prompt, completion = values["prompt"], values["completion"]
    if are_messages(prompt):
        given = (read_message(turn, number) for number, turn in enumerate(prompt, start=1))
        messages += [replace(message, is_prompt=True) for message in given]
    else:
        messages.append(Message("user", read_text(prompt, "prompt", as_json=True)))
    if are_messages(completion):
        messages += [read_message(turn, number) for number, turn in enumerate(completion, start=1)]
    else:
        messages.append(Message("assistant", read_text(completion, "completion", as_json=True)))
    return _opened(values, messages)


def _messages(values: Mapping[str, Any]) -> tuple[Message, ...]:
    turns = values["messages"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("messages: expected a list of at least one message")
    made = [read_message(turn, number) for number, turn in enumerate(turns, start=1)]
    return _opened(values, made)


def _sharegpt(values: Mapping[str, Any]) -> tuple[Message, ...]:
    turns = values["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("conversations: expected a list of at least one turn")
    made = [read_sharegpt_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    return _opened(values, made)


def _segments(values: Mapping[str, Any]) -> tuple[Segment, ...]:
    segments = values["segments"]
    if not isinstance(segments, list) or not segments:
        raise ValueError("segments: expected a list of at least one segment")
    made = []
    for number, segment in enumerate(segments, start=1):
        where = f"segment {number}"
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise ValueError(f"{where} isn't an object with text and label (true: it is trained)")
        made.append(Segment(read_text(segment.get("text"), f"{where}: text"), segment["label"]))
    return tuple(made)


def _opened(values: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation behind the system message that the row's own column holds, if it does."""
    if not values.get("system"):
        return tuple(messages)
    if any(message.role == "system" for message in messages):
        raise ValueError("a system column beside a message of system; give one")
    return (Message("system", read_text(values["system"], "system")), *messages)


def _listed(columns: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in columns) or "none"


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "alpaca": Format(("instruction", "output"), ("input", "system", "history"), _alpaca),
        "messages": Format(("messages",), ("system", "tools"), _messages),
        "sharegpt": Format(("conversations",), ("system", "tools"), _sharegpt),
        "prompt_completion": Format(("prompt", "completion"), ("system",), _prompt_completion),
        "segments": Format(("segments",), (), _segments),
        "text": Format(("text",), (), lambda values: read_text(values["text"], "text")),
    }
)
