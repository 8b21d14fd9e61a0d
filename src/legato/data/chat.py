"""From an ``Example`` to token ids and the mask of trained tokens: tokenized once, by position."""

from __future__ import annotations

import datetime as dt
import importlib.resources
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from legato.data.formats import Example, Message
from legato.data.samples import Indices, Mask, Sample, Tally
from legato.data.spans import PlannedText, Span, TemplateProblem, plan_texts
from legato.errors import ConfigError, DataError

PACKAGED = ("alpaca", "chatml")
GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

STOP_APPENDED = "answers had no stop token after them in the template; it was appended"
STRADDLING = (
    "answers begin inside a token that also holds the end of the prompt, which inference never "
    "sees; "
    "strip the white space at their beginning"
)
MARKS_DIFFER = (
    "answers aren't what the template's {% generation %} marks; what inference needs was trained"
)


class ChatFormatter:
    """Makes samples of examples, with the tokenizer's own chat template or a packaged one.

    Args:
        tokenizer: A fast tokenizer (its character offsets place the mask).
        template: ``auto`` (the tokenizer's own; where it has none, the packaged alpaca),
            ``alpaca``, ``chatml``, or the path of a Jinja file.
        template_kwargs: Variables for the template.
        train_on_inputs: Train every token, not only the answers.
        roles_to_train: Whose turns are trained.
        special_tokens_in_text: ``error`` refuses a row whose text holds a control token's name;
            ``allow`` lets the tokenizer read it as that token.
        eos_ids: The stop tokens of the model's generation config; the tokenizer's own joins them.
        start_date: The day that templates write; frozen, so that a resumed run renders the same
            text.

    Attributes:
        chat_template: The template as text: what belongs into a checkpoint's tokenizer.
        notes: What the person should know of the choice, one sentence each.
        stop_ids: Ids after which generation stops.

    Raises:
        ConfigError: A template that isn't there, or that this tokenizer can't use.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        train_on_inputs: bool = False,
        roles_to_train: Sequence[str] = ("assistant",),
        special_tokens_in_text: str = "error",
        eos_ids: Iterable[int] = (),
        start_date: dt.date | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} gives no character offsets, which the loss mask "
                "needs. "
                "Use a model folder with a tokenizer.json."
            )
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(eos_ids) | ({tokenizer.eos_token_id} - {None})
        if not self.stop_ids:
            raise ConfigError(
                "the tokenizer names no end-of-sequence token: the model couldn't learn to stop"
            )
        self._stop_id = (
            tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(self.stop_ids)
        )
        self._train_on_inputs = train_on_inputs
        self._roles_to_train = frozenset(roles_to_train)
        special = sorted(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        self._control_tokens = (
            re.compile("|".join(map(re.escape, special)))
            if special and special_tokens_in_text == "error"
            else None
        )
        self.chat_template, self.notes = _resolve_template(tokenizer, template)
        self._has_marks = GENERATION_TAG.search(self.chat_template) is not None
        self._rendered_template = _freeze_date(self.chat_template, start_date or dt.date.today())
        self._opening = _opening_ids(tokenizer)
        self._variables = tokenizer.special_tokens_map | dict(template_kwargs or {})

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
        planned = [self._guarded(example, self._plan, on_bad) or [] for example in examples]
        flat = [each for texts in planned for each in texts]
        encoded = self._encode([each.text for each in flat])
        position = 0
        result: list[list[Sample]] = []
        for example, texts in zip(examples, planned, strict=True):
            pairs = list(zip(texts, encoded[position : position + len(texts)], strict=True))
            position += len(texts)

            def mask(example: Example, pairs: Any = pairs) -> list[Sample]:
                return [
                    self._sample(example, text, ids, offsets, tally)
                    for text, (ids, offsets) in pairs
                ]

            result.append(self._guarded(example, mask, on_bad) or [])
        return result

    def prompt(self, messages: Sequence[Message]) -> str:
        """What inference gives the model before its answer to ``messages``."""
        return self._render(messages, True)

    def _guarded(
        self,
        example: Example,
        make: Callable[[Example], list[Any]],
        on_bad: Callable[[DataError, str], None] | None,
    ) -> list[Any] | None:
        try:
            return make(example)
        except (TemplateProblem, jinja2.TemplateError) as error:
            problem = DataError(f"{example.where}: {error}", path=example.where)
            if on_bad is None:
                raise problem from None
            on_bad(problem, example.sample_id)
            return None

    def _plan(self, example: Example) -> list[PlannedText]:
        if example.text is not None:
            self._refuse_control_tokens(example.text, "text")
            return [PlannedText(example.text, ())]
        for number, message in enumerate(example.messages, start=1):
            self._refuse_control_tokens(
                message.content + (message.reasoning or ""), f"message {number}"
            )
        trained = [i for i, message in enumerate(example.messages) if self._is_trained(message)]
        texts = plan_texts(example.messages, trained=trained, render=self._render)
        if self._train_on_inputs and any(text.split for text in texts):
            raise TemplateProblem(
                "train_on_inputs: a turn had to become a sample of its own, so its prompt would be "
                "trained "
                f"several times ({next(text.split for text in texts if text.split)})"
            )
        return texts

    def _is_trained(self, message: Message) -> bool:
        by_role = message.role in self._roles_to_train
        return by_role if message.is_trained is None else by_role and message.is_trained

    def _refuse_control_tokens(self, text: str, what: str) -> None:
        found = self._control_tokens.search(text) if self._control_tokens else None
        if found:
            raise TemplateProblem(
                f"{what} holds the control token {found.group()!r}, which would end or open a "
                "turn. "
                "Remove it, or set special_tokens_in_text: allow"
            )

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        texts, _ = render_jinja_template(
            [[message.for_template() for message in messages]],
            chat_template=self._rendered_template,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )
        return str(texts[0])

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

    def _sample(
        self,
        example: Example,
        planned: PlannedText,
        ids: list[int],
        offsets: list[tuple[int, int]],
        tally: Tally,
    ) -> Sample:
        if example.text is not None:
            return self._plain_sample(example, ids)
        sample_id = example.sample_id
        if planned.split is not None:
            sample_id += f"#{planned.spans[0].message + 1}"
            tally.add(f"turns became samples of their own, because {planned.split}", sample_id)
        starts, ends = token_bounds(offsets, len(planned.text))
        trained = np.zeros(
            len(ids) + 1, dtype=np.bool_
        )  # one more, for a stop that has to be appended
        for span in planned.spans:
            first = int(np.searchsorted(ends, span.start, side="right"))
            if first < len(ids) and starts[first] < span.start < span.end:
                tally.add(STRADDLING, sample_id)
            last = int(np.searchsorted(starts, span.end, side="left")) - 1
            if span.has_stop:
                last = self._stop(planned, span, ids, starts, ends)
            trained[first : last + 1] = True
        if trained[len(ids)]:
            ids = [*ids, self._stop_id]
            tally.add(STOP_APPENDED, sample_id)
        # What follows the last trained token can't change the loss.
        kept = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else len(ids)
        if self._train_on_inputs:
            trained[:kept] = True
        return _finished(ids[:kept], trained[:kept], sample_id)

    def _stop(
        self, planned: PlannedText, span: Span, ids: list[int], starts: Indices, ends: Indices
    ) -> int:
        """Index of the token that ends the turn; ``len(ids)`` if it has to be appended."""
        text = planned.text
        j = int(np.searchsorted(starts, span.end, side="left"))
        while j < len(ids):
            if ids[j] in self.stop_ids:
                return j
            if not text[starts[j] : ends[j]].isspace():
                break
            j += 1
        if j == len(ids):
            return len(ids)
        names = [self._tokenizer.convert_ids_to_tokens(i) for i in sorted(self.stop_ids)]
        raise TemplateProblem(
            f"after message {span.message + 1} the chat template writes "
            f"{text[starts[j] : ends[j]]!r}, which "
            f"isn't one of the model's stop tokens ({', '.join(map(repr, names))}), so generation "
            "wouldn't stop "
            "there. Add it to eos_token_id in the model's generation_config.json, or choose "
            "another chat_template"
        )

    def _plain_sample(self, example: Example, ids: list[int]) -> Sample:
        """Plain text, opened as the tokenizer itself opens text (a BOS, or nothing), and ended."""
        ids = [*self._opening, *ids]
        if not ids or ids[-1] != self._stop_id:
            ids.append(self._stop_id)
        return _finished(ids, np.ones(len(ids), dtype=np.bool_), example.sample_id)


def token_bounds(offsets: Sequence[tuple[int, int]], text_length: int) -> tuple[Indices, Indices]:
    """First character of each token, and the first character after it.

    A token reaches at least to where the next one begins: some tokenizers report empty offsets.
    Tokens that share a character (the bytes of an emoji) share its bounds.

    Args:
        offsets: ``(start, end)`` in characters, as the tokenizer reports them.
        text_length: Characters of the text.

    Returns:
        Starts and ends, int64 ``[T]`` each, neither falling.
    """
    if not offsets:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    pairs = np.array(offsets, dtype=np.int64)
    starts = np.maximum.accumulate(pairs[:, 0])
    following = np.append(starts, text_length)[np.searchsorted(starts, starts, side="right")]
    return starts, np.maximum.accumulate(np.maximum(pairs[:, 1], following))


def _finished(ids: Sequence[int], trained: Mask, sample_id: str) -> Sample:
    trained = trained.copy()
    trained[:1] = False  # nothing comes before the first token
    return Sample(np.array(ids, dtype=np.int32), trained, sample_id)


def _freeze_date(template: str, day: dt.date) -> str:
    """The template with today's date written in, so that a resumed run renders the same text."""
    moment = dt.datetime.combine(day, dt.time())
    frozen = DATE_CALL.sub(lambda call: repr(moment.strftime(call.group(2))), template)
    if re.search(r"strftime_now\(", frozen):
        raise ConfigError(
            "the chat template writes the date in a form that can't be frozen, so a resumed run "
            "would train "
            "on another text. Give chat_template a copy of it with a fixed date."
        )
    return frozen


