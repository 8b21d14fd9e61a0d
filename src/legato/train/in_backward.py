"""Updates during backward: a gradient is gone before the next one is there.

An update after backward needs all gradients at once, as much memory as the weights or, in fp32,
twice that. Here each weight is updated at the moment its gradient is complete. What that rules out:
a gradient norm to clip by, sums over micro-batches, and leaving out an update whose gradient turns
out not to be finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from legato.train.masters import Masters


class InBackward:
    """Makes every backward pass update the parameters, each as soon as its gradient is there.

    One optimizer over all parameters stays what it is: its state, and what a checkpoint holds of
    it, are those of an optimizer that updates after backward.

    Args:
        optimizer: Over exactly ``parameters``. Its rate must be set before backward.
        parameters: Canonical name -> what the optimizer holds: trainable parameters, or masters.
        masters: Where ``parameters`` come from, when some of them are fp32 copies.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> updates = InBackward(torch.optim.SGD([weight], lr=0.5), parameters={"weight": weight})
        >>> weight.sum().backward()
        >>> weight.tolist(), weight.grad, updates.take_norms()["weight"].item()
        ([0.5, 0.5], None, 1.4142135381698608)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: Mapping[str, nn.Parameter],
        masters: Masters | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._held = dict(parameters)
        self._masters = masters
        self._norms: dict[str, Tensor] = {}
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        live = parameters if masters is None else masters.live
        # After those of the masters, which move the gradient to where the optimizer looks for it.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._update, name))  # type: ignore[no-untyped-call]
            for name, parameter in live.items()
        ]

    def take_norms(self) -> dict[str, Tensor]:
        """The L2 norm of each gradient since the last call, in fp32, by name in a fixed order."""
        norms = {name: self._norms[name] for name in self._held if name in self._norms}
        self._norms = {}
        return norms

    def close(self) -> None:
        """Leave gradients to the caller again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _update(self, name: str, parameter: Tensor) -> None:
        held = self._held[name]
        if held.grad is None:
            return
        (self._norms[name],) = torch._foreach_norm([held.grad], 2.0, torch.float32)
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**self._group_of[id(held)], "params": [held]}]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        held.grad = None
        if self._masters is not None:
            self._masters.publish([name])
