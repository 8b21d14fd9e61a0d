"""YAML as text with places: what was typed, and on which line.

Every plain scalar stays the text that was typed (``null`` and ``None`` excepted); the schema
decides whether ``012`` is a name or a number. Anchors, tags and duplicate keys are refused: a
config is a plain tree, and reading one can't run code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from legato.config.problems import KeyPath, Problem

FREE_FORM = frozenset({"chat_template_kwargs"})
"""Keys whose content no schema types: scalars below them are read as YAML 1.2 does."""

MAX_DEPTH = 32
"""Levels of lists and mappings; no config needs nearly as many, and libraries recurse over them."""

_TOO_DEEP = f"nested too deeply: more than {MAX_DEPTH} levels"
_LONGEST_INTEGER = 1000  # digits; Python refuses to read more than 4300
_NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL", "None"})
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


@dataclass
class Layer:
    """One place where keys are set: a file, or the command line."""

    name: str
    """How errors call it, e.g. ``my.yaml``."""
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """1-based line of each key; empty for the command line."""
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """``my.yaml:12`` for the key, or for the nearest mapping around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


class _TextLoader(yaml.SafeLoader):
    """Composes nodes only; no implicit types, so that every plain scalar is text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - a table that PyYAML looks up here

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # no hints there
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            raise yaml.composer.ComposerError(
                None,
                None,
                f"anchors and aliases ({anchor}) aren't read; refer to another key as ${{key}}",
                event.start_mark,
            )
        return super().compose_node(parent, index)


def read_yaml(text: str, *, name: str) -> Layer:
    """Read a config file's text.

    Args:
        text: YAML.
        name: How errors call the file.

    Returns:
        Keys and values, scalars as they were typed, with their lines; what can't be read is in
        ``.problems``.
    """
    layer = Layer(name)
    try:
        node = yaml.compose(text, Loader=_TextLoader)
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None:
            layer.name = f"{name}:{error.problem_mark.line + 1}"
        layer.problems.append(
            Problem((), f"not readable as YAML: {error.problem or error.context}")
        )
        return layer
    except RecursionError:
        layer.problems.append(Problem((), "not readable as YAML: nested too deeply"))
        return layer
    except yaml.YAMLError as error:
        layer.problems.append(Problem((), f"not readable as YAML: {' '.join(str(error).split())}"))
        return layer
    if node is None:
        layer.problems.append(Problem((), "the file holds no keys"))
    elif not isinstance(node, yaml.MappingNode):
        layer.problems.append(Problem((), "expected keys and values, `model: ...` on a line"))
    else:
        layer.data = _read_node(node, (), layer)
    return layer


def _read_node(node: yaml.Node, path: KeyPath, layer: Layer) -> Any:
    if len(path) > MAX_DEPTH:
        problem = Problem(path[:1], _TOO_DEEP)
        if problem not in layer.problems:
            layer.problems.append(problem)
        return None
    if node.tag not in _PLAIN_TAGS:
        layer.problems.append(Problem(path, f"YAML tags ({node.tag}) aren't read; write the value"))
        return None
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(node, path, layer)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            layer.lines[(*path, index)] = item.start_mark.line + 1
        return [_read_node(item, (*path, i), layer) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return node.value
    return read_plain(node.value, free_form=bool(path) and path[0] in FREE_FORM)


def _read_mapping(node: yaml.MappingNode, path: KeyPath, layer: Layer) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            layer.problems.append(Problem(path, "a key must be a word, not a list or a mapping"))
            continue
        child = (*path, key_node.value)
        if key_node.value in values:
            first = layer.lines[child]
            layer.problems.append(Problem(child, f"set twice, on lines {first} and {line}"))
            continue
        layer.lines[child] = line
        values[key_node.value] = _read_node(value_node, child, layer)
    return values


def read_plain(text: str, *, free_form: bool = False) -> Any:
    """An unquoted scalar: None for the null words, else its text or, free-form, its value."""
    if text in _NULL_WORDS:
        return None
    if not free_form:
        return text
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if len(text) <= _LONGEST_INTEGER and _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return text


@dataclass(frozen=True)
class Override:
    """One ``key=value`` or ``~key`` of a command line."""

    argument: str
    path: KeyPath
    value: Any = None
    remove: bool = False


def read_override(argument: str) -> Override | Problem:
    """Read ``a.b=value`` (everything after the first ``=`` is the value) or ``~a.b``."""
    if argument.partition("=")[0].count(".") >= MAX_DEPTH:
        return Problem((), f"{argument[:40]}...: {_TOO_DEEP}")
    if argument.startswith("~"):
        path = _split(argument[1:])
        if not path or "=" in argument:
            return Problem((), f"{argument}: expected ~key, which removes a key")
        return Override(argument, path, remove=True)
    name, equals, text = argument.partition("=")
    path = _split(name.strip())
    if not equals or not path:
        return Problem((), f"{argument}: expected key=value or ~key")
    if text[:1] not in ("[", "{", "'", '"'):
        return Override(argument, path, read_plain(text, free_form=path[0] in FREE_FORM))
    root = path[0] if path[0] in FREE_FORM else "value"
    layer = read_yaml(f"{root}: {text}", name=argument)
    if layer.problems:
        problem = layer.problems[0]
        return Problem((), f"{argument}: {problem.message}")
    return Override(argument, path, layer.data[str(root)])


def _split(name: str) -> KeyPath:
    parts = name.split(".")
    if not all(parts):
        return ()
    return tuple(map(index_or_name, parts))


def index_or_name(part: str) -> int | str:
    """One part of a dotted key: a place in a list, or a name."""
    return int(part) if part.isdecimal() and len(part) < _LONGEST_INTEGER else part
