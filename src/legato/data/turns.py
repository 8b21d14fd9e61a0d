"""One turn of a conversation, from the forms that data sets have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legato.data.examples import ROLES, Message
from legato.data.json_text import dump_json
from legato.data.tools import read_call_id, read_calls

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
# Names by which turns say more of themselves, in messages and in sharegpt rows alike.
WEIGHTS = ("weight", "loss_weight")
REASONING = ("reasoning_content", "reasoning", "thinking")
# What other tools read of a turn, and what says the same here: silence would train something else.
OTHERS_KEYS = {
    "train": "weight: 0 or 1 says whether a turn is trained",
    "train_detail": "a segments row says which part of a text is trained",
    "function_call": "tool_calls holds the calls of a turn",
}
TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", *WEIGHTS, *REASONING)
_SAID = frozenset(("content", "tool_calls"))  # a turn has one of them
SHAREGPT_KEYS = ("from", "value", *WEIGHTS, *REASONING)


def are_messages(value: object) -> bool:
    """Whether a value is turns with a role and something said, and no other kind of list."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and "role" in each and each.keys() & _SAID for each in value)
    )


def read_message(turn: object, number: int) -> Message:
    """One turn of ``messages`` rows.

    Args:
        turn: As the row has it.
        number: Its place in the conversation, from 1, for the message.

    Returns:
        The turn.

    Raises:
        ValueError: It can't be used; says which turn, and what is wrong.
    """
    where = f"message {number}"
    if not isinstance(turn, dict):
        raise ValueError(
            f"{where} is of type {type(turn).__name__}, not an object with role and content"
        )
    role = turn.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r}. Known: {', '.join(ROLES)}")
    _refuse_others_keys(turn, OTHERS_KEYS, where)
    content = turn.get("content")
    calls = read_calls(turn["tool_calls"], where) if turn.get("tool_calls") else ()
    if calls and role != "assistant":
        raise ValueError(f"{where}: only the assistant calls tools, this is a message of {role}")
    if calls and content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    thought, weight = _thought(turn, role, where), _weight(turn, where)
    return Message(
        role=str(role),
        content=read_text(content, f"{where}: content"),
        is_trained=bool(weight) if weight is not None else None,
        reasoning=read_text(thought, f"{where}: reasoning") if thought else None,
        tool_calls=calls,
        tool_call_id=read_call_id(turn.get("tool_call_id"), where) if role == "tool" else None,
    )


def _thought(turn: Mapping[str, Any], role: str, where: str) -> object:
    """What the turn's thinking is, under whichever name; None: it has none."""
    thoughts = [turn[key] for key in REASONING if turn.get(key)]
    if thoughts and role != "assistant":
        raise ValueError(f"{where}: only the assistant reasons, this is a message of {role}")
    if any(thought != thoughts[0] for thought in thoughts):
        raise ValueError(f"{where}: several of {', '.join(REASONING)}, and they differ; give one")
    return thoughts[0] if thoughts else None


def _weight(turn: Mapping[str, Any], where: str) -> object:
    """The turn's weight, 0 or 1, under whichever name; None: it has none."""
    weights = [turn[key] for key in WEIGHTS if turn.get(key) is not None]
    if unknown := [weight for weight in weights if weight not in (0, 1)]:
        raise ValueError(
            f"{where}: weight {unknown[0]!r}; 0 (not trained) and 1 (trained) are known"
        )
    if weights[1:] not in ([], weights[:1]):
        raise ValueError(f"{where}: weight {weights[0]!r} and loss_weight {weights[1]!r}; give one")
    return weights[0] if weights else None


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text":
        return read_text(part.get("text"), where)
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: a part of type {kind!r}; only text can be trained on")


def read_sharegpt_turn(turn: object, number: int) -> Message:
    """One turn of ``conversations`` rows.

    Args:
        turn: As the row has it.
        number: Its place in the conversation, from 1, for the message.

    Returns:
        The turn.

    Raises:
        ValueError: It can't be used; says which turn, and what is wrong.
    """
    where = f"conversations: turn {number}"
    if not isinstance(turn, dict) or "from" not in turn:
        raise ValueError(f"{where} isn't an object with from and value")
    calls = {"tool_calls": "a turn from function_call holds the calls"}
    _refuse_others_keys(turn, OTHERS_KEYS | calls, where)
    sender = turn["from"]
    if not isinstance(sender, str):
        raise ValueError(f"{where}: from is of type {type(sender).__name__}; expected text")
    message = {key: turn[key] for key in (*WEIGHTS, *REASONING) if key in turn}
    if sender in CALL_ROLES:
        message |= {"role": "assistant", "tool_calls": turn.get("value")}
        if not turn.get("value"):
            raise ValueError(f"{where}: an empty {sender}")
    elif sender in SHAREGPT_ROLES:
        message |= {"role": SHAREGPT_ROLES[sender], "content": turn.get("value")}
    else:
        raise ValueError(
            f"{where}: unknown role {sender!r}. Known: {', '.join([*SHAREGPT_ROLES, *CALL_ROLES])}"
        )
    return read_message(message, number)


def _refuse_others_keys(turn: Mapping[str, Any], others: Mapping[str, str], where: str) -> None:
    for key, remedy in others.items():
        if turn.get(key) not in (None, "", [], {}):
            raise ValueError(f"{where}: {key} isn't read; {remedy}")


def read_text(value: object, what: str, *, as_json: bool = False) -> str:
    """A value of a row that has to be text.

    Args:
        value: As the row has it.
        what: Its name, for the message.
        as_json: Write another value than text as JSON, as where an answer is an object.

    Returns:
        The text.

    Raises:
        ValueError: It is null or, without ``as_json``, something else; says what.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise ValueError(f"{what} is null; expected text")
    if as_json:
        try:
            return dump_json(value)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from None
    raise ValueError(f"{what} is of type {type(value).__name__}; expected text")
