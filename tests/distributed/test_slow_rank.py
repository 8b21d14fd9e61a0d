"""Rank 0 may be slow in anything that it does alone: training's own group never waits for it."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from legato.checkpoint import Checkpointer, KeepLast
from legato.config.load import load_config
from legato.parallel.mesh import MeshPlan, build_mesh
from legato.recipes.training import run
from legato.report.metrics import EventName, MetricsLog, read_events
from legato.storage import LocalStorage
from tests.helpers import spawn
from tests.helpers.faults import Operation, StorageWrapper
from tests.helpers.loops import Loop
from tests.helpers.runs import steps_in, write_config

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


# Where rank 0 is slow, and whether saves are written in the background.
SLOW = [("sync_file", True), ("rename", True), ("remove_file", True), ("rename", False)]


def train_in_turn(rank: int, folder: str) -> list[bool]:
    training = dist.new_group(timeout=dt.timedelta(seconds=WATCHDOG_SECONDS))
    return [
        train(rank, f"{folder}/{number}", slow_in, asynchronous, training)
        for number, (slow_in, asynchronous) in enumerate(SLOW)
    ]


def train(
    rank: int, output_dir: str, slow_in: str, asynchronous: bool, training: dist.ProcessGroup
) -> bool:
    """Three saves; after each one a collective of training, which must not wait for rank 0."""
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


def test_a_slow_rank_never_trips_the_watchdog_of_training(tmp_path: Path) -> None:
    was_slow, _ = spawn.run(train_in_turn, 2, str(tmp_path))
    assert was_slow == [True] * len(SLOW)
    for number in range(len(SLOW)):
        assert [path.name for path in (tmp_path / f"{number}").glob("step_*")] == ["step_3"]


def build_watched_mesh(plan: MeshPlan, *, device_type: str) -> DeviceMesh:
    """The mesh of a run, whose collectives must not take long."""
    mesh = build_mesh(plan, device_type=device_type)
    for group in mesh.get_all_groups():
        _set_pg_timeout(dt.timedelta(seconds=WATCHDOG_SECONDS), group)
    return mesh


class SlowMetrics(MetricsLog):
    """Sleeps before the first line of a step and of an evaluation."""

    slow_in: ClassVar = {"step", "eval"}

    def write(self, event: EventName, **fields: object) -> None:
        if event in self.slow_in:
            self.slow_in.discard(event)
            time.sleep(SLOW_SECONDS)
        super().write(event, **fields)


class SlowStorage(LocalStorage):
    """Sleeps before the first sync of a step's file."""

    is_slow = True

    def sync_file(self, path: str) -> None:
        if self.is_slow and "step_" in path:
            SlowStorage.is_slow = False
            time.sleep(SLOW_SECONDS)
        super().sync_file(path)


def train_as_configured(rank: int, config: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.recipes.model.build_mesh", build_watched_mesh)
        if rank == 0:
            patch.setattr("legato.recipes.output.MetricsLog", SlowMetrics)
            patch.setattr("legato.storage.remote.LocalStorage", SlowStorage)
        loaded = load_config(config)
        run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    return not SlowMetrics.slow_in and not SlowStorage.is_slow


def test_a_run_whose_rank_0_is_slow_in_its_metrics_and_its_disk_goes_on(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_distributed",
        epochs=2,  # of one step each
        val_set_size=2,
        run_val_every_n_steps=1,
        save_every_n_train_steps=1,
    )
    assert spawn.run(train_as_configured, 2, str(config)) == [True, False], "rank 0 wasn't slow"
    assert steps_in(tmp_path / "out") == [1, 2]
    events = [event["event"] for event in read_events(tmp_path / "out" / "metrics.jsonl")]
    assert (events.count("step"), events.count("eval"), events.count("save")) == (2, 2, 2)
