"""Why each step of a run is kept, by the config that its newest step carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from legato.config.load import load_config
from legato.errors import CheckpointNotFoundError, LegatoError

if TYPE_CHECKING:
    from legato.checkpoint.records import Committed, StepInfo
    from legato.checkpoint.retention import PrunePlan
    from legato.config.schema import RunConfig


@dataclass(frozen=True)
class Keeping:
    """What a run's config decides about its steps.

    Attributes:
        config: The config of the newest complete step.
        steps: The complete steps of the newest branch, ascending: no others are ever pruned.
        plan: What happens to each of them.
    """

    config: RunConfig
    steps: Sequence[Committed]
    plan: PrunePlan


def plan_keeping(infos: Sequence[StepInfo]) -> Keeping:
    """Decide what stays as the run itself would.

    Args:
        infos: The steps of a run, ascending; one of them is complete.

    Returns:
        The decision.

    Raises:
        CheckpointNotFoundError: The newest step carries no config; ``.path``.
        LegatoError: Its config can't be read.
    """
    from legato.checkpoint.retention import KeepRules, plan_prune
    from legato.recipes.policies import keep_policy

    complete = [info for info in infos if info.is_complete]
    newest, config = complete[-1].committed(), _config_of(complete[-1])
    ours = [step for info in complete if same_branch(step := info.committed(), newest)]
    plan = plan_prune(
        [step.step for step in ours],
        rules=KeepRules(keep_policy(config), config.keep_last_n_states),
        metrics={step.step: step.manifest.metrics for step in ours},
        pinned=[info.step for info in complete if info.pinned],
    )
    return Keeping(config, ours, plan)


def kept_because(infos: Sequence[StepInfo]) -> dict[int, tuple[str, ...]]:
    """Why each step stays, as far as that can be told.

    Args:
        infos: The steps of a run, ascending.

    Returns:
        Step -> its reasons; none: it goes at the next prune. Steps that no config decides about
        are absent.
    """
    if not any(info.is_complete for info in infos):
        return {}
    try:
        found = plan_keeping(infos)
    except LegatoError:  # no config, or one of another version: the list is worth having anyway
        return {}
    return {step.step: found.plan.reasons.get(step.step, ()) for step in found.steps}


def same_branch(step: Committed, other: Committed) -> bool:
    """Whether one branch of one run wrote both."""
    return (step.run_id, step.branch) == (other.run_id, other.branch)


def _config_of(info: StepInfo) -> RunConfig:
    """The config that a step folder carries."""
    assert info.manifest is not None
    name = next((n for n in info.manifest.files if n.endswith(".yaml")), None)
    if name is None:
        raise CheckpointNotFoundError(
            f"{info.path} carries no config: its run decides by itself what it keeps. Use `rm`",
            path=info.path,
        )
    return load_config(str(Path(info.path) / name)).config
