"""A snapshot is a copy that nothing changes any more."""

from __future__ import annotations

import pytest
import torch

from legato.checkpoint.staging import LiveValues, Stager
from legato.errors import CheckpointError

SOURCES = {
    "model/matrix": torch.arange(6.0).view(2, 3),
    "model/transposed": torch.arange(6.0).view(2, 3).t(),
    "model/half": torch.ones(3, dtype=torch.bfloat16),
    "model/float8": torch.ones(3).to(torch.float8_e4m3fn),
    "model/scalar": torch.tensor(2.5),
    "model/flags": torch.tensor([True, False, True]),
    "model/empty": torch.zeros(0, 4),
    "optimizer/step/w": torch.tensor(7),
}


def copies() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in SOURCES.items()}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_no_tensor_and_no_scalar_of_a_snapshot_changes_with_the_live_one() -> None:
    live = copies()
    stager = Stager(live)
    snapshot = stager.stage({"rng/torch": torch.arange(3)})
    snapshot.wait()
    for tensor in live.values():
        tensor.view(torch.uint8).zero_() if tensor.dtype.itemsize == 1 else tensor.zero_()
    for name, expected in SOURCES.items():
        value = snapshot.value(name)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert value.is_contiguous()
        assert bits(value) == bits(expected), name
    assert snapshot.value("rng/torch").tolist() == [0, 1, 2]
    assert snapshot.staged_bytes == sum(t.numel() * t.element_size() for t in SOURCES.values())


def test_buffers_are_allocated_once() -> None:
    stager = Stager(copies())
    addresses = [
        {name: stager.stage().value(name).data_ptr() for name in SOURCES if "empty" not in name}
        for _ in range(3)
    ]
    assert addresses[0] == addresses[1] == addresses[2]


def test_the_check_finds_a_snapshot_that_was_changed() -> None:
    stager = Stager(copies(), check=True)
    stager.stage().wait()
    snapshot = stager.stage()
    snapshot.value("model/matrix").add_(1)
    with pytest.raises(CheckpointError, match="the snapshot of model/matrix differs"):
        snapshot.wait()


def test_the_check_finds_a_tensor_that_was_replaced() -> None:
    live = copies()
    stager = Stager(live, check=True)
    stager.stage()
    live["model/matrix"].data = torch.zeros(2, 3)
    with pytest.raises(CheckpointError, match="model/matrix has moved in memory"):
        stager.stage()


def test_too_little_memory_is_a_memory_error_before_anything_is_touched() -> None:
    with pytest.raises(MemoryError, match="100 are free"):
        Stager(copies(), available_bytes=100)


def test_live_values_are_no_copies() -> None:
    live = copies()
    values = LiveValues(live, {})
    live["model/matrix"].zero_()
    assert values.value("model/matrix").sum() == 0
    assert not values.is_copy
