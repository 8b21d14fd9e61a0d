"""Which part of a tensor each of four ranks writes: every part once, replicas by one rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from legato.hf_folder import Box, local_box, own_box
from tests.helpers.spawn import run

pytestmark = pytest.mark.distributed

Boxes = dict[str, tuple[Box | None, Box | None]]


def boxes_of_rank(rank: int) -> Boxes:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tensors: dict[str, torch.Tensor] = {
        "rows": distribute_tensor(torch.zeros(6, 3), line, [Shard(0)]),
        "few_rows": distribute_tensor(torch.zeros(2, 3), line, [Shard(0)]),
        "columns": distribute_tensor(torch.zeros(3, 8), line, [Shard(1)]),
        "replicated": distribute_tensor(torch.zeros(3), line, [Replicate()]),
        "hybrid": distribute_tensor(torch.zeros(5, 2), grid, [Replicate(), Shard(0)]),
        "both": distribute_tensor(torch.zeros(8, 2), grid, [Shard(0), Shard(0)]),
        "grid": distribute_tensor(torch.zeros(4, 6), grid, [Shard(1), Shard(0)]),
        "plain": torch.zeros(2, 2),
    }
    assert all(isinstance(value, DTensor) for key, value in tensors.items() if key != "plain")
    return {key: (own_box(value), local_box(value)) for key, value in tensors.items()}


def test_each_rank_writes_its_part_and_one_rank_each_replica() -> None:
    by_rank: list[Boxes] = run(boxes_of_rank, 4)
    written = {key: [boxes[key][0] for boxes in by_rank] for key in by_rank[0]}
    assert written == {
        "rows": [Box((0, 0), (2, 3)), Box((2, 0), (2, 3)), Box((4, 0), (2, 3)), None],
        "few_rows": [Box((0, 0), (1, 3)), Box((1, 0), (1, 3)), None, None],
        "columns": [Box((0, 2 * rank), (3, 2)) for rank in range(4)],
        "replicated": [Box((0,), (3,)), None, None, None],
        "hybrid": [Box((0, 0), (3, 2)), Box((3, 0), (2, 2)), None, None],
        "both": [Box((2 * rank, 0), (2, 2)) for rank in range(4)],
        "grid": [
            Box((0, 0), (2, 3)),
            Box((2, 0), (2, 3)),
            Box((0, 3), (2, 3)),
            Box((2, 3), (2, 3)),
        ],
        "plain": [Box((0, 0), (2, 2))] * 4,
    }
    held = [boxes["hybrid"][1] for boxes in by_rank]
    assert held == [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))] * 2
    assert [boxes["replicated"][1] for boxes in by_rank] == [Box((0,), (3,))] * 4
