"""SIGKILL at operation k of a run, for every k: nothing acknowledged is lost.

The run makes three saves and prunes after each, so every operation of a start, of a save and of a
prune is a crash point.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legato.checkpoint import Checkpointer, KeepLast
from legato.storage import LocalStorage
from tests.helpers.faults import KillingStorage, RecordingStorage
from tests.helpers.loops import Loop, assert_same

pytestmark = [pytest.mark.crash, pytest.mark.slow]

STEPS = (1, 2, 3)
# What a kill may leave half done; anything else is done or not.
DIVISIBLE = ("create_file", "write_at", "write_bytes")


def loops() -> list[Loop]:
    return [Loop().run_to(step) for step in STEPS]


def train(out: str, storage: object, states: list[Loop], acknowledged: str) -> None:
    """Three saves; each acknowledged one is written down before the next begins."""
    with Checkpointer(out, storage=storage, keep=KeepLast(1), asynchronous=False) as checkpointer:
        for loop in states:
            step = checkpointer.save(loop.state, step=loop.counter.step).result().step
            with open(acknowledged, "w") as file:
                file.write(str(step))


def record_operations(folder: Path, states: list[Loop]) -> list[str]:
    storage = RecordingStorage(LocalStorage())
    train(str(folder / "counted"), storage, states, str(folder / "acknowledged"))
    return [operation.name for operation in storage.operations]


def check_what_is_left(out: Path, acknowledged: Path, states: list[Loop], *, k: int) -> None:
    """The invariants, checked by a fresh start."""
    last = int(acknowledged.read_text()) if acknowledged.exists() else 0
    torn = {p.name for p in out.glob("step_*")} if out.exists() else set()
    resumed = Loop()
    with Checkpointer(out, keep=KeepLast(1), verify_on_load=True) as checkpointer:
        restored = checkpointer.restore(resumed.state)
        # What has a name is complete, at any instant.
        assert all(info.is_complete for info in checkpointer.steps()), (k, torn)
    step = 0 if restored is None else restored["step"]
    assert step >= last, f"killed at operation {k}: step {last} was acknowledged, {step} is there"
    if step:
        assert_same(resumed.tensors(), states[step - 1].tensors())
    leftovers = [p.name for p in out.iterdir() if p.name.startswith((".step", ".trash", "latest."))]
    assert leftovers == [], k
    # And the run goes on.
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        checkpointer.restore(Loop().state)
        checkpointer.save(resumed.run_to(9).state, step=9)
    assert sorted(p.name for p in out.glob("step_*")) == ["step_9"]


def _train_and_die(out: str, kill_at: int, halfway: bool, acknowledged: str) -> None:
    torch.set_num_threads(1)
    storage = KillingStorage(LocalStorage(), kill_at=kill_at, halfway=halfway)
    train(out, storage, loops(), acknowledged)


@pytest.mark.parametrize("halfway", [False, True])
def test_a_process_killed_at_any_operation_loses_nothing_acknowledged(
    tmp_path: Path, halfway: bool
) -> None:
    states = loops()
    operations = record_operations(tmp_path, states)
    assert len(operations) > 60
    # Forked: a fresh interpreter for each of some hundred kills would take minutes. Nothing has
    # started a thread in this process's own checkpointer when it forks.
    context = multiprocessing.get_context("fork")
    for k, name in enumerate(operations, start=1):
        if halfway and name not in DIVISIBLE:
            continue
        out, acknowledged = tmp_path / f"out_{k}", tmp_path / f"acknowledged_{k}"
        process = context.Process(
            target=_train_and_die, args=(str(out), k, halfway, str(acknowledged))
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, k
        check_what_is_left(out, acknowledged, states, k=k)


def _rank_trains_and_dies(rank: int, folder: str, killed: int, kill_at: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    storage = KillingStorage(LocalStorage(), kill_at=kill_at) if rank == killed else LocalStorage()
    states = loops()
    checkpointer = Checkpointer(
        f"{folder}/out", storage=storage, keep=KeepLast(1), process_group=dist.group.WORLD
    )
    for loop in states:
        checkpointer.save(loop.state, step=loop.counter.step).result()
        if rank == 0:
            Path(f"{folder}/acknowledged").write_text(str(loop.counter.step))
    checkpointer.close()
    if rank == killed:
        Path(f"{folder}/survived").touch()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_at_any_operation_loses_nothing_acknowledged(
    tmp_path: Path, killed: int
) -> None:
    states = loops()
    context = multiprocessing.get_context("fork")
    for k in range(1, 500):
        folder = tmp_path / str(k)
        folder.mkdir()
        ranks = [
            context.Process(target=_rank_trains_and_dies, args=(rank, str(folder), killed, k))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        ranks[killed].join(60)
        survived = (folder / "survived").exists()
        # The other one hears of it through the group, soon, and ends by itself.
        ranks[1 - killed].join(30)
        assert ranks[1 - killed].exitcode is not None, k
        if survived:
            break
        assert ranks[killed].exitcode == -signal.SIGKILL, k
        check_what_is_left(folder / "out", folder / "acknowledged", states, k=k)
    assert k > (15 if killed else 60)
    assert (folder / "out" / "step_3").exists()
