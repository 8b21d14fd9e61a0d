"""What a start decides: which run and branch this is, and which step it goes on from."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from legato.checkpoint.inspection import find_damage, inspect
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import OutputDirLock
from legato.checkpoint.records import Committed, StepInfo
from legato.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointTornError,
)
from legato.storage import LocalStorage, Storage, open_storage
from legato.storage.writing import writing_to

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What started the ranks of a run.

    Attributes:
        launch_id: Its name; None: nothing that restarts them.
        attempt: How often it restarted them.
    """

    launch_id: str | None = None
    attempt: int = 0

    def is_going_on(self, previous: Mapping[str, Any], steps: Sequence[StepInfo]) -> bool:
        """Whether an earlier attempt of this launch has opened the run, and a step is there.

        Args:
            previous: What the last holder of the lock wrote.
            steps: What lies in output_dir.

        Returns:
            If so, ``resume`` and ``start_over`` have had their effect: to start over again at each
            restart would throw away what was trained in between.
        """
        if not self.attempt or self.launch_id is None:
            return False
        return previous.get("launch_id") == self.launch_id and any(
            info.is_complete and info.manifest and info.manifest.run_id == previous.get("run_id")
            for info in steps
        )


@dataclass(frozen=True)
class StartOptions:
    """How a run asks to begin.

    Attributes:
        resume: ``auto``, False, or an absolute path; see `decide_opening`.
        start_over: Move steps that are in the way.
        verify: Read every byte of the step to go on from.
        lock_wait_seconds: How long to wait for the lock of output_dir.
        launch: What started the ranks.
    """

    resume: Literal["auto", False] | str = "auto"
    start_over: bool = False
    verify: bool = False
    lock_wait_seconds: float = 0.0
    launch: Launch = field(default_factory=Launch)


@dataclass(frozen=True)
class Opening:
    """How a run begins.

    Attributes:
        run_id: Made at the first start, inherited by everything that resumes from it.
        branch: Which continuation of the run this is, from 0.
        source: The step to restore; None: a fresh start.
    """

    run_id: str
    branch: int
    source: Committed | None


def decide_opening(
    folder: RunFolder,
    steps: Sequence[StepInfo],
    *,
    resume: Literal["auto", False] | str,
    start_over: bool,
    last_run_id: str | None,
    now: float,
    verify: bool = False,
) -> Opening:
    """Decide how a run begins; with ``start_over`` move steps that are in its way.

    Args:
        folder: The run's output_dir.
        steps: What lies in it.
        resume: ``auto``: the newest complete step of the run, if there is one; False: none; a
            path: that step and no other.
        start_over: Move steps that this run would meet to ``.old-<time>/``.
        last_run_id: The run that used this output_dir last, if that is known.
        now: Seconds since 1970.
        verify: Read every byte of the step to go on from; with ``auto`` a damaged one is skipped.

    Returns:
        The decision.

    Raises:
        CheckpointNotFoundError: There is nothing at the given path.
        CheckpointTornError: The step at the given path isn't complete; an explicit path never
            falls back to another one. Or ``auto`` finds damaged ones only.
        CheckpointExistsError: Steps are in the way; ``.steps``. Or ``auto`` finds those of several
            runs, and nothing says which of them used the folder last; ``.runs``.
    """
    inside = True
    if resume == "auto":
        if verify:
            steps = _verify_newest(folder, steps, last_run_id)
        _refuse_several_runs(folder.path, steps, last_run_id)
        source = _newest(steps, last_run_id)
        if source is None and not start_over:
            _refuse_to_begin_anew(folder, steps)
    elif resume is False:
        source = None
    else:
        source = find_step(folder.storage, resume)
        if verify and (damage := find_damage(folder.storage, source)):
            raise _torn(source.path, damage[0])
        inside = posixpath.dirname(source.path) == folder.path
    there = [info for info in steps if info.status != "torn"]
    in_the_way = [info for info in there if not (inside and source and info.step <= source.step)]
    if in_the_way and not start_over:
        _refuse(folder.path, in_the_way, source)
    branches = [info.manifest.branch for info in there if info.manifest is not None]
    if in_the_way:
        old = folder.archive([info.step for info in in_the_way], now=now)
        logger.warning("moved %s to %s", _list_steps(in_the_way), old)
    if source is None:
        return Opening(run_id=uuid.uuid4().hex[:12], branch=0, source=None)
    is_new_branch = bool(in_the_way) or not inside
    branch = max([source.branch, *branches]) + 1 if is_new_branch else source.branch
    return Opening(run_id=source.run_id, branch=branch, source=source)


