"""From an ``Example`` to token ids and the mask of trained tokens: tokenized once, by position."""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from legato.data.bare import STRADDLING, BareTexts, finished_sample
from legato.data.bounds import token_bounds, tokens_of
from legato.data.examples import ROLES, Example, Message, with_call_ids
from legato.data.json_text import dump_json
from legato.data.samples import Indices, Sample, Tally
from legato.data.spans import (
    EMPTY_THOUGHT,
    Marked,
    PlannedText,
    Span,
    TemplateProblem,
    plan_segments,
    plan_texts,
    refuse_unwritten_tools,
    unmarked_answers,
)
from legato.data.templates import opening_ids, resolve_template, stop_ids, told
from legato.data.vocabulary import refuse_unknown
from legato.errors import ConfigError, DataError

STOP_APPENDED = "answers without a stop token in the template, appended"
RETOKENIZED = (
    "answers whose prompt ends in other tokens than inference sees, as the tokenizer cuts white "
    "space otherwise where an answer follows"
)
EMPTY = "trained turns that are empty, so that only the stop token is trained"
MARKS_DIFFER = (
    "answers that aren't what the template's {% generation %} marks "
    "(trained is what inference needs)"
)
THOUGHT_TRAINED = (
    "turns before whose answer the template puts {added}; it is trained, as inference doesn't give "
    "it"
)
THOUGHT_GIVEN = (
    "turns before whose answer the template puts an empty thought; it isn't trained, as inference "
    "gives it"
)
SPLIT_OFF = "turns that became samples of their own, because "

# Most templates end every prompt alike.
_MOST_PROMPT_ENDS = 100

Tools = Sequence[dict[str, Any]]
Encoded = tuple[PlannedText, list[int], list[tuple[int, int]]]
Made = TypeVar("Made")


