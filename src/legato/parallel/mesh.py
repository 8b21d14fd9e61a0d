"""How ranks are laid out: which share one copy of the model, and how many copies there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from legato.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class MeshPlan:
    """The sizes of the mesh's axes.

    Attributes:
        dp_replicate: Copies of the model.
        dp_shard: Ranks that share one copy, neighbours in rank: they exchange weights in every
            layer, copies exchange gradients only.
    """

    dp_replicate: int
    dp_shard: int

    @property
    def world_size(self) -> int:
        """Ranks in the mesh."""
        return self.dp_replicate * self.dp_shard


def plan_mesh(*, dp_shard: int | Literal["all"], dp_replicate: int, world_size: int) -> MeshPlan:
    """Lay out ``world_size`` ranks as the config wants it.

    Args:
        dp_shard: Ranks that share one copy; ``all``: as many as there are for each copy.
        dp_replicate: Copies of the model, >= 1.
        world_size: Number of processes.

    Returns:
        A plan of exactly ``world_size`` ranks.

    Raises:
        ConfigError: The numbers don't multiply to ``world_size``; names the keys.

    Example:
        >>> plan_mesh(dp_shard="all", dp_replicate=2, world_size=8)
        MeshPlan(dp_replicate=2, dp_shard=4)
    """
    if dp_shard == "all":
        if world_size % dp_replicate:
            raise ConfigError(
                f"dp_replicate: {dp_replicate} copies don't divide {world_size} processes. "
                f"Choose one of {_divisors(world_size)}, or start another number of processes."
            )
        return MeshPlan(dp_replicate, world_size // dp_replicate)
    if dp_replicate * dp_shard != world_size:
        raise ConfigError(
            f"dp_shard, dp_replicate: {dp_shard} x {dp_replicate} is {dp_shard * dp_replicate}, "
            f"but there are {world_size} processes. Set dp_shard: all, choose numbers that "
            f"multiply to {world_size}, or start {dp_shard * dp_replicate} processes."
        )
    return MeshPlan(dp_replicate, dp_shard)


def build_mesh(plan: MeshPlan, *, device_type: str) -> DeviceMesh:
    """Collective: build the mesh of a plan; the default process group exists and has its size.

    Args:
        plan: The layout.
        device_type: ``cpu`` or ``cuda``.

    Returns:
        A mesh with the axis ``dp_shard``, and ``dp_replicate`` before it where there are copies.
    """
    # Imported here: it costs half a second, and a single process never meets a mesh.
    from torch.distributed.device_mesh import init_device_mesh

    if plan.dp_replicate == 1:
        return init_device_mesh(device_type, (plan.dp_shard,), mesh_dim_names=AXES[1:])
    return init_device_mesh(device_type, (plan.dp_replicate, plan.dp_shard), mesh_dim_names=AXES)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
