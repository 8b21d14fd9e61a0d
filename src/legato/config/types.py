"""Field types of a config: what the text that a person typed means is decided by the field.

A config file is read with every plain scalar left as text (see :mod:`legato.config.source`):
``012``, ``1:30``, ``off`` and ``yes`` reach a text field as they were typed, while a number field
or a switch reads the same text as a number or a switch. Values given from Python are taken as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

OnResume = Literal["fixed", "refuse", "contents", "warn", "free", "-"]
"""What another value does to a resumed run: an error, one that can be accepted, a line, nothing.

``fixed`` keys decide which tensors a checkpoint holds. "-": the key names the run.
"""

Recipe = Literal[
    "full_finetune_single_device",
    "lora_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_distributed",
]
RECIPES: tuple[str, ...] = get_args(Recipe)

_TRUE_WORDS = frozenset({"true", "yes", "on"})
_FALSE_WORDS = frozenset({"false", "no", "off"})


class Section(BaseModel):
    """Base of every mapping in a config: unknown keys are errors, numbers finite, values frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def key(
    default: Any = ...,
    doc: str = "",
    *,
    on_resume: OnResume,
    unit: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare a config key.

    Args:
        default: Value when the key is absent; ``...`` makes it required.
        doc: One or two sentences for docs/config.md, the JSON schema and ``missing`` errors.
        on_resume: What happens when a resumed run finds another value.
        unit: What a number counts, e.g. ``"optimizer steps"``.
        **constraints: Passed to pydantic, e.g. ``ge=1``.

    Returns:
        The field's declaration.
    """
    extra: dict[str, Any] = {"on_resume": on_resume}
    if unit is not None:
        extra["unit"] = unit
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


def as_switch(value: Any) -> Any:
    """``true``/``yes``/``on`` and their opposites as a bool; anything else unchanged."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE_WORDS:
            return True
        if word in _FALSE_WORDS:
            return False
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _switch_or_count(value: Any) -> Any:
    value = as_switch(value)
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return value


def _resume_source(value: Any) -> Any:
    value = as_switch(value)
    return "auto" if value is True else value


def _target_modules(value: Any) -> Any:
    return [value] if isinstance(value, str) and value != "all-linear" else value


def _loggers(value: Any) -> Any:
    if isinstance(value, str):
        return [] if value.lower() == "none" else [value]
    return value


def by_kind(**kinds: type | tuple[type, ...]) -> Discriminator:
    """Choose the branch of a union by the value's type, so that one mistake gives one error.

    Tags are written ``<kind>`` and are taken out of the error's path again (see
    :mod:`legato.config.explain`). The last kind takes what no other does.
    """
    last = list(kinds)[-1]

    def kind_of(value: Any) -> str:
        return next(
            (f"<{kind}>" for kind, types in kinds.items() if isinstance(value, types)), f"<{last}>"
        )

    return Discriminator(kind_of)


Whole = Annotated[int, Field(le=2**31 - 1)]
"""Every whole number of a config but the seed: beyond this none means anything, and products of two
still fit into 64 bits."""

# "1" and "0" as a switch are left to pydantic, which reads them as true and false.
Switch = Annotated[bool, BeforeValidator(as_switch)]
TextList = Annotated[list[str], BeforeValidator(_as_list)]
Logger = Literal["tensorboard", "wandb", "mlflow", "trackio"]
LoggerList = Annotated[list[Logger], BeforeValidator(_loggers)]

SwitchOrCount = Annotated[
    Annotated[bool, Tag("<switch>")] | Annotated[Whole, Field(ge=1), Tag("<count>")],
    by_kind(switch=bool, count=int),
    BeforeValidator(_switch_or_count),
]
ResumeSource = Annotated[
    Annotated[Literal[False], Tag("<off>")] | Annotated[str, Tag("<path>")],
    by_kind(off=bool, path=str),
    BeforeValidator(_resume_source),
]
TargetModules = Annotated[
    Annotated[Literal["all-linear"], Tag("<all>")] | Annotated[list[str], Tag("<names>")],
    by_kind(all=str, names=list),
    BeforeValidator(_target_modules),
]


def _all_or_number(value: Any) -> str:
    is_word = isinstance(value, str) and not value.strip().lstrip("-").isdigit()
    return "<word>" if is_word else "<number>"


AllOrCount = Annotated[
    Annotated[Literal["all"], Tag("<word>")] | Annotated[Whole, Field(ge=1), Tag("<number>")],
    Discriminator(_all_or_number),
]
