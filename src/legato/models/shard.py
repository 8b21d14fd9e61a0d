"""One model over several ranks: each holds a part of every weight (FSDP2).

A block's weights are gathered before it computes and freed after it; gradients are added up over
the ranks, and each rank keeps its part. What an optimizer holds, and what a checkpoint stores, are
the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from legato.models.blocks import decoder_blocks
from legato.models.head import Decoder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

logger = logging.getLogger(__name__)

FillBlock = Callable[[nn.Module], set[nn.Parameter]]


@dataclass(frozen=True)
class Sharding:
    """How a model is spread over ranks.

    Attributes:
        mesh: The ranks: one axis, or copies by shards.
        compute_dtype: What weights are rounded to when they are gathered. Stored in fp32, they are
            their own master weights.
        reshard_after_forward: Free a block's gathered weights after forward and gather them again
            for backward; False keeps them, which takes the memory of the whole model.
        cpu_offload: Keep the parts, their gradients and what an optimizer makes of them in host
            memory.
    """

    mesh: DeviceMesh
    compute_dtype: torch.dtype
    reshard_after_forward: bool = True
    cpu_offload: bool = False


def shard_model(
    model: nn.Module, sharding: Sharding, *, fill_block: FillBlock | None = None
) -> None:
    """Collective: leave this rank its rows of every weight of ``model``, in place.

    Args:
        model: The model; weights on the meta device stay there, others are cut.
        sharding: How.
        fill_block: Called with each block before it is cut, so that no more than one stands in
            memory whole; gives the parameters that each rank keeps whole.

    Raises:
        UnsupportedModelError: The model has no blocks that can be told apart.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    options: dict[str, Any] = {
        "mesh": sharding.mesh,
        # Inputs aren't cast: blocks get what they get on a single device.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    blocks = decoder_blocks(model)
    for block in blocks.values():
        whole = fill_block(block) if fill_block is not None else None
        fully_shard(
            block,
            reshard_after_forward=sharding.reshard_after_forward,
            ignored_params=whole,
            **options,
        )
    # Embedding, last norm and head stay gathered from forward to backward: the head is called
    # after the decoder has returned, and a tied one is the embedding.
    fully_shard(model, reshard_after_forward=False, **options)
    for part in sharded_modules(model):
        # Sums, not means: the loss is divided by the tokens of all ranks already. And plain sums:
        # gloo knows no scaled ones.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    logger.info("sharded %d blocks over %s", len(blocks), tuple(sharding.mesh.shape))


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Each module of ``model`` whose weights are gathered together, ``model`` itself first."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def sharded_decode(model: nn.Module, decode: Decoder) -> Callable[..., Tensor]:
    """``decode`` as a forward pass of a sharded model.

    The decoder is a module inside of ``model``: called by itself it would find the embedding in
    parts.

    Args:
        model: What :func:`shard_model` was given.
        decode: A decoder of modules of ``model``.

    Returns:
        The same function; collective. After it the head may be called.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    holder = cast("Any", model)
    holder.legato_decode = decode
    register_fsdp_forward_method(model, "legato_decode")
    return cast("Callable[..., Tensor]", holder.legato_decode)


def free_gathered(model: nn.Module) -> None:
    """Drop weights that are still gathered, so that the next forward sees changed parts.

    Backward does this by itself; a forward pass without one doesn't.
    """
    for module in sharded_modules(model):
        module.reshard()


@contextmanager
def gathered_root(model: nn.Module) -> Iterator[bool]:
    """Collective if ``model`` is sharded: gather what belongs to no block, and free it afterwards.

    Then any method of it computes, not only its forward pass; blocks gather themselves.

    Args:
        model: A sharded model, or any other: then nothing happens.

    Yields:
        bool: Whether it is sharded.
    """
    root = next(sharded_modules(model), None)
    if root is None:
        yield False
        return
    root.unshard()
    try:
        yield True
    finally:
        free_gathered(model)


def gradient_sync(model: nn.Module, *, keeps_whole_gradients: bool) -> Callable[[bool], None]:
    """The switch that saves communication while gradients of micro-batches are added up.

    Args:
        model: A sharded model.
        keeps_whole_gradients: Between micro-batches keep this rank's gradients whole, in fp32, and
            send nothing: right where few parameters train. Otherwise each rank keeps its part
            only, and just the copies of the model wait for each other once a step.

    Returns:
        Called before each forward: True before the last micro-batch of a step.
    """
    root = cast("FSDPModule", model)
    if keeps_whole_gradients:
        return root.set_requires_gradient_sync
    return root.set_requires_all_reduce
