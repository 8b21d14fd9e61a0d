"""Where in a rendered conversation the assistant's words are, for any chat template.

No template is known by name. The definition: the model is trained on exactly what it must produce
after the text that inference gives it. So a turn begins where the generation prompt of the turns
before it ends, and it ends where two renders that differ only in its content become equal again. A
turn for which that can't hold in the joint text becomes a text of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from legato.data.examples import Message, Segment
from legato.data.tools import with_name

# Two strings that no text contains and no template changes; two, so that a template can't be fitted
# to one.
PROBES = ("Qz7probeKw3x", "Jx4querryVb9")
_ANCHOR = "Vk5anchorTz8"  # the same for the message before the one that is probed
THINK_TAGS = re.compile(r"</?think>")
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text."""
Marked = tuple[str, list[tuple[int, int]]]
"""A rendered text, and in characters what its ``{% generation %}`` says that the model produces."""


class Split(StrEnum):
    """Why a turn can't be trained inside the joint text."""

    PROMPT = "at inference the template renders the turns before it otherwise"
    CONTENT = "the template leaves out a part of it once other turns follow"
    LATER = "the template writes it otherwise once other turns follow"


class TemplateProblem(ValueError):
    """The assistant's part can't be told from this template and this row."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that is trained, in characters.

    Attributes:
        start: First character.
        end: After the last character of the content; the stop token follows.
        message: Number of the message, from 0.
        has_stop: True for what the model produces: then a stop token must follow and is trained
            too.
        added: What the template puts between the generation prompt and the row's own words, white
            space aside.
    """

    start: int
    end: int
    message: int
    has_stop: bool = True
    added: str = ""


@dataclass(frozen=True, slots=True)
class PlannedText:
    """A text to tokenize once, and what is trained in it.

    Attributes:
        text: The rendered conversation.
        spans: Trained parts, in order.
        split: Why this is one turn's own text; None for the joint text.
    """

    text: str
    spans: tuple[Span, ...]
    split: Split | None = None

    def turns(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Those of a conversation that the text renders."""
        return messages if self.split is None else messages[: self.spans[0].message + 1]

    def sample_id(self, row: str) -> str:
        """The id of its sample, from the row's."""
        return row if self.split is None else f"{row}#{self.spans[0].message + 1}"


def plan_texts(
    messages: Sequence[Message], *, trained: Iterable[int], render: Render
) -> list[PlannedText]:
    """The texts that train the given turns.

    Args:
        messages: The conversation.
        trained: Numbers, from 0, of the messages to train.
        render: The chat template.

    Returns:
        The joint text first (absent if every trained turn had to leave it), then one for each turn
        that did.

    Raises:
        TemplateProblem: The template drops, repeats or changes a turn.
    """
    joint = render(messages, False)
    for i, message in enumerate(messages):
        if message.role == "tool":  # what a tool returned must be read, trained or not
            _around(messages, i, render)
    spans: list[Span] = []
    alone: list[PlannedText] = []
    last_answer = 0
    for i in trained:
        if messages[i].role != "assistant":
            spans.append(_given_span(joint, messages, i, render))
            continue
        last_answer = i
        found = _answer_span(joint, messages, i, render)
        if isinstance(found, Span) and not _is_told_alike(joint, found, messages, render):
            found = Split.LATER
        if isinstance(found, Span):
            spans.append(found)
        else:
            alone.append(_text_of_turn(messages, i, render, found))
    if last_answer:
        _refuse_unwritten(messages[:last_answer], render)
    if spans or not alone:
        alone.insert(0, PlannedText(joint, tuple(spans)))
    return alone


def _refuse_unwritten(messages: Sequence[Message], render: Render) -> None:
    """What is given must be in the prompt, wherever the template writes it: one render for all."""
    given = {i: f"{PROBES[0]}{i}x" for i, m in enumerate(messages) if m.role in ("system", "user")}
    probed = [_saying(m, given[i]) if i in given else m for i, m in enumerate(messages)]
    text = render(probed, True)
    for i, probe in given.items():
        if probe not in text:
            raise TemplateProblem(
                f"the template leaves out message {i + 1} ({messages[i].role}). Remove it from the "
                "row, or choose another chat_template"
            )


def refuse_unwritten_tools(
    texts: Sequence[PlannedText],
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]],
    render: Callable[..., str],
) -> None:
    """Each tool that a row offers must be in every text, under whatever name it has.

    Args:
        texts: What :func:`plan_texts` made of the messages.
        messages: The conversation.
        tools: Those that it offers.
        render: The chat template: (messages, add_generation_prompt, tools=tools) -> text.

    Raises:
        TemplateProblem: The template leaves one out.
    """
    # A tool's own name may stand in a call or in the user's words.
    probes = [f"{PROBES[0]}{number}t" for number in range(len(tools))]
    probed = [with_name(tool, probe) for tool, probe in zip(tools, probes, strict=True)]
    for each in texts:
        text = render(each.turns(messages), False, tools=probed)
        for tool, probe in zip(tools, probes, strict=True):
            if probe not in text:
                raise TemplateProblem(
                    f"the row offers the tool {tool['function']['name']}, and the template doesn't "
                    "write it. Use a template that knows tools, as chat_template: chatml does"
                )


