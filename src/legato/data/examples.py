"""What a row says, free of its format: a conversation, segments of text, or plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from legato.data.json_text import dump_json
from legato.data.tools import ToolCall, made_up_id

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant, or tool for what a tool returned.
        content: Its text; may be empty beside calls of tools.
        is_trained: What the row itself says (a weight); None: by role.
        is_prompt: Part of a row's prompt: not trained, whatever its role, unless inputs are.
        reasoning: The thinking before the answer, where the row keeps it apart.
        tool_calls: Tools that the assistant calls in this turn.
        tool_call_id: Of a tool's result: the call that it belongs to.
    """

    role: str
    content: str
    is_trained: bool | None = None
    is_prompt: bool = False
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def texts(self) -> Iterator[str]:
        """All of it that a template may write."""
        yield self.content
        yield self.reasoning or ""
        yield self.tool_call_id or ""
        yield from (dump_json(call.for_template()) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text as the tokenizer is to see it, without a template.

    Attributes:
        text: The piece, control tokens written out.
        is_trained: Whether the model must produce it.
    """

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Example:
    """What a row says, free of its format: a conversation, segments of text, or plain text."""

    sample_id: str
    where: str
    messages: tuple[Message, ...] = ()
    segments: tuple[Segment, ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


def with_call_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with an id for every call and every result that has none.

    Args:
        messages: The conversation.

    Returns:
        Ids that rows have stay; made up ones are given in order, to results in the order of the
        calls before them.
    """
    made: list[Message] = []
    number = 0
    waiting: list[str] = []  # ids of calls whose results are still to come
    for message in messages:
        calls = []
        for call in message.tool_calls:
            number += 1
            calls.append(replace(call, id=call.id or made_up_id(number)))
        if calls:
            waiting = [call.id for call in calls if call.id is not None]
        named = message.tool_call_id
        if message.role == "tool" and named is None and waiting:
            named = waiting.pop(0)
        elif named in waiting:
            waiting.remove(named)
        made.append(replace(message, tool_calls=tuple(calls), tool_call_id=named))
    return tuple(made)
