"""One place that hears what a run does, and passes it on to the bar and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from legato.report.metrics import MetricsLog
from legato.report.progress import Progress, StepFacts, peak_memory_bytes


class SaveFacts(Protocol):
    """What the end of a save tells: :class:`legato.checkpoint.SaveRecord`."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""

    @property
    def error(self) -> str | None:
        """Why it failed; None when it didn't."""

    @property
    def blocked_seconds(self) -> float:
        """How long training was held up."""

    @property
    def committed_seconds(self) -> float:
        """From the call of ``save()`` until the checkpoint was durable and visible."""

    @property
    def checkpoint_bytes(self) -> int | None:
        """Size of the checkpoint, all ranks' files together; None when there is none."""


class RunReport:
    """Passes a run's events on; rank 0 has one.

    Args:
        metrics: The run's ``metrics.jsonl``, and the loggers behind it.
        progress: What a person sees.
        device: Whose peak memory is reported.
    """

    def __init__(self, *, metrics: MetricsLog, progress: Progress, device: torch.device) -> None:
        self._metrics = metrics
        self._progress = progress
        self._device = device

    def step(self, step: int, values: Mapping[str, Any], *, log: bool) -> None:
        """A step is done; ``log``: it is one of the logged ones."""
        memory = peak_memory_bytes(self._device)
        facts = StepFacts(
            step=step,
            loss=values["loss"],
            learning_rate=values["lr"],
            grad_norm=values["grad_norm"],
            tokens_per_second=values["tokens_per_second"],
            memory_bytes=memory,
        )
        if values.get("compile_seconds"):
            self._progress.compiled(
                step,
                step_seconds=values["step_seconds"],
                compile_seconds=values["compile_seconds"],
            )
        self._progress.step(facts, log=log)
        if log:
            self._metrics.write("step", step=step, **values, peak_memory_bytes=memory)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """An evaluation is done; ``values`` holds ``eval_loss``."""
        self._progress.evaluated(step, loss=values["eval_loss"])
        self._metrics.write("eval", step=step, **values)

    def sampled(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """The model has answered prompts: ``sample_id``, ``prompt``, ``expected``, ``answer``."""
        for sample in samples:
            self._progress.sampled(step, **sample)
            self._metrics.write("sample", step=step, **sample)

    def saving(self, step: int) -> None:
        """A save began."""
        self._progress.saving(step)

    def saved(self, record: SaveFacts) -> None:
        """A save was committed, or failed."""
        if record.error is None:
            self._progress.saved(
                record.step,
                size_bytes=record.checkpoint_bytes or 0,
                blocked_seconds=record.blocked_seconds,
                committed_seconds=record.committed_seconds,
            )
            self._metrics.write("save", **vars(record))
        else:
            self._progress.save_failed(record.step)
            self._metrics.write("save_failed", **vars(record))

    def note(self, message: str) -> None:
        """Something the user should read."""
        self._progress.note(message)


class SilentReport:
    """The report of every rank but 0: one world, one log."""

    def step(self, step: int, values: Mapping[str, Any], *, log: bool) -> None:
        """A step is done."""

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """An evaluation is done."""

    def sampled(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """The model has answered some prompts."""

    def saving(self, step: int) -> None:
        """A save began."""

    def saved(self, record: SaveFacts) -> None:
        """A save was committed, or failed."""

    def note(self, message: str) -> None:
        """Something the user should read."""
