"""When a config saves, and what it keeps. No torch here: ``legato ckpt`` is quick."""

from __future__ import annotations

from legato.checkpoint.policy import (
    EpochEnd,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSchedule,
    LogSchedule,
    NewBest,
    OnSignal,
    SavePolicy,
)
from legato.config.rules import has_evaluation_data
from legato.config.schema import RunConfig, Schedule

StepSet = EverySteps | LogSchedule


def step_set(value: int | Schedule) -> StepSet:
    """An interval of the config as a set of steps."""
    if isinstance(value, int):
        return EverySteps(value)
    return LogSchedule(value.first, factor=value.factor, max_interval=value.max_interval)


def save_policy(config: RunConfig) -> SavePolicy:
    """When the config wants checkpoints."""
    policy: SavePolicy = OnSignal()
    if config.save_every_n_train_steps is not None:
        policy = step_set(config.save_every_n_train_steps) | policy
    if config.save_every_n_seconds is not None:
        policy |= EverySeconds(config.save_every_n_seconds)
    if config.save_at_epoch_end:
        policy |= EpochEnd()
    if config.keep_best_n_checkpoints is not None:
        policy |= NewBest()
    return policy


def planned_saves(config: RunConfig, *, steps_per_epoch: int | None) -> list[StepSet]:
    """The steps that the config may save at, as sets; those by time or by signal aren't known.

    Args:
        config: The run.
        steps_per_epoch: None: a stream, whose epochs aren't counted before.

    Returns:
        The sets. Every evaluation is in them where a new best one is saved.
    """
    planned: list[StepSet] = []
    if config.save_every_n_train_steps is not None:
        planned.append(step_set(config.save_every_n_train_steps))
    if config.save_at_epoch_end and steps_per_epoch is not None:
        planned.append(EverySteps(steps_per_epoch))
    evaluates = config.run_val_every_n_steps
    if saves_new_best(config) and evaluates is not None:
        planned.append(step_set(evaluates))
    return planned


def saves_new_best(config: RunConfig) -> bool:
    """Whether an evaluation that finds a new best metric is saved at once."""
    return (
        config.keep_best_n_checkpoints is not None
        and has_evaluation_data(config)
        and metric_of_best(config) != "train_loss"
    )


def keep_policy(config: RunConfig) -> KeepPolicy:
    """Which checkpoints the config wants kept."""
    policies: list[KeepPolicy] = []
    if config.keep_last_n_checkpoints is not None:
        policies.append(KeepLast(config.keep_last_n_checkpoints))
    if config.keep_best_n_checkpoints is not None:
        count, name = config.keep_best_n_checkpoints, metric_of_best(config)
        policies.append(KeepBest(count, name, config.greater_is_better))
    if config.keep_every_n_steps is not None:
        steps = step_set(config.keep_every_n_steps)
        if isinstance(steps, EverySteps):
            policies.append(KeepEvery(steps.interval))
        else:
            policies.append(KeepSchedule(steps))
    if not policies:
        return KeepAll()
    policy, *others = policies
    for other in others:
        policy |= other
    return policy


def metric_of_best(config: RunConfig) -> str:
    """The metric of ``best``: eval_loss where there is evaluation data, else train_loss."""
    fitting = "eval_loss" if has_evaluation_data(config) else "train_loss"
    return config.metric_for_best_model or fitting
