"""A model as a step takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from legato.train.in_backward import InBackward
from legato.train.loss import ChunkLoss
from legato.train.masters import Masters

Decode = Callable[..., Tensor]
"""``(input_ids [B, T]) -> hidden [B, T, D]``, and position_ids ``[B, T]`` where rows are packed."""


@dataclass(frozen=True)
class TrainableModel:
    """A causal language model as the loop sees it.

    Attributes:
        module: The live module; switched between train and eval mode.
        decode: ``(input_ids [B, T]) -> hidden [B, T, D]``.
        head: ``hidden [N, D] -> logits [N, V]``; a module that holds its own weights.
        parameters: Canonical name -> the tensor that the optimizer updates: the trainable
            parameter, or its fp32 master.
        masters: fp32 copies of lower-precision parameters; None when there are none.
        in_backward: Updates the parameters during backward: a step then takes a single
            micro-batch, and clips and skips nothing. None: that is done after it.
        set_gradient_sync: Told whether the next backward is to add gradients up over the ranks;
            None: there is nothing to switch.
        chunk_loss: Loss of a chunk of logits and its gradient, compiled; None: the plain one.
    """

    module: nn.Module
    decode: Decode
    head: nn.Module
    parameters: Mapping[str, nn.Parameter]
    masters: Masters | None = None
    in_backward: InBackward | None = None
    set_gradient_sync: Callable[[bool], object] | None = None
    chunk_loss: ChunkLoss | None = None