def find_step(storage: Storage, path: str) -> Committed:
    """The complete step at ``path``.

    Args:
        storage: Where it is.
        path: Absolute path of a step folder, or of a link to one.

    Returns:
        The step.

    Raises:
        CheckpointNotFoundError: There is no folder; ``.path``.
        CheckpointTornError: It isn't a complete checkpoint; ``.path``.
    """
    found = storage.stat(path)
    if found is None or not found.is_folder:
        raise CheckpointNotFoundError(f"{path}: there is no such folder", path=path)
    info = inspect(storage, path)
    if not info.is_complete:
        raise _torn(path, info.problem)
    return info.committed()


def _torn(path: str, problem: str | None) -> CheckpointTornError:
    return CheckpointTornError(
        f"{path} isn't a complete checkpoint: {problem}. Give the path of another step.", path=path
    )


def _candidates(steps: Sequence[StepInfo], last_run_id: str | None) -> list[StepInfo]:
    """What ``auto`` may go on from, the newest first: the run's own that used the folder last."""
    complete = [info for info in steps if info.is_complete]
    own = [i for i in complete if i.manifest is not None and i.manifest.run_id == last_run_id]
    return sorted(own or complete, key=lambda info: info.step, reverse=True)


def _verify_newest(
    folder: RunFolder, steps: Sequence[StepInfo], last_run_id: str | None
) -> Sequence[StepInfo]:
    """Read the newest step, and those before it until one is sound; damaged ones are torn then."""
    while candidates := _candidates(steps, last_run_id):
        newest = candidates[0].committed()
        damage = find_damage(folder.storage, newest)
        if not damage:
            break
        saved_at = newest.manifest.saved_at
        folder.mark_damaged(newest.step, saved_at=saved_at, problem=damage[0])
        steps = folder.steps()
    return steps


def _newest(steps: Sequence[StepInfo], last_run_id: str | None) -> Committed | None:
    """The newest complete step of the run that used the folder last; torn ones are named."""
    newest = next(iter(_candidates(steps, last_run_id)), None)
    for info in steps:
        if info.status == "torn" and (newest is None or info.step > newest.step):
            logger.warning(
                "step %d is skipped, it isn't complete: %s; resuming from %s",
                info.step,
                info.problem,
                f"step {newest.step}" if newest else "nothing",
            )
    return newest.committed() if newest else None


def _refuse_several_runs(path: str, steps: Sequence[StepInfo], last_run_id: str | None) -> None:
    """The newest step of whatever run it is isn't what anybody asked for."""
    runs: dict[str, list[StepInfo]] = {}
    for info in _candidates(steps, last_run_id):
        runs.setdefault(info.committed().run_id, []).insert(0, info)
    if len(runs) > 1:
        listed = "; ".join(f"run {run} wrote {_list_steps(of)}" for run, of in runs.items())
        raise CheckpointExistsError(
            f"{path} holds steps of several runs, and nothing says which of them used it last: "
            f"{listed}. Say which one goes on: the path of its newest step as "
            "resume_from_checkpoint.",
            path=path,
            steps=[info.step for of in runs.values() for info in of],
            runs=list(runs),
        )


def _refuse_to_begin_anew(folder: RunFolder, steps: Sequence[StepInfo]) -> None:
    """Nobody asked for all of the training once more, only because the disk is failing."""
    damaged = [i for i in steps if i.status == "torn" and folder.was_committed(i.path)]
    if damaged:
        problems = "; ".join(str(info.problem) for info in damaged[:3])
        raise CheckpointTornError(
            f"{folder.path} holds no step to go on from: {problems}. "
            "Give the path of a step of another folder, or --start-over to begin anew; a damaged "
            "step is then moved aside by the save of its number.",
            path=folder.path,
        )


