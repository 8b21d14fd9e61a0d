"""Asynchronous, atomic step checkpoints for transformers' Trainer and for TRL: one callback.

::

    checkpoints = LegatoCheckpoints(save=EverySteps(500), keep=KeepLast(2))
    args = TrainingArguments("out", save_strategy="no")
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.latest("out"))

When what happens:

- ``on_train_begin``: open the run, restore weights, optimizer and scheduler.
- ``on_epoch_begin``, ``on_step_begin``: save the step before, if it is due. By then it has been
  logged and evaluated, and all that takes random numbers between two steps has taken them. For the
  same reason the random states of a step are restored at the very event that they were saved at.
- ``on_pre_optimizer_step``: order the update behind the copy that is being taken.
- ``on_step_end`` and others: take the Trainer's wish to save, so that it doesn't save by itself.
- ``on_train_end``: save the last step, wait until it is on disk, give the folder back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from legato.checkpoint import (
    Checkpointer,
    KeepAll,
    KeepBest,
    KeepLast,
    ModelPart,
    OptimizerPart,
    SaveRecord,
)
from legato.checkpoint.policy import KeepPolicy, SavePolicy
from legato.errors import CheckpointExistsError, ConfigError
from legato.integrations.trainer_parts import (
    LaterRng,
    SchedulerPart,
    build_model_part,
    build_optimizer_part,
    logged_metrics,
    with_trainer_state,
)
from legato.integrations.trainer_resume import newest_step, require_same_step, resumed_step
from legato.integrations.trainer_rules import argument_problems, model_problems, planned_saves

__all__ = ["LegatoCheckpoints"]

logger = logging.getLogger(__name__)

# Events between two steps at which a step is saved, and its random states are restored.
Event = Literal["epoch_begin", "step_begin"]


@dataclass(eq=False)
class _Run:
    """What is open between ``on_train_begin`` and ``on_train_end``."""

    checkpointer: Checkpointer
    model: ModelPart
    optimizer: OptimizerPart
    scheduler: SchedulerPart
    rng: LaterRng
    first_step: int
    """Where this training began: steps up to it are never saved again."""
    looked_at: int
    """The last step that was asked about."""
    best_metric: float | None
    is_asked: bool = False
    """The Trainer, or another callback, wants this step saved."""
    is_prepared: bool = False
    restore_rng_at: Event | None = None

    def parts(self, state: TrainerState, *, event: Event) -> dict[str, Any]:
        """What a checkpoint of this moment holds."""
        files = with_trainer_state(
            self.model, state, run_id=self.checkpointer.run_id, branch=self.checkpointer.branch
        )
        return {
            "model": files,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": self.rng,
            "trainer": {"step": state.global_step, "epoch": state.epoch, "saved_at": event},
        }


class LegatoCheckpoints(TrainerCallback):
    """Saves a Trainer's run by step while it trains, and restores it bit for bit.

    A step folder ``output_dir/step_N`` is a Hugging Face folder (of a PEFT model: an adapter) with
    the Trainer's own trainer_state.json in it; nothing in it is a pickle. See `Checkpointer` for
    what a save does. Give it as the last callback; the Trainer then writes no checkpoint itself.

    Works in a single process and with DDP. Everything that can't work is refused, all at once,
    when the Trainer is built or before the first step.

    Args:
        save: When to save, with ``save_strategy="no"``. None: when the Trainer's ``save_strategy``
            (``steps``, ``epoch``) wants to. Either way a step that another callback asks for by
            ``control.should_save`` is saved as well, and so is the last one.
        keep: What stays. None: as many as ``save_total_limit`` says, all without it.
        start_over: Move steps that this run would meet to ``output_dir/.old-<time>/``.
        asynchronous: Write in the background; else training waits until a step is on disk.
        staging: ``overlap``: on a GPU the copy takes place during the next forward and backward;
            ``blocking``: before.
        on_save_error: ``continue``: a failed save is logged and tried again; ``raise``: it ends
            training at the next step.
        final_save_patience_seconds: How long the last save is tried again.
        allow_missing: Parts that a step to resume from may lack: ``optimizer``, ``rng``, ...
        verify_on_load: Compare every byte of the step to resume from with its digest.
        keep_last_n_states: Older kept steps lose what only resuming needs; None: none does.
        prune: ``delete`` what isn't kept, or ``move`` it to ``output_dir/.pruned/``.

    Attributes:
        saves: How each save of the last training went, in order.

    Raises:
        ConfigError: Arguments that can't work, when the Trainer is built; ``.problems``.
    """

    def __init__(
        self,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        start_over: bool = False,
        asynchronous: bool = True,
        staging: Literal["overlap", "blocking"] = "overlap",
        on_save_error: Literal["continue", "raise"] = "continue",
        final_save_patience_seconds: float = 600.0,
        allow_missing: Collection[str] = (),
        verify_on_load: bool = False,
        keep_last_n_states: int | None = None,
        prune: Literal["delete", "move"] = "delete",
    ) -> None:
        self.saves: list[SaveRecord] = []
        self._save = save
        self._keep = keep
        self._options: dict[str, Any] = {
            "save": save,
            "start_over": start_over,
            "asynchronous": asynchronous,
            "staging": staging,
            "on_save_error": on_save_error,
            "final_save_patience_seconds": final_save_patience_seconds,
            "allow_missing": allow_missing,
            "verify_on_load": verify_on_load,
            "keep_last_n_states": keep_last_n_states,
            "prune": prune,
        }
        self._run: _Run | None = None

    def latest(self, output_dir: str | os.PathLike[str]) -> str | None:
        """The step to resume from, for ``trainer.train(resume_from_checkpoint=..)``.

        Collective after a training that was interrupted: what that one left open is finished first.

        Args:
            output_dir: The Trainer's.

        Returns:
            Path of the newest complete step of the run that used the folder last; None: there is
            none, and training begins at the beginning.
        """
        self._close()
        return newest_step(output_dir)

    # ---- the Trainer's events ----------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse arguments that can't work."""
        if problems := argument_problems(args, save=self._save, keep=self._keep):
            raise ConfigError([f"TrainingArguments: {problem}" for problem in problems])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective: open the run; restore all but the random states."""
        self.on_init_end(args, state, control)
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if problems := model_problems(
            model, optimizer, is_search=bool(state.is_hyper_param_search)
        ):
            raise ConfigError(problems)
        self._close()
        self.saves = []
        # What can't be stored is refused before the folder is taken.
        part = build_model_part(model, processing_class=kwargs["processing_class"], args=args)
        optimizer_part = build_optimizer_part(optimizer, part)
        scheduler_part = SchedulerPart(kwargs["lr_scheduler"])
        self._run = run = _Run(
            checkpointer=self._open(args, state),
            model=part,
            optimizer=optimizer_part,
            scheduler=scheduler_part,
            rng=LaterRng(),
            first_step=state.global_step,
            looked_at=state.global_step,
            best_metric=state.best_metric,
        )
        try:
            self._restore(run, args, state)
        except BaseException:
            self._close()
            raise

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective: save the last step of the epoch before, if it is due."""
        self._between_steps(args, state, "epoch_begin")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective: save the step before, if it is due."""
        self._between_steps(args, state, "step_begin")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Order the update behind the copy that is being taken."""
        if self._run is not None:
            self._run.checkpointer.wait_staged()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective: hear how saves ended."""
        self._take(control)
        if (run := self._run) is not None:
            if not run.is_prepared:
                # Now the optimizer has its state; memory is touched here, not at the first save.
                run.checkpointer.prepare(run.parts(state, event="step_begin"))
                run.is_prepared = True
            self._note(run.checkpointer.poll())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take a wish to save that another callback had here."""
        self._take(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take a wish to save that another callback had here."""
        self._take(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the Trainer's wish to save."""
        self._take(control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer saved by itself: a callback that comes later asked for it."""
        if self._run is not None:
            logger.warning(
                "the Trainer itself wrote checkpoint-%d, past Legato: a callback that comes after "
                "LegatoCheckpoints asked for it. Make LegatoCheckpoints the last callback.",
                state.global_step,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Collective: save the last step, and wait until it is on disk."""
        run = self._run
        if run is None:
            return
        if state.global_step > run.first_step:
            # A training that goes on from here begins an epoch, or goes on in the middle of one.
            at_end = float(state.epoch or 0.0).is_integer()
            self._save_step(run, state, "epoch_begin" if at_end else "step_begin", reason="final")
        self._close()

    # ---- what they share ---------------------------------------------------------------------

    def _open(self, args: TrainingArguments, state: TrainerState) -> Checkpointer:
        """Collective: take the folder; go on from the step that the Trainer has loaded."""
        group = dist.group.WORLD if args.world_size > 1 else None
        if group is not None:
            require_same_step(state.global_step, device=args.device)
        metric = args.metric_for_best_model
        best = None
        if metric is not None:
            name = metric if metric.startswith("eval_") else f"eval_{metric}"
            best = KeepBest(1, name, greater_is_better=bool(args.greater_is_better))
        keep = self._keep
        if keep is None:
            keep = KeepLast(args.save_total_limit) if args.save_total_limit else KeepAll()
        try:
            return Checkpointer(
                args.output_dir,
                keep=keep,
                best=best,
                resume=resumed_step(args, state) or False,
                save_only_model=args.save_only_model,
                process_group=group,
                **self._options,
            )
        except CheckpointExistsError as error:
            raise CheckpointExistsError(
                f"{error} In a Trainer: trainer.train(resume_from_checkpoint="
                "checkpoints.latest(output_dir)) goes on from the newest of them, and "
                "LegatoCheckpoints(start_over=True) moves them.",
                **error.facts,
            ) from error

    def _restore(self, run: _Run, args: TrainingArguments, state: TrainerState) -> None:
        """Collective: fill all but the random states; hold what will be saved against the disk."""
        parts = run.parts(state, event="step_begin")
        restored = run.checkpointer.restore(parts) or {}
        run.restore_rng_at = restored.get("saved_at")
        run.checkpointer.check_space(parts, planned_saves(args, state, save=self._save))

    def _between_steps(self, args: TrainingArguments, state: TrainerState, event: Event) -> None:
        """Collective: restore random states here, or save the step that is over."""
        run = self._run
        if run is None:
            return
        if run.restore_rng_at == event:
            run.restore_rng_at = None
            run.rng.set_now()
        if state.global_step == run.looked_at:
            return
        run.looked_at = state.global_step
        is_asked, run.is_asked = run.is_asked, False
        new_best = state.best_metric != run.best_metric
        run.best_metric = state.best_metric
        reason = None
        if self._save is not None:
            reason = run.checkpointer.due(
                state.global_step, epoch_end=event == "epoch_begin", new_best=new_best
            )
        if reason is None and is_asked:
            reason = {"steps": "interval", "epoch": "epoch"}.get(args.save_strategy.value, "asked")
        if reason is not None:
            self._save_step(run, state, event, reason=reason)

    def _save_step(self, run: _Run, state: TrainerState, event: Event, *, reason: str) -> None:
        run.checkpointer.save(
            run.parts(state, event=event),
            step=state.global_step,
            reason=reason,
            metrics=logged_metrics(state),
        )

    def _take(self, control: TrainerControl) -> None:
        if self._run is not None and control.should_save:
            self._run.is_asked = True
            control.should_save = False

    def _note(self, records: list[SaveRecord]) -> None:
        for record in records:
            self.saves.append(record)
            if record.path is not None:
                logger.info(
                    "%s is complete: %.1f s after it began, training stood still for %.3f s",
                    record.path, record.committed_seconds, record.blocked_seconds,
                )  # fmt: skip

    def _close(self) -> None:
        """Collective: finish what is being written, and give the folder back."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.checkpointer.drain()
            self._note(run.checkpointer.poll())
        finally:
            run.checkpointer.close()
