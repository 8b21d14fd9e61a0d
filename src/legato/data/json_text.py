"""JSON as it must be: Python's own reader passes over what a person would want to hear of."""

from __future__ import annotations

import json
from typing import Any

# Far more than any format has, and far less than what reading, pickling or a template breaks at.
MOST_LEVELS = 100
_TOO_DEEP = f"holds lists and objects in more than {MOST_LEVELS} levels; expected a few"
# Python's own limit, of which its message speaks in words of Python.
_MOST_DIGITS = 4300


class _Doubled(dict[str, Any]):
    """An object that names a key twice; Python keeps the last."""

    key: str


def parse_json(text: str) -> Any:
    """The value of a JSON text, for :func:`fault_of` to look at.

    Args:
        text: All of it.

    Returns:
        Its value.

    Raises:
        json.JSONDecodeError: It isn't JSON.
        ValueError: It is too deep, or has a number that is too long, to be read; says so.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError(f"holds a number of more than {_MOST_DIGITS} digits") from None


def fault_of(value: object) -> str | None:
    """What is wrong with a value that was read, objects and lists inside of it included.

    Args:
        value: From :func:`parse_json`, or of a table.

    Returns:
        What to tell; None: it may be used.
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        inside: list[object] = []
        for each in level:
            if isinstance(each, _Doubled):
                return f"has {each.key!r} twice in one object; give it once"
            if isinstance(each, dict):
                inside += each.values()
            elif isinstance(each, list):
                inside += each
        if not inside:
            return None
        level = inside
    return _TOO_DEEP


def dump_json(value: object) -> str:
    """A value as text that is trained on, every character as it stands.

    Args:
        value: Of a row.

    Returns:
        JSON; what JSON has no form for, such as a date, as its text.

    Raises:
        ValueError: It holds NaN or an infinite number, which Python writes and JSON doesn't have.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        raise ValueError("holds NaN or an infinite number, which JSON doesn't have") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    doubled = _Doubled(made)
    names = [name for name, _ in pairs]
    doubled.key = next(name for name in names if names.count(name) > 1)
    return doubled
