"""When to save and what to keep, as literal lists."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import pytest

from legato.checkpoint import (
    EpochEnd,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSchedule,
    LogSchedule,
    NewBest,
    OnSignal,
    Pinned,
)
from legato.checkpoint.policy import KeepPolicy, Moment, SavePolicy, find_best_rule

LOSSES = {
    10: {"eval_loss": 2.0},
    20: {"eval_loss": 1.0},
    30: {"eval_loss": math.nan},
    40: {"eval_loss": 1.0},
    50: {"eval_loss": 1.5, "accuracy": 0.5},
    60: {"train_loss": 0.1},
    70: {"eval_loss": -math.inf},
}
STEPS = sorted(LOSSES)
SCHEDULE = LogSchedule(first=10, factor=2, max_interval=1000)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepAll(), [10, 20, 30, 40, 50, 60, 70]),
        (KeepLast(1), [70]),
        (KeepLast(3), [50, 60, 70]),
        (KeepLast(99), [10, 20, 30, 40, 50, 60, 70]),
        (KeepBest(1), [20]),
        (KeepBest(2), [20, 40]),
        (KeepBest(3), [20, 40, 50]),
        (KeepBest(99), [10, 20, 40, 50]),
        (KeepBest(1, greater_is_better=True), [10]),
        (KeepBest(1, metric="accuracy", greater_is_better=True), [50]),
        (KeepBest(2, metric="absent"), []),
        (KeepEvery(20), [20, 40, 60]),
        (KeepSchedule(SCHEDULE), [10, 20, 40]),
        (Pinned(frozenset({30, 31})), [30]),
        (KeepLast(1) | KeepBest(1), [20, 70]),
        (KeepLast(1) | KeepEvery(30), [30, 60, 70]),
        (KeepLast(1) | KeepSchedule(SCHEDULE), [10, 20, 40, 70]),
        (KeepLast(1) | Pinned(frozenset({10})), [10, 70]),
        (KeepBest(1) | KeepEvery(30), [20, 30, 60]),
        (KeepBest(1) | KeepSchedule(SCHEDULE), [10, 20, 40]),
        (KeepBest(1) | Pinned(frozenset({10})), [10, 20]),
        (KeepEvery(30) | KeepSchedule(SCHEDULE), [10, 20, 30, 40, 60]),
        (KeepEvery(30) | Pinned(frozenset({10})), [10, 30, 60]),
        (KeepSchedule(SCHEDULE) | Pinned(frozenset({70})), [10, 20, 40, 70]),
        (KeepLast(2) | KeepBest(1) | KeepEvery(30), [20, 30, 60, 70]),
        (KeepLast(1) | KeepBest(1) | KeepEvery(30) | Pinned(frozenset({50})), [20, 30, 50, 60, 70]),
        (KeepLast(1) | KeepAll(), [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_each_keep_policy_and_combination_keeps_what_it_says(
    policy: KeepPolicy, kept: list[int]
) -> None:
    assert policy.keep(STEPS, LOSSES) == kept
    assert policy.keep(STEPS[::-1], LOSSES) == kept
    assert policy.keep([], {}) == []


SINGLES: list[tuple[KeepPolicy, set[int]]] = [
    (KeepLast(1), {70}),
    (KeepBest(1), {20}),
    (KeepEvery(30), {30, 60}),
    (KeepSchedule(SCHEDULE), {10, 20, 40}),
    (Pinned(frozenset({50})), {50}),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_combination_keeps_what_any_of_its_parts_keeps(size: int) -> None:
    for parts in itertools.permutations(SINGLES, size):
        policy = functools.reduce(operator.or_, (policy for policy, _ in parts))
        kept = set().union(*(kept for _, kept in parts))
        assert policy.keep(STEPS, LOSSES) == sorted(kept), policy


def test_order_is_by_number_and_not_by_text() -> None:
    assert KeepLast(2).keep([100, 9, 1000]) == [100, 1000]


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (KeepLast(3), 3),
        (KeepLast(3) | KeepBest(2), 5),
        (KeepLast(3) | KeepEvery(10), None),
        (KeepAll(), None),
        (KeepLast(1) | Pinned(frozenset({1, 2})), 3),
    ],
)
def test_a_keep_policy_knows_how_many_it_keeps_at_most(
    policy: KeepPolicy, limit: int | None
) -> None:
    assert policy.max_kept == limit


def test_the_best_rule_is_found_in_any_combination() -> None:
    best = KeepBest(2, metric="accuracy", greater_is_better=True)
    assert find_best_rule(KeepLast(1) | (KeepEvery(5) | best)) == best
    assert find_best_rule(KeepLast(1) | KeepEvery(5)) is None


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (LogSchedule(10, 2, 1000), [10, 20, 40, 80, 160, 320, 640, 1280, 2280, 3280]),
        (LogSchedule(10, 2, 50), [10, 20, 40, 80, 130, 180, 230, 280, 330, 380]),
        (LogSchedule(1, 1.5, 4), [1, 2, 3, 4, 6, 9, 13, 17, 21, 25]),
        (LogSchedule(5, 10, 1), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
    ],
)
def test_a_log_schedule_is_dense_at_first_and_regular_later(
    schedule: LogSchedule, steps: list[int]
) -> None:
    assert [step for step in range(4000) if schedule.due(step)][:10] == steps


@pytest.mark.parametrize(
    "schedule",
    [
        EverySteps(7),
        SCHEDULE,
        LogSchedule(10, 2, 50),
        LogSchedule(1, 1.5, 4),
        LogSchedule(5, 10, 1),
    ],
)
def test_due_steps_are_counted_without_walking_to_each(schedule: EverySteps | LogSchedule) -> None:
    for after, before in ((0, 0), (0, 1), (0, 5), (0, 700), (4, 5), (37, 1281), (500, 501)):
        counted = schedule.num_due(after=after, before=before)
        assert counted == sum(schedule.due(step) for step in range(after + 1, before))
    assert schedule.num_due(after=3, before=10**18) > 10**14


@pytest.mark.parametrize(
    ("policy", "moment", "reason"),
    [
        (EverySteps(5), Moment(10), "interval"),
        (EverySteps(5), Moment(11), None),
        (EverySteps(5), Moment(0), None),
        (LogSchedule(10), Moment(20), "schedule"),
        (LogSchedule(10), Moment(30), None),
        (EverySeconds(60), Moment(3, seconds_since_save=59.9), None),
        (EverySeconds(60), Moment(3, seconds_since_save=60.0), "time"),
        (EpochEnd(), Moment(3, epoch_end=True), "epoch"),
        (EpochEnd(), Moment(3), None),
        (NewBest(), Moment(3, new_best=True), "best"),
        (NewBest(), Moment(3), None),
        (OnSignal(), Moment(3, signalled=True), "signal"),
        (OnSignal(), Moment(3), None),
        (EverySteps(5) | EpochEnd(), Moment(3, epoch_end=True), "epoch"),
        (EverySteps(5) | EpochEnd(), Moment(5, epoch_end=True), "interval"),
        (EverySteps(5) | NewBest() | OnSignal(), Moment(4, signalled=True), "signal"),
        (EverySteps(5) | NewBest() | OnSignal(), Moment(4, epoch_end=True), None),
    ],
)
def test_each_save_policy_gives_its_reason(
    policy: SavePolicy, moment: Moment, reason: str | None
) -> None:
    assert policy.reason(moment) == reason


def test_only_a_policy_by_time_needs_a_clock() -> None:
    assert not (EverySteps(5) | EpochEnd()).needs_clock
    assert (EverySteps(5) | (EpochEnd() | EverySeconds(1))).needs_clock


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: LogSchedule(0),
        lambda: LogSchedule(1, 1.0),
        lambda: LogSchedule(1, 2, 0),
        lambda: EverySeconds(0),
        lambda: KeepLast(0),
        lambda: KeepBest(0),
        lambda: KeepEvery(0),
    ],
)
def test_values_that_mean_nothing_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="it must be"):
        make()  # type: ignore[operator]
