"""Columns of a row, and keys of its turns, that its format has no use for: to be named, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from legato.data.formats import FORMATS
from legato.data.turns import SHAREGPT_KEYS, TURN_KEYS

# Columns that hold turns, by format, and what is read of a turn.
_TURNS = {
    "messages": (("messages", frozenset(TURN_KEYS)),),
    "sharegpt": (("conversations", frozenset(SHAREGPT_KEYS)),),
    "prompt_completion": (("prompt", frozenset(TURN_KEYS)), ("completion", frozenset(TURN_KEYS))),
    "segments": (("segments", frozenset(("text", "label"))),),
}


def unread_names(columns: Mapping[str, Any], name: str, mapping: Mapping[str, str]) -> set[str]:
    """What a row holds and nobody reads.

    Args:
        columns: The row.
        name: A key of ``FORMATS``.
        mapping: Our column name: the file's.

    Returns:
        Names of columns; of turns' keys as ``messages[].name``. Empty ``tools`` are none.
    """
    shape = FORMATS[name]
    read = {mapping.get(ours, ours) for ours in shape.required + shape.optional}
    unread = {each for each in columns.keys() - read if each != "tools"}
    for ours, keys in _TURNS.get(name, ()):
        column = mapping.get(ours, ours)
        for turn in _objects(columns.get(column)):
            if more := turn.keys() - keys:
                unread |= {f"{column}[].{key}" for key in more if turn[key] is not None}
    return unread


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))
