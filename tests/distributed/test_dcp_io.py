"""``dcp.save`` and ``dcp.load`` over Hugging Face folders: every sharding, other world sizes."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from legato.checkpoint.reader import FolderStorageReader
from legato.checkpoint.writer import FolderStorageWriter
from legato.storage import LocalStorage
from tests.helpers.faults import FaultyStorage
from tests.helpers.spawn import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Name -> (shape, dtype, dim that is sharded; None: replicated; "plain": no DTensor).
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, Any]] = {
    "even": ((8, 6), torch.float32, 0),
    "uneven": ((7, 6), torch.float32, 0),
    "one_row": ((1, 6), torch.float32, 0),
    "vector": ((5,), torch.float32, 0),
    "columns": ((6, 8), torch.float32, 1),
    "middle": ((3, 8, 2), torch.float32, 1),
    "bf16": ((7, 3), torch.bfloat16, 0),
    "fp8": ((6, 4), torch.float8_e4m3fn, 0),
    "int64": ((9,), torch.int64, 0),
    "bool": ((10, 3), torch.bool, 0),
    "empty": ((0, 4), torch.float32, 0),
    "replicated": ((4, 4), torch.float32, None),
    "plain": ((3, 3), torch.float32, "plain"),
    "scalar": ((), torch.float32, "plain"),
    "count": ((), torch.int64, "plain"),
}
MAX_FILE_BYTES = 300  # several files


def full_tree() -> dict[str, Tensor]:
    """The same random bits on every rank and in the test."""
    generator = torch.Generator().manual_seed(7)
    tree = {}
    for name, (shape, dtype, _) in CASES.items():
        high = 2 if dtype == torch.bool else 100
        tree[name] = torch.randint(0, high, shape, generator=generator).to(dtype)
    return tree


def local_part(tensor: Tensor, dim: int, num_parts: int, part: int) -> Tensor:
    chunks = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype)
    found = chunks.chunk(num_parts, dim)
    if part < len(found):
        return found[part].contiguous().clone().view(tensor.dtype)
    shape = list(tensor.shape)
    shape[dim] = 0
    return torch.empty(shape, dtype=tensor.dtype)


def placed(tree: Mapping[str, Tensor], mesh: DeviceMesh, *, turned: bool) -> dict[str, Tensor]:
    """The tree as ranks hold it; ``turned`` shards matrices along their other dim."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    found = {}
    for name, tensor in tree.items():
        dim = CASES[name][2]
        if dim == "plain":
            found[name] = tensor.clone()
            continue
        placements: list[Placement] = [Replicate()] * mesh.ndim
        local = tensor.clone()
        if dim is not None:
            if turned and tensor.ndim == 2:
                dim = 1 - dim
            placements[-1] = Shard(dim)
            local = local_part(tensor, dim, mesh.size(mesh.ndim - 1), coordinate[-1])
        found[name] = DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return found


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8),
        right.contiguous().reshape(-1).view(torch.uint8),
    )


def save_everything(rank: int, folder: str, world_size: int) -> None:
    group = dist.new_group(backend="gloo")
    tree = full_tree()
    meshes = {"line": init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        meshes["grid"] = init_device_mesh("cpu", (2, 2))
    for name, mesh in meshes.items():
        writer = FolderStorageWriter(f"{folder}/{name}", max_file_bytes=MAX_FILE_BYTES)
        dcp.save(placed(tree, mesh, turned=False), storage_writer=writer, process_group=group)


def load_everything(rank: int, folders: list[str], world_size: int) -> None:
    tree = full_tree()
    mesh = init_device_mesh("cpu", (world_size,))
    for folder in folders:
        for turned in (False, True):
            blank = {name: torch.zeros_like(value) for name, value in tree.items()}
            target = placed(blank, mesh, turned=turned)
            reader = FolderStorageReader(folder)
            dcp.load(target, storage_reader=reader)
            expected = placed(tree, mesh, turned=turned)
            for name, value in expected.items():
                assert same_bits(local_of(target[name]), local_of(value)), (folder, turned, name)
            own_bytes = sum(local_of(value).nbytes for value in expected.values())
            assert reader.bytes_read == own_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One folder per way of saving: 1, 2 and 4 ranks in a line, 4 in a grid of replicas."""
    root = tmp_path_factory.mktemp("dcp")
    for world_size in (1, 2, 4):
        (root / str(world_size)).mkdir()
        run(save_everything, world_size, str(root / str(world_size)), world_size)
    return {
        "1": str(root / "1" / "line"),
        "2": str(root / "2" / "line"),
        "4": str(root / "4" / "line"),
        "2x2": str(root / "4" / "grid"),
    }


@pytest.mark.parametrize("way", ["1", "2", "4", "2x2"])
def test_whoever_saves_safetensors_reads_the_same_bits(saved: dict[str, str], way: str) -> None:
    files = sorted(Path(saved[way]).glob("*.safetensors"))
    assert len(files) > 3
    found: dict[str, Tensor] = {}
    for path in files:
        found |= safetensors.torch.load_file(path)
    tree = full_tree()
    assert found.keys() == tree.keys()
    for name, value in tree.items():
        assert found[name].dtype == value.dtype
        assert same_bits(found[name], value), name


def test_the_bytes_of_a_folder_do_not_tell_how_many_ranks_wrote_it(saved: dict[str, str]) -> None:
    folders = [
        {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        for folder in saved.values()
    ]
    assert all(folder == folders[0] for folder in folders)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_folder_loads_on_another_world_and_ranks_read_their_own_bytes_only(
    saved: dict[str, str], world_size: int
) -> None:
    run(load_everything, world_size, list(saved.values()), world_size)


def save_sharded_model(rank: int, model_dir: str, folder: str) -> list[str]:
    from transformers import AutoModelForCausalLM

    group = dist.new_group(backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    config = (Path(model_dir) / "config.json").read_bytes()

    def writer(name: str, **options: Any) -> FolderStorageWriter:
        return FolderStorageWriter(
            f"{folder}/{name}", files={"config.json": config}, max_file_bytes=20_000, **options
        )

    # Three background saves in a row, changed in place right after each began.
    for number in (1, 2, 3):
        future: Any = dcp.async_save(
            weights, storage_writer=writer(f"step_{number}"), process_group=group
        )
        with torch.no_grad():
            for value in weights.values():
                value.add_(1.0)
        future.result()

    # A rank that can't write: everyone hears it, and no folder appears.
    disk = FaultyStorage(LocalStorage(), fail_at=1 if rank == 1 else None)
    disk.error = OSError(errno.EIO, "the disk of rank 1 is broken")
    try:
        dcp.save(weights, storage_writer=writer("broken", storage=disk), process_group=group)
    except CheckpointException as error:
        return [str(failure) for failure, _ in error.failures.values()]
    return []


def test_a_sharded_model_saved_in_the_background_opens_in_transformers(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    heard = run(save_sharded_model, 2, str(tiny_model_dir), str(tmp_path))
    assert heard == [["[Errno 5] the disk of rank 1 is broken"]] * 2
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert names == ["step_1", "step_2", "step_3"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for number in (1, 2, 3):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"step_{number}")
        assert found.lm_head.weight is found.model.embed_tokens.weight
        for name, value in found.named_parameters():
            assert torch.equal(value, model.get_parameter(name)), name
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1.0)
