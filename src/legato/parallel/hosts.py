"""What a launcher does while torch waits for other hosts: it says so, and can be stopped.

torch waits in C++, where no signal handler of Python's runs: without this, nothing would be said
and Ctrl-C would have no effect for a quarter of an hour. torch is imported only where hosts wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.parallel.meeting import StopBoard

logger = logging.getLogger(__name__)

SAY_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""How often it looks whether another host was stopped."""
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# Python's own handler ends the launcher within this, unless the main thread is inside torch.
_HANDLER_SECONDS = 2.0


def waiting_text(arguments: Namespace, *, seconds: float) -> str:
    """Say where this host has been waiting, and for how long at most.

    Args:
        arguments: torchrun's.
        seconds: How long it has waited.

    Returns:
        One line.
    """
    is_static = arguments.rdzv_backend == "static"
    # torch's own defaults.
    key, limit = ("timeout", 900) if is_static else ("join_timeout", 600)
    if match := re.search(rf"(?:^|,)\s*{key}=(\d+)", arguments.rdzv_conf or ""):
        limit = int(match[1])
    return (
        f"waiting at {meeting_place(arguments)} for the other hosts, {arguments.nnodes} in all: "
        f"{seconds:.0f} s so far, at most {limit} s (--rdzv-conf={key}={limit})"
    )


def meeting_place(arguments: Namespace) -> str:
    """Where torchrun's ``arguments`` have the launchers of several hosts meet, as torch says it."""
    place: str = arguments.rdzv_endpoint
    return place or f"{arguments.master_addr}:{arguments.master_port or 29500}"


def stop_board(arguments: Namespace) -> StopBoard | None:
    """What the launchers of several hosts tell each other while they meet.

    Args:
        arguments: torchrun's.

    Returns:
        The board; None where they don't meet at a ``TCPStore``.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from legato.parallel.meeting import StopBoard

    if arguments.rdzv_backend not in ("static", "c10d"):
        return None
    try:
        address, port = parse_rendezvous_endpoint(meeting_place(arguments), 29400)
    except ValueError:  # a path: store_type=file
        return None
    return StopBoard(address, port)


class HostWatch:
    """A block in which torch may be waiting for other hosts. For the main thread.

    Args:
        say: Called every ``SAY_SECONDS`` from another thread, with the seconds since the start of
            the block.
        is_waiting: Whether no process of ours is running.
        give_up: Called from another thread when a stop signal has come while ``is_waiting`` and
            the main thread doesn't get to handle it; ends the process.
        tell: Called from another thread when a stop signal has come while ``is_waiting``: tells
            the other hosts; whether they may be there.
        is_stopped: Called from another thread while ``is_waiting``: whether another host was
            stopped. This process then gets SIGTERM.
        say_seconds: How often ``say`` is called.
        look_seconds: How often ``is_stopped`` is.
    """

    def __init__(
        self,
        *,
        say: Callable[[float], None],
        is_waiting: Callable[[], bool],
        give_up: Callable[[int], None],
        tell: Callable[[], bool] = lambda: False,
        is_stopped: Callable[[], bool] = lambda: False,
        say_seconds: float = SAY_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._say = say
        self._is_waiting = is_waiting
        self._give_up = give_up
        self._tell = tell
        self._is_stopped = is_stopped
        self._say_seconds = say_seconds
        self._look_seconds = look_seconds
        self._thread = threading.Thread(target=self._watch, name="legato-hosts", daemon=True)

    def __enter__(self) -> HostWatch:
        self._began = self._said = time.monotonic()
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._old = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old)
        os.close(self._sender)
        self._thread.join()
        os.close(self._receiver)

    def _watch(self) -> None:
        pause, is_told = self._look_seconds, False
        while True:
            numbers = self._signals(within_seconds=pause)
            if numbers is None:
                return
            if not self._is_waiting():
                pause = self._say_seconds
                continue
            pause = self._look_seconds
            stops = [number for number in numbers if number in _STOP_SIGNALS]
            if stops:
                if not is_told and self._tell():
                    # This host may serve what the others look at.
                    time.sleep(2 * self._look_seconds)
                if self._signals(within_seconds=_HANDLER_SECONDS) is None:
                    return
                self._give_up(stops[0])
            elif not is_told and self._is_stopped():
                is_told = True
                logger.warning("another host was stopped while the hosts met")
                os.kill(os.getpid(), signal.SIGTERM)
            elif time.monotonic() - self._said >= self._say_seconds:
                self._said = time.monotonic()
                self._say(self._said - self._began)

    def _signals(self, *, within_seconds: float) -> bytes | None:
        """Numbers of the signals that have come; none in time; None: the block has ended."""
        ready, _, _ = select.select([self._receiver], [], [], within_seconds)
        return (os.read(self._receiver, 64) or None) if ready else b""


def end_process(number: int) -> None:
    """End this process as signal ``number`` would have it, without the main thread."""
    logger.warning("stopped before the hosts had met")
    with contextlib.suppress(OSError):  # a closed terminal
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(128 + number)
