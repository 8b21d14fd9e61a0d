"""What is done to a loaded model before training, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from legato.errors import ConfigError
from legato.models.blocks import decoder_blocks
from legato.models.compile import compile_in_place
from legato.models.shard import FillBlock, Sharding, shard_model

logger = logging.getLogger(__name__)


def wrap_model(
    model: nn.Module,
    *,
    checkpoint_every: int = 0,
    compile_options: Mapping[str, Any] | None = None,
    sharding: Sharding | None = None,
    fill_block: FillBlock | None = None,
) -> None:
    """Checkpoint, compile and shard a model's blocks, in this order, in place.

    Sharding comes last: its hooks gather a block's weights before the block runs, and again before
    a checkpointed block runs a second time.

    Args:
        model: The model, an adapter already attached. With ``sharding`` its weights may still be on
            the meta device.
        checkpoint_every: Activation checkpointing of every n-th block; 0: none.
        compile_options: Of :func:`compile_in_place`; None: nothing is compiled.
        sharding: How its weights are spread over ranks; None: each rank holds all of them.
            Collective then.
        fill_block: Of :func:`shard_model`.

    Raises:
        UnsupportedModelError: The model has no blocks that can be told apart.
    """
    if checkpoint_every:
        apply_activation_checkpointing(model, every=checkpoint_every)
    if compile_options is not None:
        compile_in_place(model, **compile_options)
    if sharding is not None:
        shard_model(model, sharding, fill_block=fill_block)


def offload_activations(
    decode: Callable[..., Tensor], *, device: torch.device
) -> Callable[..., Tensor]:
    """``decode`` with what it saves for backward kept in host memory meanwhile.

    For a model whose blocks are all checkpointed: then that is each block's input. Of other blocks
    it would be their weights as well.

    Args:
        decode: A forward pass of the model's blocks.
        device: Where it computes.

    Returns:
        The same function.

    Raises:
        ConfigError: The device isn't a CUDA device: there is no other memory to keep them out of.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"enable_activation_offloading: this run computes on {device.type}, where activations "
            "are in host memory already. Leave it out."
        )

    def offloading(*inputs: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return decode(*inputs)

    return offloading


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
