"""AdamW for bf16 parameters without fp32 masters: what doesn't fit is kept on average.

Rounding to nearest loses an update that is smaller than half a step of the number it is added to,
every time. Rounding up with the probability of the lost part keeps the mean. torchao's optimizer
does this for the parameters but rounds the moments to nearest, where the second one gets stuck:
after 50 gradients of 1 and 3000 of 0.1 it still held 0.052 (0.012 is right), and with it a rate too
low by half. So all three are rounded stochastically here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def round_stochastically(values: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down at random in proportion to what is lost.

    Draws from torch's global generator of the device: seed that, and the result repeats.

    Args:
        values: fp32, any shape.

    Returns:
        bf16; a value that bf16 can hold stays as it is.
    """
    bits = values.view(torch.int32)
    # bf16 is the upper half of fp32: a carry out of a random lower half rounds away from zero with
    # the probability of the lower half.
    noise = torch.empty_like(bits).random_(0, 1 << 16)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` in bf16 with stochastic rounding; fp32 parameters get plain AdamW.

    The arithmetic of an update is fp32. Parameter and moments are stored in the parameter's dtype.

    Args:
        params: Parameters or groups, bf16 or fp32.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.

    Cost:
        4 bytes of state a bf16 parameter, and the fp32 of one parameter at a time.

    Raises:
        ValueError: A parameter is neither bf16 nor fp32.

    Source:
        Loshchilov and Hutter 2019, arXiv:1711.05101. Stochastic rounding in bf16: Zamirai et al.
        2020, arXiv:2010.06192.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.bfloat16, torch.float32):
                    raise ValueError(f"expected bf16 or fp32 parameters, found {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew; optional, as in torch.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = _own_part(parameter.grad).float()
        weight = _own_part(parameter)
        exp_avg, exp_avg_sq = _own_part(state["exp_avg"]), _own_part(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        state["step"] += 1
        num_updates = state["step"].item()

        first = exp_avg.float().lerp(gradient, 1 - beta1)
        second = exp_avg_sq.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        spread = second.sqrt().div_((1 - beta2**num_updates) ** 0.5).add_(group["eps"])
        updated = weight.float().mul(1 - group["lr"] * group["weight_decay"])
        updated.addcdiv_(first, spread, value=-group["lr"] / (1 - beta1**num_updates))

        for target, value in ((weight, updated), (exp_avg, first), (exp_avg_sq, second)):
            target.copy_(value if target.dtype is torch.float32 else round_stochastically(value))


def _own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, as a view: an update is made element by element."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
