"""AdamW whose two moments take one byte a value, by torchao."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.errors import MissingDependencyError

try:
    from torchao.optim import AdamW8bit
except ImportError as error:
    raise MissingDependencyError.of_torchao("optimizer.name: adamw_8bit", error) from error


class PackedAdamW(AdamW8bit):
    """torchao's 8-bit AdamW, whose packed moments can be made before its first step.

    Moments are quantized in blocks of 256 values; those of tensors below 4096 values, or not a
    multiple of 256, stay as they are. The arithmetic of an update is fp32. On a CUDA device it is
    one compiled kernel per shape; elsewhere it isn't compiled, which needs no C++ compiler.

    Cost:
        2 bytes of state a parameter, and 1/32 for the scales of the blocks.

    Source:
        Dettmers et al. 2022, arXiv:2110.02861.
    """

    def step(self, closure: object = None) -> object:
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss anew; optional, as in torch.

        Returns:
            What ``closure`` returned.
        """
        devices = {p.device.type for group in self.param_groups for p in group["params"]}
        with torch.compiler.set_stance("default" if devices == {"cuda"} else "force_eager"):
            return super().step(closure)

    def empty_moment(self, parameter: Tensor, moment: str) -> Tensor:
        """A moment of zeros as the first step makes it, packed or not.

        Args:
            parameter: Whose moment.
            moment: ``exp_avg``, which has a sign, or ``exp_avg_sq``.

        Returns:
            The moment, on the device of ``parameter``.
        """
        made: Tensor = self._new_buffer(parameter.detach(), moment == "exp_avg")
        return made
