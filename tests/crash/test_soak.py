"""Many saves with processes killed at random moments, on one rank and on two in turn.

LEGATO_SOAK_SAVES says how many saves must be acknowledged (``make soak``: 200), LEGATO_SOAK_SEED
repeats the same lives; moments of a kill depend on the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from legato.checkpoint import Checkpointer, KeepEvery, KeepLast, ModelPart, OptimizerPart
from legato.checkpoint.lifecycle import RunFolder
from legato.cli.main import main
from legato.storage import LocalStorage

NUM_SAVES = int(os.environ.get("LEGATO_SOAK_SAVES", "30"))
SEED = int(os.environ.get("LEGATO_SOAK_SEED", str(time.time_ns() % 1_000_000)))
# How long a rank may live on after its peer was killed.
ALONE_SECONDS = 30.0
STARTING_SECONDS = 60.0

# Fewer rows than ranks need, uneven ones, 16 bits, an integer scalar.
SHAPES = {"a.weight": (7, 16), "b.weight": (64, 32), "norm.weight": (3,)}
DTYPES = {"norm.weight": torch.bfloat16}
MOMENTS = ("exp_avg", "exp_avg_sq")


def expected(step: int) -> dict[str, Tensor]:
    """What a folder of ``step`` holds, key by key: every value is a function of the step."""
    found = {"count": torch.tensor(step)}
    for number, (name, shape) in enumerate(SHAPES.items()):
        size = torch.Size(shape).numel()
        for offset, key in enumerate([name, *(f"{moment}/{name}" for moment in MOMENTS)]):
            dtype = DTYPES.get(name, torch.float32)
            values = torch.arange(size) * (offset + 1) + number + step
            found[key] = values.reshape(shape).to(dtype)
        found[f"step/{name}"] = torch.tensor(float(step))
    return found


# -- a process that trains, and is killed


class Training:
    """Tensors whose values are set by hand; sharded by rows when there are two ranks."""

    def __init__(self, world_size: int) -> None:
        self.mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
        start = expected(0)
        self.weights = {name: self.shard(start[name]) for name in SHAPES}
        self.weights["count"] = start["count"]
        trained = {name: self.weights[name] for name in SHAPES}
        self.optimizer = torch.optim.AdamW(list(trained.values()))
        for name, tensor in trained.items():
            self.optimizer.state[tensor] = {
                "step": start[f"step/{name}"],
                **{key: self.shard(start[f"{key}/{name}"]) for key in MOMENTS},
            }
        self.step = 0
        self.parts = {
            "model": ModelPart(self.weights),
            "optimizer": OptimizerPart(self.optimizer, names=trained),
            "trainer": self,
        }

    def shard(self, tensor: Tensor) -> Tensor:
        if self.mesh is None or tensor.dim() == 0:
            return tensor.clone()
        return distribute_tensor(tensor, self.mesh, [Shard(0)], src_data_rank=None)

    def live(self) -> dict[str, Tensor]:
        moments = {
            f"{key}/{name}": value
            for name in SHAPES
            for key, value in self.optimizer.state[self.weights[name]].items()
        }
        return self.weights | moments

    def set_values(self, step: int) -> None:
        values = expected(step)
        for key, tensor in self.live().items():
            local(tensor).copy_(local(self.shard(values[key])))
        self.step = step

    def has_values(self, step: int) -> bool:
        values = expected(step)
        return self.step == step and all(
            torch.equal(local(tensor), local(self.shard(values[key])))
            for key, tensor in self.live().items()
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(rank: int, world_size: int, folder: Path, life: int, last_step: int | None) -> None:
    """Save every step until killed, or until ``last_step``; tell of every committed one."""
    try:
        if world_size > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.FileStore(str(folder / f"store-{life}"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        _train(rank, world_size, folder, last_step)
    except BaseException:
        (folder / f"error-{life}-{rank}").write_text(traceback.format_exc())
        raise


def _train(rank: int, world_size: int, folder: Path, last_step: int | None) -> None:
    log = os.open(folder / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    training = Training(world_size)
    with Checkpointer(
        folder / "out",
        keep=KeepLast(3) | KeepEvery(10),
        keep_last_n_states=2,
        max_file_bytes=4096,
        process_group=dist.group.WORLD if world_size > 1 else None,
        final_save_patience_seconds=0,
    ) as checkpointer:
        restored = checkpointer.restore(training.parts)
        start = 0 if restored is None else restored["step"]
        assert restored is None or training.has_values(start), f"step {start} came back changed"
        for step in itertools.count(start + 1):
            training.set_values(step)
            checkpointer.save(training.parts, step=step)
            training.set_values(-step)  # what is being written mustn't see this
            acknowledge(checkpointer, log if rank == 0 else None)
            if step == last_step:
                break
        checkpointer.drain()
        acknowledge(checkpointer, log if rank == 0 else None)


def acknowledge(checkpointer: Checkpointer, log: int | None) -> None:
    for record in checkpointer.poll():
        assert record.error is None, record.error
        if log is not None:
            os.write(log, f"{record.step}\n".encode())


# -- the parent, which kills


def acknowledged(folder: Path) -> list[int]:
    log = folder / "acknowledged"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def start(folder: Path, life: int, world_size: int, last_step: int | None) -> list[BaseProcess]:
    # Forked from a server that has imported torch: a start takes a fraction of a second.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [
        context.Process(target=train, args=(rank, world_size, folder, life, last_step), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def wait_for_saves(folder: Path, ranks: list[BaseProcess], number: int) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while len(acknowledged(folder)) < number:
        assert all(process.is_alive() for process in ranks), errors(folder)
        assert time.monotonic() < deadline, f"no save in {STARTING_SECONDS} s"
        time.sleep(0.005)


def errors(folder: Path) -> str:
    return "\n".join(f"{p.name}: {p.read_text()}" for p in sorted(folder.glob("error-*")))


def check_newest(folder: Path) -> int:
    """Every step that is visible is complete, and none that was acknowledged newest is lost."""
    steps = RunFolder(LocalStorage(), str(folder / "out")).steps()
    assert [info.problem for info in steps if not info.is_complete] == []
    newest = max((info.step for info in steps), default=0)
    assert newest >= max(acknowledged(folder), default=0)
    return newest


def check_values(step_folder: Path) -> None:
    """Read by the safetensors library: every tensor that the folder must hold, bit for bit."""
    step = int(step_folder.name.removeprefix("step_"))
    has_state = (step_folder / "state").exists()
    wanted = {k: v for k, v in expected(step).items() if has_state or "/" not in k}
    found = {}
    for path in step_folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert found.keys() == wanted.keys(), step_folder
    assert all(torch.equal(found[key], wanted[key]) for key in wanted), step_folder


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_again_and_again_no_acknowledged_step_is_lost_or_torn(
    tmp_path: Path,
) -> None:
    dice = random.Random(SEED)
    print(f"LEGATO_SOAK_SEED={SEED}")
    for life in itertools.count():
        before = len(acknowledged(tmp_path))
        if before >= NUM_SAVES:
            break
        ranks = start(tmp_path, life, dice.choice((1, 2)), last_step=None)
        num_saves = dice.randint(0, NUM_SAVES // 4)
        # One that starts alone would wait for its peer: what starts processes has to see to that.
        victims = ranks if num_saves == 0 or dice.random() < 0.5 else [dice.choice(ranks)]
        try:
            wait_for_saves(tmp_path, ranks, before + num_saves)
            time.sleep(dice.random() * 0.1)
        finally:
            for process in victims:
                process.kill()
            for process in ranks:
                process.join(ALONE_SECONDS)
                if process.is_alive():
                    process.kill()
                    pytest.fail(f"a rank lived on for {ALONE_SECONDS} s after its peer was killed")
        if (tmp_path / "out").exists():
            newest = check_newest(tmp_path)
            if newest:
                check_values(tmp_path / "out" / f"step_{newest}")

    last_step = check_newest(tmp_path) + 3
    for process in start(tmp_path, life, 2, last_step):
        process.join(STARTING_SECONDS)
        assert process.exitcode == 0, errors(tmp_path)

    steps = sorted((tmp_path / "out").glob("step_*"), key=lambda p: int(p.name[5:]))
    assert check_newest(tmp_path) == last_step
    assert [int(p.name[5:]) for p in steps[-3:]] == [last_step - 2, last_step - 1, last_step]
    for step_folder in steps:
        check_values(step_folder)
    assert main(["ckpt", "verify", str(tmp_path / "out")]) == 0
    # The last start has cleaned up after all the kills.
    left = {p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")}
    assert left == {".lock"}