def unmarked_answers(
    texts: Sequence[PlannedText],
    messages: Sequence[Message],
    *,
    marks: Callable[[Sequence[Message]], Marked],
) -> Iterator[PlannedText]:
    """Answers that the template's own marks don't hold from their beginning to their end.

    Args:
        texts: What :func:`plan_texts` made of the messages.
        messages: The conversation.
        marks: The chat template.

    Yields:
        PlannedText: The text of such an answer, as often as it holds one.
    """
    for each in texts:
        text, marked = marks(each.turns(messages))
        for span in each.spans:
            is_marked = text == each.text and any(_covers(mark, span, text) for mark in marked)
            if span.has_stop and not is_marked:
                yield each


def _covers(mark: tuple[int, int], span: Span, text: str) -> bool:
    first, last = sorted((mark[0], span.start))  # between them may be white space
    return span.end <= mark[1] and not text[first:last].strip()


def plan_segments(segments: Sequence[Segment]) -> PlannedText:
    """The text that segments are, one after the other.

    Args:
        segments: Pieces of text.

    Returns:
        The text; a span for each piece that is trained and isn't empty.
    """
    text, spans = "", []
    for number, segment in enumerate(segments):
        end = len(text) + len(segment.text)
        if segment.is_trained and segment.text:
            spans.append(Span(len(text), end, number, has_stop=False))
        text += segment.text
    return PlannedText(text, tuple(spans))


def _answer_span(text: str, messages: Sequence[Message], i: int, render: Render) -> Span | Split:
    prompt = _prompt(messages, i, render)
    before, after = _around(messages, i, render)
    if not text.startswith(prompt):
        return Split.PROMPT
    start, end = len(prompt), len(text) - len(after)
    if end < start or not text.endswith(after) or not _holds(text[start:end], messages[i]):
        return Split.CONTENT
    if _dropped_call(messages, i, render, (prompt, after)) is not None:
        return Split.CONTENT
    return Span(start, end, i, added=_added(text, prompt, before, messages[i]))


def _added(text: str, prompt: str, before: str, message: Message) -> str:
    """What stands between ``prompt`` and the words of ``message`` and isn't of them."""
    if message.reasoning or not before.startswith(prompt) or not text.startswith(before):
        return ""
    added = before[len(prompt) :].strip()
    return "" if added in message.content else added


def _is_told_alike(text: str, span: Span, messages: Sequence[Message], render: Render) -> bool:
    """Whether the turn is written as it is where it's the last one, as at inference it is."""
    head = messages[: span.message + 1]
    if len(head) == len(messages):
        return True
    try:
        alone = render(head, False)
        last = _answer_span(alone, head, span.message, render)
    except TemplateProblem:  # a call without its result, say: nothing to compare with
        return True
    return isinstance(last, Split) or alone[: last.end] == text[: span.end]


def _prompt(messages: Sequence[Message], i: int, render: Render) -> str:
    """The text that inference gives the model before it answers message ``i``."""
    if i == 0:
        raise TemplateProblem("message 1 is the assistant's: there is no prompt that it answers")
    return render(messages[:i], True)


def _around(messages: Sequence[Message], i: int, render: Render) -> tuple[str, str]:
    """What the template writes before and after the content of message ``i``, found by probes."""
    found = []
    for probe in PROBES:
        parts = render(
            [*messages[:i], _saying(messages[i], probe), *messages[i + 1 :]], False
        ).split(probe)
        if len(parts) != 2:
            did = "leaves out" if len(parts) == 1 else "repeats"
            raise TemplateProblem(f"the template {did} message {i + 1} ({messages[i].role})")
        found.append((parts[0], parts[1]))
    if found[0] != found[1]:
        raise TemplateProblem(
            f"the template writes message {i + 1} ({messages[i].role}) depending on its words"
        )
    return found[0]


