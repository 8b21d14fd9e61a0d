"""The kept plan: the same folder on every rank, each byte written by one of them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from legato.checkpoint import ModelPart, OptimizerPart
from legato.checkpoint.manifest import FileEntry, Slice, check_coverage
from legato.checkpoint.parts import Parts
from legato.checkpoint.plan import SavePlan, plan_save
from legato.errors import CheckpointError


def parts_of(model: ModelPart, optimizer: OptimizerPart | None = None) -> Parts:
    return Parts(model=model, optimizer=optimizer, rng=None, others={})


def entries(plans: list[SavePlan]) -> dict[str, FileEntry]:
    """What the manifest of these ranks' plans would say."""
    return {
        file.name: FileEntry(
            file.size_bytes,
            tuple(
                Slice(runs.offset, runs.run_bytes, "", runs.num_runs, runs.distance_bytes)
                for plan in plans
                for write in plan.writes[file.name]
                for runs in write.runs
            ),
            "",
        )
        for file in plans[0].files
    }


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2]


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    world_size=st.integers(1, 5),
    max_file_bytes=st.integers(1, 200),
)
def test_all_ranks_together_write_every_byte_once(
    shapes: list[list[int]], dtypes: list[torch.dtype], world_size: int, max_file_bytes: int
) -> None:
    tensors = {
        f"t{i}": torch.zeros(shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    plans = [
        plan_save(
            parts_of(ModelPart(tensors=tensors)),
            rank=rank,
            world_size=world_size,
            max_file_bytes=max_file_bytes,
        )
        for rank in range(world_size)
    ]
    assert len({plan.layout_digest for plan in plans}) == 1
    for file, entry in zip(plans[0].files, entries(plans).values(), strict=True):
        assert entry.header_bytes == len(file.header)
        check_coverage(file.name, entry)


def test_a_bf16_weight_comes_from_its_master_and_only_the_master_is_staged() -> None:
    live, master, frozen = torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.ones(3)
    model = ModelPart(
        tensors={"w": live, "frozen": frozen}, masters={"w": master}, file_dtype=torch.bfloat16
    )
    plan = plan_save(parts_of(model))
    assert {name: t.dtype for name, t in plan.sources.items()} == {
        "master/w": torch.float32,
        "model/frozen": torch.float32,
    }
    weights, state = plan.files
    assert {key: spec.dtype for key, spec in weights.specs.items()} == {
        "w": torch.bfloat16,
        "frozen": torch.float32,
    }
    assert list(state.specs) == ["master/w"]


def test_without_state_the_live_weight_is_staged_because_it_is_smaller() -> None:
    live, master = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    model = ModelPart(tensors={"w": live}, masters={"w": master})
    plan = plan_save(parts_of(model), with_state=False)
    assert {name: t is live for name, t in plan.sources.items()} == {"model/w": True}
    assert [file.name for file in plan.files] == ["model.safetensors"]


def test_optimizer_files_are_numbered_and_as_many_as_local_ranks() -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(6)))
    optimizer = torch.optim.SGD(layers.parameters(), momentum=0.9)
    layers(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names: dict[str, Tensor] = dict(layers.named_parameters())
    parts = parts_of(ModelPart(tensors=names), OptimizerPart(optimizer, names))
    plan = plan_save(parts, world_size=4, local_ranks=4)
    numbered = [file.name for file in plan.files[1:]]
    assert len(numbered) >= 4
    assert numbered[0] == f"state/optimizer-00001-of-{len(numbered):05d}.safetensors"
    (single,) = plan_save(parts).files[1:]
    assert single.name == "state/optimizer-00001-of-00001.safetensors"


def test_an_adapter_is_one_file_however_large() -> None:
    tensors = {f"t{i}": torch.ones(100) for i in range(5)}
    adapter = ModelPart(tensors=tensors, kind="adapter")
    plan = plan_save(parts_of(adapter), max_file_bytes=100)
    assert [file.name for file in plan.files] == ["adapter_model.safetensors"]
    model = plan_save(parts_of(ModelPart(tensors=tensors)), max_file_bytes=900)
    index = json.loads(model.small_files["model.safetensors.index.json"])
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]


def test_tensors_of_unknown_kinds_are_refused_by_name() -> None:
    class Packed(Tensor):
        pass

    packed = torch.ones(2).as_subclass(Packed)
    with pytest.raises(CheckpointError, match="w is a Packed"):
        plan_save(parts_of(ModelPart(tensors={"w": packed})))
