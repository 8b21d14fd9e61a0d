"""How a run begins: its state and its data, held against the checkpoint that it goes on from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from typing import Any

from legato.checkpoint import Checkpointer, Committed
from legato.checkpoint.foresight import Foresight
from legato.config.resume import diff_on_resume
from legato.config.schema import RunConfig
from legato.data.loader import Loader
from legato.data.stream import StreamLoader
from legato.errors import ResumeError
from legato.parallel.world import World
from legato.recipes.data import RunData, open_run_data
from legato.recipes.inputs import check_inputs, judged_by_contents
from legato.recipes.plan import plan_global_batch, plan_last_step, rate_of, stored_global_batch
from legato.train.state import TrainState, process_facts

logger = logging.getLogger(__name__)

_NO_HELP = " --accept-changes can't help: a checkpoint's tensors are as they were with the old %s."


@contextmanager
def begin_run(
    config: RunConfig, opened: Checkpointer | Foresight, *, world: World, accept_changes: bool
) -> Iterator[tuple[TrainState, RunData]]:
    """Collective: where the run stands and what it reads; the data is closed when the block ends.

    Args:
        config: The run.
        opened: Says which step it goes on from.
        world: The ranks.
        accept_changes: Only warn of what a run shouldn't change.

    Yields:
        tuple[TrainState, RunData]: A new state, or that of the step; and the data, placed by it.

    Raises:
        ResumeError: The step holds no state, or a field changed, or what lies under a name, that a
            run can't change; ``.changes``.
        LegatoError: Data, template or tokenizer that can't be used, here or on another rank.
    """
    state = begin_state(config, opened, world=world, accept_changes=accept_changes)
    rows = plan_global_batch(config, state.facts, world_size=world.world_size)
    with open_run_data(config, state, global_batch_size=rows, world=world) as data:
        if opened.source is not None:
            check_inputs(state, config, data, accept=accept_changes)
        yield state, data


def begin_state(
    config: RunConfig, opened: Checkpointer | Foresight, *, world: World, accept_changes: bool
) -> TrainState:
    """Collective: the state that a run begins with; a resumed one's config is held against it.

    Args:
        config: The run.
        opened: Says which step it goes on from.
        world: The ranks.
        accept_changes: Only warn of what a run shouldn't change.

    Returns:
        A new state, or that of the step.

    Raises:
        ResumeError: The step holds none, or a field changed that a run can't change.
    """
    state = TrainState(
        facts={"start_date": world.control.broadcast(date.today().isoformat())},
        process=process_facts(world.device),
    )
    if opened.source is not None:
        stored = read_state(opened, opened.source)
        state.load_state_dict(stored)
        say_new_process(stored.get("process", {}), state)
        check_changes(state, config, world_size=world.world_size, accept=accept_changes)
    return state


def read_state(opened: Checkpointer | Foresight, source: Committed) -> dict[str, Any]:
    """What the run knew at ``source``.

    Args:
        opened: The run.
        source: The step to resume from.

    Returns:
        The training state, as JSON values.

    Raises:
        ResumeError: The step holds no training state; ``.path``.
    """
    if stored := opened.read_trainer_state(source):
        return stored
    merged, first = source.path, ""
    if source.manifest.kind == "adapter":
        merged, first = "DIR", f"merge it (legato merge {source.path} --output-dir DIR) and "
    raise ResumeError(
        f"{source.path} holds weights and no training state (it was saved with save_only_model, or "
        "keep_last_n_states took the state away): a run can't go on from it, whatever "
        f"allow_missing says. Resume from a step with a state folder, or {first}begin a new run "
        f"with model={merged} and another output_dir.",
        path=source.path,
    )


def check_changes(state: TrainState, config: RunConfig, *, world_size: int, accept: bool) -> None:
    """Hold the config against the resumed run's.

    Paths whose contents the checkpoint tells are left to
    :func:`~legato.recipes.inputs.check_inputs`.

    Args:
        state: As the checkpoint has it.
        config: The one that is to go on.
        world_size: Number of processes now.
        accept: Only warn of what a run shouldn't change; what it can't change stays an error.

    Raises:
        ResumeError: A field changed that a run can't change; ``.changes``.
    """
    refused, warned = diff_on_resume(
        state.facts["config"],
        config,
        global_batch_size=stored_global_batch(state.facts),
        world_size=world_size,
        by_contents=judged_by_contents(state),
    )
    for change in warned:
        logger.warning("changed since the checkpoint: %s", change)
    _say_new_moments(state.facts["config"]["optimizer"]["name"], config.optimizer.name)
    if not refused:
        return
    fixed = [change for change in refused if change.is_fixed]
    if accept and not fixed:
        for change in refused:
            logger.warning("changed since the checkpoint, accepted: %s", change)
        return
    listed = fixed if accept else refused
    raise ResumeError(
        f"{config.output_dir} holds a run with another config:\n  "
        + "\n  ".join(str(change) for change in listed)
        + "\nPut these back, "
        + ("" if fixed else "add --accept-changes to go on all the same, ")
        + "or train anew with another output_dir (or resume_from_checkpoint=false and "
        "--start-over)." + (_NO_HELP % ", ".join(change.key for change in fixed) if fixed else ""),
        changes=[str(change) for change in listed],
    )


def _say_new_moments(before: str, now: str) -> None:
    """Say what another optimizer makes of the moments in a checkpoint, where it isn't an error."""
    if before != now == "sgd":
        logger.warning("sgd keeps no moments: those of the checkpoint are left out")
    elif now != before == "sgd":
        logger.warning("the checkpoint holds no moments: those of %s begin at 0", now)


