"""Random trees of tensors, placed at random on some of the ranks of a process group."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from legato.checkpoint import Checkpointer, ModelPart
from legato.checkpoint.opening import find_step
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.restore import restore_parts
from legato.storage import LocalStorage

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
)
# How many ranks a tree lies on. Four are a line, or two replicas of two.
NUM_RANKS = (1, 2, 3, 4)
# A place: a mesh, None being a single process, and where a tensor lies on it.
Place = tuple[DeviceMesh | None, list[Placement]]


def write_and_read(rank: int, folder: str, *, seeds: Sequence[int]) -> None:
    """Collective on four ranks: for each seed some ranks write a tree, and others read it back.

    Bit for bit: by the safetensors library whole, and by each reading rank its own part.
    """
    meshes = {
        num: [DeviceMesh("cpu", list(range(num)))] if num > 1 else [None] for num in NUM_RANKS
    }
    meshes[4].append(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    writers = {(num, whole): _open(num, folder, whole) for num in NUM_RANKS for whole in (0, 1)}
    for seed in seeds:
        choose = random.Random(seed)
        tree = _build_tree(choose)
        num_writers, num_readers = choose.choice(NUM_RANKS), choose.choice(NUM_RANKS)
        whole_files = choose.randint(0, 1)
        placed = _place(tree, choose.choice(meshes[num_writers]), choose)
        shaped = _place(tree, choose.choice(meshes[num_readers]), choose)
        path = f"{folder}/{num_writers}-{whole_files}/step_{seed}"
        if (writer := writers[num_writers, whole_files]) is not None:
            state = {"model": ModelPart(tensors=_tensors_of(tree, placed))}
            assert writer.save(state, step=seed).result().path == path
        dist.barrier()
        if rank == 0:
            files = list(Path(path).glob("*.safetensors"))
            found = {key: value for file in files for key, value in load_file(file).items()}
            _assert_bits(found, tree, seed)
        if rank < num_readers:
            targets = _tensors_of(tree, shaped)
            parts = {name: _local(tensor) for name, tensor in targets.items()}
            expected = {name: part.clone() for name, part in parts.items()}
            for part in parts.values():
                part.copy_(torch.zeros_like(part))
            storage = LocalStorage()
            restore_parts(
                sort_parts({"model": ModelPart(tensors=targets)}),
                find_step(storage, path),
                storage=storage,
                rank=rank,
            )
            _assert_bits(parts, expected, seed)
        dist.barrier()
    for writer in writers.values():
        if writer is not None:
            writer.close()


def _open(num_ranks: int, folder: str, whole_files: int) -> Checkpointer | None:
    """Collective: a run on the first ranks; files are written by all, or by one rank each."""
    ranks = list(range(num_ranks))
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        for _ in range(2):  # those that an opened run makes: every process is to know of each
            dist.new_group(ranks)
        return None
    return Checkpointer(
        f"{folder}/{num_ranks}-{whole_files}",
        process_group=group,
        storage=LocalStorage(positioned_shared_writes=not whole_files),
        max_file_bytes=150,
    )


def _build_tree(choose: random.Random) -> dict[str, Tensor]:
    tree = {}
    for i in range(choose.randint(1, 7)):
        shape = [choose.randint(0, 7) for _ in range(choose.randint(0, 3))]
        dtype = choose.choice(DTYPES)
        count = math.prod(shape) * dtype.itemsize
        bits = [choose.randrange(2 if dtype == torch.bool else 256) for _ in range(count)]
        # Any bits: NaN payloads and negative zeros included.
        tree[f"t{i}"] = torch.tensor(bits, dtype=torch.uint8).view(dtype).reshape(shape)
    return tree


def _place(
    tree: dict[str, Tensor], mesh: DeviceMesh | None, choose: random.Random
) -> dict[str, Place]:
    """For each tensor rows, columns, deeper dims, replicas; on a square two of them."""
    places: dict[str, Place] = {}
    for name, tensor in tree.items():
        if mesh is None or choose.random() < 0.2:
            places[name] = (None, [])
            continue
        dims = list(range(tensor.dim()))
        choose.shuffle(dims)
        placements: list[Placement] = []
        for _ in range(mesh.ndim):
            shards = dims and choose.random() < 0.75
            placements.append(Shard(dims.pop()) if shards else Replicate())
        places[name] = (mesh, placements)
    return places


def _tensors_of(tree: dict[str, Tensor], places: dict[str, Place]) -> dict[str, Tensor]:
    """This rank's tensors, cut as torch says."""
    found: dict[str, Tensor] = {}
    for name, whole in tree.items():
        mesh, placements = places[name]
        part = whole.clone()
        if mesh is not None:
            sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, min(offset, whole.shape[dim]), size)
            part = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                mesh,
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        found[name] = part
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor], seed: int) -> None:
    assert found.keys() == expected.keys(), f"seed {seed}"
    for name, value in expected.items():
        other, where = found[name], f"seed {seed}, {name}"
        assert (other.dtype, other.shape) == (value.dtype, value.shape), where
        assert torch.equal(_bits(other), _bits(value)), where


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
