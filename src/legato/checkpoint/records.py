"""What saving tells its caller: a committed step, a step on disk, a save's figures, a handle."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from legato.checkpoint.manifest import Manifest
from legato.errors import CheckpointError, CheckpointWriteError


@dataclass(frozen=True)
class Committed:
    """A complete, durable step folder; only such a thing has a path.

    Attributes:
        path: Absolute path of the folder.
        manifest: What it holds.
    """

    path: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.manifest.step

    @property
    def run_id(self) -> str:
        """The run that wrote it."""
        return self.manifest.run_id

    @property
    def branch(self) -> int:
        """The branch of the run that wrote it."""
        return self.manifest.branch


@dataclass(frozen=True)
class StepInfo:
    """A ``step_N`` folder as it lies on disk.

    Attributes:
        step: N.
        path: Absolute path of the folder.
        status: ``complete``; ``torn``: no valid manifest, or files absent or of a wrong size;
            ``unknown``: complete by the rules of a newer format.
        problem: What is wrong with a torn or unknown one.
        manifest: What a complete one holds.
        pinned: Someone pinned it: it is never pruned.
    """

    step: int
    path: str
    status: Literal["complete", "torn", "unknown"]
    problem: str | None = None
    manifest: Manifest | None = None
    pinned: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it can be restored."""
        return self.status == "complete"

    def committed(self) -> Committed:
        """The same as a committed step; only for complete ones."""
        assert self.manifest is not None
        return Committed(path=self.path, manifest=self.manifest)


@dataclass(frozen=True)
class SaveRecord:
    """How one attempt at a save went. All times are seconds from the call of ``save()`` on.

    Attributes:
        step: Optimizer steps completed.
        reason: Why it was saved: ``interval``, ``final``, ...
        path: The folder; None when the attempt failed.
        error: Why it failed; None when it didn't.
        will_retry: It failed, and its snapshot is kept to be tried again.
        waited_seconds: ``save()`` waited for the save before.
        blocked_seconds: ``save()`` held up training, ``waited_seconds`` included.
        staged_seconds: Until the snapshot was complete.
        written_seconds: Until every byte was durable.
        committed_seconds: Until the folder was visible under its name.
        staged_bytes: Bytes that this rank copied.
        written_bytes: Bytes that this rank wrote.
        checkpoint_bytes: Size of the checkpoint, all ranks' files together; None when the attempt
            failed.
    """

    step: int
    reason: str
    path: str | None
    error: str | None
    will_retry: bool
    waited_seconds: float
    blocked_seconds: float
    staged_seconds: float
    written_seconds: float
    committed_seconds: float
    staged_bytes: int
    written_bytes: int
    checkpoint_bytes: int | None


@dataclass
class SaveTimes:
    """Figures of one save, filled in as it goes on; see `SaveRecord`."""

    started: float = field(default_factory=time.perf_counter)
    waited_seconds: float = 0.0
    blocked_seconds: float = 0.0
    staged_seconds: float = 0.0
    written_seconds: float = 0.0
    committed_seconds: float = 0.0
    staged_bytes: int = 0
    written_bytes: int = 0

    def since_start(self) -> float:
        """Seconds from the call of ``save()`` until now."""
        return time.perf_counter() - self.started


class PendingSave:
    """A save on its way to the disk.

    Args:
        step: Optimizer steps completed.
        reason: Why it is saved.
        times: Its figures so far; None: it begins now.
    """

    def __init__(self, *, step: int, reason: str, times: SaveTimes | None = None) -> None:
        self.step = step
        self.reason = reason
        self.times = times or SaveTimes()
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._committed: Committed | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is committed or has failed; a failed one may still be retried."""
        return self._committed is not None or self._error is not None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody has nothing else to do until it is done."""
        return self._num_waiting > 0

    @property
    def committed(self) -> Committed | None:
        """The committed step; None as long as there is none."""
        return self._committed

    @property
    def error(self) -> BaseException | None:
        """Why the last attempt failed; None when none did."""
        return self._error

    @property
    def blocked_seconds(self) -> float:
        """Seconds that ``save()`` held up training."""
        return self.times.blocked_seconds

    @property
    def staged_bytes(self) -> int:
        """Bytes that this rank copied."""
        return self.times.staged_bytes

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it is committed or has failed; false when the time was up before."""
        with self._changed:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(lambda: self.done, timeout_seconds)
            finally:
                self._num_waiting -= 1

    def result(self, timeout_seconds: float | None = None) -> Committed:
        """Wait for the committed step.

        Args:
            timeout_seconds: Give up after so long; None: never.

        Returns:
            The committed step.

        Raises:
            CheckpointError: It couldn't be written (a `CheckpointWriteError`, with the cause
                chained), or ranks disagreed.
            TimeoutError: It is still being written.
        """
        if not self.wait(timeout_seconds):
            raise TimeoutError(f"step {self.step} isn't committed after {timeout_seconds} s")
        if self._committed is None:
            assert self._error is not None
            raise as_write_error(self._error, step=self.step)
        return self._committed

    def settle(self, outcome: Committed | BaseException) -> None:
        """Tell whoever waits how it ended."""
        with self._changed:
            if isinstance(outcome, Committed):
                self._committed, self._error = outcome, None
            else:
                self._error = outcome
            self._changed.notify_all()

    def reopen(self) -> None:
        """Forget a failed attempt: it is tried again."""
        with self._changed:
            self._error = None

    def record(self, *, will_retry: bool = False) -> SaveRecord:
        """How it went."""
        times = {name: value for name, value in vars(self.times).items() if name != "started"}
        return SaveRecord(
            step=self.step,
            reason=self.reason,
            path=self._committed.path if self._committed else None,
            error=str(self._error) if self._error else None,
            will_retry=will_retry and self._committed is None,
            checkpoint_bytes=self._committed.manifest.size_bytes if self._committed else None,
            **times,
        )


def as_write_error(error: BaseException, *, step: int) -> CheckpointError:
    """``error`` as one of Legato's own, chained to the cause."""
    if isinstance(error, CheckpointError):
        return error
    wrapped = CheckpointWriteError(
        f"step {step} could not be saved: {error or type(error).__name__}", step=step
    )
    wrapped.__cause__ = error
    return wrapped