def _refuse(path: str, in_the_way: Sequence[StepInfo], source: Committed | None) -> None:
    start = f"from step {source.step}" if source else "from the beginning"
    unused = [f"step_{i.step}: {why}" for i in in_the_way if (why := _why_unused(i, source))]
    reasons = f" (It doesn't go on from {'; '.join(unused[:3])}.)" if unused else ""
    raise CheckpointExistsError(
        f"{path} already holds {_list_steps(in_the_way)}, and this run starts {start}: it would "
        f"meet them.{reasons} Use another output_dir, or --start-over to move them to a folder "
        "beside them (nothing is deleted).",
        path=path,
        steps=[info.step for info in in_the_way],
    )


def _why_unused(info: StepInfo, source: Committed | None) -> str | None:
    """What keeps any run, or the one that ``source`` is of, from resuming from a step."""
    if info.manifest is None:
        return info.problem
    if source is not None and info.manifest.run_id != source.run_id:
        return f"run {info.manifest.run_id} wrote it, and run {source.run_id} goes on"
    return None


def _list_steps(steps: Sequence[StepInfo]) -> str:
    shown = ", ".join(f"step_{info.step}" for info in list(steps)[:5])
    return shown + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def open_run(
    folder: RunFolder, *, start: StartOptions, lock: OutputDirLock | None, now: float
) -> tuple[dict[str, Any], list[StepInfo]]:
    """What rank 0 does at a start: lock, decide, clean up.

    Args:
        folder: The run's output_dir; made if it is absent.
        start: What is asked for.
        lock: Taken, and kept; None: no lock.
        now: Seconds since 1970.

    Returns:
        The opening as JSON (`read_opening` turns it back), and the steps that are there now.

    Raises:
        CheckpointError: Somebody's own file has the name of a step or of the lock, or the path is
            too long; ``.path``.
    """
    storage = folder.storage
    with writing_to(folder.path):
        if storage.stat(folder.path) is None:
            storage.make_folder(folder.path)
        folder.refuse_files()
        folder.refuse_long_paths()
        if lock is not None:
            lock.acquire(wait_seconds=start.lock_wait_seconds)
    previous: Mapping[str, Any] = lock.previous if lock is not None else {}
    steps = folder.steps()
    if not steps:  # a new folder, whoever made it: its own name has to be durable too
        with contextlib.suppress(PermissionError):
            storage.sync_folder(posixpath.dirname(folder.path))
    if start.launch.is_going_on(previous, steps):
        start = replace(start, resume="auto", start_over=False)
    opening = decide_opening(
        folder,
        steps,
        resume=start.resume,
        start_over=start.start_over,
        last_run_id=previous.get("run_id"),
        now=now,
        verify=start.verify,
    )
    with writing_to(folder.path):
        if lock is not None:
            lock.write(
                run_id=opening.run_id,
                branch=opening.branch,
                now=now,
                launch_id=start.launch.launch_id,
            )
        steps = folder.steps()
        folder.recover(steps, run_id=opening.run_id)
    path = opening.source.path if opening.source else None
    content = {"run_id": opening.run_id, "branch": opening.branch, "source": path}
    return content | {"damage": folder.marks()}, steps


def read_opening(content: Mapping[str, Any], folder: RunFolder) -> Opening:
    """What rank 0 decided, on any rank: each reads the source's manifest itself."""
    path = content["source"]
    source = find_step(folder.storage, path) if path is not None else None
    for step, saved_at, problem in content["damage"]:
        folder.mark_damaged(step, saved_at=saved_at, problem=problem)
    return Opening(run_id=content["run_id"], branch=content["branch"], source=source)


def locate(path: str | os.PathLike[str], storage: Storage | None = None) -> tuple[Storage, str]:
    """The storage of a path or URL, and the path in it.

    Args:
        path: A path, or a URL that fsspec knows.
        storage: Where ``path`` is; None: as it says. Then links of a disk are resolved, so
            ``out/latest`` is the step it leads to.

    Returns:
        The storage, and the absolute path.
    """
    if storage is not None:
        return storage, os.fspath(path)
    storage, found = open_storage(os.fspath(path))
    return storage, os.path.realpath(found) if isinstance(storage, LocalStorage) else found
