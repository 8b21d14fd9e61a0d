"""What a run says once nobody reads it: a terminal that was closed, a pipe whose reader ended."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe; a terminal


def leave_closed_terminal() -> None:
    """Write to nowhere from now on where standard output and error were a terminal that has gone.

    Every further line would be an error in the midst of the last save. One that is still there is
    left alone: somebody has sent SIGHUP by hand.
    """
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # it was closed before
            # A closed terminal is still a device, but no terminal any more.
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                _lead_nowhere(fd)


def outlive_readers() -> None:
    """Let this process go on, unheard, where standard output or error can't be written any more.

    Ctrl-C and a closed terminal end the ``tee`` of ``legato run ... 2>&1 | tee log`` too, often
    before the run has written its next line, which must not cost it the last save. Streams that
    were put in the place of the process's own are left alone.
    """
    if sys.stdout is sys.__stdout__:
        sys.stdout = _outliving(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _outliving(sys.stderr, 2)


def _outliving(stream: TextIO | None, fd: int) -> TextIO:
    if stream is None:  # started with `>&-`: the next file to be opened would get its number
        _lead_nowhere(fd)
        stream = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True)
    if not isinstance(stream, io.TextIOWrapper) or _number(stream) != fd:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Unheard(fd, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _number(stream: TextIO) -> int | None:
    """The file that a stream writes to; None: it is in memory, or closed."""
    try:
        return stream.fileno()
    except ValueError:
        return None


class _Unheard(io.FileIO):
    """Leads to nowhere once nobody reads it, for whatever else writes to its number too."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        _lead_nowhere(self.fileno())
        return super().write(data)


def _lead_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
