"""A run from its config to its last checkpoint, in time order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from legato.checkpoint import Checkpointer, Committed, SaveRecord
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.space import checkpoint_bytes
from legato.config.resume import diff_on_resume
from legato.config.schema import RunConfig
from legato.errors import ConfigError, ResumeError, StopRequested
from legato.optim.schedule import learning_rate
from legato.parallel.world import World
from legato.recipes.facts import introduce, start_facts
from legato.recipes.parts import (
    RunData,
    RunParts,
    build_parts,
    build_run_data,
    keep_policy,
    save_policy,
    step_set,
    watched_metric,
)
from legato.report.loggers import RunFacts, build_loggers
from legato.report.metrics import MetricsLog
from legato.report.progress import Progress
from legato.report.report import RunReport
from legato.report.start import StartFacts, human_bytes
from legato.train.state import TrainState
from legato.train.trainer import Intervals, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        output_dir: Where its step folders are.
        last_step: The last completed optimizer step.
        saves: The saves of this process, in order; none when nothing was left to do.
    """

    output_dir: Path
    last_step: int
    saves: tuple[SaveRecord, ...] = ()


def run(
    config: RunConfig,
    *,
    config_name: str,
    config_yaml: str,
    start_over: bool = False,
    accept_changes: bool = False,
) -> RunResult:
    """Train as ``config`` says, or go on where an earlier call with it was ended.

    Args:
        config: The run.
        config_name: What it is called; its file in output_dir and in each step folder.
        config_yaml: The resolved config as text.
        start_over: Move steps that are in the way to ``output_dir/.old-<time>/`` first.
        accept_changes: Resume although fields changed that a run can't change.

    Returns:
        How it ended.

    Raises:
        LegatoError: Anything that stands in the way; where possible before step 1.
        StopRequested: A signal ended the run, after a checkpoint.
    """
    world = World.single(config.device)
    with open_checkpointer(
        config, config_name=config_name, config_yaml=config_yaml, start_over=start_over
    ) as checkpointer:
        state = TrainState(facts={"start_date": date.today().isoformat()})
        if checkpointer.source is not None:
            state.load_state_dict(read_state(checkpointer, checkpointer.source))
            check_changes(state.facts["config"], config, accept=accept_changes)
        start_date = date.fromisoformat(state.facts["start_date"])
        data = build_run_data(config, start_date=start_date, world=world)
        total_steps = plan_total_steps(config, data.loader.steps_per_epoch)
        if checkpointer.source is not None:
            say_new_rate(state, config, total_steps=total_steps)
        last_step = min(total_steps, config.stop_after_step or total_steps)
        if checkpointer.source is not None and state.step >= last_step:
            logger.info(nothing_left(state.step, config, total_steps=total_steps))
            return RunResult(output_dir=Path(config.output_dir), last_step=state.step)

        parts = build_parts(config, data, world=world, state=state)
        checkpointer.restore(parts.saved)
        state.facts = {
            "start_date": start_date.isoformat(),
            "config": config.model_dump(mode="json"),
            "total_steps": total_steps,
        }
        checkpointer.check_space(parts.saved, planned_saves=num_saves(config, state, last_step))
        Path(config.output_dir, f"{config_name}.yaml").write_text(config_yaml, encoding="utf-8")
        facts = start_facts(
            config,
            config_name=config_name,
            world=world,
            data=data,
            parts=parts,
            total_steps=total_steps,
            checkpoint_bytes=checkpointer.checkpoint_bytes(parts.saved),
            source=checkpointer.source.path if checkpointer.source else None,
            resume_step=state.step,
        )
        introduce(facts, data)
        return _train(config, facts, data, parts, checkpointer, world=world)


