"""What an open `Checkpointer` holds until it is closed: groups, lock, thread, memory."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from legato.checkpoint.fetch import check_first_host, fetch_step
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import OutputDirLock
from legato.checkpoint.opening import Opening, StartOptions, open_run, read_opening
from legato.checkpoint.records import StepInfo
from legato.checkpoint.retention import Keeper, KeepRules
from legato.checkpoint.saver import BACKGROUND_TIMEOUT_SECONDS, SaveOptions, Saver
from legato.errors import CheckpointError
from legato.parallel.peers import Peers
from legato.storage import probe_positioned_writes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Session:
    """An open run.

    Attributes:
        opening: Which run and branch this is, and what it goes on from.
        control: All ranks, for the main thread.
        background: All ranks, for the background threads.
        lock: Held by rank 0; None: this storage has none.
        saver: Saves.
        folder: The run's output_dir.
    """

    opening: Opening
    control: Peers
    background: Peers
    lock: OutputDirLock | None
    saver: Saver
    folder: RunFolder

    def close(self) -> None:
        """Give everything back; what is being written is finished first."""
        try:
            self.saver.close()
        finally:
            _release(self.control, self.background, self.lock, self.folder)


def open_session(
    folder: RunFolder,
    *,
    start: StartOptions,
    use_lock: bool,
    process_group: dist.ProcessGroup | None,
    shared_storage: bool,
    rules: KeepRules,
    options: SaveOptions,
    clock: Callable[[], float],
) -> Session:
    """Collective: open a run; rank 0 locks, decides and cleans up, everyone hears it.

    Args:
        folder: The run's output_dir.
        start: How it asks to begin.
        use_lock: Whether rank 0 locks the folder.
        process_group: The ranks; None: a single process.
        shared_storage: Every rank sees rank 0's output_dir; else rank 0 has all of each step, and
            the others get the one to resume from.
        rules: What to keep.
        options: How saving works.
        clock: Gives seconds since 1970.

    Returns:
        The session.
    """
    control = Peers.beside(process_group)
    background = Peers.beside(process_group, timeout_seconds=BACKGROUND_TIMEOUT_SECONDS)
    lock = OutputDirLock(folder.path) if use_lock and control.is_main else None
    if control.is_main and not folder.storage.atomic_rename:
        logger.warning(
            "%s: object stores have no locks: a second run on this output_dir wouldn't be noticed. "
            "Give each run its own", folder.path,
        )  # fmt: skip
    host = socket.gethostname()
    try:
        content, steps = _decide_on_main(folder, start, lock=lock, control=control, now=clock)
        if not shared_storage:
            content["source"] = _bring_source(content["source"], folder, start, control=control)
        opening = read_opening(content, folder)
    except BaseException:
        _release(control, background, lock, folder)
        raise
    keeper = Keeper(
        folder,
        rules=rules,
        steps=steps,
        run_id=opening.run_id,
        branch=opening.branch,
        resumed_from=opening.source.step if opening.source else None,
        clock=clock,
    )
    saver = Saver(
        folder=folder,
        keeper=keeper if control.is_main else None,
        control=control,
        background=background,
        local_ranks=control.gather(host).count(host),
        num_owners=_count_owners(folder, control, shared_storage=shared_storage),
        run_id=opening.run_id,
        branch=opening.branch,
        source=opening.source,
        options=options,
        clock=clock,
        lock=lock,
    )
    return Session(opening, control, background, lock, saver, folder)


def _decide_on_main(
    folder: RunFolder,
    start: StartOptions,
    *,
    lock: OutputDirLock | None,
    control: Peers,
    now: Callable[[], float],
) -> tuple[dict[str, Any], list[StepInfo]]:
    """Collective: the opening as JSON, on every rank; the steps that are there, on rank 0."""
    steps: list[StepInfo] = []

    def decide() -> dict[str, Any]:
        content, found = open_run(folder, start=start, lock=lock, now=now())
        steps.extend(found)
        return content

    return control.on_main(decide, fallback=CheckpointError), steps


def _bring_source(
    path: str | None, folder: RunFolder, start: StartOptions, *, control: Peers
) -> str | None:
    """Collective: the path of the step to resume from on this rank's own disk; None: none."""
    host = socket.gethostname()
    if start.resume == "auto":
        check_first_host(folder=folder, host=host, peers=control)
    return fetch_step(path, folder=folder, host=host, peers=control, verify=start.verify)


def _count_owners(folder: RunFolder, control: Peers, *, shared_storage: bool) -> int | None:
    """Collective: how many ranks own files; None: all may write into all."""
    if not shared_storage and control.size > 1:
        return 1
    return None if _may_write_in_place(folder, control) else control.size


def _may_write_in_place(folder: RunFolder, control: Peers) -> bool:
    """Collective: whether ranks may write into one file: tried, since some mounts lose it."""
    if control.size == 1:
        return True
    found = probe_positioned_writes(
        folder.storage,
        folder.path,
        rank=control.rank,
        world_size=control.size,
        barrier=lambda: control.all_true(True),
    )
    agreed = control.all_true(found)
    if not agreed and folder.storage.positioned_shared_writes and control.is_main:
        logger.warning(
            "%s loses what several processes write into one file: each file is written by one "
            "rank, which the others send their parts to", folder.path,
        )  # fmt: skip
    return agreed


def _release(
    control: Peers, background: Peers, lock: OutputDirLock | None, folder: RunFolder
) -> None:
    control.close()
    background.close()
    if lock is not None:
        with contextlib.suppress(OSError):
            if lock.is_new and not folder.steps():  # of a run that never began nothing is left
                lock.remove()
        lock.release()