class ChatFormatter:
    """Makes samples of examples, with the tokenizer's own chat template or a packaged one.

    Args:
        tokenizer: A fast tokenizer (its character offsets place the mask).
        template: ``auto`` (the tokenizer's own; where it has none, the packaged alpaca),
            ``alpaca``, ``chatml``, or the path of a Jinja file.
        template_kwargs: Variables for the template.
        train_on_inputs: Train every token, not only the answers.
        roles_to_train: Whose turns are trained.
        turns_to_train: ``all`` of them, or only the ``last`` one of each conversation.
        special_tokens_in_text: ``error`` refuses a row whose text holds a control token's name;
            ``allow`` lets the tokenizer read it as that token.
        eos_ids: Stop tokens of the model's generation config; the tokenizer's own joins them.
        vocab_size: Rows of the model's embedding: a row with a token beyond them can't be used.
            None: nobody knows.
        start_date: The day that templates write; frozen, so that a resumed run renders the same
            text.

    Attributes:
        chat_template: The template as text: what belongs into a checkpoint's tokenizer.
        notes: What the person should know of the choice, one sentence each.
        stop_ids: Ids after which generation stops.

    Raises:
        ConfigError: A template that isn't there, or that this tokenizer can't use; a word that
            isn't known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        train_on_inputs: bool = False,
        roles_to_train: Sequence[str] = ("assistant",),
        turns_to_train: str = "all",
        special_tokens_in_text: str = "error",
        eos_ids: Iterable[int] | int | None = None,
        vocab_size: int | None = None,
        start_date: dt.date | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} gives no character offsets, which the loss mask "
                "needs. Use a model folder with a tokenizer.json."
            )
        unknown = set(roles_to_train) - set(ROLES)
        if unknown or not roles_to_train:
            raise ConfigError(f"roles_to_train: {list(roles_to_train)}: some of {', '.join(ROLES)}")
        for key, value, known in (
            ("turns_to_train", turns_to_train, ("all", "last")),
            ("special_tokens_in_text", special_tokens_in_text, ("error", "allow")),
        ):
            if value not in known:
                raise ConfigError(f"{key}: {value}: {' or '.join(known)}")
        self._tokenizer = tokenizer
        self.stop_ids = stop_ids(tokenizer, eos_ids)
        self._stop_id = (
            tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(self.stop_ids)
        )
        self._vocab_size = vocab_size
        self._train_on_inputs = train_on_inputs
        self._roles_to_train = frozenset(roles_to_train)
        self._turns_to_train = turns_to_train
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._prompt_ends: dict[str, list[int]] = {}
        control = sorted(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        self._control_tokens = re.compile("|".join(map(re.escape, control))) if control else None
        self._control_tokens_allowed = special_tokens_in_text == "allow"
        template_found = resolve_template(
            tokenizer, template, start_date=start_date or dt.date.today()
        )
        self.chat_template = template_found.text
        self.notes = (template_found.note,) if template_found.note else ()
        self._rendered_template = template_found.frozen
        self._has_marks = template_found.marks_answers
        self._names_calls = template_found.names_calls
        self._bare = BareTexts(
            opening=opening_ids(tokenizer),
            stop_id=self._stop_id,
            stop_ids=self.stop_ids,
            train_on_inputs=train_on_inputs,
        )
        self._variables = tokenizer.special_tokens_map | dict(template_kwargs or {})

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that samples depend on besides the rows, as JSON values."""
        return {
            "tokenizer": self._tokenizer.backend_tokenizer.to_str(),
            "template": self._rendered_template,
            "variables": self._variables,
            "train_on_inputs": self._train_on_inputs,
            "roles_to_train": sorted(self._roles_to_train),
            "turns_to_train": self._turns_to_train,
            "control_tokens_allowed": self._control_tokens_allowed,
            "stop_ids": sorted(self.stop_ids),
            "stop_id": self._stop_id,
            "opening": self._bare.opening,
            "vocab_size": self._vocab_size,
            "notes": self.notes,
        }

    def format(
        self,
        examples: Sequence[Example],
        *,
        tally: Tally | None = None,
        on_bad: Callable[[DataError, str], None] | None = None,
    ) -> list[list[Sample]]:
        """Samples of each example, tokenized in one batch.

        Args:
            examples: Rows.
            tally: Counts what is worth saying about samples.
            on_bad: Called with the error and the sample id of a row that can't be used, instead of
                raising.

        Returns:
            A list for each example: mostly one sample; none for a bad row; several where turns had
            to be split off.

        Raises:
            DataError: A row that can't be used, without ``on_bad``.
        """
        tally = Tally() if tally is None else tally
        plan = functools.partial(self._plan, tally=tally)
        planned = [_guarded(example, plan, on_bad) for example in examples]
        encoded = iter(self._encode([each.text for texts in planned for each in texts]))
        return [
            _guarded(
                example,
                functools.partial(
                    self._samples, planned=[(text, *next(encoded)) for text in texts], tally=tally
                ),
                on_bad,
            )
            for example, texts in zip(examples, planned, strict=True)
        ]

    def prompt(self, messages: Sequence[Message]) -> str:
        """What inference gives the model before its answer to ``messages``."""
        return self._render(messages, True)

    def _plan(self, example: Example, *, tally: Tally) -> list[PlannedText]:
        if example.text is not None:
            self._refuse_control_tokens(example.text, "text")
            return [PlannedText(example.text, ())]
        if example.segments:  # control tokens are written out in these
            return [plan_segments(example.segments)]
        messages = example.messages
        if self._names_calls:
            messages = with_call_ids(messages)
        for number, message in enumerate(messages, start=1):
            for text in message.texts():
                self._refuse_control_tokens(text, f"message {number}")
        for tool in example.tools:
            self._refuse_control_tokens(dump_json(tool), "tools")
        trained = [i for i, message in enumerate(messages) if self._is_trained(message)]
        if self._turns_to_train == "last":
            trained = trained[-1:]
        if self._train_on_inputs:  # to be found, so that they can be left out
            trained = [i for i, m in enumerate(messages) if i in trained or m.is_trained is False]
        render = functools.partial(self._render, tools=example.tools)
        texts = plan_texts(messages, trained=trained, render=render)
        if example.tools:
            refuse_unwritten_tools(texts, messages, tools=example.tools, render=self._render)
        split = next((text.split for text in texts if text.split), None)
        if self._train_on_inputs and split:
            raise TemplateProblem(
                "train_on_inputs: a turn would have to become a sample of its own, and its prompt "
                f"would be trained several times, because {split}"
            )
        if self._has_marks:
            marks = functools.partial(self._marks, tools=example.tools)
            for unmarked in unmarked_answers(texts, messages, marks=marks):
                tally.add(MARKS_DIFFER, unmarked.sample_id(example.sample_id))
        return texts

    def _is_trained(self, message: Message) -> bool:
        if message.role not in self._roles_to_train:
            return False
        return not message.is_prompt if message.is_trained is None else message.is_trained

    def _refuse_control_tokens(self, text: str, what: str) -> None:
        if self._control_tokens is None or self._control_tokens_allowed:
            return
        found = self._control_tokens.search(text)
        if found:
            raise TemplateProblem(
                f"{what} holds the control token {found.group()!r}, which would end or open a "
                "turn. Remove it, or set special_tokens_in_text: allow"
            )

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, *, tools: Tools = ()
    ) -> str:
        return self._render_with_marks(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )[0]

    def _marks(self, messages: Sequence[Message], *, tools: Tools) -> Marked:
        return self._render_with_marks(messages, tools=tools, return_assistant_tokens_mask=True)

    def _render_with_marks(
        self, messages: Sequence[Message], *, tools: Tools = (), **options: bool
    ) -> Marked:
        try:
            texts, marks = render_jinja_template(
                [[message.for_template() for message in messages]],
                chat_template=self._rendered_template,
                tools=list(tools) or None,
                **options,
                **self._variables,
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise TemplateProblem(
                f"the chat template refuses the conversation: {told(error)}"
            ) from error
        return str(texts[0]), list(marks[0]) if marks else []

    def _encode(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _samples(self, example: Example, *, planned: list[Encoded], tally: Tally) -> list[Sample]:
        for _, ids, _ in planned:
            refuse_unknown(
                [*ids, *self._bare.opening, self._stop_id], self._tokenizer, self._vocab_size
            )
        if example.text is not None:
            return [self._bare.plain_sample(example, ids) for _, ids, _ in planned]
        if example.segments:
            return [self._bare.segments_sample(example, *each, tally=tally) for each in planned]
        return [self._sample(example, *each, tally) for each in planned]

    def _sample(
        self,
        example: Example,
        planned: PlannedText,
        ids: list[int],
        offsets: list[tuple[int, int]],
        tally: Tally,
    ) -> Sample:
        sample_id = planned.sample_id(example.sample_id)
        if planned.split is not None:
            tally.add(SPLIT_OFF + planned.split, sample_id)
        starts, ends = token_bounds(offsets, len(planned.text))
        found = np.zeros(len(ids) + 1, dtype=np.bool_)  # the last is for a stop to be appended
        left_out = np.zeros_like(found)
        for span in planned.spans:
            message = example.messages[span.message]
            first, last = tokens_of(span, starts, ends)
            if span.has_stop:
                last = self._stop(planned, span, ids, starts, ends)
            found[first : last + 1] = True
            if message.is_trained is False:
                left_out[first : last + 1] = True
                continue
            if not message.content.strip() and not message.tool_calls:
                tally.add(EMPTY, sample_id)
            if span.added:
                is_thought = EMPTY_THOUGHT.fullmatch(span.added)
                added = "an empty thought" if is_thought else repr(span.added)
                tally.add(THOUGHT_TRAINED.format(added=added), sample_id)
            elif span.has_stop and EMPTY_THOUGHT.search(planned.text, 0, span.start):
                tally.add(THOUGHT_GIVEN, sample_id)
            if first < len(ids) and starts[first] < span.start < span.end:
                tally.add(STRADDLING, sample_id)
            elif span.has_stop and not self._is_prompted_alike(planned, span, ids[:first], starts):
                tally.add(RETOKENIZED, sample_id)
        found[len(ids)] &= not left_out[len(ids)]
        if found[len(ids)]:
            ids = [*ids, self._stop_id]
            tally.add(STOP_APPENDED, sample_id)
        # What follows the last trained token can't change the loss.
        kept = int(np.flatnonzero(found)[-1]) + 1 if found.any() else len(ids)
        if self._train_on_inputs:
            found[:kept] = True
        return finished_sample(ids[:kept], (found & ~left_out)[:kept], sample_id)

    def _is_prompted_alike(
        self, planned: PlannedText, span: Span, given: list[int], starts: Indices
    ) -> bool:
        """Whether the prompt alone, as inference tokenizes it, is what stands before an answer."""
        # A tokenizer works on what is between added tokens: the prompt's end says it all.
        last = next((j for j in reversed(range(len(given))) if given[j] in self._added_ids), 0)
        end = planned.text[starts[last] if given else 0 : span.start]
        alone = self._prompt_ends.get(end)
        if alone is None:
            backend = self._tokenizer.backend_tokenizer
            alone = backend.encode(end, add_special_tokens=False).ids
            if len(self._prompt_ends) < _MOST_PROMPT_ENDS:
                self._prompt_ends[end] = alone
        return given[last:] == alone

    def _stop(
        self, planned: PlannedText, span: Span, ids: list[int], starts: Indices, ends: Indices
    ) -> int:
        """Index of the token that ends the turn; ``len(ids)`` if it has to be appended."""
        # From the first token that ends after the content: control tokens may swallow white space
        # before them.
        for j in range(int(np.searchsorted(ends, span.end, side="right")), len(ids)):
            if ids[j] in self.stop_ids:
                return j
            written = planned.text[max(starts[j], span.end) : ends[j]]
            if written.strip():
                names = self._tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
                raise TemplateProblem(
                    f"after message {span.message + 1} the chat template writes {written!r}, which "
                    f"isn't a stop token of the model ({', '.join(map(repr, names))}): generation "
                    "wouldn't stop there. Add it to eos_token_id in the model's "
                    "generation_config.json, or choose another chat_template"
                )
        return len(ids)


def _guarded(
    example: Example,
    make: Callable[[Example], list[Made]],
    on_bad: Callable[[DataError, str], None] | None,
) -> list[Made]:
    """``make(example)``; a problem gets the row's place, and goes to ``on_bad`` if given."""
    try:
        return make(example)
    except TemplateProblem as error:
        problem = DataError(f"{example.where}: {error}", path=example.where)
        if on_bad is None:
            raise problem from error.__cause__
        on_bad(problem, example.sample_id)
        return []