def preflight(config: RunConfig, *, config_name: str) -> StartFacts:
    """Do everything that a run does before step 1, and write nothing.

    Args:
        config: The run.
        config_name: What it is called.

    Returns:
        The facts of the start block, which has been shown.

    Raises:
        LegatoError: What would stand in the run's way.
    """
    world = World.single(config.device)
    today = date.today()
    state = TrainState(facts={"start_date": today.isoformat()})
    data = build_run_data(config, start_date=today, world=world)
    total_steps = plan_total_steps(config, data.loader.steps_per_epoch)
    parts = build_parts(config, data, world=world, state=state)
    facts = start_facts(
        config,
        config_name=config_name,
        world=world,
        data=data,
        parts=parts,
        total_steps=total_steps,
        checkpoint_bytes=checkpoint_bytes(
            sort_parts(parts.saved), with_state=not config.save_only_model
        ),
    )
    introduce(facts, data)
    if facts.free_bytes is not None and facts.free_bytes < facts.checkpoint_bytes:
        raise ConfigError(
            f"output_dir: {config.output_dir} has {human_bytes(facts.free_bytes)} free, one "
            f"checkpoint takes {human_bytes(facts.checkpoint_bytes)}. Free some space, or choose "
            "another output_dir."
        )
    return facts


def open_checkpointer(
    config: RunConfig, *, config_name: str, config_yaml: str, start_over: bool
) -> Checkpointer:
    """Lock output_dir, clean up what a crash left, and find the step to resume from."""
    return Checkpointer(
        config.output_dir,
        save=save_policy(config),
        keep=keep_policy(config),
        config_name=config_name,
        config_yaml=config_yaml,
        resume=config.resume_from_checkpoint,
        start_over=start_over,
        asynchronous=config.enable_async_checkpointing,
        staging=config.staging,
        on_save_error=config.on_save_error,
        final_save_patience_seconds=config.final_save_patience_seconds,
        save_only_model=config.save_only_model,
        allow_missing=tuple(config.allow_missing),
        verify_on_load=config.verify_on_load,
        prune=config.prune,
        keep_last_n_states=config.keep_last_n_states,
    )


def read_state(checkpointer: Checkpointer, source: Committed) -> dict[str, Any]:
    """What the run knew at ``source``.

    Args:
        checkpointer: The open run.
        source: The step to resume from.

    Returns:
        The training state, as JSON values.

    Raises:
        ResumeError: The step holds no training state; ``.path``.
    """
    if stored := checkpointer.read_trainer_state(source):
        return stored
    raise ResumeError(
        f"{source.path} holds a model and no training state (it was saved with save_only_model, or "
        "keep_last_n_states took the state away): a run can't go on from it. Resume from a step "
        f"with a state folder, or begin a new run with model={source.path} and another output_dir.",
        path=source.path,
    )


def check_changes(before: Mapping[str, Any], config: RunConfig, *, accept: bool) -> None:
    """Hold the config against the resumed run's.

    Args:
        before: The config that wrote the checkpoint, as JSON.
        config: The one that is to go on.
        accept: Only warn of what a run can't change.

    Raises:
        ResumeError: A field changed that a run can't change; ``.changes``.
    """
    refused, warned = diff_on_resume(dict(before), config)
    for change in warned:
        logger.warning("changed since the checkpoint: %s", change)
    if not refused:
        return
    if accept:
        for change in refused:
            logger.warning("changed since the checkpoint, accepted: %s", change)
        return
    raise ResumeError(
        f"{config.output_dir} holds a run with another config:\n  "
        + "\n  ".join(str(change) for change in refused)
        + "\nPut these back, add --accept-changes to go on all the same, or train anew with "
        "another output_dir (or resume_from_checkpoint=false and --start-over).",
        changes=[str(change) for change in refused],
    )


