"""The end of a process whose loop never closed its checkpointer."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable

from legato.errors import CheckpointError

_lost: list[CheckpointError] = []


def close_at_exit(close: Callable[[], CheckpointError | None]) -> Callable[[], None]:
    """Have ``close`` called when this process ends.

    Args:
        close: Finishes what is under way; returns why the last save is lost, None: it isn't. Then
            the process ends with that error's exit code.

    Returns:
        A function that takes it back.
    """
    process = os.getpid()

    def at_exit() -> None:
        if os.getpid() != process:  # a fork: what is under way is its parent's
            return
        error = close()
        if error is not None:
            _lost.append(error)

    atexit.register(at_exit)
    return lambda: atexit.unregister(at_exit)


def _end_with_the_code_of_what_is_lost() -> None:
    """Let whoever started the process hear of a lost save, by its exit code.

    At this point no exception and no `sys.exit` changes the code any more: it would be 0, and a
    queue would go on with a checkpoint that isn't there. Whatever else was registered since this
    module was imported has been done by now; logs and streams are flushed here.
    """
    if not _lost:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed terminal, a closed stream
        sys.stderr.write(f"error: {_lost[-1]}\n")
    if hasattr(sys, "last_value"):  # it ends by an exception: the code isn't 0 anyway
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_lost[-1].exit_code)


# The first to be registered is the last to be called.
atexit.register(_end_with_the_code_of_what_is_lost)
