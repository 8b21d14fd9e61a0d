"""Several ranks write one Hugging Face folder together, and any number of ranks reads it back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from legato.checkpoint import Checkpointer, KeepLast, ModelPart, OptimizerPart, RngPart
from legato.checkpoint import fetch as fetch_module
from legato.checkpoint import preparation as preparation_module
from legato.checkpoint import relay as relay_module
from legato.checkpoint import saver as saver_module
from legato.checkpoint.inspection import find_damage
from legato.errors import (
    CheckpointError,
    CheckpointExistsError,
    PeerLostError,
    RankDisagreementError,
)
from legato.storage import LocalStorage, MemoryStorage, RemoteStorage, Storage
from tests.helpers import random_trees, s3, spawn
from tests.helpers.faults import FaultyStorage, Operation
from tests.helpers.loops import Counter

pytestmark = pytest.mark.distributed


class Sharded:
    """A small FSDP2 model: uneven rows, fewer rows than ranks, vectors, a plain buffer."""

    def __init__(self) -> None:
        self.model = self.build()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.counter = Counter()

    @staticmethod
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 1)
        )
        model.register_buffer("scale", torch.arange(3.0))
        return model

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.counter}

    def step(self) -> int:
        self.counter.step += 1
        generator = torch.Generator().manual_seed(self.counter.step)
        inputs = torch.randn(12, 4, generator=generator)
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = inputs[rank * 12 // size : (rank + 1) * 12 // size]
        self.optimizer.zero_grad()
        self.model(rows).square().mean().backward()
        self.optimizer.step()
        return self.counter.step

    def whole(self) -> dict[str, torch.Tensor]:
        """Collective: every tensor, gathered by torch itself."""
        found = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key}/{name}"] = value
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in found.items()
        }


Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Tensors don't travel between processes as they are."""
    return {name: value.numpy() for name, value in tensors.items()}


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def write_three_steps(rank: int, folder: str) -> Arrays:
    loop, expected = Sharded(), {}
    with Checkpointer(
        f"{folder}/out", process_group=dist.group.WORLD, keep=KeepLast(2), check_snapshots=True
    ) as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            expected[step] = loop.whole()
            checkpointer.save(loop.state, step=step)
            with torch.no_grad():  # right after save() returned
                for parameter in loop.model.parameters():
                    parameter.mul_(1.5)
                loop.model.scale.add_(1)
            checkpointer.poll()
        share = checkpointer.save(loop.state, step=3).result()
        assert share.manifest.world_size == dist.get_world_size()
        if rank == 0:  # it has pruned when its save is done, others don't wait for that
            assert [info.step for info in checkpointer.steps()] == [2, 3]
        records = checkpointer.poll()
        # Of the whole, on every rank; each has written its share of it.
        assert records[-1].checkpoint_bytes == share.manifest.size_bytes > records[-1].written_bytes
        assert (
            records[-1].staged_bytes
            < 2 * sum(value.numel() * 4 for value in expected[3].values()) / dist.get_world_size()
        )
    return arrays(expected[3])


