"""The mappings inside a config: data sets, optimizer, schedules, compile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from legato.config.types import Section, Switch, Whole, by_kind, key


class DatasetConfig(Section):
    """One source of rows: a file, a glob, a folder or a data set on the hub."""

    path: str = key(..., "File, glob, folder or hub name.", on_resume="contents", min_length=1)
    type: (
        Literal["alpaca", "messages", "sharegpt", "prompt_completion", "segments", "text"] | None
    ) = key(
        None,
        "Format of the rows; detected from the columns when absent, and said aloud.",
        on_resume="refuse",
    )
    columns: dict[str, str] = key({}, "Our column name: the file's.", on_resume="refuse")
    split: str | None = key(None, "Split of a hub data set.", on_resume="refuse")
    weight: float = key(
        1.0,
        "How many times each row appears per epoch, at most 1000; 0.5 is every second row.",
        on_resume="refuse",
        ge=1e-6,
        le=1000,
    )


class OptimizerConfig(Section):
    """The update rule."""

    name: Literal["adamw", "adamw_8bit", "adam", "sgd"] = key(
        "adamw",
        "The algorithm; adamw_8bit keeps its moments in 8 bits (torchao).",
        on_resume="warn",
    )
    lr: float = key(..., "Peak learning rate.", on_resume="warn", gt=0)
    weight_decay: float = key(
        0.0,
        "Decay of weights with two or more dimensions.",
        on_resume="warn",
        ge=0,
    )
    betas: tuple[float, float] = key(
        (0.9, 0.999), "Decay rates of Adam's two moments, each in [0, 1).", on_resume="warn"
    )

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise PydanticCustomError("range", "expected two numbers in [0, 1)")
        return betas


class LRSchedulerConfig(Section):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "constant"] = key(
        "cosine", "Shape after warm-up.", on_resume="warn"
    )
    num_warmup_steps: Whole = key(
        0,
        "Steps of linear growth from 0 to the peak.",
        on_resume="warn",
        unit="optimizer steps",
        ge=0,
    )
    num_training_steps: Whole | None = key(
        None,
        "Step at which the schedule ends; the run's last step when absent.",
        on_resume="warn",
        unit="optimizer steps",
        ge=1,
    )


class CompileConfig(Section):
    """How ``torch.compile`` is used; a plain ``true`` means these defaults."""

    scope: Literal["block", "model"] = key(
        "block",
        "Each decoder block, one graph for all of them, or the whole decoder.",
        on_resume="free",
    )
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = key(
        None,
        "How hard torch.compile tries; autotuning chooses kernels by timing, so that a resumed "
        "run isn't bit-equal.",
        on_resume="free",
    )
    dynamic: Switch | None = key(
        False,
        "false: a graph for each of at most 6 row lengths, and a resumed run is bit-equal. true: "
        "one graph for all lengths. null: torch decides while running.",
        on_resume="free",
    )


class Schedule(Section):
    """Steps that grow apart: ``first``, then ``factor`` times as far, up to ``max_interval``."""

    first: Whole = key(
        ..., "The first step that counts.", on_resume="free", unit="optimizer steps", ge=1
    )
    factor: float = key(
        2.0,
        "Each interval is this many times the one before.",
        on_resume="free",
        gt=1,
    )
    max_interval: Whole = key(
        ..., "Intervals stop growing here.", on_resume="free", unit="optimizer steps", ge=1
    )


Interval = Annotated[
    Annotated[Schedule, Tag("<schedule>")] | Annotated[Whole, Field(ge=1), Tag("<number>")],
    by_kind(schedule=(dict, Schedule), number=int),
]
"""Every so many optimizer steps, or a :class:`Schedule`."""

CompileChoice = Annotated[
    Annotated[CompileConfig, Tag("<mapping>")] | Annotated[Switch, Tag("<switch>")],
    by_kind(mapping=(dict, CompileConfig), switch=bool),
]
