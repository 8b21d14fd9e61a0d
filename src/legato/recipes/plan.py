"""What a config makes of a run, as values: length, batches, rate, number of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from legato.config.schema import RunConfig
from legato.data.loader import Loader
from legato.data.stream import StreamLoader
from legato.optim.schedule import learning_rate
from legato.recipes.policies import planned_saves

# In a longer run a step that is due twice is counted twice: walking to each would take a while.
_MAX_WALKED = 100_000


def plan_global_batch(config: RunConfig, facts: Mapping[str, Any], *, world_size: int) -> int:
    """Rows of one optimizer step over all ranks. They belong to the run, not to its processes.

    Args:
        config: The config of this start.
        facts: The resumed run's, as its checkpoint has them; without a config: a fresh start.
        world_size: Number of processes now.

    Returns:
        What the run was started with, on however many processes; the config's own product at a
        fresh start, or where it was changed to another one and that was accepted.
    """
    rows_per_rank = config.batch_size * config.gradient_accumulation_steps
    before = facts.get("config")
    if before is None:
        return rows_per_rank * world_size
    if before["batch_size"] * before["gradient_accumulation_steps"] != rows_per_rank:
        return rows_per_rank * world_size
    return stored_global_batch(facts)


def stored_global_batch(facts: Mapping[str, Any]) -> int:
    """Rows of one optimizer step, as ``facts`` of a checkpoint's training state have them."""
    return int(facts["global_batch_size"])


def plan_total_steps(config: RunConfig, loader: Loader | StreamLoader) -> int:
    """Whichever of ``epochs`` and ``max_steps`` comes first, in optimizer steps.

    Args:
        config: The run; one of the two is set.
        loader: Knows how many steps an epoch has. A stream doesn't, and only ``max_steps`` ends it.

    Returns:
        The run's last step, from 1; 0: nothing is trained.
    """
    by_epochs = None
    if isinstance(loader, Loader) and config.epochs is not None:
        by_epochs = loader.last_step_of(config.epochs)
    limits = [limit for limit in (by_epochs, config.max_steps) if limit is not None]
    return min(limits)


def plan_last_step(config: RunConfig, *, total_steps: int) -> int:
    """The step that this process ends at: ``total_steps``, or ``stop_after_step`` before it."""
    stop = config.stop_after_step
    return total_steps if stop is None else min(total_steps, stop)


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


def num_saves(config: RunConfig, *, step: int, last_step: int, steps_per_epoch: int | None) -> int:
    """Checkpoints that are planned from here on.

    Args:
        config: The run.
        step: Steps that are done.
        last_step: The last one of this process.
        steps_per_epoch: None: a stream.

    Returns:
        Their number, the final one and one for each evaluation that may find a new best included;
        those by time and by signal aren't.
    """
    planned = planned_saves(config, steps_per_epoch=steps_per_epoch)
    if len(planned) == 1 or last_step - step > _MAX_WALKED:
        return 1 + sum(steps.num_due(after=step, before=last_step) for steps in planned)
    return 1 + sum(any(steps.due(s) for steps in planned) for s in range(step + 1, last_step))
