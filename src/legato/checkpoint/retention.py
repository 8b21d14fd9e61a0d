"""What to prune: a pure decision over the steps that are there, and the carrying out of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from legato.checkpoint.inspection import inspect
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.policy import KeepBest, KeepPolicy, Metrics, find_best_rule
from legato.checkpoint.records import Committed, StepInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeepRules:
    """Everything that decides what stays.

    Attributes:
        keep: The policy.
        keep_last_n_states: Of the kept steps only the newest so many keep what a resumed run
            needs; None: all of them.
        how: Whether what goes is deleted, or moved to ``.pruned/``.
        best: What the link ``best`` means; None: the `KeepBest` of the policy, if it has one.
    """

    keep: KeepPolicy
    keep_last_n_states: int | None = None
    how: Literal["delete", "move"] = "delete"
    best: KeepBest | None = None

    def __post_init__(self) -> None:
        if self.keep_last_n_states is not None and self.keep_last_n_states < 1:
            raise ValueError(f"keep_last_n_states is {self.keep_last_n_states}; at least 1")
        if self.how not in ("delete", "move"):
            raise ValueError(f"prune is {self.how!r}; it must be 'delete' or 'move'")

    @property
    def max_kept(self) -> int | None:
        """How many steps take space at the same time; None: all. What is moved frees none."""
        return None if self.how == "move" else self.keep.max_kept

    @property
    def best_rule(self) -> KeepBest | None:
        """What the link ``best`` means; None: there is none."""
        return self.best or find_best_rule(self.keep)


@dataclass(frozen=True)
class PrunePlan:
    """What happens to each step.

    Attributes:
        remove: Steps that go, ascending.
        drop_state: Steps that stay, but lose their ``state/``, ascending.
        reasons: Why each other step stays.
    """

    remove: tuple[int, ...] = ()
    drop_state: tuple[int, ...] = ()
    reasons: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def plan_prune(
    steps: Sequence[int],
    *,
    rules: KeepRules,
    metrics: Mapping[int, Metrics],
    pinned: Collection[int] = (),
    resumed_from: int | None = None,
) -> PrunePlan:
    """Decide what goes.

    Args:
        steps: Complete steps that the current branch wrote, in any order.
        rules: What to keep.
        metrics: Metrics by step.
        pinned: Steps that someone pinned on disk.
        resumed_from: The step this process resumed from; it stays until a newer one is there.

    Returns:
        The plan. The newest step always stays, whole, and so do pinned ones.
    """
    if not steps:
        return PrunePlan()
    newest = max(steps)
    reasons = rules.keep.reasons(sorted(steps), metrics)
    reasons.setdefault(newest, []).append("newest")
    for step in pinned:
        if step in steps:
            reasons.setdefault(step, []).append("pinned")
    if resumed_from == newest:
        reasons[newest].append("resumed from")
    kept = sorted(reasons)
    whole = set(kept)
    if rules.keep_last_n_states is not None:
        whole = {*kept[-rules.keep_last_n_states :], *pinned}
    return PrunePlan(
        remove=tuple(sorted(set(steps) - reasons.keys())),
        drop_state=tuple(step for step in kept if step not in whole),
        reasons={step: tuple(dict.fromkeys(why)) for step, why in reasons.items()},
    )


class Keeper:
    """Knows the steps of the current branch; after each commit sets the links and prunes.

    Used by rank 0, by one thread. Nothing that goes wrong here is a failed save.

    Args:
        folder: The run's output_dir.
        rules: What to keep.
        steps: What lies in the folder.
        run_id: This run.
        branch: This branch of it.
        resumed_from: The step this process resumed from.
        clock: Gives seconds since 1970.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        rules: KeepRules,
        steps: Sequence[StepInfo],
        run_id: str,
        branch: int,
        resumed_from: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._rules = rules
        self._run_id = run_id
        self._resumed_from = resumed_from
        self._clock = clock
        # The run's own steps: earlier branches' too, they count for "best" but never go. Of each
        # only what decides is kept: a manifest may be megabytes.
        own = [i.manifest for i in steps if i.manifest is not None and i.manifest.run_id == run_id]
        self._metrics: dict[int, Metrics] = {manifest.step: manifest.metrics for manifest in own}
        self._own = {manifest.step for manifest in own if manifest.branch == branch}
        self._with_state = {manifest.step for manifest in own if manifest.has_state}

    def committed(self, committed: Committed) -> None:
        """A step was committed: set the links, prune."""
        self._metrics[committed.step] = committed.manifest.metrics
        self._own.add(committed.step)
        if committed.manifest.has_state:
            self._with_state.add(committed.step)
        try:
            self._forget_vanished()
            self._point()
            self._prune()
        except Exception as error:  # the step is committed all the same, as other ranks know
            logger.warning(
                "cleaning up after step %d failed: %s: %s",
                committed.step, type(error).__name__, error,
            )  # fmt: skip

    def add_metrics(self, committed: Committed, metrics: Metrics) -> Committed:
        """Metrics came after the commit: into the manifest, and count them."""
        manifest = dataclasses.replace(
            committed.manifest, metrics={**committed.manifest.metrics, **metrics}
        )
        self._folder.amend(committed.step, manifest)
        amended = Committed(path=committed.path, manifest=manifest)
        self.committed(amended)
        return amended

    def _forget_vanished(self) -> None:
        """Someone may have deleted a step meanwhile."""
        for step in [step for step in self._metrics if not self._folder.exists(step)]:
            self._forget(step)

    def _point(self) -> None:
        if not self._metrics:  # someone took every step away, this one too
            return
        self._folder.point("latest", max(self._metrics))
        rule = self._rules.best_rule
        best = rule.best(sorted(self._metrics), self._metrics) if rule else []
        if best:
            self._folder.point("best", best[0])

    def _prune(self) -> None:
        plan = plan_prune(
            sorted(self._own),
            rules=self._rules,
            metrics=self._metrics,
            pinned=[step for step in self._own if self._folder.is_pinned(step)],
            resumed_from=self._resumed_from,
        )
        for step in plan.remove:
            self._attempt(step, self._remove)
        for step in plan.drop_state:
            if step in self._with_state:
                self._attempt(step, self._drop_state)

    def _remove(self, step: int) -> None:
        if self._is_anothers(step):
            return
        self._folder.prune(step, how=self._rules.how, now=self._clock())
        self._forget(step)

    def _drop_state(self, step: int) -> None:
        if self._is_anothers(step):
            return
        info = inspect(self._folder.storage, self._folder.step_path(step))
        if info.is_complete:
            self._folder.drop_state(info.committed())
        self._with_state.discard(step)

    def _is_anothers(self, step: int) -> bool:
        """Whether another run's step has taken the place of ours; such a one is let alone."""
        writer = self._folder.writer(step)
        if writer in (None, self._run_id):
            return False
        logger.warning(
            "%s was written by run %s, not by this one (%s): it isn't pruned",
            self._folder.step_path(step), writer, self._run_id,
        )  # fmt: skip
        self._forget(step)
        return True

    def _forget(self, step: int) -> None:
        self._own.discard(step)
        self._metrics.pop(step, None)

    def _attempt(self, step: int, action: Callable[[int], None]) -> None:
        try:
            action(step)
        except OSError as error:
            logger.warning("step_%d could not be pruned: %s", step, error)
