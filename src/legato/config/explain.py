"""What pydantic found, in the words of a config: where, expected, found, nearest valid key."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from legato.config.aliases import ADVICE, ALIASES, VALUE_ADVICE
from legato.config.problems import KeyPath, Problem, dotted
from legato.config.schema import RunConfig
from legato.config.types import Section
from legato.words import counted


@dataclass(frozen=True)
class Key:
    """A key of the schema; list entries are written ``*``: ``datasets.*.path``."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[Section]

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    @property
    def on_resume(self) -> str:
        """What another value does to a resumed run."""
        if self.path[0] == "eval_datasets":
            # The keys of a section that `datasets` has as well; no update depends on these.
            return "warn"
        extra = self.field.json_schema_extra
        return str(extra["on_resume"]) if isinstance(extra, dict) else "undeclared"

    @property
    def unit(self) -> str | None:
        """What a number counts."""
        extra = self.field.json_schema_extra
        return str(extra["unit"]) if isinstance(extra, dict) and "unit" in extra else None


@functools.cache
def schema_keys() -> tuple[Key, ...]:
    """Every key of a config, sections before what they hold."""
    return tuple(_walk(RunConfig, ()))


def _walk(section: type[Section], path: tuple[str, ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        yield Key((*path, name), field, section)
        for inner, in_list in _sections_in(field.annotation, False):
            yield from _walk(inner, (*path, name, "*") if in_list else (*path, name))


def _sections_in(annotation: Any, in_list: bool) -> Iterator[tuple[type[Section], bool]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _sections_in(get_args(annotation)[0], in_list)
    elif origin in (Union, UnionType, list):
        for item in get_args(annotation):
            yield from _sections_in(item, in_list or origin is list)
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, in_list


def key_at(path: KeyPath) -> Key | None:
    """The schema's key for a config path, e.g. ``("datasets", 0, "path")``."""
    generic = tuple("*" if isinstance(part, int) else part for part in path)
    return next((key for key in schema_keys() if key.path == generic), None)


def problems_of(error: ValidationError) -> list[Problem]:
    """One problem for each thing that pydantic found."""
    problems: list[Problem] = []
    for details in error.errors(include_url=False):
        if details["type"] == "combination":
            problems += details["ctx"]["problems"]
        else:
            problems.append(_problem(details))
    return problems


def _problem(details: ErrorDetails) -> Problem:
    # Unions name the branch they took: see legato.config.types.by_kind.
    path = tuple(part for part in details["loc"] if not str(part).startswith("<"))
    kind = details["type"]
    if kind == "extra_forbidden":
        return Problem(path, f"unknown key{unknown_key_advice(path)}")
    if kind == "missing":
        key = key_at(path)
        doc = f" ({key.field.description})" if key else ""
        return Problem(path, f"missing{doc.replace('.)', ')')}")
    return Problem(path, expected_and_found(details) + _hint(details))


def expected_and_found(details: ErrorDetails) -> str:
    """A value that doesn't fit, in words: ``expected a whole number, found 'x'``."""
    return f"expected {_expected(details)}, found {_shown(details['input'])}"


_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that isn't empty",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _EXPECTED:
        place = str(details["loc"][0]) if details["loc"] else ""
        section = {"optimizer": " such as {name: adamw, lr: 2e-5}"}.get(place, "")
        return _EXPECTED[kind] + (section if _EXPECTED[kind] == "a mapping" else "")
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "range":
        return details["msg"].removeprefix("expected ")
    if kind == "string_pattern_mismatch":
        key = key_at(tuple(details["loc"]))
        return str(key.field.description).rstrip(".") if key else f"text like {context['pattern']}"
    if kind == "too_short":
        return f"at least {counted(context['min_length'], 'entry', 'entries')}"
    if kind == "too_long":
        return f"at most {counted(context['max_length'], 'entry', 'entries')}"
    bounds = {
        "greater_than": ("gt", "a number above"),
        "greater_than_equal": ("ge", "a number of at least"),
        "less_than": ("lt", "a number below"),
        "less_than_equal": ("le", "a number of at most"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        bound = context[name]
        return f"{words} {bound:,}" if isinstance(bound, int) else f"{words} {bound:g}"
    return details["msg"].removeprefix("Input should be ")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _hint(details: ErrorDetails) -> str:
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return ""
    advice = VALUE_ADVICE.get(dotted(tuple(details["loc"])), {}).get(details["input"].lower())
    if advice is not None:
        return f". {advice}"
    allowed = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    return did_you_mean(details["input"], allowed)


def did_you_mean(word: str, candidates: list[str]) -> str:
    """``". Did you mean x?"`` or nothing."""
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f". Did you mean {close[0]}?" if close else ""


def unknown_key_advice(path: KeyPath) -> str:
    """What to write instead of an unknown key: a near spelling, its real place, or another key."""
    word = str(path[-1])
    generic = tuple("*" if isinstance(part, int) else part for part in path)
    siblings = [key.path[-1] for key in schema_keys() if key.path[:-1] == generic[:-1]]
    if len(path) == 1:
        siblings += list(ALIASES)
    if word in ADVICE:
        return f". {ADVICE[word][0].upper()}{ADVICE[word][1:]}"
    elsewhere = [key.name for key in schema_keys() if key.path[-1] == word and "*" not in key.path]
    if elsewhere:
        return f". Did you mean {elsewhere[0]}?"
    near = did_you_mean(word, siblings)
    if near:
        return near
    if len(path) > 1 and siblings:
        return f". Keys of {dotted(path[:-1])}: {', '.join(siblings)}"
    return ""
