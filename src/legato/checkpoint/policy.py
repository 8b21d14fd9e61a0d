"""When to save and what to keep: values, not objects with a life.

Both kinds combine with ``|``. Nothing here reads a clock or a disk::

    >>> (EverySteps(500) | EpochEnd()).reason(Moment(step=730, epoch_end=True))
    'epoch'
    >>> (KeepLast(2) | KeepEvery(100)).keep([50, 100, 150, 200, 250])
    [100, 200, 250]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Metrics = Mapping[str, float]
"""Metrics of one step by name, e.g. ``{"eval_loss": 1.25}``."""


@dataclass(frozen=True)
class Moment:
    """The facts that a save policy decides by.

    Attributes:
        step: Optimizer steps completed.
        seconds_since_save: Seconds since the last save began, or since the start.
        epoch_end: The step is the last one of an epoch.
        new_best: An evaluation at this step found a new best metric.
        signalled: Someone asked for a save (SIGUSR1, or the trigger file).
    """

    step: int
    seconds_since_save: float = 0.0
    epoch_end: bool = False
    new_best: bool = False
    signalled: bool = False


class SavePolicy:
    """When to save; combine with ``|``."""

    needs_clock: bool = False

    def reason(self, moment: Moment) -> str | None:
        """Why to save at ``moment``, in a word; None: no reason to."""
        raise NotImplementedError

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Save when either would; the left one's reason comes first."""
        return AnySave((self, other))


@dataclass(frozen=True)
class AnySave(SavePolicy):
    """Save when any of ``policies`` would."""

    policies: tuple[SavePolicy, ...]

    @property
    def needs_clock(self) -> bool:  # type: ignore[override]  # a fact of the parts, not of the class
        """Whether any part decides by time."""
        return any(policy.needs_clock for policy in self.policies)

    def reason(self, moment: Moment) -> str | None:
        """The first part's reason that there is."""
        return next(filter(None, (policy.reason(moment) for policy in self.policies)), None)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Every ``interval`` steps: ``interval``, ``2 * interval``, ..."""

    interval: int

    def __post_init__(self) -> None:
        _require(self.interval >= 1, "interval", self.interval, "at least 1")

    def due(self, step: int) -> bool:
        """Whether ``step`` is a multiple of ``interval``."""
        return step > 0 and step % self.interval == 0

    def num_due(self, *, after: int, before: int) -> int:
        """How many steps between the two, neither included, are due."""
        return max(0, (before - 1) // self.interval - after // self.interval)

    def reason(self, moment: Moment) -> str | None:
        """``interval``."""
        return "interval" if self.due(moment.step) else None


@dataclass(frozen=True)
class LogSchedule(SavePolicy):
    """Often at first, then ever more rarely: ``first``, ``first * factor``, ...

    Once the distance between two steps would exceed ``max_interval``, it stays at that::

        >>> schedule = LogSchedule(first=10, factor=2, max_interval=50)
        >>> [step for step in range(300) if schedule.due(step)]
        [10, 20, 40, 80, 130, 180, 230, 280]
    """

    first: int
    factor: float = 2.0
    max_interval: int = 1000

    def __post_init__(self) -> None:
        _require(self.first >= 1, "first", self.first, "at least 1")
        _require(self.factor > 1, "factor", self.factor, "greater than 1")
        _require(self.max_interval >= 1, "max_interval", self.max_interval, "at least 1")

    def due(self, step: int) -> bool:
        """Whether ``step`` is on the schedule."""
        point = self.first
        while point < step:
            distance = max(1, math.floor(point * self.factor) - point)
            if distance >= self.max_interval:
                return (step - point) % self.max_interval == 0
            point += distance
        return point == step

    def num_due(self, *, after: int, before: int) -> int:
        """How many steps between the two, neither included, are due."""
        point, count = self.first, 0
        while point < before:
            distance = max(1, math.floor(point * self.factor) - point)
            if distance >= self.max_interval:  # from here on they are equally far apart
                start = max(point - 1, after)
                last, passed = ((step - point) // self.max_interval for step in (before - 1, start))
                return count + max(0, last - passed)
            count += point > after
            point += distance
        return count

    def reason(self, moment: Moment) -> str | None:
        """``schedule``."""
        return "schedule" if self.due(moment.step) else None


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """As soon as ``seconds`` have passed since the last save began."""

    seconds: float
    needs_clock = True

    def __post_init__(self) -> None:
        _require(self.seconds > 0, "seconds", self.seconds, "greater than 0")

    def reason(self, moment: Moment) -> str | None:
        """``time``."""
        return "time" if moment.seconds_since_save >= self.seconds else None


@dataclass(frozen=True)
class EpochEnd(SavePolicy):
    """After the last step of each epoch."""

    def reason(self, moment: Moment) -> str | None:
        """``epoch``."""
        return "epoch" if moment.epoch_end else None


@dataclass(frozen=True)
class NewBest(SavePolicy):
    """After an evaluation that found a new best metric."""

    def reason(self, moment: Moment) -> str | None:
        """``best``."""
        return "best" if moment.new_best else None


@dataclass(frozen=True)
class OnSignal(SavePolicy):
    """When someone asks for it: SIGUSR1, or the trigger file ``SAVE``."""

    def reason(self, moment: Moment) -> str | None:
        """``signal``."""
        return "signal" if moment.signalled else None


class KeepPolicy:
    """What to keep; combine with ``|``. The newest complete step is always kept besides."""

    max_kept: int | None = None

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """Why each kept step is kept; steps that aren't kept are absent."""
        raise NotImplementedError

    def keep(self, steps: Sequence[int], metrics: Mapping[int, Metrics] | None = None) -> list[int]:
        """Which of ``steps`` are kept, ascending.

        Args:
            steps: Complete steps, in any order.
            metrics: Metrics by step, for policies that compare them.

        Returns:
            The kept ones.
        """
        return sorted(self.reasons(sorted(steps), metrics or {}))

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        """Keep what either keeps."""
        return AnyKeep((self, other))


