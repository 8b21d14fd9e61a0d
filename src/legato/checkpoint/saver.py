"""The main-thread half of saving: plan once, stage, hand over, hear how it ended, try again.

What is decided here is decided at the same step on every rank: a save counts as ended once every
rank knows that it has, so a failure is raised, and a retry begins, at the same step everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from legato.checkpoint.background import SaveJob, write_checkpoint
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import OutputDirLock
from legato.checkpoint.parts import Parts
from legato.checkpoint.plan import MAX_FILE_BYTES, SavePlan
from legato.checkpoint.preparation import Preparation
from legato.checkpoint.records import (
    Committed,
    PendingSave,
    SaveRecord,
    SaveTimes,
    as_write_error,
)
from legato.checkpoint.retention import Keeper
from legato.checkpoint.staging import Snapshot
from legato.checkpoint.threads import BackgroundThreads
from legato.errors import CheckpointError, OutputDirLockedError, RankDisagreementError
from legato.parallel.peers import Peers

logger = logging.getLogger(__name__)

# A full disk is asked again this often, not at every step.
RETRY_SECONDS = 30.0
# A rank that hangs (not one that dies) is noticed by this alone; half of it is worth a warning.
BACKGROUND_TIMEOUT_SECONDS = 1800.0
SLOW_SAVE_SECONDS = BACKGROUND_TIMEOUT_SECONDS / 2


@dataclass(frozen=True)
class SaveOptions:
    """How saving works; see `Checkpointer`."""

    asynchronous: bool = True
    staging: Literal["overlap", "blocking"] = "overlap"
    on_save_error: Literal["continue", "raise"] = "continue"
    save_only_model: bool = False
    max_file_bytes: int = MAX_FILE_BYTES
    check_snapshots: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("staging", ("overlap", "blocking")),
            ("on_save_error", ("continue", "raise")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")


class Saver:
    """Saves one run's steps.

    Args:
        folder: Where to.
        keeper: Told of every commit; on rank 0 only.
        control: All ranks, for this thread.
        background: All ranks, for the background threads.
        local_ranks: Processes on this host.
        num_owners: How many ranks own files; None: all write into all. See `write_checkpoint`.
        run_id: This run.
        branch: This branch of it.
        source: The step resumed from; asked for again, it is returned as it is.
        options: How saving works.
        clock: Gives seconds since 1970.
        lock: On output_dir; held by rank 0 where there is one.
    """

    def __init__(
        self,
        *,
        folder: RunFolder,
        keeper: Keeper | None,
        control: Peers,
        background: Peers,
        local_ranks: int,
        num_owners: int | None,
        run_id: str,
        branch: int,
        source: Committed | None,
        options: SaveOptions,
        clock: Callable[[], float],
        lock: OutputDirLock | None = None,
    ) -> None:
        self._folder = folder
        self._keeper = keeper
        self._control = control
        self._background = background
        self._num_owners = num_owners
        self._run_id = run_id
        self._branch = branch
        self._options = options
        self._clock = clock
        self._lock = lock
        self._preparation = Preparation(
            control=control,
            local_ranks=local_ranks,
            with_state=not options.save_only_model,
            max_file_bytes=options.max_file_bytes,
            blocking=options.staging == "blocking",
            check=options.check_snapshots,
        )
        self._threads = BackgroundThreads()
        self._in_flight: SaveJob | None = None
        self._held: SaveJob | None = None
        self._failed_at = 0.0
        self._warned_of: int | None = None
        self._to_raise: CheckpointError | None = None
        # Why the last save failed for good; a newer one makes up for it, the end of the run can't.
        self._lost: CheckpointError | None = None
        self._records: list[SaveRecord] = []
        # This branch's newest step, and no more: a manifest may be megabytes.
        self._newest: Committed | None = None
        if source is not None and source.run_id == run_id and source.branch == branch:
            self._newest = source

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved, or whose failed snapshot is kept; None: none is."""
        job = self._in_flight or self._held
        return job.step if job else None

    def prepare(self, read_parts: Callable[[], Parts]) -> None:
        """Collective: plan and allocate unless that is done for just these tensors."""
        self._preparation.together(lambda: self._preparation.plan(read_parts()))

    def save(
        self,
        read_parts: Callable[[], Parts],
        *,
        small_files: Callable[[Parts, SavePlan], Mapping[str, bytes]],
        step: int,
        reason: str,
        metrics: Mapping[str, float],
    ) -> PendingSave:
        """Collective: begin a save; see `Checkpointer.save`."""
        pending = PendingSave(step=step, reason=reason, times=SaveTimes())
        self._finish_previous(step)
        pending.times.waited_seconds = pending.times.since_start()
        if self._newest is not None and self._newest.step == step and self._is_there(step):
            return self._return_committed(pending, self._newest, metrics)

        def begin() -> tuple[Parts, SavePlan, Mapping[str, bytes], Snapshot]:
            parts = read_parts()
            plan = self._preparation.plan(parts)
            return parts, plan, small_files(parts, plan), self._preparation.stage(parts)

        parts, plan, files, snapshot = self._preparation.together(begin)
        if snapshot.is_copy and not self._preparation.makes_copies:  # another rank has no room
            snapshot = self._preparation.stage(parts)
        pending.times.staged_bytes = snapshot.staged_bytes
        job = SaveJob(
            pending=pending,
            plan=plan,
            snapshot=snapshot,
            small_files=files,
            kind=parts.model.kind,
            metrics=metrics,
            run_id=self._run_id,
            branch=self._branch,
            saved_at=self._clock(),
        )
        self._submit(job)
        must_wait = not self._options.asynchronous or not snapshot.is_copy
        if must_wait:
            pending.wait()
        pending.times.blocked_seconds = pending.times.since_start()
        if must_wait:  # its record takes the time over
            self._settle()
        self._raise_if_asked()
        return pending

    def _is_there(self, step: int) -> bool:
        """Collective: whether a committed step still is where rank 0 put it."""
        is_there = self._control.all_true(self._keeper is None or self._folder.exists(step))
        if not is_there:
            logger.warning("step_%d has gone from %s: it is saved again", step, self._folder.path)
        return is_there

    def _return_committed(
        self, pending: PendingSave, committed: Committed, metrics: Mapping[str, float]
    ) -> PendingSave:
        """The step is on disk already; only metrics that it lacks are added to it."""
        if not metrics.items() <= committed.manifest.metrics.items() and self._keeper is not None:
            keeper, step = self._keeper, pending.step

            def amend() -> Committed:
                try:
                    self._newest = keeper.add_metrics(committed, metrics)
                except Exception as error:
                    logger.warning("step_%d: its metrics could not be added: %s", step, error)
                    return committed
                return self._newest

            self._threads.submit(amend, pending=pending)
        else:
            pending.settle(committed)
        pending.times.blocked_seconds = pending.times.since_start()
        return pending

    def wait_staged(self) -> None:
        """Order what is computed from now on behind the snapshot; see `Stager.wait_staged`."""
        self._preparation.wait_staged()

    def poll(self) -> list[SaveRecord]:
        """Collective while a save is under way or is to be retried; see `Checkpointer.poll`."""
        if self._in_flight is not None:
            if self._control.all_true(self._in_flight.pending.done):
                self._settle()
            else:
                self._warn_if_slow(self._in_flight)
        elif self._held is not None:
            rested = time.monotonic() - self._failed_at >= RETRY_SECONDS
            if self._control.all_true(rested):
                self._submit(self._held)
        self._raise_if_asked()
        records, self._records = self._records, []
        return records

    def drain(self, *, patience_seconds: float) -> None:
        """Collective: finish what is under way; retry a failed save until patience is over.

        Args:
            patience_seconds: How long; 0: one more try.

        Raises:
            CheckpointWriteError: The last save isn't on disk.
        """
        self._settle()
        deadline = time.monotonic() + patience_seconds
        while (job := self._held) is not None:
            self._submit(job)
            self._settle()
            if self._held is None:
                break
            left = deadline - time.monotonic()
            if not self._control.all_true(left > 0):
                self._held = None
                assert job.pending.error is not None
                raise as_write_error(job.pending.error, step=job.step)
            logger.error(
                "step %d isn't saved yet (%s). Its snapshot is in memory: make room in %s. Trying "
                "again for %.0f s more.", job.step, job.pending.error, self._folder.path, left,
            )  # fmt: skip
            time.sleep(max(0.0, min(RETRY_SECONDS, left)))
        self._raise_if_asked()
        error, self._lost = self._lost, None
        if error is not None:
            raise error

    def abandon(self) -> CheckpointError | None:
        """Finish what is under way without asking the others; alone, retry a failed save once.

        Returns:
            Why the last save isn't on disk; None: it is.
        """
        self._settle(together=False)
        if self._held is not None and self._control.size == 1:
            self._submit(self._held)
            self._settle(together=False)
        error = self._to_raise or self._lost
        if (job := self._held) is not None:
            logger.error("step %d could not be saved, and is lost", job.step)
            self._held = None
            assert job.pending.error is not None
            error = as_write_error(job.pending.error, step=job.step)
        return error

    def close(self) -> None:
        """End the background threads, when what they do is done, and free the buffers."""
        self._threads.stop()
        self._preparation.close()
        self._held = None

    def _warn_if_slow(self, job: SaveJob) -> None:
        """Once, while there is still time: a rank that hangs is noticed by a timeout alone."""
        seconds = job.pending.times.since_start()
        if seconds > SLOW_SAVE_SECONDS and self._warned_of != job.step:
            self._warned_of = job.step
            logger.warning(
                "step %d has been under way for %.0f s; it fails when ranks wait %.0f s for each "
                "other. Is the disk slow, or does a rank hang?",
                job.step, seconds, BACKGROUND_TIMEOUT_SECONDS,
            )  # fmt: skip

    def _submit(self, job: SaveJob) -> None:
        self._held = None
        self._in_flight = job
        job.pending.reopen()
        self._threads.submit(lambda: self._write(job), pending=job.pending)

    def _write(self, job: SaveJob) -> Committed:
        """On the background thread: the whole rest of a save."""
        committed = write_checkpoint(
            job,
            folder=self._folder,
            peers=self._background,
            work_off=lambda steps: self._threads.work_off(steps, pending=job.pending),
            num_owners=self._num_owners,
            lock=self._lock,
        )
        if self._keeper is not None:
            self._keeper.committed(committed)
        return committed

    def _finish_previous(self, step: int) -> None:
        """One save in flight, one snapshot: wait for the one before; if it failed, retry it."""
        self._settle()
        if self._held is not None:
            self._submit(self._held)
            self._settle()
            if self._held is not None:
                if self._held.step != step:
                    told = "step %d is given up: step %d takes its place"
                    logger.warning(told, self._held.step, step)
                self._held = None
        self._raise_if_asked()

    def _settle(self, *, together: bool = True) -> None:
        """Wait for the save in flight, on all ranks if ``together``; take note of how it ended."""
        if self._in_flight is None:
            return
        job, self._in_flight = self._in_flight, None
        job.pending.wait()
        if together:
            # Rank 0 may still be pruning. Whoever is done waits here: a collective of training
            # would wait with it, and its watchdog doesn't wait for ever.
            self._control.all_true(True)
        error = job.pending.error
        will_retry = error is not None and self._may_retry(job, error)
        self._records.append(job.pending.record(will_retry=will_retry))
        self._lost = None
        if error is None:
            self._newest = job.pending.committed
            return
        logger.warning(
            "step %d could not be saved: %s. Earlier checkpoints are untouched%s.",
            job.step, str(error).rstrip("."), "; it will be tried again" if will_retry else "",
        )  # fmt: skip
        self._failed_at = time.monotonic()
        self._held = job if will_retry else None
        # Two runs in one folder: whatever is to be done about other failures, this one has to end.
        if self._options.on_save_error == "raise" or isinstance(error, OutputDirLockedError):
            self._to_raise = as_write_error(error, step=job.step)
        elif not will_retry:
            self._lost = as_write_error(error, step=job.step)

    def _may_retry(self, job: SaveJob, error: BaseException) -> bool:
        """Whether the snapshot is still there, and what failed may go better another time."""
        return (
            self._options.on_save_error == "continue"
            and job.snapshot.is_copy
            and isinstance(error, CheckpointError | OSError)
            and not isinstance(error, RankDisagreementError | OutputDirLockedError)
        )

    def _raise_if_asked(self) -> None:
        error, self._to_raise = self._to_raise, None
        if error is not None:
            raise error
