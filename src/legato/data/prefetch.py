"""Batches of the next steps, made while the current one is trained."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from legato.data.dealing import BatchSource, StepBatches

STEPS_AHEAD = 2


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