def read_back(rank: int, folder: str) -> Arrays:
    loop = Sharded()
    with Checkpointer(f"{folder}/out", process_group=dist.group.WORLD) as checkpointer:
        assert checkpointer.restore(loop.state) == {"step": 3, "notes": []}
        found = arrays(loop.whole())
        for parameter in loop.model.parameters():
            moment = loop.optimizer.state[parameter]["exp_avg"]
            assert isinstance(moment, DTensor)
            assert moment.placements == parameter.placements
        loop.step()
        checkpointer.save(loop.state, step=4).result()
    return found


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (4, 2), (1, 3), (2, 2)])
def test_a_step_is_restored_bit_for_bit_by_any_number_of_ranks(
    tmp_path: Path, writers: int, readers: int
) -> None:
    expected = spawn.run(write_three_steps, writers, str(tmp_path))[0]
    folder = tmp_path / "out" / "step_3"
    # What torch gathered is what the safetensors library reads.
    model = {f"model/{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    moments: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("state/optimizer-*.safetensors")):
        moments |= load_file(path)
    assert_equal(arrays(model | moments), expected)
    assert len(list(folder.glob("state/optimizer-*"))) >= writers
    for found in spawn.run(read_back, readers, str(tmp_path)):
        assert_equal(found, expected)


def placements(rank: int, folder: str) -> None:
    """Row, column, replicated, HSDP, uneven, empty, 0-dim, integer and boolean tensors at once."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    whole = {
        "rows": torch.rand(9, 3),
        "columns": torch.rand(6, 8),
        "middle": torch.rand(3, 6, 5),
        "few_rows": torch.rand(2, 5),
        "replicated": torch.rand(4, 4),
        "hsdp": torch.rand(5, 4),
        "both": torch.rand(6, 6),
        "half": torch.rand(5, 3).to(torch.bfloat16),
        "float8": torch.rand(8, 3).to(torch.float8_e4m3fn),
        "integers": torch.arange(10),
        "flags": torch.tensor([True, False, True, True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    placed = {
        "rows": distribute_tensor(whole["rows"], line, [Shard(0)]),
        "columns": distribute_tensor(whole["columns"], line, [Shard(1)]),
        "middle": distribute_tensor(whole["middle"], line, [Shard(1)]),
        "few_rows": distribute_tensor(whole["few_rows"], line, [Shard(0)]),
        "replicated": distribute_tensor(whole["replicated"], line, [Replicate()]),
        "hsdp": distribute_tensor(whole["hsdp"], square, [Replicate(), Shard(0)]),
        "both": distribute_tensor(whole["both"], square, [Shard(0), Shard(1)]),
        "half": distribute_tensor(whole["half"], line, [Shard(0)]),
        "integers": distribute_tensor(whole["integers"], line, [Shard(0)]),
        "flags": distribute_tensor(whole["flags"], line, [Shard(0)]),
        **{name: whole[name].clone() for name in ("float8", "scalar", "empty")},
    }
    state = {"model": ModelPart(tensors=placed), "rng": RngPart()}
    with Checkpointer(f"{folder}/out", process_group=dist.group.WORLD) as checkpointer:
        torch.manual_seed(100 + rank)
        pending = checkpointer.save(state, step=1)
        pending.result()
        drawn = torch.rand(3)
        if rank == 0:
            found = load_file(f"{folder}/out/step_1/model.safetensors")
            assert found.keys() == whole.keys()
            for name, value in whole.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name].float(), value.float()), name
        checkpointer.source = pending.committed
        for tensor in placed.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        checkpointer.restore(state)
        for name, tensor in placed.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full.float(), whole[name].float()), name
        # Each rank has its own random states back.
        assert torch.equal(torch.rand(3), drawn)
    random_trees.write_and_read(rank, f"{folder}/random", seeds=range(30))


def test_every_placement_and_dtype_is_written_once_and_read_back(tmp_path: Path) -> None:
    """Those of one example, and of random trees that other numbers of ranks read."""
    spawn.run(placements, 4, str(tmp_path))
    manifest = json.loads((tmp_path / "out/step_1/manifest.json").read_text())
    entry = manifest["files"]["model.safetensors"]
    assert any(len(part) == 5 for part in entry["slices"]), "a column shard is one slice of runs"


def disagree(rank: int, folder: str) -> str:
    model = nn.Linear(3, 3)
    checkpointer = Checkpointer(f"{folder}/out", process_group=dist.group.WORLD)
    pending = checkpointer.save({"model": model}, step=1 + rank)
    with pytest.raises(RankDisagreementError) as caught:
        pending.result()
    pending.wait()
    records = []
    while not records:
        time.sleep(0.02)
        records = checkpointer.poll()
    assert not records[0].will_retry
    checkpointer.save({"model": model}, step=5)
    checkpointer.close()
    return str(caught.value)


def test_ranks_that_disagree_on_the_step_all_fail_by_name(tmp_path: Path) -> None:
    messages = spawn.run(disagree, 2, str(tmp_path))
    assert messages == ["step 1 isn't saved: the ranks differ in step: {0: 1, 1: 2}",
                        "step 2 isn't saved: the ranks differ in step: {0: 1, 1: 2}"]  # fmt: skip
    assert [p.name for p in (tmp_path / "out").glob("*step*")] == ["step_5"]


def different_layout(rank: int, folder: str) -> str:
    model = nn.Linear(3, 3 + rank)
    checkpointer = Checkpointer(f"{folder}/out", process_group=dist.group.WORLD)
    pending = checkpointer.save({"model": model}, step=1)
    with pytest.raises(RankDisagreementError, match="differ in layout"):
        pending.result()
    # Trying again would end alike: the run mustn't end as if its last step were on disk.
    with pytest.raises(RankDisagreementError, match="differ in layout") as caught:
        checkpointer.close()
    return str(caught.value)


def test_ranks_with_different_models_all_fail(tmp_path: Path) -> None:
    spawn.run(different_layout, 2, str(tmp_path))
    assert list((tmp_path / "out").glob("*step*")) == []


class FailingOnce(FaultyStorage):
    """Its first `verb` on a weight file fails."""

    def __init__(self, verb: str, inner: Storage | None = None) -> None:
        super().__init__(inner or LocalStorage(), fail_at=None)
        self.verb = verb

    def before(self, operation: Operation, number: int, half: object) -> None:
        if operation.name == self.verb and operation.path.endswith(".safetensors"):
            self.verb = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)


# A rank, and what fails on it.
FAILURES = [
    (0, "create_file"),
    (0, "write_at"),
    (1, "write_at"),
    (1, "sync_file"),
    (0, "sync_file"),
]


def ranks_fail_in_turn(rank: int, folder: str) -> list[list[tuple[int, str | None]]]:
    saver_module.RETRY_SECONDS = 0.0
    return [
        one_rank_fails(rank, f"{folder}/{failing}-{verb}", failing, verb)
        for failing, verb in FAILURES
    ]


def one_rank_fails(rank: int, folder: str, failing: int, verb: str) -> list[tuple[int, str | None]]:
    storage = FailingOnce(verb) if rank == failing else LocalStorage()
    loop = Sharded()
    found = []
    with Checkpointer(
        f"{folder}/out", process_group=dist.group.WORLD, storage=storage
    ) as checkpointer:
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step())
            # Every rank hears of a failure, and tries again, at the same call.
            while checkpointer.in_flight is not None:
                records = checkpointer.poll()
                found += [(r.step, r.error) for r in records]
                time.sleep(0.02)
        assert [info.step for info in checkpointer.steps()] == [1, 2, 3]
        assert all(info.is_complete for info in checkpointer.steps())
    return found


def test_a_rank_that_fails_fails_the_save_on_all_and_it_is_retried_on_all(tmp_path: Path) -> None:
    by_rank = spawn.run(ranks_fail_in_turn, 2, str(tmp_path))
    for (failing, verb), first, second in zip(FAILURES, *by_rank, strict=True):
        assert [step for step, _ in first] == [step for step, _ in second] == [1, 1, 2, 3]
        for failed, *others in (first, second):
            assert failed[1] is not None
            assert "Input/output error" in failed[1]
            assert [error for _, error in others] == [None] * 3
        assert list((tmp_path / f"{failing}-{verb}" / "out").glob(".step*")) == []


def raise_on_error(rank: int, folder: str) -> int:
    storage = FailingOnce("write_at") if rank == 1 else LocalStorage()
    loop = Sharded()
    checkpointer = Checkpointer(
        f"{folder}/out", process_group=dist.group.WORLD, storage=storage, on_save_error="raise"
    )
    checkpointer.save(loop.state, step=loop.step())
    calls = 0

    def poll_for_ever() -> None:
        nonlocal calls
        while True:
            calls += 1
            checkpointer.poll()
            time.sleep(0.01 * (1 + rank))

    with pytest.raises(CheckpointError, match="rank 1: OSError"):
        poll_for_ever()
    checkpointer.close()
    return calls


def test_a_failure_is_raised_at_the_same_call_on_every_rank(tmp_path: Path) -> None:
    calls = spawn.run(raise_on_error, 2, str(tmp_path))
    assert calls[0] == calls[1]


class NotJson:
    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def one_rank_cannot_begin(rank: int, folder: str) -> list[tuple[str, str, float]]:
    """Rank 1 fails in save() before anything is handed over: at the first plan, and later."""
    loop, found = Sharded(), []
    with Checkpointer(f"{folder}/out", process_group=dist.group.WORLD) as checkpointer:
        for step, wrong in ((1, {"model": "no module"}), (2, None), (3, {"notes": NotJson()})):
            state = {**loop.state, **(wrong or {})} if rank == 1 else loop.state
            began = time.monotonic()
            try:
                checkpointer.save(state, step=step)
            except (CheckpointError, PeerLostError, TypeError) as error:
                found.append((type(error).__name__, str(error), time.monotonic() - began))
            checkpointer.poll()
        checkpointer.save(loop.state, step=4)
    preparation_module.free_host_bytes = lambda **_: 10 if rank == 1 else 1 << 40
    with Checkpointer(f"{folder}/out", process_group=dist.group.WORLD) as checkpointer:
        for step in (5, 6, 7):
            pending = checkpointer.save(loop.state, step=step)
            # No room for a copy on rank 1: nobody takes one.
            assert pending.done
            assert pending.staged_bytes == 0
    return found


def test_where_one_rank_cannot_begin_a_save_all_raise_at_once_and_go_on_together(
    tmp_path: Path,
) -> None:
    first, second = spawn.run(one_rank_cannot_begin, 2, str(tmp_path))
    assert [kind for kind, _, _ in first] == ["PeerLostError"] * 2
    for (_, told, seconds), (kind, text, _) in zip(first, second, strict=True):
        assert kind != "PeerLostError"
        assert told == f"no save is begun: rank 1: {kind}: {text}"
        assert seconds < 10
    assert sorted(p.name for p in (tmp_path / "out").glob("step_*")) == [
        f"step_{step}" for step in (2, 4, 5, 6, 7)
    ]


def open_in_the_way(rank: int, folder: str) -> str:
    out, model = f"{folder}/out", nn.Linear(1, 1)
    with Checkpointer(out, process_group=dist.group.WORLD, verify_on_load=True) as checkpointer:
        assert checkpointer.source is not None
        latest = checkpointer.latest()
        assert latest is not None
        assert checkpointer.source.step == latest.step == 6
        checkpointer.restore({"model": model})
        assert torch.equal(model.weight, torch.full((1, 1), 6.0))
        checkpointer.save({"model": model}, step=7).result()
        assert [info.status for info in checkpointer.steps()] == ["complete"] * 2
    with pytest.raises(CheckpointExistsError) as caught:
        Checkpointer(f"{folder}/out", process_group=dist.group.WORLD, resume=False)
    with Checkpointer(
        f"{folder}/out", process_group=dist.group.WORLD, resume=False, start_over=True
    ) as checkpointer:
        assert checkpointer.source is None
        facts = [caught.value.facts[name] for name in ("path", "steps")]
        return f"{caught.value} {facts} {checkpointer.run_id}"


def test_what_rank_0_finds_at_the_start_holds_for_every_rank(tmp_path: Path) -> None:
    """A damaged step: all go on from the one before. Steps in the way: all raise."""
    model = nn.Linear(1, 1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step in (6, 7):
            nn.init.constant_(model.weight, step)
            checkpointer.save({"model": model}, step=step)
    damaged = tmp_path / "out" / "step_7" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    messages = spawn.run(open_in_the_way, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "already holds step_6, step_7" in messages[0]
    assert f"['{tmp_path}/out', [6, 7]]" in messages[0]


def masters_of_a_sharded_model(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    master = nn.Parameter(distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)]))
    live = master.detach().to(torch.bfloat16)
    optimizer = torch.optim.AdamW([master])
    state = {
        "model": ModelPart(tensors={"w": live}, masters={"w": master}, file_dtype=torch.bfloat16),
        "optimizer": OptimizerPart(optimizer, {"w": master}),
    }
    with Checkpointer(f"{folder}/out", process_group=dist.group.WORLD) as checkpointer:
        committed = checkpointer.save(state, step=1).result()
        expected = master.full_tensor().detach().clone()
        with torch.no_grad():
            master.zero_()
            live.zero_()
        checkpointer.source = committed
        checkpointer.restore(state)
        assert torch.equal(master.full_tensor(), expected)
        assert torch.equal(live.full_tensor(), expected.to(torch.bfloat16))
    stored = load_file(f"{folder}/out/step_1/model.safetensors")["w"]
    assert torch.equal(stored, expected.to(torch.bfloat16))


def test_sharded_masters_are_restored_exactly(tmp_path: Path) -> None:
    spawn.run(masters_of_a_sharded_model, 2, str(tmp_path))


class KillingRank(FaultyStorage):
    """Kills its process before its first bytes of a weight file."""

    def before(self, operation: Operation, number: int, half: object) -> None:
        if operation.name == "write_at" and operation.path.endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)


def one_rank_dies(rank: int, folder: str) -> float:
    storage = KillingRank(LocalStorage(), fail_at=None) if rank == 1 else LocalStorage()
    loop = Sharded()
    checkpointer = Checkpointer(f"{folder}/out", process_group=dist.group.WORLD, storage=storage)
    pending = checkpointer.save(loop.state, step=loop.step())
    began = time.monotonic()
    pending.wait()
    assert pending.error is not None
    with contextlib.suppress(RuntimeError):
        checkpointer.poll()
    checkpointer._close_failing()
    return time.monotonic() - began


def test_when_a_rank_dies_the_others_end_soon_and_nothing_half_made_is_visible(
    tmp_path: Path,
) -> None:
    seconds = spawn.run(one_rank_dies, 2, str(tmp_path), may_die={1})[0]
    assert seconds < 30
    assert list((tmp_path / "out").glob("*step*")) == []
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is None


class OneWriterPerFile(FaultyStorage):
    """Fails unless each weight file is written by one process, front to back."""

    def __init__(self, folder: str, rank: int, *, fail_once: bool = False) -> None:
        super().__init__(LocalStorage(positioned_shared_writes=False), fail_at=None)
        self.folder = folder
        self.rank = rank
        self.fail_once = fail_once
        self.ends: dict[str, int] = {}

    def write_at(self, path: str, offset: int, data: Any) -> None:
        if self.fail_once and offset:
            self.fail_once = False
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        assert self.ends.get(path, 0) == offset, "not front to back"
        self.ends[path] = offset + len(memoryview(data))
        writer = Path(self.folder) / f"writer-of-{path.replace('/', '_')}"
        assert not writer.exists() or writer.read_text() == str(self.rank)
        writer.write_text(str(self.rank))
        super().write_at(path, offset, data)

    def create_file(self, path: str, size_bytes: int) -> None:
        self.ends[path] = 0
        super().create_file(path, size_bytes)


FAILING = (None, 0, 1)


def relay_in_turn(rank: int, folder: str) -> list[Arrays]:
    saver_module.RETRY_SECONDS = 0.0
    relay_module.MESSAGE_BYTES = 40
    return [relay_three_steps(rank, f"{folder}/{failing}", failing) for failing in FAILING]


def relay_three_steps(rank: int, folder: str, failing: int | None) -> Arrays:
    storage = OneWriterPerFile(folder, rank, fail_once=rank == failing)
    loop = Sharded()
    with Checkpointer(
        f"{folder}/out", process_group=dist.group.WORLD, storage=storage, max_file_bytes=200
    ) as checkpointer:
        failures = 0
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step())
            while checkpointer.in_flight is not None:
                failures += sum(r.error is not None for r in checkpointer.poll())
                time.sleep(0.02)
        assert failures == (failing is not None)
    return arrays(loop.whole())


def test_where_a_file_may_have_one_writer_the_others_send_their_slices(tmp_path: Path) -> None:
    by_failing = spawn.run(relay_in_turn, 3, str(tmp_path))[0]
    for failing, expected in zip(FAILING, by_failing, strict=True):
        out = tmp_path / str(failing) / "out"
        found: dict[str, torch.Tensor] = {}
        for path in out.glob("step_3/state/*.safetensors"):
            found |= load_file(path)
        for path in out.glob("step_3/model*.safetensors"):
            found |= {f"model/{key}": value for key, value in load_file(path).items()}
        assert_equal(arrays(found), expected)
        with Checkpointer(out, verify_on_load=True) as checkpointer:
            assert [info.is_complete for info in checkpointer.steps()] == [True] * 3
            assert checkpointer.source is not None
            assert find_damage(LocalStorage(), checkpointer.source) == []


def on_disks_of_their_own(rank: int) -> list[str]:
    """Each rank's disk is in its own memory: what hosts see that share none."""
    fetch_module.MESSAGE_BYTES = relay_module.MESSAGE_BYTES = 40
    socket.gethostname = lambda: f"host-{rank}"
    disk = MemoryStorage()
    group: dict[str, Any] = {"process_group": dist.group.WORLD, "shared_storage": False}
    loop = Sharded()
    with Checkpointer("/run", storage=disk, max_file_bytes=200, **group) as checkpointer:
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step())
    found = [name for name in disk.list_folder("/run") if name.startswith("step_")]
    assert found == (["step_1", "step_2", "step_3"] if rank == 0 else [])
    # Step 4 is made of step 3, and again of step 2.
    for resume, step, made_of in (("auto", 3, 3), ("/run/step_2", 2, 2), ("auto", 4, 2)):
        resumed = Sharded()
        with Checkpointer(
            "/run", storage=disk, resume=resume, start_over=True, **group
        ) as checkpointer:
            assert checkpointer.restore(resumed.state) == {"step": made_of, "notes": []}
            if step == 3:
                assert_equal(arrays(resumed.whole()), arrays(loop.whole()))
            checkpointer.save(resumed.state, step=4)
        assert disk.list_folder("/run/.source") == ([f"step_{step}"] if rank else [])
    for is_damaged in (False, True):  # what rots on a host is brought there again
        if is_damaged and rank == 1:
            path = "/run/.source/step_4/model.safetensors"
            disk.write_bytes(path, disk.read_bytes(path)[:-1] + b"x")
        with Checkpointer("/run", storage=disk, verify_on_load=True, **group) as checkpointer:
            assert checkpointer.source is not None
            assert checkpointer.source.step == 4
            assert find_damage(disk, checkpointer.source) == []
    if rank == 0:
        assert [find_damage(disk, step.committed()) for step in checkpointer.steps()] == [[]] * 3
    told = []
    # A host that can't take the step; then another host as the first one.
    disk.remove_tree("/run/.source" if rank == 1 else "/absent")
    failing = FailingOnce("write_at", disk) if rank == 1 else disk
    for storage in (failing, MemoryStorage() if rank == 0 else disk):
        with pytest.raises((CheckpointError, PeerLostError)) as caught:
            Checkpointer("/run", storage=storage, **group)
        told.append(str(caught.value))
    return told


