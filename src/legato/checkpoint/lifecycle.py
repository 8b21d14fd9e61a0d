"""The life of a step folder: reserve, write, commit, point, prune; and what a start finds.

::

    output_dir/
      step_500/                        committed: it got this name by one rename
      .step_1000.tmp-<run id>-<id>/    being written, or left by a crash
      .torn-step_900-<time>/           a torn folder that stood in the way of a commit
      .trash-step_100-<time>/          pruned, being deleted
      .pruned/step_100/                pruned with ``prune: move``, or what no save wrote into it
      .old-<time>/step_1500/           moved out of the way of a new branch
      latest -> step_500               a convenience; the folders are the truth

On storage whose rename isn't one step (object stores) a save writes into ``step_N/`` itself, and
its manifest, written last, is the commit.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import posixpath
import re
import uuid
from collections.abc import Sequence
from typing import Literal

from legato.checkpoint.deletion import delete_step, move_strangers
from legato.checkpoint.inspection import STEP_NAME, inspect
from legato.checkpoint.manifest import (
    AMENDED_NAME,
    BEGUN_NAME,
    MANIFEST_NAME,
    PIN_NAME,
    STATE_FOLDER,
    Manifest,
    parse_manifest,
)
from legato.checkpoint.records import Committed, StepInfo
from legato.errors import CheckpointError, CheckpointExistsError, FolderFormatError
from legato.storage import Storage

logger = logging.getLogger(__name__)

POINTERS = ("latest", "best")

_LEFTOVER = re.compile(
    r"\.step_[0-9]+\.tmp-.+|\.trash-step_[0-9]+-.+|(latest|best)\.tmp-.+", re.DOTALL
)
_WAS_STEP = re.compile(r"\.(?:trash|torn)-step_([0-9]+)-.+", re.DOTALL)
_TORN = re.compile(r"\.torn-step_[0-9]+-.+", re.DOTALL)


class RunFolder:
    """The step folders of one output_dir.

    Args:
        storage: Where it is.
        path: Absolute path of output_dir.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        # (step, when it was saved) -> what is wrong with its bytes, which somebody has read.
        self._damage: dict[tuple[int, float], str] = {}
        # Where locks don't reach, another process of the same run may write the same step.
        self._writer = uuid.uuid4().hex[:8]

    # ---- what is there ---------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Every ``step_N`` folder, by step number."""
        names = [name for name in self.storage.list_folder(self.path) if STEP_NAME.fullmatch(name)]
        return sorted((self._inspect(self._at(name)) for name in names), key=lambda i: i.step)

    def mark_damaged(self, step: int, *, saved_at: float, problem: str) -> None:
        """Take a committed step for torn from here on: its bytes were read, and aren't its own."""
        self._damage[step, saved_at] = problem

    def marks(self) -> list[tuple[int, float, str]]:
        """What :meth:`mark_damaged` was told: step, when it was saved, problem."""
        return [(*key, problem) for key, problem in self._damage.items()]

    def step_path(self, step: int) -> str:
        """Where ``step`` is once it is committed."""
        return self._at(f"step_{step}")

    def exists(self, step: int) -> bool:
        """Whether there is a folder of ``step``, complete or not."""
        return self.storage.stat(self.step_path(step)) is not None

    def is_taken(self, step: int) -> bool:
        """Whether anything has the name of ``step``, even a link that leads nowhere."""
        return self.exists(step) or f"step_{step}" in self.storage.list_folder(self.path)

    def is_pinned(self, step: int) -> bool:
        """Whether someone pinned ``step``."""
        return self.storage.stat(posixpath.join(self.step_path(step), PIN_NAME)) is not None

    def was_committed(self, path: str) -> bool:
        """Whether a save made the folder at ``path`` visible, however damaged it is by now.

        One without any manifest is somebody's own, whatever its name, or was never complete.
        """
        return self.storage.stat(posixpath.join(path, MANIFEST_NAME)) is not None

    def writer(self, step: int) -> str | None:
        """The id of the run that saved what is there as ``step``; None: nothing says it."""
        path = posixpath.join(self.step_path(step), MANIFEST_NAME)
        try:
            return parse_manifest(self.storage.read_bytes(path), path=path).run_id
        except (OSError, FolderFormatError):
            return None

    def refuse_files(self) -> None:
        """See that nothing but folders has the name of a step.

        Raises:
            CheckpointError: Somebody's own file has; ``.path``.
        """
        for name in self.storage.list_folder(self.path):
            if not STEP_NAME.fullmatch(name):
                continue
            found = self.storage.stat(self._at(name))
            if found is not None and not found.is_folder:
                raise CheckpointError(
                    f"{self._at(name)} is a file; a run saves its step in a folder of that name. "
                    "Move it away, or choose another output_dir.",
                    path=self._at(name),
                )

    def refuse_long_paths(self) -> None:
        """See that a file system takes the longest path of a save: the last one is too late.

        Raises:
            CheckpointError: It doesn't; ``.path``.
        """
        temporary = f".step_{10**9}.tmp-{'0' * 12}-{self._writer}"
        path = self._at(f"{temporary}/{STATE_FOLDER}/optimizer-00001-of-00001.safetensors")
        if not self.storage.atomic_rename:  # an object store has no such bound
            return
        try:
            self.storage.stat(path)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise CheckpointError(
                f"{self.path} is too long, and its checkpoints' files need {len(path)} characters. "
                "Choose an output_dir with a shorter path.",
                path=self.path,
            ) from error

    # ---- a save ----------------------------------------------------------------------------

    def reserve(self, step: int, *, run_id: str, branch: int, saved_at: float) -> str:
        """Make the empty folder that ``step`` is written into.

        Args:
            step: Optimizer steps completed.
            run_id: Who writes it.
            branch: Who writes it.
            saved_at: When the save began; tells another try of it from another save.

        Returns:
            Absolute path of the folder.

        Raises:
            CheckpointExistsError: A complete step of that number is there; ``.path``, ``.steps``.
        """
        there = self._found(step)
        if there is not None and there.status != "torn":
            writer = there.manifest
            if writer is None or (writer.run_id, writer.branch, writer.saved_at) != (
                run_id, branch, saved_at,
            ):  # fmt: skip
                raise _exists(there)
        path = self._at(f".step_{step}.tmp-{run_id}-{self._writer}")
        if not self.storage.atomic_rename:
            path = self.step_path(step)
            if there is not None and not self._is_begun(path):
                self._move_aside(there, now=saved_at)
        self.storage.remove_tree(path)
        self.storage.make_folder(path)
        if there is not None and there.pinned:  # it goes aside, or is the one that is written
            self.storage.write_bytes(posixpath.join(path, PIN_NAME), b"")
        if not self.storage.atomic_rename:
            self.storage.write_bytes(posixpath.join(path, BEGUN_NAME), run_id.encode())
        return path

    def discard(self, temporary: str) -> None:
        """Remove what a failed save has written; a failure here is a warning."""
        if not self.storage.atomic_rename and inspect(self.storage, temporary).is_complete:
            return
        try:
            self.storage.remove_tree(temporary)
        except OSError as error:
            logger.warning("%s could not be removed after a failed save: %s", temporary, error)

    def commit(self, temporary: str, manifest: Manifest, *, now: float) -> Committed:
        """Make a written folder visible: manifest, sync, one rename, sync.

        Args:
            temporary: What `reserve` returned; every other file in it is synced.
            manifest: What it holds.
            now: Seconds since 1970, for the name of a torn folder in the way.

        Returns:
            The committed step.

        Raises:
            CheckpointExistsError: A complete folder of that step is there.
        """
        path = posixpath.join(temporary, MANIFEST_NAME)
        self.storage.write_bytes(path, manifest.encode())
        self.storage.sync_file(path)
        if manifest.has_state:
            self.storage.sync_folder(posixpath.join(temporary, STATE_FOLDER))
        self.storage.sync_folder(temporary)
        target = self.step_path(manifest.step)
        if self.storage.atomic_rename:
            self._rename_into_place(temporary, manifest, now=now)
            self.storage.sync_folder(self.path)
        return Committed(path=target, manifest=manifest)

    def point(self, name: str, step: int) -> None:
        """Let the link ``latest`` or ``best`` lead to ``step``; a failure is a warning."""
        try:
            if not self.storage.link(f"step_{step}", self._at(name)):
                logger.info("%s: no links on this file system, so no '%s'", self.path, name)
        except OSError as error:
            logger.warning("the link '%s' in %s could not be set: %s", name, self.path, error)

    def amend(self, step: int, manifest: Manifest) -> None:
        """Replace the manifest of a committed step, atomically."""
        path = posixpath.join(self.step_path(step), MANIFEST_NAME)
        if not self.storage.atomic_rename:
            self.storage.write_bytes(path, manifest.encode())  # a store replaces whole objects
            return
        beside = posixpath.join(self.step_path(step), AMENDED_NAME)
        self.storage.write_bytes(beside, manifest.encode())
        self.storage.sync_file(beside)
        self.storage.rename(beside, path)
        self.storage.sync_folder(self.step_path(step))

    # ---- pruning ---------------------------------------------------------------------------

    def prune(self, step: int, *, how: Literal["delete", "move"], now: float) -> None:
        """Take ``step`` away: deleted, or moved to ``.pruned/``; one gone already is fine.

        It is renamed first, so that no moment shows half of it under its name. Files that no save
        wrote into it go to ``.pruned/``.
        """
        source = self.step_path(step)
        if self.storage.stat(source) is None:
            return
        if how == "move":
            self.storage.make_folder(self._at(".pruned"))
            self._move(source, self._free_name(f".pruned/step_{step}"))
            return
        if self.storage.atomic_rename:
            trash = self._free_name(f".trash-step_{step}-{int(now)}")
            self._move(source, trash)
            self._delete(trash, step)
            return
        move_strangers(self.storage, source, to=self._free_name(f".pruned/step_{step}"))
        # Without its manifest it isn't complete any more.
        self.storage.remove_file(posixpath.join(source, MANIFEST_NAME))
        self.storage.remove_tree(source)

    def drop_state(self, committed: Committed) -> Committed:
        """Take ``state/`` away from a step: it stays a model that loads, and resumes no more."""
        files = {
            name: entry
            for name, entry in committed.manifest.files.items()
            if not name.startswith(f"{STATE_FOLDER}/")
        }
        manifest = dataclasses.replace(committed.manifest, files=files)
        self.amend(committed.step, manifest)
        self.storage.remove_tree(posixpath.join(committed.path, STATE_FOLDER))
        return Committed(path=committed.path, manifest=manifest)

    # ---- a start ---------------------------------------------------------------------------

    def recover(self, steps: Sequence[StepInfo], *, run_id: str) -> None:
        """Remove what a crashed process left; the lock must be held.

        Args:
            steps: What `steps` returned.
            run_id: Whose half-written steps go where steps are written in place: such storage has
                no lock, so another run's may be under way.
        """
        for name in self.storage.list_folder(self.path):
            path = self._at(name)
            if _LEFTOVER.fullmatch(name):
                logger.info("removing %s, left by a process that ended before it was done", path)
                self._remove(path)
            elif _TORN.fullmatch(name) and self.storage.stat(posixpath.join(path, PIN_NAME)):
                logger.warning("keeping the torn checkpoint %s: it is pinned", path)
            elif _TORN.fullmatch(name) and self.was_committed(path):
                logger.warning("removing the torn checkpoint %s", path)
                self._remove(path)
        for info in steps:
            if info.status == "torn" and self._was_begun_by(run_id, info.path):
                logger.info("removing %s, which wasn't written to its end", info.path)
                self._remove(info.path)
            half_done = [AMENDED_NAME]
            if info.manifest and not info.manifest.has_state:
                half_done.append(STATE_FOLDER)
            for name in half_done if info.is_complete else []:
                path = posixpath.join(info.path, name)
                if self.storage.stat(path) is not None:
                    self._remove(path)

    def archive(self, steps: Sequence[int], *, now: float) -> str:
        """Move ``steps`` into a folder ``.old-<time>/``, the newest first; returns its path."""
        folder = self._free_name(f".old-{int(now)}")
        self.storage.make_folder(folder)
        # The newest first: cut short, what is left still is the beginning of one run.
        for step in sorted(steps, reverse=True):
            self.storage.rename(self.step_path(step), posixpath.join(folder, f"step_{step}"))
        self.storage.sync_folder(folder)
        self.storage.sync_folder(self.path)
        return folder

    # ---- inside ----------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _free_name(self, name: str) -> str:
        """``name``, with a number where it is taken; absolute."""
        path, count = self._at(name), 1
        while self.storage.stat(path) is not None:
            path, count = f"{self._at(name)}.{count}", count + 1
        return path

    def _move(self, source: str, target: str) -> None:
        self.storage.rename(source, target)
        folder = posixpath.dirname(target)
        if folder != self.path:  # there before it is gone from here
            self.storage.sync_folder(folder)
        # Durable before anything in it is deleted: a power cut mustn't bring half of it back.
        self.storage.sync_folder(self.path)

    def _found(self, step: int) -> StepInfo | None:
        return self._inspect(self.step_path(step)) if self.is_taken(step) else None

    def _inspect(self, path: str) -> StepInfo:
        info = inspect(self.storage, path)
        if info.manifest is None:
            return info
        problem = self._damage.get((info.step, info.manifest.saved_at))
        if problem is None:
            return info
        return StepInfo(info.step, path, "torn", problem=problem, pinned=info.pinned)

    def _is_begun(self, path: str) -> bool:
        names = self.storage.list_folder(path)
        return BEGUN_NAME in names or MANIFEST_NAME in names

    def _was_begun_by(self, run_id: str, path: str) -> bool:
        if self.storage.atomic_rename:  # then no step is written under its own name
            return False
        names = self.storage.list_folder(path)
        return (
            BEGUN_NAME in names
            and MANIFEST_NAME not in names
            and self.storage.read_bytes(posixpath.join(path, BEGUN_NAME)) == run_id.encode()
        )

    def _move_aside(self, there: StepInfo, *, now: float) -> None:
        aside = self._free_name(f".torn-step_{there.step}-{int(now)}")
        logger.warning("moving %s aside to %s: %s", there.path, aside, there.problem)
        self.storage.rename(there.path, aside)

    def _rename_into_place(self, temporary: str, manifest: Manifest, *, now: float) -> None:
        there = self._found(manifest.step)
        if there is not None and there.manifest == manifest:
            # An earlier attempt came as far as the rename; only its last sync failed.
            self.storage.remove_tree(temporary)
            return
        if there is not None and there.status != "torn":
            raise _exists(there)
        if there is not None:
            self._move_aside(there, now=now)
        self.storage.rename(temporary, self.step_path(manifest.step))

    def _delete(self, path: str, step: int) -> None:
        delete_step(self.storage, path, strangers_to=self._free_name(f".pruned/step_{step}"))

    def _remove(self, path: str) -> None:
        try:
            found = self.storage.stat(path)
            if was_step := _WAS_STEP.fullmatch(posixpath.basename(path)):
                self._delete(path, int(was_step[1]))
            elif found is not None and found.is_folder and not _is_pointer_leftover(path):
                self.storage.remove_tree(path)
            else:
                self.storage.remove_file(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error)


def _exists(there: StepInfo) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{there.path} is there already and isn't this save's; nothing is overwritten. "
        "Move it away.",
        path=there.path,
        steps=[there.step],
    )


def _is_pointer_leftover(path: str) -> bool:
    return posixpath.basename(path).startswith(tuple(f"{name}.tmp-" for name in POINTERS))