def say_new_process(before: Mapping[str, Any], state: TrainState) -> None:
    """Say what computes now and didn't, where a resumed run's bits depend on it.

    Args:
        before: ``process`` of the checkpoint; what isn't known there isn't compared.
        state: This process's.
    """
    changes = [
        f"{name} was {before[name]}, is {now}"
        for name, now in state.process.items()
        if before.get(name, now) != now
    ]
    if changes:
        logger.info(
            "%s: the run goes on from the same values, and may compute other last bits",
            "; ".join(changes),
        )


def has_steps_left(
    config: RunConfig,
    opened: Checkpointer | Foresight,
    state: TrainState,
    loader: Loader | StreamLoader,
    *,
    total_steps: int,
) -> bool:
    """Whether a run begins; of a resumed one, say what is another than before, or why it ends.

    Args:
        config: The run.
        opened: Says which step it goes on from.
        state: Where it stands.
        loader: Deals its rows.
        total_steps: Last step of the run.

    Returns:
        True for a fresh start, which writes step 0 where there are no steps to take; of a resumed
        run, whether a step is left for this process.
    """
    if opened.source is None:
        return True
    is_done = state.step >= plan_last_step(config, total_steps=total_steps)
    if is_done and not state.evaluation_left:
        logger.info(_nothing_left(state.step, config, total_steps=total_steps))
        return False
    _say_new_batch(state, loader)
    say_new_rate(state, config, total_steps=total_steps)
    return True


def say_new_rate(state: TrainState, config: RunConfig, *, total_steps: int) -> None:
    """Say what another length or schedule does to the learning rate of the steps that follow.

    Args:
        state: As the checkpoint has it.
        config: The one that is to go on.
        total_steps: Last step of the run, as it is planned now.
    """
    old_total, step = state.facts["total_steps"], state.step + 1
    old = rate_of(state.facts["config"], total_steps=old_total)
    new = rate_of(config.model_dump(mode="json"), total_steps=total_steps)
    if old_total == total_steps and old.keywords == new.keywords:
        return
    logger.warning(
        "the schedule was planned anew (%d steps before, %d now): %s",
        old_total,
        total_steps,
        compare_rates(old, new, step=step, last_step=total_steps),
    )


def compare_rates(
    old: Callable[[int], float], new: Callable[[int], float], *, step: int, last_step: int
) -> str:
    """What becomes of the learning rate, in words.

    Args:
        old: ``step -> lr`` as it was planned before.
        new: The same as it is planned now.
        step: The next step.
        last_step: Step at which the run ends.

    Returns:
        The rate of the next step before and now; where that is the same, how long it stays so.
    """
    if old(step) != new(step):
        return f"lr at step {step}: was {old(step):.3g}, now {new(step):.3g}"
    same = f"lr at step {step}: {new(step):.3g}, as before"
    parting = next((s for s in range(step + 1, last_step + 1) if old(s) != new(s)), None)
    if parting is None:
        return f"{same}; the same up to step {last_step}, the last"
    return f"{same}; from step {parting} on another"


def _say_new_batch(state: TrainState, loader: Loader | StreamLoader) -> None:
    """Say where steps of another size go on in the data."""
    old, new = stored_global_batch(state.facts), loader.global_batch_size
    if old != new:
        logger.warning(
            "a step takes %d rows now, %d before: training goes on with %s",
            new,
            old,
            loader.next_row(),
        )


def _nothing_left(step: int, config: RunConfig, *, total_steps: int) -> str:
    """What a finished run says when it is started again."""
    if step >= total_steps:
        beyond = f"of {total_steps}" if step == total_steps else f"and {total_steps} are asked for"
        return (
            f"nothing left to do: {config.output_dir} has done step {step} {beyond}. "
            "Set epochs or max_steps higher to go on."
        )
    return (
        f"nothing left to do: stop_after_step={config.stop_after_step} and step {step} of "
        f"{total_steps} is done. Set it higher to go on."
    )
