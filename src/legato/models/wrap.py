"""What is done to a model's blocks before training: activation checkpointing, compilation."""

from __future__ import annotations

import logging
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from legato.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)


def decoder_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model, in order: what is checkpointed, compiled and sharded each.

    Args:
        model: A causal language model of transformers, with or without an adapter.

    Returns:
        Name -> block.

    Raises:
        UnsupportedModelError: The model has no such layers; ``.architecture``.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            blocks[name] = module
    if not blocks:
        architecture = type(model).__name__
        raise UnsupportedModelError(
            f"{architecture}: its decoder layers can't be told apart from the rest (they aren't "
            "transformers' GradientCheckpointingLayer). Switch off compile and "
            "enable_activation_checkpointing for it.",
            architecture=architecture,
        )
    return blocks


def apply_activation_checkpointing(model: nn.Module, *, every: int = 1) -> int:
    """Keep only the inputs of every n-th block in forward, and compute it again in backward.

    Switches on transformers' own checkpointing per block, without wrapper modules: names and
    values stay as they are.

    Args:
        model: The model, changed in place.
        every: 1 for every block, 2 for every second one; >= 1.

    Returns:
        How many blocks are checkpointed.

    Raises:
        ConfigError: ``every`` is below 1.
        UnsupportedModelError: The model has no such blocks.
    """
    if every < 1:
        raise ConfigError(f"enable_activation_checkpointing: expected true or >= 1, found {every}.")
    # Set directly: the method that does this is called otherwise in each transformers release.
    chosen = list(decoder_blocks(model).values())[::every]
    for block in chosen:
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        block.gradient_checkpointing = True  # type: ignore[assignment]
    logger.info("activation checkpointing in %d blocks", len(chosen))
    return len(chosen)
