"""Which chat template a run uses, as text, and with its dates frozen."""

from __future__ import annotations

import datetime as dt
import importlib.resources
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from legato.config.names import PACKAGED_TEMPLATES
from legato.errors import ConfigError

GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
_NO_NAMES = ("true", "false", "none")  # Jinja's spelling of Python's
_DEFAULT = re.compile(r"{% if (\w+) is not defined %}{% set \1 = (.*) %}{% endif %}\n")
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template that has been found.

    Attributes:
        text: As it belongs into a checkpoint's tokenizer.
        frozen: The same with the run's date written in: what is rendered.
        note: What to say about the choice; empty for the tokenizer's own.
    """

    text: str
    frozen: str
    note: str

    @property
    def marks_answers(self) -> bool:
        """True if the template says itself, with ``{% generation %}``, what the model produces."""
        return GENERATION_TAG.search(self.text) is not None

    @property
    def names_calls(self) -> bool:
        """True if the template writes the ids that join a tool's call and its result."""
        return names_calls(self.text)


def names_calls(template: str) -> bool:
    """True if a template, as text, writes the ids that join a tool's call and its result."""
    return "tool_call_id" in template


def resolve_template(
    tokenizer: PreTrainedTokenizerBase, template: str, *, start_date: dt.date
) -> ChatTemplate:
    """Find a template by name or path.

    Args:
        tokenizer: Whose own template ``auto`` means, and whose tokens a packaged one needs.
        template: ``auto``, ``alpaca``, ``chatml``, or the path of a Jinja file.
        start_date: Written wherever the template asks for today.

    Returns:
        The template.

    Raises:
        ConfigError: No such file, not Jinja, tokens that the tokenizer lacks, a date that can't be
            frozen.
    """
    text, note = _find(tokenizer, template)
    frozen = _freeze_date(text, start_date)
    try:
        render_jinja_template([], chat_template=frozen)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template: {template}: line {error.lineno}: isn't Jinja: {error.message}"
        ) from None
    except Exception as error:  # a template is a program, and may raise anything
        raise ConfigError(f"chat_template: {template}: can't be used: {told(error)}") from error
    return ChatTemplate(text, frozen, note)


def told(error: Exception) -> str:
    """What an error of a template says, with its kind where the text alone says little."""
    if isinstance(error, TemplateError) and str(error):  # raise_exception("...") of a template
        return str(error)
    return f"{type(error).__name__}: {error}"


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """A template in which variables have values unless whoever renders it gives others.

    So a checkpoint's template asks as training did, in every tool that reads it.

    Args:
        template: Jinja.
        variables: Names and JSON values.

    Returns:
        The template behind one line for each variable.

    Raises:
        ConfigError: A name that no template could use.
    """
    for name in variables:
        if not name.isidentifier() or keyword.iskeyword(name) or name in _NO_NAMES:
            raise ConfigError(
                f"chat_template_kwargs: {name}: isn't a name that a template could read"
            )
    lines = [
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        for name, value in variables.items()
    ]
    return "".join(lines) + template


def variables_of(template: str) -> dict[str, str]:
    """What :func:`with_variables` wrote before a template.

    Args:
        template: Any.

    Returns:
        Names, and values as Jinja writes them; empty where nothing was written.
    """
    found: dict[str, str] = {}
    at = 0
    while line := _DEFAULT.match(template, at):
        found.setdefault(line[1], line[2])  # the first one is in force
        at = line.end()
    return found


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text, as at inference: a BOS, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    return next((ids[:k] for k in range(len(ids)) if ids[k : k + len(bare)] == bare), [])


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] | int | None
) -> frozenset[int]:
    """Ids after which generation stops.

    Args:
        tokenizer: Its end-of-sequence token is one of them.
        eos_ids: Those of the model's generation config.

    Returns:
        At least one.

    Raises:
        ConfigError: Nobody names one.
    """
    ids = {eos_ids} if isinstance(eos_ids, int) else set(eos_ids or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            "neither the tokenizer nor the model names an end-of-sequence token: "
            "the model couldn't learn to stop"
        )
    return frozenset(ids)


def _find(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    if template == "auto" and tokenizer.chat_template:
        return str(tokenizer.get_chat_template()), ""
    if template in ("auto", *PACKAGED_TEMPLATES):
        name = "alpaca" if template == "auto" else template
        why = " (the tokenizer has none of its own)" if template == "auto" else ""
        return _packaged(tokenizer, name), f"chat template: the packaged {name}{why}"
    path = Path(template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template: {template}: no such file. "
            f"Expected auto, {', '.join(PACKAGED_TEMPLATES)} or a Jinja file."
        )
    try:
        return path.read_text("utf-8"), f"chat template: {path}"
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template: {template}: isn't UTF-8 at byte {error.start}") from None


def _packaged(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    file = importlib.resources.files("legato.data").joinpath(f"chat_templates/{name}.jinja")
    text = file.read_text("utf-8")
    if name == "chatml":
        vocabulary = tokenizer.get_vocab()
        missing = [mark for mark in ("<|im_start|>", "<|im_end|>") if mark not in vocabulary]
        if missing:
            raise ConfigError(
                f"chat_template chatml: the tokenizer has no {' and no '.join(missing)}. "
                "Use chat_template: alpaca."
            )
    elif tokenizer.eos_token is None:
        raise ConfigError(
            "chat_template alpaca: the tokenizer has no eos_token to end an answer with"
        )
    if opening_ids(tokenizer) == [tokenizer.bos_token_id]:
        text = "{{- bos_token -}}\n" + text
    return text


def _freeze_date(template: str, day: dt.date) -> str:
    """Write the date in, so that a resumed run renders the same text."""
    moment = dt.datetime.combine(day, dt.time())
    frozen = DATE_CALL.sub(lambda call: repr(moment.strftime(call.group(2))), template)
    if "strftime_now(" in frozen:
        raise ConfigError(
            "the chat template writes the date in a form that can't be frozen, so a resumed run "
            "would train on another text. Give chat_template a copy of it with a fixed date."
        )
    return frozen
