"""The frozen base in four bits: NF4 of torchao. The adapter on top trains in its own dtype.

Linear layers of the decoder's blocks are quantized; embeddings, norms and head stay as they are.
Weights come from the files one at a time, so that the whole model never stands in memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from legato.errors import MissingDependencyError, UnsupportedModelError
from legato.models.blocks import decoder_blocks
from legato.models.meta import MetaModel
from legato.models.quiet import silence_known_noise

logger = logging.getLogger(__name__)

# QLoRA's own sizes: one scale for 64 weights, and one scale of scales for 256 of them.
_BLOCK_SIZE, _SCALER_BLOCK_SIZE = 64, 256
# Below this the scales take so much that little is saved.
_SMALLEST_BLOCK = 16
# How often a weight's rows can be halved and still hold whole blocks. The sizes mustn't depend on
# the number of ranks: other blocks are other values.
_SHARDS = 8


@dataclass(frozen=True)
class QuantizedBase:
    """What became of a base's weights, over all ranks.

    Attributes:
        num_weights: Weights that were quantized.
        num_bytes: What they take, counted once.
        full_bytes: What they would take in the model's dtype.
        num_whole: Those of them that each rank holds whole, because they can't be cut evenly.
    """

    num_weights: int
    num_bytes: int
    full_bytes: int
    num_whole: int = 0


class Quantizer:
    """Replaces the frozen linear weights of a model without memory, block by block.

    Args:
        base: The model; an adapter may have been put on it.
        device: Where it computes.
        num_shards: Ranks that share each weight.

    Raises:
        MissingDependencyError: torchao is absent or too old.
    """

    def __init__(self, base: MetaModel, *, device: torch.device, num_shards: int = 1) -> None:
        import_nf4()  # before anything is read
        self._base = base
        self._device = device
        self._num_shards = num_shards
        self._sizes: list[tuple[int, int, bool]] = []

    @torch.no_grad()
    def quantize(self, block: nn.Module) -> set[nn.Parameter]:
        """Give the frozen linear layers inside of ``block`` their weights, in NF4.

        Args:
            block: A part of the model; changed in place.

        Returns:
            The weights that each rank must keep whole: they can't be cut into even shards, or there
            is one shard only.
        """
        whole: set[nn.Parameter] = set()
        for module, sizes in _quantizable(block):
            full = self._base.read_whole(module, "weight").to(self._device)
            weight = nn.Parameter(quantize_weight(full), requires_grad=False)
            module.weight = weight
            is_uneven = not _cuts_evenly(full.shape, self._num_shards, *sizes)
            # Where there is but one shard, FSDP2 hands on one of the three tensors of an NF4Tensor
            # (torch 2.13, wait_for_unshard); and there is nothing to cut.
            if is_uneven or self._num_shards == 1:
                whole.add(weight)
            self._sizes.append((_nf4_bytes(full, *sizes), full.nbytes, is_uneven))
        return whole

    def summary(self) -> QuantizedBase:
        """What was quantized.

        Returns:
            The counts.

        Raises:
            UnsupportedModelError: Nothing was; ``.architecture``.
        """
        if not self._sizes:
            architecture = type(self._base.model).__name__
            raise UnsupportedModelError(
                f"quantize_base: {architecture} has no linear layers in its decoder's blocks that "
                "NF4 can hold. Leave quantize_base out.",
                architecture=architecture,
            )
        quantized, full, whole = zip(*self._sizes, strict=True)
        return QuantizedBase(len(quantized), sum(quantized), sum(full), sum(whole))


def quantize_model(base: MetaModel, root: nn.Module, *, device: torch.device) -> QuantizedBase:
    """Load a base for one device: its blocks' linear layers in NF4, all the rest as it is.

    Args:
        base: The model without memory.
        root: ``base.model`` itself, or what was put around it; an adapter's own tensors stay
            where they are.
        device: Where it computes.

    Returns:
        What was quantized.

    Raises:
        MissingDependencyError: torchao is absent or too old.
        UnsupportedModelError: The model has no blocks, or nothing in them that can be quantized.
    """
    quantizer = Quantizer(base, device=device)
    for block in decoder_blocks(root).values():
        quantizer.quantize(block)
    summary = quantizer.summary()
    base.fill(root, device=device)
    return summary


def quantize_weight(weight: Tensor) -> Tensor:
    """A weight in NF4, the same values wherever and by how many threads it is made.

    Args:
        weight: ``[rows, columns]``, of a size that :func:`block_sizes` knows.

    Returns:
        torchao's ``NF4Tensor`` of the same shape, dtype and device.

    Raises:
        MissingDependencyError: torchao is absent or too old.
    """
    sizes = block_sizes(weight.numel())
    assert sizes is not None, "the caller leaves others as they are"
    _, to_nf4 = import_nf4()
    # On a CPU the mean of a weight's scales depends on how many threads add them up, and ranks
    # have fewer than a single process.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantized: Tensor = to_nf4(weight, *sizes)
    finally:
        torch.set_num_threads(before)
    return quantized


def saved_bytes(block: nn.Module) -> int:
    """What NF4 saves of a block's memory.

    Args:
        block: A part of a model, its weights not quantized; they may be on the meta device.

    Returns:
        Bytes.
    """
    weights = [(module.weight, sizes) for module, sizes in _quantizable(block)]
    return sum(weight.nbytes - _nf4_bytes(weight, *sizes) for weight, sizes in weights)


def block_sizes(num_weights: int) -> tuple[int, int] | None:
    """Sizes of blocks that a weight divides into, also when ranks share it.

    Args:
        num_weights: Elements of the weight.

    Returns:
        Weights under one scale, and scales under one scale of scales; None: too few or too oddly
        many for NF4 to save anything.

    Example:
        >>> block_sizes(4096 * 4096)
        (64, 256)
        >>> block_sizes(192 * 576)  # 27 * 64 blocks
        (64, 8)
    """
    block = _power_of_two_in(num_weights, at_most=_BLOCK_SIZE)
    if block < _SMALLEST_BLOCK:
        return None
    divisor = _power_of_two_in(num_weights // block, at_most=_SCALER_BLOCK_SIZE * _SHARDS)
    return block, max(1, divisor // _SHARDS)


def import_nf4() -> tuple[Any, Any]:
    """The tensor class of torchao and the function that makes one.

    Returns:
        ``NF4Tensor`` and ``to_nf4(weight, block_size, scaler_block_size)``.

    Raises:
        MissingDependencyError: torchao is absent or too old; the message holds the command.
    """
    silence_known_noise()
    try:
        from torchao.quantization import NF4Tensor, to_nf4
    except ImportError as error:
        raise MissingDependencyError.of_torchao("quantize_base: nf4", error) from error
    return NF4Tensor, to_nf4


def _power_of_two_in(number: int, *, at_most: int) -> int:
    """The largest power of two that divides both; ``at_most`` is one itself."""
    return min(number & -number, at_most)


def _cuts_evenly(shape: torch.Size, num_shards: int, block: int, scaler_block: int) -> bool:
    rows, columns = shape
    return rows % num_shards == 0 and rows // num_shards * columns % (block * scaler_block) == 0


def _quantizable(block: nn.Module) -> list[tuple[nn.Linear, tuple[int, int]]]:
    """The frozen linear layers inside of ``block`` and the sizes of their weights' blocks."""
    found = []
    for name, module in block.named_modules():
        # Not subclasses: their forward may read the weight in a way that NF4 doesn't know. Nor
        # what PEFT keeps beside a copy that trains as a whole, and copies first.
        if type(module) is nn.Linear and not name.endswith("original_module"):
            sizes = block_sizes(module.weight.numel())
            if sizes is not None and not module.weight.requires_grad:
                found.append((module, sizes))
    return found


def _nf4_bytes(weight: Tensor, block: int, scaler_block: int) -> int:
    """Half a byte a weight, one for each scale, and scales of scales, their mean and the table."""
    num_scalers = weight.numel() // block
    in_dtype = num_scalers // scaler_block + 1 + 16
    return weight.numel() // 2 + num_scalers + in_dtype * weight.element_size()
