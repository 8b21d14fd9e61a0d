"""A process's signal handlers, taken for a while and given back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def handlers_taken(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Let the block's signals go to ``handlers``; the old ones are put back at its end.

    Outside the main thread Python can't take signals: there the process's own handlers stay. So
    does a SIGHUP that is ignored (nohup): the program is to outlive its terminal.

    Args:
        handlers: Signal -> who is called.

    Yields:
        None: the block is what the signals are for.
    """
    old: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                old[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in old.items():
            # None: a handler that wasn't set from Python; the default is the nearest that can be.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
