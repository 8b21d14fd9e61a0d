"""The loop. A run is: fetch, step, evaluate, save, log, until the last step.

Every recipe goes through this one loop; what differs between them is in the parts it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from legato.checkpoint import Checkpointer, PendingSave, SaveRecord
from legato.data.dealing import Batch, BatchSource, StepBatches
from legato.errors import CheckpointWriteError, LegatoError, NonFiniteError, StopRequested
from legato.parallel.reports import launch_folder
from legato.parallel.world import World
from legato.train.fetching import fetch_together
from legato.train.model import TrainableModel
from legato.train.signals import StopSignals
from legato.train.state import BestMetric, TrainState
from legato.train.step import StepResult, StepTimes, train_step

Evaluate = Callable[[Callable[[], bool]], Mapping[str, Any] | None]
"""Asks between batches whether to stop; gives ``eval_loss`` and more, or None when it stopped."""

AnswerPrompts = Callable[[], Sequence[Mapping[str, str]]]
"""What the model says now: ``sample_id``, ``prompt``, ``expected``, ``answer`` of each prompt."""


class StepSet(Protocol):
    """Some of the steps of a run: ``EverySteps``, ``LogSchedule``."""

    def due(self, step: int) -> bool:
        """Whether ``step`` is one of them."""


@dataclass(frozen=True)
class Intervals:
    """When the loop evaluates and logs; when it saves is the checkpointer's own policy.

    Attributes:
        evaluate: None: at the last step only.
        log: Steps that are logged; the first and the last one always are.
    """

    evaluate: StepSet | None
    log: StepSet


@dataclass(frozen=True)
class WatchedMetric:
    """Which value makes a checkpoint ``best``.

    Attributes:
        name: ``eval_loss`` or ``train_loss``.
        greater_is_better: Direction.
    """

    name: str = "eval_loss"
    greater_is_better: bool = False

    def improves(self, value: float, best: BestMetric | None) -> bool:
        """Whether ``value`` beats ``best``, if that is of this metric; a NaN never does."""
        if value != value:  # NaN
            return False
        if best is None or best.metric not in (None, self.name):
            return True
        return value > best.value if self.greater_is_better else value < best.value


class Reporter(Protocol):
    """Who hears what happens, on each rank: metrics file, loggers, progress bar."""

    def step(self, step: int, values: Mapping[str, float | int | None], *, log: bool) -> None:
        """A step is done; ``log`` says that it is one of the logged ones."""

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """An evaluation is done."""

    def sampled(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """The model has answered some prompts."""

    def saved(self, record: SaveRecord) -> None:
        """A save was committed, or failed."""

    def saving(self, step: int) -> None:
        """A save began."""

    def note(self, message: str) -> None:
        """Something the user should read."""


@dataclass(frozen=True)
class FitResult:
    """How a call of :meth:`Trainer.fit` ended.

    Attributes:
        last_step: The last optimizer step that was completed.
        saves: Every save that was committed or failed, in order.
    """

    last_step: int
    saves: tuple[SaveRecord, ...]


class Trainer:
    """Takes optimizer steps from ``state.step + 1`` to the last one.

    Args:
        model: What is trained.
        optimizer: Over exactly ``model.parameters``.
        loader: Gives each step its batches.
        learning_rate: ``step -> lr``, a pure function of the step.
        checkpointer: Saves; an open one. The caller closes it.
        saved: What a checkpoint holds, by name; ``saved["trainer"]`` is ``state``.
        state: Counters; already restored when resuming.
        total_steps: Last step of the run; evaluated whatever the interval.
        intervals: When to evaluate and log.
        reporter: Who hears of it.
        world: The ranks of the run.
        stop_after_step: Last step of this process, when it is to end before the run does.
        evaluate: The evaluation; None: there is no evaluation data.
        answer_prompts: Called after each evaluation, or where one would be; None: no prompts.
        watched: What ``best`` means.
        clip_grad_norm: Largest global gradient norm, L2; None: no clipping.
        on_nonfinite: ``stop`` or ``skip`` when a loss or gradient isn't finite.
        seed: Root of the derived random streams.
        compile_seconds: How long torch has been compiling so far; None: nothing is compiled.
    """

    def __init__(
        self,
        *,
        model: TrainableModel,
        optimizer: Any,
        loader: BatchSource,
        learning_rate: Callable[[int], float],
        checkpointer: Checkpointer,
        saved: Mapping[str, Any],
        state: TrainState,
        total_steps: int,
        intervals: Intervals,
        reporter: Reporter,
        world: World,
        stop_after_step: int | None = None,
        evaluate: Evaluate | None = None,
        answer_prompts: AnswerPrompts | None = None,
        watched: WatchedMetric | None = None,
        clip_grad_norm: float | None = 1.0,
        on_nonfinite: str = "stop",
        seed: int = 0,
        compile_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.learning_rate = learning_rate
        self.checkpointer = checkpointer
        self.saved = saved
        self.state = state
        self.total_steps = total_steps
        self.last_step = (
            total_steps if stop_after_step is None else min(total_steps, stop_after_step)
        )
        self.intervals = intervals
        self.reporter = reporter
        self.evaluate = evaluate
        self.answer_prompts = answer_prompts
        self.watched = watched or WatchedMetric()
        self.clip_grad_norm = clip_grad_norm
        self.on_nonfinite = on_nonfinite
        self.seed = seed
        self.compile_seconds = compile_seconds
        self.world = world
        self._saves: list[SaveRecord] = []
        self._signals = StopSignals(
            checkpointer.output_dir if world.is_main else None,
            launch_folder=launch_folder(),
            agree=world.agree,
        )

    def fit(self) -> FitResult:
        """Train to the last step, save there, and wait until that checkpoint is on disk.

        Collective: every rank takes the same steps.

        Returns:
            What happened.

        Raises:
            StopRequested: A signal asked for a stop; the checkpoint of the step it came in is on
                disk.
            NonFiniteError: A loss or gradient wasn't finite, and ``on_nonfinite`` is ``stop``; the
                weights of the step before are on disk, unless an update in backward has spoiled
                them (``.weights_changed``): then the newest checkpoint is the last one.
            DataError: A stream came to a row that can't be used; the weights of the step before are
                on disk.
            CheckpointWriteError: The final checkpoint couldn't be written, or, with
                ``on_save_error: raise``, any.
        """
        self.model.module.train()
        metrics: dict[str, Any] = {}
        first_step = self.state.step + 1
        with self._signals:
            stopped_by = self._make_up_for_evaluation()
            try:
                for step in range(first_step, self.last_step + 1) if stopped_by is None else ():
                    began, compiled = time.perf_counter(), self._compile_seconds()
                    fetched = self._fetch(step)
                    result = self._train_step(step, fetched.batches)
                    self._count(result, fetched)
                    times = StepTimes(
                        seconds=time.perf_counter() - began,
                        compile_seconds=self._compile_seconds() - compiled,
                    )
                    self._report_step(step, result=result, fetched=fetched, times=times)
                    if step == first_step:  # now the optimizer has a state to make room for
                        self.checkpointer.prepare(self.saved)

                    metrics = self._evaluate_if_due(step)
                    request = self._signals.poll()
                    self._save_if_due(step, fetched, metrics, signalled=request.save)
                    self._report_saves()
                    if request.stop is not None:
                        stopped_by = request.stop
                        break
            except NonFiniteError as error:
                if not error.weights_changed:
                    # The check came before the update: the weights are those of the step before.
                    self._final_save({}, reason="error")
                raise
            except CheckpointWriteError:
                self._report_saves()  # the failed one
                raise
            self._final_save(metrics, reason="final" if stopped_by is None else "signal")
        if stopped_by is not None:
            raise StopRequested(stopped_by)
        return FitResult(last_step=self.state.step, saves=tuple(self._saves))

    def _fetch(self, step: int) -> StepBatches:
        if not self.loader.reads_while_training:
            return self.loader.fetch(step)
        try:
            return fetch_together(self.loader, step, world=self.world)
        except LegatoError:
            # Every rank is between two steps, and the row may be the next run's to deal with.
            if self.state.step:
                self._final_save({}, reason="error")
            raise

    def _train_step(self, step: int, batches: list[Batch]) -> StepResult:
        return train_step(
            batches,
            model=self.model,
            optimizer=self.optimizer,
            world=self.world,
            lr=self.learning_rate(step),
            step=step,
            seed=self.seed,
            clip_grad_norm=self.clip_grad_norm,
            on_nonfinite=self.on_nonfinite,
            # The snapshot of the last save must be complete before weights change.
            before_update=self.checkpointer.wait_staged,
        )

    def _count(self, result: StepResult, fetched: StepBatches) -> None:
        self.state.advance(
            rows=fetched.num_rows,
            tokens=result.num_tokens,
            loss=0.0 if result.skipped else result.loss,
            loss_tokens=0 if result.skipped else result.num_loss_tokens,
            data_place=fetched.data_place,
        )
        if result.skipped:
            self.reporter.note(
                f"step {self.state.step}: loss {result.loss}, gradient norm {result.grad_norm}: "
                f"no update was made; samples {', '.join(result.nonfinite_ids[:8])}"
            )

    def _compile_seconds(self) -> float:
        return self.compile_seconds() if self.compile_seconds is not None else 0.0

    def _report_step(
        self, step: int, *, result: StepResult, fetched: StepBatches, times: StepTimes
    ) -> None:
        values: dict[str, float | int | None] = {
            "loss": result.loss,
            "lr": self.learning_rate(step),
            "grad_norm": result.grad_norm,
            "num_tokens": result.num_tokens,
            "num_loss_tokens": result.num_loss_tokens,
            "step_seconds": times.seconds,
            "tokens_per_second": result.num_tokens / times.seconds,
            "epoch": fetched.epoch,
        }
        if self.compile_seconds is not None:
            values["compile_seconds"] = times.compile_seconds
        log = self.intervals.log.due(step) or step == self.last_step
        self.reporter.step(step, values, log=log)

    def _evaluate_if_due(self, step: int) -> dict[str, Any]:
        """The evaluation's values when one is due at ``step`` and wasn't cut short; else empty."""
        interval = self.intervals.evaluate
        if step != self.total_steps and (interval is None or not interval.due(step)):
            return {}
        values: dict[str, Any] = {}
        if self.evaluate is not None:
            values = dict(self.evaluate(self._signals.stop_requested) or {})
            self.state.evaluation_left = not values
        if values:
            self.reporter.evaluated(step, values)
        if self.answer_prompts is not None and not self._signals.stop_requested():
            self.reporter.sampled(step, self.answer_prompts())
        return values

    def _make_up_for_evaluation(self) -> int | None:
        """Evaluate after the step that a stop came in; the signal of another stop, if one comes.

        That step is saved already, so what is found is told and doesn't count for `best`.
        """
        if not self.state.evaluation_left:
            return None
        self.state.evaluation_left = False
        self._evaluate_if_due(self.state.step)
        return self._signals.poll().stop if self._signals.stop_requested() else None

    def _save_if_due(
        self, step: int, fetched: StepBatches, metrics: Mapping[str, Any], *, signalled: bool
    ) -> None:
        reason = self.checkpointer.due(
            step,
            epoch_end=fetched.ends_epoch,
            new_best=self._is_new_best(metrics),
            signalled=signalled,
        )
        if reason is not None:
            self._save(metrics, reason=reason)

    def _is_new_best(self, metrics: Mapping[str, Any]) -> bool:
        """Whether ``metrics`` hold a new best; remembered in the state, NaN never wins."""
        value = metrics.get(self.watched.name)
        if value is None or not self.watched.improves(value, self.state.best):
            return False
        self.state.best = BestMetric(value, step=self.state.step, metric=self.watched.name)
        return True

    def _save(self, metrics: Mapping[str, Any], *, reason: str) -> PendingSave:
        values = dict(metrics)
        if self.state.window_train_loss is not None:
            values["train_loss"] = self.state.window_train_loss
            if self.watched.name == "train_loss":
                self._is_new_best(values)
        self.state.close_window()
        pending = self.checkpointer.save(
            self.saved, step=self.state.step, reason=reason, metrics=values
        )
        self.reporter.saving(self.state.step)
        return pending

    def _report_saves(self) -> None:
        for record in self.checkpointer.poll():
            self._saves.append(record)
            self.reporter.saved(record)

    def _final_save(self, metrics: Mapping[str, Any], *, reason: str) -> None:
        """The checkpoint that every run ends with; the engine returns a committed one as it is."""
        try:
            self._save(metrics, reason=reason)
            self.checkpointer.drain()
        finally:
            self._report_saves()
