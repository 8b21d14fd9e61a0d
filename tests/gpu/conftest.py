"""Twins of the CPU tests for a CUDA device; skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

# Read by cuBLAS at its start: what makes its kernels repeat their bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

EXPECTED = (
    "ignore:TensorFloat32 tensor cores",  # advice that inductor gives where fp32 is computed
    "ignore:The .grad attribute of a Tensor",  # read while torch compiles
)


@pytest.fixture(autouse=True)
def kernels_that_repeat_their_bits() -> Iterator[None]:
    """Backward of attention and of a compiled embedding adds up in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def compiled_apart(own_compiler_state: None) -> None:
    """Here many tests compile: each has a state of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="there is no CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            for warning in EXPECTED:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if not torch.cuda.is_available():
                item.add_marker(skip)
