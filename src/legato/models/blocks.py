"""A model's repeated layers: what is checkpointed, compiled and sharded each."""

from __future__ import annotations

from torch import nn

from legato.errors import UnsupportedModelError


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
            "transformers' GradientCheckpointingLayer). Train it on a single device, with compile "
            "and enable_activation_checkpointing off.",
            architecture=architecture,
        )
    return blocks
