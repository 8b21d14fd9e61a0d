"""From a config's optimizer section to a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from legato.errors import ConfigError
from legato.optim.stochastic import StochasticAdamW

if TYPE_CHECKING:
    from legato.optim.eight_bit import PackedAdamW

# What torch's fused Adam kernels run on; elsewhere torch chooses by itself.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    name: str = "adamw",
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    stochastic_rounding: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer over exactly the given parameters.

    Parameters with two or more dimensions decay; vectors and scalars (biases, norms) don't. Each
    kind is one group, in the given order; a kind without parameters makes no group.

    Args:
        named_parameters: Canonical name -> parameter, or its fp32 master.
        name: ``adamw``; ``adamw_8bit``, whose moments take one byte a value; ``adam``, whose decay
            is an L2 term of the gradient; or ``sgd``, without momentum.
        lr: Learning rate until somebody sets another one in ``param_groups``.
        weight_decay: Strength of the decay.
        betas: Decay rates of Adam's two moments; ``sgd`` has none.
        eps: Added to Adam's denominator; ``sgd`` has none.
        stochastic_rounding: For bf16 parameters without fp32 masters: round each update up or down
            at random, in proportion, so that small ones aren't lost. With ``adamw`` and
            ``adamw_8bit`` only.

    Returns:
        The optimizer; fused where torch has fused kernels.

    Raises:
        ConfigError: There is nothing to train, no optimizer of that name, or none of that name with
            stochastic rounding.
        MissingDependencyError: ``adamw_8bit`` without torchao, or with one that is too old.
    """
    parameters = list(named_parameters.values())
    if not parameters:
        raise ConfigError("optimizer: the model has no trainable parameter")
    groups = _decay_groups(parameters, weight_decay=weight_decay)
    if name == "adamw_8bit":
        return import_packed_adamw()(
            groups, lr=lr, betas=betas, eps=eps, bf16_stochastic_round=stochastic_rounding
        )
    if stochastic_rounding:
        if name != "adamw":
            raise ConfigError(
                f"optimizer.name: {name} can't round stochastically, only adamw and adamw_8bit "
                "can. Use one of them, or master_weights: fp32."
            )
        return StochasticAdamW(groups, lr=lr, betas=betas, eps=eps)
    is_fused = all(
        parameter.device.type in _FUSED_DEVICES and parameter.is_floating_point()
        for parameter in parameters
    )
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=is_fused or None)
    if name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=is_fused or None)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    raise ConfigError(f"optimizer.name: expected adamw, adamw_8bit, adam or sgd, found {name!r}")


def import_packed_adamw() -> type[PackedAdamW]:
    """The class of ``adamw_8bit``, not imported before: torchao takes a second, and may be absent.

    Returns:
        The class.

    Raises:
        MissingDependencyError: torchao is absent or too old; the message holds the command.
    """
    from legato.optim.eight_bit import PackedAdamW

    return PackedAdamW


def _decay_groups(
    parameters: list[nn.Parameter], *, weight_decay: float
) -> list[dict[str, list[nn.Parameter] | float]]:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group of ``optimizer`` the rate of the coming update.

    Args:
        optimizer: Any torch optimizer; one that keeps its rate in a tensor gets it written there.
        lr: The rate.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
