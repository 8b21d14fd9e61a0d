"""What goes, what stays and why, as literals."""

from __future__ import annotations

import pytest

from legato.checkpoint import KeepAll, KeepBest, KeepEvery, KeepLast
from legato.checkpoint.policy import KeepPolicy
from legato.checkpoint.retention import KeepRules, plan_prune

METRICS = {10: {"eval_loss": 3.0}, 20: {"eval_loss": 1.0}, 30: {"eval_loss": 2.0}}
STEPS = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("keep", "states", "pinned", "resumed_from", "remove", "drop_state"),
    [
        (KeepAll(), None, [], None, (), ()),
        (KeepAll(), 2, [], None, (), (10, 20, 30)),
        (KeepAll(), 2, [10], None, (), (20, 30)),
        (KeepLast(2), None, [], None, (10, 20, 30), ()),
        (KeepLast(2), 1, [], None, (10, 20, 30), (40,)),
        (KeepLast(2), None, [10, 99], None, (20, 30), ()),
        (KeepLast(1), None, [], 40, (10, 20, 30, 40), ()),
        (KeepLast(1), None, [], 50, (10, 20, 30, 40), ()),
        (KeepBest(1), None, [], None, (10, 30, 40), ()),
        (KeepBest(1) | KeepLast(2), None, [], None, (10, 30), ()),
        (KeepBest(2) | KeepLast(1), 1, [], None, (10, 40), (20, 30)),
        (KeepEvery(20), None, [], None, (10, 30), ()),
        (KeepEvery(20), 2, [], None, (10, 30), (20,)),
    ],
)
def test_what_is_pruned(
    keep: KeepPolicy,
    states: int | None,
    pinned: list[int],
    resumed_from: int | None,
    remove: tuple[int, ...],
    drop_state: tuple[int, ...],
) -> None:
    plan = plan_prune(
        STEPS,
        rules=KeepRules(keep, keep_last_n_states=states),
        metrics=METRICS,
        pinned=pinned,
        resumed_from=resumed_from,
    )
    assert (plan.remove, plan.drop_state) == (remove, drop_state)


def test_why_each_step_stays() -> None:
    plan = plan_prune(
        STEPS,
        rules=KeepRules(KeepLast(2) | KeepBest(1) | KeepEvery(50)),
        metrics=METRICS,
        pinned=[10],
        resumed_from=50,
    )
    assert plan.reasons == {
        10: ("pinned",),
        20: ("best",),
        40: ("last",),
        50: ("last", "every", "newest", "resumed from"),
    }


def test_nothing_to_prune_in_an_empty_folder() -> None:
    assert plan_prune([], rules=KeepRules(KeepLast(1)), metrics={}).remove == ()


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last_n_states is 0"):
        KeepRules(KeepAll(), keep_last_n_states=0)
    with pytest.raises(ValueError, match="must be 'delete' or 'move'"):
        KeepRules(KeepAll(), how="burn")  # type: ignore[arg-type]
