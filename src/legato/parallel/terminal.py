"""A terminal that was closed under a run."""

from __future__ import annotations

import os
import stat


def leave_closed_terminal() -> None:
    """Write to nowhere from now on where standard output and error were a terminal that has gone.

    Every further line would be an error in the midst of the last save. One that is still there is
    left alone: somebody has sent SIGHUP by hand.
    """
    for fd in (1, 2):
        # A closed terminal is still a device, but no terminal any more.
        if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
