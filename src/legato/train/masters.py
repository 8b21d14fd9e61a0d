"""fp32 master copies of bf16 parameters.

A bf16 number has 8 bits of mantissa: at a learning rate of 2e-5 about 96 % of the weights of a real
model don't change when AdamW adds its update to them. So the update is made on an fp32 copy, and
the model computes with that copy rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """Lets an optimizer update fp32 copies of a model's lower-precision parameters.

    After this, a backward pass leaves no gradient on such a parameter: each one is added in fp32 to
    the gradient of its copy and freed, so several micro-batches add up without rounding. Parameters
    that are fp32 already stay as they are: the optimizer holds them themselves.

    Args:
        named: Canonical name -> the model's trainable parameter; tied ones once.

    Attributes:
        live: Canonical name -> the model's parameter: ``named``.
        tensors: Canonical name -> what the optimizer must hold, in the order of ``named``.
        copies: The part of ``tensors`` that are copies; what a checkpoint stores as masters.

    Cost:
        8 bytes a parameter (the copy and its gradient, both fp32) beside the parameter's own 2.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> masters = Masters({"weight": weight})
        >>> weight.sum().backward()
        >>> masters.tensors["weight"].grad
        tensor([1., 1.])
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.live = dict(named)
        self.copies: dict[str, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().to(torch.float32))
            for name, parameter in named.items()
            if parameter.dtype is not torch.float32
        }
        self.tensors: dict[str, nn.Parameter] = {
            name: self.copies.get(name, parameter) for name, parameter in named.items()
        }
        self._hooks = [
            named[name].register_post_accumulate_grad_hook(_GradientMove(copy))  # type: ignore[no-untyped-call]
            for name, copy in self.copies.items()
        ]

    @torch.no_grad()
    def publish(self, names: Iterable[str] | None = None) -> None:
        """Round copies into the model's parameters: called after every update.

        Args:
            names: Which parameters; those that have no copy are passed over. None: all.
        """
        changed = [
            name for name in (self.copies if names is None else names) if name in self.copies
        ]
        if changed:
            torch._foreach_copy_(
                [self.live[name] for name in changed], [self.copies[name] for name in changed]
            )

    def close(self) -> None:
        """Give the parameters their own gradients back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _GradientMove:
    """Adds a parameter's gradient to its fp32 copy's, and frees it."""

    def __init__(self, copy: nn.Parameter) -> None:
        self.copy = copy

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if self.copy.grad is None:
            self.copy.grad = gradient.to(torch.float32)
        else:
            self.copy.grad += gradient
