"""Tools and calls of tools, from the forms that data sets have to the one that templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from legato.data.json_text import fault_of, parse_json


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the assistant calls.

    Attributes:
        name: The tool's.
        arguments: By name, JSON values.
        id: What the tool's result refers to; None: the row has none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        named = {} if self.id is None else {"id": self.id}
        return {
            **named,
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }

    def words(self) -> Iterator[str]:
        """What every way of writing the call holds."""
        yield self.name
        yield from self.arguments

    def in_probes(self, prefix: str) -> tuple[ToolCall, list[str]]:
        """The call with words of its own in the place of its name and of each value.

        Args:
            prefix: What the words begin with; no other text holds it.

        Returns:
            The call, its arguments' names and nesting kept; the words, each of which a template
            that writes the call writes.
        """
        words = [f"{prefix}0x"]

        def probed(value: object) -> object:
            if isinstance(value, Mapping) and value:
                return {name: probed(inner) for name, inner in value.items()}
            if isinstance(value, list) and value:
                return [probed(inner) for inner in value]
            words.append(f"{prefix}{len(words)}x")
            return words[-1]

        arguments = {name: probed(value) for name, value in self.arguments.items()}
        return replace(self, name=words[0], arguments=arguments), words


def with_name(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A tool, as templates expect it, under another name."""
    return {**tool, "function": {**tool["function"], "name": name}}


def read_tools(value: object) -> tuple[dict[str, Any], ...]:
    """The tools that a row offers.

    Args:
        value: A list of schemas, or one as JSON text; each as it is or inside of ``function``.

    Returns:
        Schemas as chat templates expect them: ``{"type": "function", "function": {...}}``.

    Raises:
        ValueError: It isn't that; says what is wrong.
    """
    tools = _parsed(value, "tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise ValueError(f"tools: expected a list of tools, found {type(tools).__name__}")
    made = []
    for number, tool in enumerate(tools, start=1):
        schema = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            raise ValueError(f"tools: entry {number} isn't an object with a name")
        made.append({"type": "function", "function": schema})
    return tuple(made)


def read_calls(value: object, where: str) -> tuple[ToolCall, ...]:
    """The calls of one turn.

    Args:
        value: One call or a list of them, or that as JSON text; each with a name and arguments (an
            object, or one as JSON text), as it is or inside of ``function``.
        where: The turn, for the message.

    Returns:
        The calls, in order.

    Raises:
        ValueError: It isn't that; says what is wrong.
    """
    parsed = _parsed(value, f"{where}: tool call") if isinstance(value, str) else value
    calls: Sequence[object] = parsed if isinstance(parsed, list) else [parsed]
    made = []
    for call in calls:
        outer = call if isinstance(call, dict) else {}
        function = outer.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call isn't an object with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{where}: arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: arguments of {function['name']}: expected an object")
        made.append(ToolCall(function["name"], arguments, read_call_id(outer.get("id"), where)))
    return tuple(made)


def read_call_id(value: object, where: str) -> str | None:
    """The name of one call, by which a result says whose it is.

    Args:
        value: Text, or nothing.
        where: The turn, for the message.

    Returns:
        The text; None where there is none.

    Raises:
        ValueError: It is something else.
    """
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{where}: the id of a tool call is {value!r}; expected text")
    return value


def made_up_id(number: int) -> str:
    """An id for a call that has none: nine letters and digits, the form that Mistral's take."""
    return f"call{number:05d}"


def _parsed(text: str, what: str) -> Any:
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} isn't valid JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None
    if (fault := fault_of(value)) is not None:
        raise ValueError(f"{what} {fault}")
    return value
