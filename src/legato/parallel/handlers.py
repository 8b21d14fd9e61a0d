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
    does a SIGHUP that is ignored (nohup): the program is to outlive its terminal. A SIGUSR1 that
    :func:`saves_held` has held back comes now.

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
                old[number] = before = signal.signal(number, handler)
                if isinstance(before, _HeldBack) and before.take():
                    handler(number, None)
        yield
    finally:
        for number, handler in old.items():
            # None: a handler that wasn't set from Python; the default is the nearest that can be.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def saves_held() -> Iterator[None]:
    """Hold SIGUSR1 back where nobody answers it yet: by itself it would end the process.

    One that comes before :func:`handlers_taken` is taken there; one that comes later has no effect.
    Outside the main thread nothing is held.

    Yields:
        None: the block is when it is held.
    """
    is_held = isinstance(signal.getsignal(signal.SIGUSR1), _HeldBack)
    with handlers_taken({} if is_held else {signal.SIGUSR1: _HeldBack()}):
        yield


class _HeldBack:
    """A handler that does nothing but remember."""

    def __init__(self) -> None:
        self._has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._has_come = True

    def take(self) -> bool:
        has_come, self._has_come = self._has_come, False
        return has_come