def plan_total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Whichever of ``epochs`` and ``max_steps`` comes first, in optimizer steps."""
    by_epochs = None if config.epochs is None else config.epochs * steps_per_epoch
    limits = [limit for limit in (by_epochs, config.max_steps) if limit is not None]
    return min(limits)


def rate_of(config: Mapping[str, Any], *, total_steps: int) -> partial[float]:
    """The learning rate as a function of the step.

    Args:
        config: The run's config, as JSON.
        total_steps: Last step of the run: the schedule's end, unless the config names another.

    Returns:
        ``step -> lr``.
    """
    schedule = config["lr_scheduler"]
    return partial(
        learning_rate,
        name=schedule["name"],
        peak=config["optimizer"]["lr"],
        num_warmup_steps=schedule["num_warmup_steps"],
        total_steps=schedule["num_training_steps"] or total_steps,
    )


def say_new_rate(state: TrainState, config: RunConfig, *, total_steps: int) -> None:
    """Say what a changed length or schedule does to the learning rate of the next step."""
    step = state.step + 1
    old_total = state.facts["total_steps"]
    old = rate_of(state.facts["config"], total_steps=old_total)(step)
    new = rate_of(config.model_dump(mode="json"), total_steps=total_steps)(step)
    if old != new:
        logger.warning(
            "the schedule was planned anew (%d steps before, %d now): lr at step %d: was %.3g, "
            "now %.3g",
            old_total,
            total_steps,
            step,
            old,
            new,
        )


def nothing_left(step: int, config: RunConfig, *, total_steps: int) -> str:
    """What a finished run says when it is started again."""
    if step >= total_steps:
        return (
            f"nothing left to do: {config.output_dir} has done step {step} of {total_steps}. "
            "Set epochs or max_steps higher to go on."
        )
    return (
        f"nothing left to do: stop_after_step={config.stop_after_step} and step {step} of "
        f"{total_steps} is done. Set it higher to go on."
    )


def num_saves(config: RunConfig, state: TrainState, last_step: int) -> int:
    """Checkpoints that are planned from here on, the final one included; time-based ones aren't."""
    if config.save_every_n_train_steps is None:
        return 1
    steps = step_set(config.save_every_n_train_steps)
    return 1 + sum(steps.due(step) for step in range(state.step + 1, last_step))


def _train(
    config: RunConfig,
    facts: StartFacts,
    data: RunData,
    parts: RunParts,
    checkpointer: Checkpointer,
    *,
    world: World,
) -> RunResult:
    state: TrainState = parts.saved["trainer"]
    values = config.model_dump(mode="json")
    loggers = build_loggers(
        config.loggers,
        RunFacts(
            output_dir=Path(config.output_dir),
            name=facts.config_name,
            run_id=checkpointer.run_id,
            config=values,
            resumed_step=state.step,
        ),
    )
    metrics = MetricsLog(Path(config.output_dir, "metrics.jsonl"), loggers=loggers)
    progress = Progress(total_steps=facts.total_steps, first_step=state.step)
    trainer = Trainer(
        model=parts.model,
        optimizer=parts.optimizer,
        loader=data.loader,
        learning_rate=rate_of(values, total_steps=facts.total_steps),
        checkpointer=checkpointer,
        saved=parts.saved,
        state=state,
        total_steps=facts.total_steps,
        stop_after_step=config.stop_after_step,
        intervals=Intervals(
            evaluate=step_set(config.run_val_every_n_steps)
            if config.run_val_every_n_steps is not None
            else None,
            log=step_set(config.log_every_n_steps),
        ),
        reporter=RunReport(metrics=metrics, progress=progress, device=world.device),
        evaluate=parts.evaluate,
        watched=watched_metric(config),
        clip_grad_norm=config.clip_grad_norm,
        on_nonfinite=config.on_nonfinite,
        seed=config.seed,
        rank=world.rank,
    )
    try:
        if facts.resumes_from is None:
            metrics.write("start", run_id=checkpointer.run_id, **vars(facts))
        else:
            metrics.write("resume", step=state.step, run_id=checkpointer.run_id, **vars(facts))
        with progress:
            result = trainer.fit()
        metrics.write("end", step=result.last_step)
    except StopRequested as stop:
        metrics.write("stop", step=state.step, signal=stop.signal_number)
        raise
    finally:
        metrics.close()
    return RunResult(Path(config.output_dir), result.last_step, result.saves)
