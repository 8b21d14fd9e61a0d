"""Process facts: who am I, how many are we, on which device.

One process today; the trainer and the checkpointer take these facts as values, so that a world of
several ranks is another value and not another loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The facts of this process.

    Attributes:
        rank: This process's number, from 0.
        world_size: Number of processes.
        device: Where this process computes.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank decides and reports for all."""
        return self.rank == 0

    @classmethod
    def single(cls, device: str = "auto") -> World:
        """A world of one process on ``device``; see :func:`pick_device`."""
        return cls(rank=0, world_size=1, device=pick_device(device))


def pick_device(name: str) -> torch.device:
    """The device that a config's ``device`` means.

    Args:
        name: ``auto`` (cuda, else mps, else cpu) or a torch device such as ``cuda:0``.

    Returns:
        A device that exists on this machine.

    Raises:
        ConfigError: The name isn't a device, or this machine doesn't have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device: expected auto, cpu, mps, cuda or cuda:N, found {name!r}"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device: {name} isn't here: torch sees {count} CUDA devices. "
                "Use device=auto, or install a torch build for this machine's GPU."
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device: mps isn't here: torch sees no Apple GPU. Use device=auto.")
    elif device.type not in ("cpu", "mps"):
        raise ConfigError(f"device: expected auto, cpu, mps, cuda or cuda:N, found {name!r}")
    return device
