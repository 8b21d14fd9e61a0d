"""What comes next, made by a thread while the current one is trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from legato.data.dealing import BatchSource, StepBatches

Item = TypeVar("Item")

STEPS_AHEAD = 2


class OneAhead(Generic[Item]):
    """An endless generator whose next item is made by a thread while the last one is in use.

    What comes is what the generator gives, in its order; what fails is raised at its turn, and
    again if asked again. The first item is made by who asks: processes that a generator starts are
    the main thread's.

    Args:
        items: The generator; nobody else may take from it.
    """

    def __init__(self, items: Generator[Item, None, None]) -> None:
        self._items = items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="legato-read")
        self._pending: Future[Item] | None = None

    def take(self) -> Item:
        """The next item; the one after it is begun."""
        item = next(self._items) if self._pending is None else self._pending.result()
        self._pending = self._thread.submit(next, self._items)
        return item

    def close(self) -> None:
        """Wait for the item that is being made, drop it, and close the generator."""
        self._thread.shutdown(cancel_futures=True)
        self._items.close()


class Prefetcher:
    """A thread that fetches ahead from another source, which nobody else may fetch from meanwhile.

    What a step gets, the place in a stream included, is what the source gives for that step,
    however far the thread is.

    Args:
        source: Where batches come from.
        last_step: Nothing is fetched beyond it.
    """

    def __init__(self, source: BatchSource, *, last_step: int) -> None:
        self._source, self._last_step = source, last_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="legato-prefetch")
        self._pending: deque[tuple[int, Future[StepBatches]]] = deque()

    @property
    def reads_while_training(self) -> bool:
        """Whether a file or a row may turn out to be unusable at any step."""
        return self._source.reads_while_training

    def fetch(self, step: int) -> StepBatches:
        """This rank's part of ``step``, from 1; asked for in order. Raises what the source does."""
        begin = self._pending[-1][0] + 1 if self._pending else step
        for ahead in range(begin, min(step + STEPS_AHEAD, self._last_step) + 1):
            self._pending.append((ahead, self._thread.submit(self._source.fetch, ahead)))
        fetched, batches = self._pending.popleft()
        assert fetched == step, f"steps are fetched in order: {step}, and {fetched} is next"
        return batches.result()

    def close(self) -> None:
        """End the thread; the source stays open."""
        self._thread.shutdown(cancel_futures=True)
