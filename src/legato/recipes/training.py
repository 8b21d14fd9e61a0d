"""A training run, from its config to its last checkpoint, in time order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from legato.checkpoint import Checkpointer, SaveRecord
from legato.config.rules import check_processes, is_distributed
from legato.config.schema import RunConfig
from legato.data.dealing import BatchSource
from legato.data.prefetch import Prefetcher
from legato.data.stream import StreamLoader
from legato.errors import StopRequested
from legato.models.compile import CompileClock
from legato.parallel.handlers import saves_held
from legato.parallel.placement import find_placement
from legato.parallel.world import World
from legato.recipes.beginning import begin_run, has_steps_left
from legato.recipes.data import RunData
from legato.recipes.facts import introduce, start_facts
from legato.recipes.output import open_metrics, output_folder, write_config
from legato.recipes.parts import RunParts, build_parts, watched_metric
from legato.recipes.plan import num_saves, plan_last_step, plan_total_steps, rate_of
from legato.recipes.policies import keep_policy, save_policy, step_set
from legato.recipes.ranks import (
    check_local_problems,
    check_mesh,
    check_same_config,
)
from legato.report.byte_bar import byte_bar
from legato.report.loggers import RunFacts, build_loggers
from legato.report.metrics import MetricsLog
from legato.report.progress import Progress
from legato.report.report import RunReport, SilentReport
from legato.report.start import StartFacts
from legato.train.determinism import repeated_bits
from legato.train.state import TrainState
from legato.train.trainer import Intervals, Reporter, Trainer

logger = logging.getLogger(__name__)

# A killed rank 0 may hold the lock of output_dir until its host has noticed.
RESTART_LOCK_SECONDS = 30.0


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


@saves_held()
def run(
    config: RunConfig,
    *,
    config_name: str,
    config_yaml: str,
    start_over: bool = False,
    accept_changes: bool = False,
    local_problems: Sequence[str] = (),
) -> RunResult:
    """Train as ``config`` says, or go on where an earlier call with it was ended.

    Collective where the environment says that this process is one of several, as torchrun or srun
    set it: every one calls it alike.

    Args:
        config: The run.
        config_name: What it is called; its file in output_dir and in each step folder.
        config_yaml: The resolved config as text.
        start_over: Move steps that are in the way to ``output_dir/.old-<time>/`` first.
        accept_changes: Resume although fields changed that a run can't change.
        local_problems: What this host's files say against the config. The ranks meet before it is
            an error, so that nobody waits for one that doesn't come.

    Returns:
        How it ended.

    Raises:
        LegatoError: Anything that stands in the way; where possible before step 1.
        StopRequested: A signal ended the run, after a checkpoint.
    """
    placement = find_placement(os.environ)
    check_processes(config, placement.world_size if placement is not None else 1)
    with (
        repeated_bits(config.deterministic),
        World.join(config.device, distributed=is_distributed(config)) as world,
    ):
        flags = {"--start-over": start_over, "--accept-changes": accept_changes}
        check_same_config(config, world=world, flags=flags)
        check_local_problems(local_problems, world=world)
        check_mesh(config, world=world)
        with (
            output_folder(config, config_name=config_name, world=world),
            open_checkpointer(
                config,
                config_name=config_name,
                config_yaml=config_yaml,
                start_over=start_over,
                world=world,
            ) as checkpointer,
            begin_run(config, checkpointer, world=world, accept_changes=accept_changes) as begun,
        ):
            return _run(
                config,
                checkpointer,
                *begun,
                config_name=config_name,
                config_yaml=config_yaml,
                world=world,
            )


def _run(
    config: RunConfig,
    checkpointer: Checkpointer,
    state: TrainState,
    data: RunData,
    *,
    config_name: str,
    config_yaml: str,
    world: World,
) -> RunResult:
    total_steps = plan_total_steps(config, data.loader)
    if not has_steps_left(config, checkpointer, state, data.loader, total_steps=total_steps):
        return RunResult(output_dir=Path(config.output_dir), last_step=state.step)

    parts = build_parts(config, data, world=world, state=state)
    shown = partial(byte_bar, "restoring") if world.is_main else None
    checkpointer.restore(parts.saved, progress=shown)
    state.facts = {
        "start_date": state.facts["start_date"],
        "config": config.model_dump(mode="json"),
        "total_steps": total_steps,
        "global_batch_size": data.loader.global_batch_size,
        "inputs": data.inputs,
    }
    planned = num_saves(
        config,
        step=state.step,
        last_step=plan_last_step(config, total_steps=total_steps),
        steps_per_epoch=data.loader.steps_per_epoch,
    )
    checkpointer.check_space(parts.saved, planned_saves=planned)
    facts = start_facts(
        config,
        config_name=config_name,
        world=world,
        data=data,
        parts=parts,
        total_steps=total_steps,
        checkpoint_bytes=checkpointer.checkpoint_bytes(parts.saved),
        source=checkpointer.source,
    )
    world.on_rank_0(lambda: write_config(config, config_name=config_name, config_yaml=config_yaml))
    if world.is_main:
        introduce(facts, data)
    return _train(config, facts, data, parts, checkpointer, world=world)


def open_checkpointer(
    config: RunConfig, *, config_name: str, config_yaml: str, start_over: bool, world: World
) -> Checkpointer:
    """Collective: lock output_dir, clean up what a crash left, find the step to resume from.

    Args:
        config: The run; decides when to save and what to keep.
        config_name: What it is called; its file in each step folder.
        config_yaml: The resolved config as text.
        start_over: Move steps that are in the way to ``output_dir/.old-<time>/`` first.
        world: The ranks; those of a restart wait a while for the lock.

    Returns:
        The checkpointer. Close it in the end.

    Raises:
        OutputDirLockedError: Another run is using output_dir.
        CheckpointError: What else keeps the run from beginning, as `Checkpointer` lists it.
    """
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
        process_group=world.group,
        shared_storage=config.shared_storage,
        lock_wait_seconds=RESTART_LOCK_SECONDS if world.attempt else 0.0,
        launch_id=world.launch_id,
        attempt=world.attempt,
    )


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
    with (
        _reporting(config, facts, checkpointer, state=state, world=world) as reporter,
        _fetching_ahead(config, data, total_steps=facts.total_steps) as source,
        CompileClock() if config.compile else nullcontext() as clock,
    ):
        trainer = Trainer(
            model=parts.model,
            optimizer=parts.optimizer,
            loader=source,
            learning_rate=rate_of(config.model_dump(mode="json"), total_steps=facts.total_steps),
            checkpointer=checkpointer,
            saved=parts.saved,
            state=state,
            total_steps=facts.total_steps,
            intervals=Intervals(
                evaluate=step_set(config.run_val_every_n_steps)
                if config.run_val_every_n_steps is not None
                else None,
                log=step_set(config.log_every_n_steps),
            ),
            reporter=reporter,
            world=world,
            stop_after_step=config.stop_after_step,
            evaluate=parts.evaluate,
            answer_prompts=parts.answer_prompts,
            watched=watched_metric(config),
            clip_grad_norm=config.clip_grad_norm,
            on_nonfinite=config.on_nonfinite,
            seed=config.seed,
            compile_seconds=(lambda: clock.seconds) if clock is not None else None,
        )
        result = trainer.fit()
    if world.is_main and isinstance(data.loader, StreamLoader):
        for line in data.loader.report().lines():
            logger.info("this pass so far: %s", line)
    return RunResult(Path(config.output_dir), result.last_step, result.saves)


@contextmanager
def _fetching_ahead(config: RunConfig, data: RunData, *, total_steps: int) -> Iterator[BatchSource]:
    """The loader; with workers, a thread of its own fetches from it."""
    if not config.num_workers:
        yield data.loader
        return
    last_step = plan_last_step(config, total_steps=total_steps)
    with closing(Prefetcher(data.loader, last_step=last_step)) as ahead:
        try:
            yield ahead
        finally:
            if isinstance(data.loader, StreamLoader):
                data.loader.stop_reading()  # the thread may be in the midst of a long block


@contextmanager
def _reporting(
    config: RunConfig,
    facts: StartFacts,
    checkpointer: Checkpointer,
    *,
    state: TrainState,
    world: World,
) -> Iterator[Reporter]:
    """Rank 0 tells of the run: metrics, loggers, the bar. The other ranks are silent."""

    def open_log() -> MetricsLog | None:
        if not world.is_main:
            return None
        about = RunFacts(
            output_dir=Path(config.output_dir),
            name=facts.config_name,
            run_id=checkpointer.run_id,
            config=config.model_dump(mode="json"),
            resumed_step=state.step,
        )
        return open_metrics(
            config,
            loggers=build_loggers(config.loggers, about),
            is_ours=lambda: checkpointer.holds_output_dir,
        )

    metrics = world.on_every_rank(open_log)
    if metrics is None:
        yield SilentReport()
        return
    progress = Progress(total_steps=facts.total_steps, first_step=state.step)
    try:
        if facts.resumes_from is None:
            metrics.write("start", run_id=checkpointer.run_id, **vars(facts))
        else:
            metrics.write("resume", step=state.step, run_id=checkpointer.run_id, **vars(facts))
        with progress:
            yield RunReport(metrics=metrics, progress=progress, device=world.device)
        metrics.write("end", step=state.step)
    except StopRequested as stop:
        metrics.write("stop", step=state.step, signal=stop.signal_number)
        raise
    finally:
        metrics.close()