def _resolve_template(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[str, tuple[str, ...]]:
    if template == "auto" and tokenizer.chat_template:
        return str(tokenizer.get_chat_template()), ()
    if template in ("auto", *PACKAGED):
        name = "alpaca" if template == "auto" else template
        text = (
            importlib.resources.files("legato.data")
            .joinpath(f"templates/{name}.jinja")
            .read_text("utf-8")
        )
        if name == "chatml":
            _refuse_missing_chatml_tokens(tokenizer)
        elif tokenizer.eos_token is None:
            raise ConfigError(
                "chat_template alpaca: the tokenizer has no eos_token to end an answer with"
            )
        if _opening_ids(tokenizer) == [tokenizer.bos_token_id]:
            text = "{{- bos_token -}}\n" + text
        said = f"chat template: the packaged {name}"
        return text, (
            said + (" (the tokenizer has none of its own)" if template == "auto" else ""),
        )
    path = Path(template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template: {template}: no such file. Expected auto, {', '.join(PACKAGED)} or a "
            "Jinja file."
        )
    try:
        return path.read_text("utf-8"), (f"chat template: {path}",)
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template: {template}: isn't UTF-8 at byte {error.start}") from None


def _refuse_missing_chatml_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"chat_template chatml: the tokenizer has no {' and no '.join(missing)}. Use "
            "chat_template: alpaca."
        )


def _opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text, as at inference: a BOS, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    return next((ids[:k] for k in range(len(ids)) if ids[k : k + len(bare)] == bare), [])
