"""Rank 0 may be slow in anything that it does alone: training's own group never waits for it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legato.checkpoint import Checkpointer, KeepLast
from legato.storage import LocalStorage
from tests.helpers import spawn
from tests.helpers.faults import Operation, StorageWrapper
from tests.helpers.loops import Loop

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SLOW_SECONDS = 7.0
WATCHDOG_SECONDS = 4.0


class SlowOnce(StorageWrapper):
    """Sleeps before the first ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__(LocalStorage())
        self.name: str | None = name

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        if operation.name == self.name:
            self.name = None
            time.sleep(SLOW_SECONDS)


def train(rank: int, output_dir: str, slow_in: str, asynchronous: bool) -> bool:
    """Three saves; after each one a collective of training, which must not wait for rank 0."""
    training = dist.new_group(timeout=dt.timedelta(seconds=WATCHDOG_SECONDS))
    storage = SlowOnce(slow_in if rank == 0 else "nothing")
    loop, value = Loop(), torch.ones(1)
    with Checkpointer(
        output_dir,
        keep=KeepLast(1),
        storage=storage,
        process_group=training,
        asynchronous=asynchronous,
    ) as checkpointer:
        for step in range(1, 4):
            loop.step()
            checkpointer.save(loop.state, step=step)
            dist.all_reduce(value, group=training)
            checkpointer.poll()
            dist.all_reduce(value, group=training)
        checkpointer.drain()
        dist.all_reduce(value, group=training)
    return storage.name != slow_in


@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "blocking"])
@pytest.mark.parametrize("slow_in", ["sync_file", "rename", "remove_file"])
def test_a_slow_rank_never_trips_the_watchdog_of_training(
    tmp_path: Path, slow_in: str, asynchronous: bool
) -> None:
    out = tmp_path / "out"
    assert spawn.run(train, 2, str(out), slow_in, asynchronous)[0], "rank 0 wasn't slow"
    assert [path.name for path in out.glob("step_*")] == ["step_3"]
