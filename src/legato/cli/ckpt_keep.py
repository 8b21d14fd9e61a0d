"""The verbs of ``legato ckpt`` that keep and remove steps, and why each step of a run is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from legato.cli.ckpt_open import AsJson, RunArgument, StepsArgument, open_run, open_step
from legato.cli.show import show_json

if TYPE_CHECKING:
    from legato.checkpoint.lifecycle import RunFolder
    from legato.checkpoint.records import Committed, StepInfo
    from legato.checkpoint.retention import PrunePlan
    from legato.config.schema import RunConfig

_Tell = Callable[[str, dict[str, Any]], None]


def pin(steps: StepsArgument, as_json: AsJson = False) -> None:
    """Keep a checkpoint whatever the run's keep_ keys say."""
    from legato.checkpoint.manifest import PIN_NAME
    from legato.errors import CheckpointTornError

    opened = [open_step(path) for path in steps]
    for path, (_, info) in zip(steps, opened, strict=True):
        if not info.is_complete:
            raise CheckpointTornError(f"{path}: {info.problem}", path=str(path))
    with _telling(as_json=as_json) as tell:
        for folder, info in opened:
            folder.storage.write_bytes(f"{info.path}/{PIN_NAME}", b"")
            tell(f"step_{info.step} is pinned", _place(info) | {"pinned": True})


def unpin(steps: StepsArgument, as_json: AsJson = False) -> None:
    """Take a pin back: the run's keep_ keys decide again."""
    from legato.checkpoint.manifest import PIN_NAME

    opened = [open_step(path) for path in steps]
    with _telling(as_json=as_json) as tell:
        for folder, info in opened:
            if info.pinned:
                folder.storage.remove_file(f"{info.path}/{PIN_NAME}")
            tell(f"step_{info.step} is not pinned", _place(info) | {"pinned": False})


def remove(
    steps: StepsArgument,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints. Not while a run is using their folder, and not pinned ones."""
    from legato.errors import UsageError

    opened = [open_step(path) for path in steps]
    for _, info in opened:
        if info.pinned:
            raise UsageError(f"{info.path} is pinned. `legato ckpt unpin {info.path}` first")
    names = ", ".join(info.path for _, info in opened)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"this deletes {names}. Add --yes to do it")
        typer.confirm(f"Delete {names}?", abort=True, err=True)  # standard output may be JSON
    with _telling(as_json=as_json) as tell:
        for folder, info in opened:
            with _locked(folder):
                folder.prune(info.step, how="delete", now=time.time())
                _point_to_newest(folder)
            tell(f"deleted {info.path}", _place(info) | {"action": "delete"})


def prune(
    run: RunArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would happen; delete nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Apply the keep_ keys of the run's config now."""
    folder = open_run(run)
    if dry_run:
        decided = _decide(folder)
        with _telling(as_json=as_json) as tell:
            for fate in decided:
                tell(f"step_{fate.step.step}: would be {fate.words}", fate.facts)
        return
    with _locked(folder):
        decided = _decide(folder)
        with _telling(as_json=as_json) as tell:
            for fate in decided:
                _carry_out(folder, fate)
                tell(f"step_{fate.step.step}: {fate.words}", fate.facts)


@dataclass(frozen=True)
class _Fate:
    """What happens to a step.

    Attributes:
        step: The step.
        action: What is done with it.
        reasons: Why it stays; none for one that goes.
    """

    step: Committed
    action: Literal["keep", "drop_state", "move", "delete"]
    reasons: tuple[str, ...]

    @property
    def words(self) -> str:
        """The same for people, after the step's name."""
        why = ", ".join(self.reasons)
        return {
            "keep": f"kept ({why})",
            "drop_state": f"kept without state/ ({why})",
            "move": "moved to .pruned/",
            "delete": "deleted",
        }[self.action]

    @property
    def facts(self) -> dict[str, Any]:
        """The same for scripts."""
        return _place(self.step) | {"action": self.action, "kept": list(self.reasons)}


def _decide(folder: RunFolder) -> list[_Fate]:
    """What the run's config says of each step of the newest branch, ascending."""
    from legato.errors import CheckpointNotFoundError

    steps = folder.steps()
    if not any(info.is_complete for info in steps):
        raise CheckpointNotFoundError(
            f"{folder.path} holds no complete checkpoint", path=folder.path
        )
    found = plan_keeping(steps)
    decided = [_fate_of(step, found) for step in found.steps]
    if any(fate.action != "keep" for fate in decided):
        _refuse_damaged(folder, found.steps[-1])
    return decided


def _fate_of(step: Committed, found: Keeping) -> _Fate:
    reasons = found.plan.reasons.get(step.step, ())
    if step.step in found.plan.remove:
        return _Fate(step, found.config.prune, reasons)
    if step.step in found.plan.drop_state and step.manifest.has_state:
        return _Fate(step, "drop_state", reasons)
    return _Fate(step, "keep", reasons)


def _carry_out(folder: RunFolder, fate: _Fate) -> None:
    if fate.action == "drop_state":
        folder.drop_state(fate.step)
    elif fate.action != "keep":
        folder.prune(fate.step.step, how=fate.action, now=time.time())


def _place(step: StepInfo | Committed) -> dict[str, Any]:
    return {"step": step.step, "path": step.path}


@contextmanager
def _telling(*, as_json: bool) -> Iterator[_Tell]:
    """Say what is done, at once; or as JSON at the end, which an error on the way doesn't hide."""
    done: list[dict[str, Any]] = []

    def tell(line: str, facts: dict[str, Any]) -> None:
        if as_json:
            done.append(facts)
        else:
            typer.echo(line)

    try:
        yield tell
    finally:
        if as_json:
            show_json(done)


def _refuse_damaged(folder: RunFolder, newest: Committed) -> None:
    """Read the newest step, which stands in for all that go: a disk may have spoilt it since."""
    from legato.checkpoint.inspection import find_damage
    from legato.errors import CheckpointTornError

    if damage := find_damage(folder.storage, newest):
        raise CheckpointTornError(
            f"{damage[0]}: the newest step isn't what was saved, so nothing is deleted. `legato "
            f"ckpt rm {newest.path}` removes it, `legato ckpt verify {folder.path}` checks others.",
            path=newest.path,
            problems=damage,
        )


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock: nothing is deleted under a run that is writing."""
    from legato.checkpoint.lock import OutputDirLock

    lock = OutputDirLock(folder.path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _point_to_newest(folder: RunFolder) -> None:
    """Mend links that a removal left dangling: ``latest`` leads to the newest, ``best`` goes."""
    complete = [info.step for info in folder.steps() if info.is_complete]
    for name in ("latest", "best"):
        link = Path(folder.path) / name
        if link.is_symlink() and not link.exists():
            if name == "latest" and complete:
                folder.point("latest", complete[-1])
            else:
                link.unlink()


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
    from legato.errors import LegatoError

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
    from legato.config.load import load_config
    from legato.errors import CheckpointNotFoundError

    assert info.manifest is not None
    name = next((n for n in info.manifest.files if n.endswith(".yaml")), None)
    if name is None:
        raise CheckpointNotFoundError(
            f"{info.path} carries no config: its run decides by itself what it keeps. Use `rm`",
            path=info.path,
        )
    return load_config(str(Path(info.path) / name)).config