def _saying(message: Message, text: str) -> Message:
    """The message with other words, which stand where its calls of tools stood as well."""
    return replace(message, content=text, tool_calls=())


def _pieces(message: Message) -> list[str]:
    """What must be in the rendered turn; in pieces, as templates move thinking about."""
    pieces = [message.reasoning or "", *THINK_TAGS.split(message.content)]
    return [piece.strip() for piece in pieces if piece.strip()]


def _holds(body: str, message: Message) -> bool:
    # Templates write calls in many ways; names are in all of them.
    if not all(word in body for call in message.tool_calls for word in call.words()):
        return False
    position = 0
    for piece in _pieces(message):
        found = body.find(piece, position)
        if found < 0:
            return False
        position = found + len(piece)
    return True


def _dropped_call(
    messages: Sequence[Message], i: int, render: Render, around: tuple[str, str]
) -> int | None:
    """Number, from 0, of the first call that the answer doesn't hold whole; None: it holds all.

    By probes: two calls of one tool share their name, and values may stand elsewhere in the text.
    """
    calls = messages[i].tool_calls
    if not calls:
        return None
    probed, words = zip(
        *(call.in_probes(f"{PROBES[0]}{number}c") for number, call in enumerate(calls)),
        strict=True,
    )
    turn = replace(messages[i], tool_calls=probed)
    text = render([*messages[:i], turn, *messages[i + 1 :]], False)
    before, after = around
    is_around = text.startswith(before) and text.endswith(after)
    body = text[len(before) : len(text) - len(after)] if is_around else ""
    return next((k for k, of in enumerate(words) if not all(word in body for word in of)), None)


def _given_span(text: str, messages: Sequence[Message], i: int, render: Render) -> Span:
    """The content of a turn that the model reads; trained only where ``roles_to_train`` says so."""
    before, after = _around(messages, i, render)
    end = len(text) - len(after)
    if not text.startswith(before) or not text.endswith(after) or end < len(before):
        raise TemplateProblem(
            f"message {i + 1} ({messages[i].role}) can't be found in what the template makes of it"
        )
    return Span(len(before), end, i, has_stop=False)


def _text_of_turn(
    messages: Sequence[Message], i: int, render: Render, reason: Split
) -> PlannedText:
    """Turn ``i`` as the answer to exactly what inference gives before it."""
    head = messages[: i + 1]
    text = render(head, False)
    found = _answer_span(text, head, i, render)
    if isinstance(found, Span):
        return PlannedText(text, (found,), reason)
    prompt = _prompt(messages, i, render)
    before, after = _around(head, i, render)
    rendered = text[len(before) : len(text) - len(after)]
    as_rendered = text.startswith(before) and text.endswith(after) and _holds(rendered, messages[i])
    calls = messages[i].tool_calls
    dropped = _dropped_call(head, i, render, (before, after))
    if dropped is not None:
        raise TemplateProblem(
            f"message {i + 1} calls a tool, and the template doesn't write the call "
            f"({calls[dropped].name}, {dropped + 1} of {len(calls)}) where the answer is. Use a "
            "template that knows tools, as chat_template: chatml does"
        )
    content = _after_opened_thought(prompt, messages[i].content)
    body = _lead(head, i, render) + (rendered if as_rendered else content)
    if not _holds(body, messages[i]) or (calls and not as_rendered):
        raise TemplateProblem(
            f"message {i + 1} has reasoning_content, and the template never writes it. "
            "Move it into the content, or use a template that knows it"
        )
    end = len(prompt) + len(body)
    return PlannedText(prompt + body + after, (Span(len(prompt), end, i),), reason)


def _after_opened_thought(prompt: str, content: str) -> str:
    """The content without its own ``<think>`` where the generation prompt opens one already."""
    opens = prompt.rstrip().endswith("<think>") and content.lstrip().startswith("<think>")
    return content.lstrip().removeprefix("<think>").lstrip("\n") if opens else content


def _lead(messages: Sequence[Message], i: int, render: Render) -> str:
    """What the template writes between generation prompt and content: Mistral's space, for one.

    Both texts end with what follows the last message before the turn; where the training text goes
    on after that, the rest belongs to the answer.
    """
    anchored = [*messages[: i - 1], _saying(messages[i - 1], _ANCHOR), *messages[i:]]
    prompt = _prompt(anchored, i, render)
    before, _ = _around(anchored, i, render)
    header, opened = (text[text.rfind(_ANCHOR) :] for text in (prompt, before))
    return opened[len(header) :] if _ANCHOR in prompt and opened.startswith(header) else ""
