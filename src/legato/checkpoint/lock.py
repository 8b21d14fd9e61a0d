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

from legato.errors import OutputDirLockedError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
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
    """

    def __init__(self, output_dir: str) -> None:
        self.path = str(Path(output_dir) / LOCK_NAME)
        self.previous: Mapping[str, Any] = {}
        self._fd: int | None = None

    def acquire(self, *, wait_seconds: float = 0.0) -> None:
        """Take the lock.

        Args:
            wait_seconds: How long to wait for another holder to end (an elastic restart).

        Raises:
            OutputDirLockedError: Another process holds it; ``.holder``.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    logger.warning(
                        "%s: this file system has no locks: two runs on one output_dir wouldn't "
                        "be noticed", self.path,
                    )  # fmt: skip
                    break
                holder = _read(fd)
                if error.errno not in _HELD or time.monotonic() >= deadline:
                    os.close(fd)
                    if error.errno not in _HELD:
                        raise
                    raise _locked(self.path, holder) from error
                time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
        self._fd = fd
        self.previous = _read(fd)

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
        data = json.dumps(content).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        os.fsync(self._fd)

    def release(self) -> None:
        """Give the lock back; the file stays, with the last holder's name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _read(fd: int) -> Mapping[str, Any]:
    try:
        content = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _locked(path: str, holder: Mapping[str, Any]) -> OutputDirLockedError:
    who = f"process {holder['pid']} on {holder['host']}" if "pid" in holder else "another process"
    return OutputDirLockedError(
        f"{Path(path).parent} is in use by {who}: two runs can't write to one output_dir. "
        "Wait for it, stop it, or choose another output_dir.",
        path=path,
        holder=dict(holder),
    )
