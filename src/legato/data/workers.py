"""Processes that work ahead, in order: what comes out is what one process would give."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from legato.errors import DataError

Item = TypeVar("Item")
Made = TypeVar("Made")

_work: Callable[[Any], Any]
"""What a worker does, set once in its own process: it need not travel with every item."""


def map_ahead(
    do: Callable[[Item], Made], items: Iterable[Item], *, num_workers: int, ahead: int
) -> Generator[Made, None, None]:
    """``map(do, items)``, by processes that run ahead of whoever asks.

    Items are read here and in order, by the thread that asks for results; results come in the order
    of the items. Close the iterator to end the processes.

    Args:
        do: Done to each item; it and its results can be pickled.
        items: They.
        num_workers: Number of processes; 0: done here, when it is asked for.
        ahead: Most items that are done, or being done, before they are asked for.

    Yields:
        Made: What ``do`` returned.

    Raises:
        DataError: A process was ended from outside.
        Exception: What ``do`` raised, at its item's turn.
    """
    if num_workers == 0:
        yield from map(do, items)
        return
    # The tokenizers library warns of processes that are started after it has used its threads,
    # unless it is told what to do: it is, in the process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    pool = ProcessPoolExecutor(num_workers, initializer=_begin, initargs=(do,))
    pending: deque[Future[Made]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_do, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {num_workers} processes that prepare data was ended from outside; often "
            "memory ran out. Set num_workers lower"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(do: Callable[[Any], Any]) -> None:
    global _work
    _work = do
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    # A signal for the whole group is for the run: it goes on to the end of its step and saves.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A run that was killed leaves nobody behind to hold memory, files and ports."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(item: Any) -> Any:
    return _work(item)
