"""Random streams that are computed, not stored: a resumed run draws what it would have drawn."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch


def derived_seed(seed: int, *, step: int, micro_batch: int, rank: int) -> int:
    """A seed of its own for each micro-batch of each step on each rank.

    A hash and not a sum: with ``seed + step``, step 2 of seed 0 would draw as step 1 of seed 1.

    Args:
        seed: The run's seed.
        step: Optimizer step, from 1.
        micro_batch: Number within the step, from 0; -1 for the update itself.
        rank: Process number.

    Returns:
        63 bits, the same on every machine and in every version of Python.
    """
    facts = f"{seed},{step},{micro_batch},{rank}".encode()
    return int.from_bytes(blake2b(facts, digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int, step: int, micro_batch: int, rank: int) -> None:
    """Seed torch (every device), numpy and random for one micro-batch.

    Args:
        seed: The run's seed.
        step: Optimizer step, from 1.
        micro_batch: Number within the step, from 0; -1 for the update itself.
        rank: Process number.
    """
    derived = derived_seed(seed, step=step, micro_batch=micro_batch, rank=rank)
    torch.manual_seed(derived)
    np.random.seed(derived % 2**32)  # numpy's old global stream takes 32 bits
    random.seed(derived)
