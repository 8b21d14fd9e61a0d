"""One run per output_dir: a lock that dies with its owner."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legato.errors import CheckpointError, OutputDirLockedError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_MAX_VANISHED = 3
_NOTHING = b"\0 \n"  # all that a lost power supply may leave of it
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class OutputDirLock:
    """``fcntl.lockf`` on ``output_dir/.lock``, whose content says who holds it.

    lockf and not flock: a flock outlives its killed owner through forked data-loader workers. The
    file must be opened nowhere else in this process: closing it anywhere drops the lock.

    Args:
        output_dir: An existing local folder.

    Attributes:
        previous: What the last holder wrote: ``host, pid, run_id, branch, time, launch_id``; empty
            if unknown.
        is_new: There was no such file before `acquire`.
    """

    def __init__(self, output_dir: str) -> None:
        self.path = str(Path(output_dir) / LOCK_NAME)
        self.previous: Mapping[str, Any] = {}
        self.is_new = False
        self._fd: int | None = None
        self._content = b""

    def acquire(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock.

        Args:
            wait_seconds: How long to wait for another holder to end (an elastic restart).

        Raises:
            OutputDirLockedError: Another process holds it; ``.holder``.
            CheckpointError: A folder, or somebody's own file, has its name; ``.path``.
        """
        fd, self.is_new = _take(self.path, wait_seconds=wait_seconds)
        try:
            self.previous = _read_ours(fd, self.path)
        except CheckpointError:
            os.close(fd)
            raise
        self._fd = fd

    def is_kept(self) -> bool:
        """Whether output_dir still is the folder that was locked, or was locked anew by `keep`."""
        try:
            return self._fd is not None and _is_at(self._fd, self.path)
        except OSError:  # the background thread is just taking it again
            return False

    def keep(self) -> None:
        """Take the lock again, aloud, where output_dir or the lock's file has gone meanwhile.

        Raises:
            OutputDirLockedError: By now another process holds it, or has held it: what lies there
                is its own; ``.holder``.
        """
        if self._fd is None or _is_at(self._fd, self.path):
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        # First: closing any number of a file gives all locks on it back, and it may be the same
        # file, on a mount that numbers its files anew.
        os.close(self._fd)
        self._fd = None
        fd, _ = _take(self.path, wait_seconds=0.0)
        content = _content(fd)
        if content not in (b"", self._content):
            holder = _read(fd)
            os.close(fd)
            raise _taken_over(self.path, holder)
        self._fd = fd
        if not content:
            logger.error(
                "%s has gone: was output_dir deleted or moved while this run writes to it? It is "
                "made again, without what was in it.", self.path,
            )  # fmt: skip
            self._write_content()

    def write(self, *, run_id: str, branch: int, now: float, launch_id: str | None = None) -> None:
        """Say who holds it."""
        if self._fd is None:
            return
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run_id": run_id,
            "branch": branch,
            "time": now,
            "launch_id": launch_id,
        }
        self._content = json.dumps(content).encode()
        self._write_content()

    def remove(self) -> None:
        """Take the file away, of a run that saved nothing; it must be held."""
        if self._fd is not None and _is_at(self._fd, self.path):
            os.unlink(self.path)

    def release(self) -> None:
        """Give the lock back; the file stays, with the last holder's name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write_content(self) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._content, 0)
        os.fsync(self._fd)


def look_at_lock(output_dir: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What the lock of ``output_dir`` says, without taking it.

    Not for a process that holds it: that would give it back.

    Args:
        output_dir: A local folder; may be absent.

    Returns:
        What the last holder wrote; empty if unknown.

    Raises:
        OutputDirLockedError: Another process holds it now; ``.holder``.
        CheckpointError: A folder, or somebody's own file, has its name; ``.path``.
    """
    path = str(Path(output_dir) / LOCK_NAME)
    if os.path.isdir(path):
        raise _is_folder(path)
    if not os.path.exists(path):
        return {}
    with open(path, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed, at once
        except OSError as error:
            if error.errno in _HELD:
                raise _locked(path, _read(file.fileno())) from error
            if error.errno not in _UNSUPPORTED:
                raise
        return _read_ours(file.fileno(), path)


def _take(path: str, *, wait_seconds: float) -> tuple[int, bool]:
    """Lock the file at ``path``; its descriptor, and whether it was made for this."""
    deadline = time.monotonic() + wait_seconds
    num_vanished = 0
    while True:
        fd, is_new = _open(path)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                logger.warning(
                    "%s: this file system has no locks: two runs on one output_dir wouldn't be "
                    "noticed", path,
                )  # fmt: skip
                return fd, is_new
            holder = _read(fd)
            os.close(fd)
            if error.errno not in _HELD:
                raise
            if time.monotonic() >= deadline:
                raise _locked(path, holder) from error
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
            continue
        # Whoever held it may have taken it away: a lock on such a file keeps nobody out. A few
        # times at most, for there are mounts that number their files anew all the time.
        if _is_at(fd, path) or num_vanished == _MAX_VANISHED:
            return fd, is_new
        os.close(fd)
        num_vanished += 1


def _open(path: str) -> tuple[int, bool]:
    """Open the file at ``path``; whether it was made by that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            return os.open(path, flags, 0o666), False
    except IsADirectoryError as error:
        raise _is_folder(path) from error


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is the one that ``path`` leads to."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _content(fd: int) -> bytes:
    return os.pread(fd, 4096, 0)


def _read(fd: int) -> Mapping[str, Any]:
    try:
        content = json.loads(_content(fd))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _read_ours(fd: int, path: str) -> Mapping[str, Any]:
    """What a run wrote; somebody's own file is refused."""
    holder = _read(fd)
    if "run_id" not in holder and _content(fd).strip(_NOTHING):
        raise CheckpointError(
            f"{path} isn't a lock that Legato wrote; a run keeps its own in a file of that name. "
            "Move it away, or choose another output_dir.",
            path=path,
        )
    return holder


def _is_folder(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a folder; a run keeps the lock of its output_dir in a file of that name. "
        "Move it away, or choose another output_dir.",
        path=path,
    )


def _locked(path: str, holder: Mapping[str, Any]) -> OutputDirLockedError:
    return OutputDirLockedError(
        f"{Path(path).parent} is in use by {_process(holder)}: two runs can't write to one "
        "output_dir. Wait for it, stop it, or choose another output_dir.",
        path=path,
        holder=dict(holder),
    )


def _taken_over(path: str, holder: Mapping[str, Any]) -> OutputDirLockedError:
    return OutputDirLockedError(
        f"{Path(path).parent} isn't this run's any more: it was moved or replaced, and run "
        f"{holder.get('run_id', '(unknown)')} ({_process(holder)}) has used the one that is there "
        "now. Nothing in it is touched. Start again in the folder that was moved away.",
        path=path,
        holder=dict(holder),
    )


def _process(holder: Mapping[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}" if "pid" in holder else "another process"