@dataclass(frozen=True)
class AnyKeep(KeepPolicy):
    """Keep what any of ``policies`` keeps."""

    policies: tuple[KeepPolicy, ...]

    @property
    def max_kept(self) -> int | None:  # type: ignore[override]  # a fact of the parts, not of the class
        """The sum of the parts' limits; None as soon as one has none."""
        limits = [policy.max_kept for policy in self.policies]
        return None if None in limits else sum(limit for limit in limits if limit is not None)

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """All parts' reasons."""
        merged: dict[int, list[str]] = {}
        for policy in self.policies:
            for step, why in policy.reasons(steps, metrics).items():
                merged.setdefault(step, []).extend(why)
        return merged


@dataclass(frozen=True)
class KeepAll(KeepPolicy):
    """Every step."""

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``all``."""
        return {step: ["all"] for step in steps}


@dataclass(frozen=True)
class KeepLast(KeepPolicy):
    """The ``count`` newest steps, by number."""

    count: int

    def __post_init__(self) -> None:
        _require(self.count >= 1, "count", self.count, "at least 1")

    @property
    def max_kept(self) -> int:  # type: ignore[override]  # a fact of the value, not of the class
        """``count``."""
        return self.count

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``last``."""
        return {step: ["last"] for step in sorted(steps)[-self.count :]}


@dataclass(frozen=True)
class KeepBest(KeepPolicy):
    """The ``count`` best steps by ``metric``.

    A step without the metric, or with a NaN or infinite one, never counts. Of equal ones the
    earlier step is better.
    """

    count: int
    metric: str = "eval_loss"
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        _require(self.count >= 1, "count", self.count, "at least 1")

    @property
    def max_kept(self) -> int:  # type: ignore[override]  # a fact of the value, not of the class
        """``count``."""
        return self.count

    def best(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> list[int]:
        """The ``count`` best steps, the best one first."""
        sign = -1.0 if self.greater_is_better else 1.0
        values = {step: metrics.get(step, {}).get(self.metric) for step in steps}
        ranked = sorted(
            (sign * value, step)
            for step, value in values.items()
            if value is not None and math.isfinite(value)
        )
        return [step for _, step in ranked[: self.count]]

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``best``."""
        return {step: ["best"] for step in self.best(steps, metrics)}


@dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Multiples of ``interval`` steps, for good."""

    interval: int

    def __post_init__(self) -> None:
        _require(self.interval >= 1, "interval", self.interval, "at least 1")

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``every``."""
        return {step: ["every"] for step in steps if step > 0 and step % self.interval == 0}


@dataclass(frozen=True)
class KeepSchedule(KeepPolicy):
    """The steps of a `LogSchedule`, for good."""

    schedule: LogSchedule

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``schedule``."""
        return {step: ["schedule"] for step in steps if self.schedule.due(step)}


@dataclass(frozen=True)
class Pinned(KeepPolicy):
    """These steps, for good. On disk, ``legato ckpt pin`` does the same for any policy."""

    steps: frozenset[int] = field(default_factory=frozenset)

    @property
    def max_kept(self) -> int:  # type: ignore[override]  # a fact of the value, not of the class
        """Their number."""
        return len(self.steps)

    def reasons(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> dict[int, list[str]]:
        """``pinned``."""
        return {step: ["pinned"] for step in steps if step in self.steps}


def find_best_rule(policy: KeepPolicy) -> KeepBest | None:
    """The `KeepBest` in ``policy``, which says what ``best`` means; None if there is none."""
    if isinstance(policy, KeepBest):
        return policy
    if isinstance(policy, AnyKeep):
        return next(filter(None, map(find_best_rule, policy.policies)), None)
    return None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {expected}")