def test_hosts_that_share_no_disk_save_to_rank_0_and_resume_from_there() -> None:
    first, second, third = spawn.run(on_disks_of_their_own, 3)
    # Whoever fails is named, and nobody waits for it.
    assert "Input/output error" in second[0]
    assert first[0] == third[0] == f"rank 1: CheckpointError: {second[0]}"
    # The run doesn't begin anew unnoticed.
    assert first[1] == second[1] == third[1]
    assert first[1].startswith("host host-2 (rank 2) holds step_4, and host host-0 (rank 0), ")


def save_to_a_bucket(rank: int, address: str) -> Arrays:
    """An object store: whole files with one writer each, no rename in one step."""
    store = RemoteStorage(s3.connect(address))
    group = dist.group.WORLD
    loop = Sharded()
    with Checkpointer(
        "/bucket/run", process_group=group, storage=store, keep=KeepLast(2), max_file_bytes=200
    ) as checkpointer:
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step())
        expected = arrays(loop.whole())
    resumed = Sharded()
    with Checkpointer("/bucket/run", process_group=group, storage=store) as checkpointer:
        assert checkpointer.restore(resumed.state) == {"step": 3, "notes": []}
        assert_equal(arrays(resumed.whole()), expected)
        if rank == 0:
            assert [info.step for info in checkpointer.steps()] == [2, 3]
    return expected


def test_ranks_save_to_a_bucket_and_one_process_goes_on_from_it() -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3.serving() as address:
        expected = spawn.run(save_to_a_bucket, 2, address)[0]
        store = RemoteStorage(s3.connect(address))
        assert store.list_folder("/bucket/run") == ["step_2", "step_3"]
        assert len([n for n in store.list_folder("/bucket/run/step_3") if "-of-" in n]) > 1
        model = Sharded.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer, "trainer": Counter()}
        with Checkpointer("/bucket/run", storage=store, verify_on_load=True) as checkpointer:
            assert checkpointer.restore(state) == {"step": 3, "notes": []}
    found = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    assert_equal(arrays({name: value.detach() for name, value in found.items()}), expected)
