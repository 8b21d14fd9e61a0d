"""Kernels that repeat their bits, for a run that asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from legato.errors import ConfigError, first_line


@contextmanager
def repeated_bits(asked: bool) -> Iterator[None]:
    """Let torch take only algorithms that give the same bits each time, until the block ends.

    Some kernels of a GPU add up in any order, such as backward of its fast attention; on a CPU
    torch's own repeat their bits anyway. The block has to begin before the GPU is first used:
    cuBLAS reads at its start how much memory it may take for this.

    Args:
        asked: A config's ``deterministic``; false: nothing is changed.

    Yields:
        None: the block computes.

    Raises:
        ConfigError: The model computes something that torch has no such algorithm for.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    is_ours = "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise ConfigError(
            f"deterministic: {first_line(error).partition(', but you set')[0]}. Set "
            "deterministic: false, or another attention."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        if is_ours:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
