"""The threads that write beside training: one that steps back behind it, and one that doesn't."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from legato.checkpoint.records import Committed, PendingSave

# A tenth of the weight of a thread of training, where both want one core; all of a free one.
_NICE = 10


class BackgroundThreads:
    """One resident thread that does one thing after the other, and one that relieves it.

    Daemons: a process that ends without `stop` (or its ``atexit`` hook) isn't held up, and a save
    cut short leaves nothing visible.

    The thread steps back behind training's: what it takes from one of them holds up all, at the
    end of a loop that they share. On cores that are all busy a save so takes several times as
    long, which mustn't be while somebody waits for it: before the next save, or before the end
    that a signal asked for. No thread may raise its priority again, so another one takes over.

    Torch computes with one thread in each. With more they would make OpenMP workers of their own,
    and with more workers than cores GNU's OpenMP lets those of training sleep between two loops
    instead of spinning: every later step of SmolLM2-135M on two cores took 0.3 s longer.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Committed], PendingSave] | None] = (
            queue.SimpleQueue()
        )
        self._awaited: queue.SimpleQueue[tuple[Iterator[None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        num_threads = torch.get_num_threads()
        self._thread = _start("legato-checkpoint", self._run, steps_back=True)
        self._relief = _start("legato-checkpoint-awaited", self._relieve, steps_back=False)
        torch.set_num_threads(num_threads)  # what threads to come begin with

    def submit(self, task: Callable[[], Committed], *, pending: PendingSave) -> None:
        """Do ``task`` after what was submitted before.

        Args:
            task: Its result, or whatever it raises, settles ``pending``: no rank waits for a
                save that nobody works on.
            pending: What the training thread waits for.
        """
        self._tasks.put((task, pending))

    def work_off(self, steps: Iterator[None], *, pending: PendingSave) -> None:
        """Of a task: take ``steps`` here or, from when on somebody waits, where they go faster.

        Args:
            steps: The work. What it raises is raised.
            pending: The task's.
        """
        while not pending.is_awaited:
            if next(steps, self) is self:
                return
        relieved: Future[None] = Future()
        self._awaited.put((steps, relieved))
        relieved.result()

    def stop(self) -> None:
        """End the threads once everything submitted is done."""
        self._tasks.put(None)
        self._thread.join()
        self._awaited.put(None)
        self._relief.join()

    def _run(self) -> None:
        while (submitted := self._tasks.get()) is not None:
            task, pending = submitted
            try:
                outcome: Committed | BaseException = task()
            except BaseException as error:  # whatever it is, the training thread has to hear of it
                outcome = error
            pending.settle(outcome)
            # Whatever they hold (a snapshot, a committed step) mustn't live until the next task.
            del submitted, task, pending, outcome

    def _relieve(self) -> None:
        while (given := self._awaited.get()) is not None:
            steps, relieved = given
            try:
                for _ in steps:
                    pass
                relieved.set_result(None)
            except BaseException as error:
                relieved.set_exception(error)
            del given, steps, relieved  # as above


def _start(name: str, work: Callable[[], None], *, steps_back: bool) -> threading.Thread:
    """A daemon that does ``work``, once it has made itself at home."""
    is_ready = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # the first call sets what new threads begin with: not after 1
        torch.set_num_threads(1)
        if steps_back:
            _step_back()
        is_ready.set()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    is_ready.wait()
    return thread


def _step_back() -> None:
    """Lower the priority of the calling thread; only on Linux is it a thread's own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it: a save goes on without
            lower = os.getpriority(os.PRIO_PROCESS, thread) + _NICE
            os.setpriority(os.PRIO_PROCESS, thread, min(lower, 19))
