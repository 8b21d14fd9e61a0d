"""Evaluation mode for a while, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch to evaluation mode, and back to what each module was: some may be frozen in it.

    Args:
        model: The module that is switched, with all inside of it.
        device: Where it computes; torch's random state there, and on the CPU, is put back too.

    Yields:
        None: inside, the model is in evaluation mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
