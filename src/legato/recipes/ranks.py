"""What several processes of one run must have in common, held before anything is built."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from legato.config.resume import differences
from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.parallel.mesh import MeshPlan, plan_mesh
from legato.parallel.world import World
from legato.storage.writing import writing_to


def check_same_config(config: RunConfig, *, world: World, flags: Mapping[str, bool]) -> None:
    """Collective: refuse ranks that were started with different configs.

    Args:
        config: This rank's.
        world: The ranks.
        flags: What else was asked for on the command line.

    Raises:
        ConfigError: Two ranks differ; names the keys, on every rank.
    """
    main, *others = world.gather(config.model_dump(mode="json") | dict(flags))
    problems = [
        f"{change.key}: {change.old} on rank 0, {change.new} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for change in differences(main, other)
    ]
    if problems:
        raise ConfigError(
            [
                "the ranks were started with different configs; start them with one command",
                *problems,
            ]
        )


def check_local_problems(problems: Sequence[str], *, world: World) -> None:
    """Collective: refuse what any host's files say against the config.

    Args:
        problems: This host's.
        world: The ranks.

    Raises:
        ConfigError: This host has some.
        PeerLostError: Another one has; ``.rank``.
    """

    def refuse() -> None:
        if problems:
            raise ConfigError(list(problems))

    world.on_every_rank(refuse)


def check_mesh(config: RunConfig, *, world: World) -> MeshPlan:
    """Refuse a mesh that doesn't fit the ranks, or an offload from where nothing is.

    Args:
        config: The run.
        world: The ranks.

    Returns:
        The mesh: of one rank for a recipe that isn't distributed.

    Raises:
        ConfigError: The keys that don't fit; the same on every rank.
    """
    plan = plan_mesh(
        dp_shard=config.dp_shard, dp_replicate=config.dp_replicate, world_size=world.world_size
    )
    if config.cpu_offload and world.device.type == "cpu":
        raise ConfigError(
            "cpu_offload: this run computes on the cpu, so everything is in host memory already. "
            "Leave it out."
        )
    return plan


def check_shared_storage(output_dir: str, *, world: World) -> None:
    """Collective: make output_dir, and see that what rank 0 writes there is there for all.

    Args:
        output_dir: The run's folder.
        world: The ranks.

    Raises:
        ConfigError: Another host doesn't see it; names host and rank, on every rank.
    """
    if world.world_size == 1:
        return
    token = world.control.broadcast(uuid.uuid4().hex)
    place = Path(output_dir, f".seen-{token}")
    host = socket.gethostname()

    def write() -> None:
        with writing_to(output_dir):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(token)

    world.on_rank_0(write)
    try:
        seen = world.gather([host, _sees(place, token)])
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):  # empty, hidden and of a name of its own
                place.unlink()
    blind = [(rank, where) for rank, (where, sees) in enumerate(seen) if not sees]
    if blind:
        rank, where = blind[0]
        raise ConfigError(
            f"output_dir: {place.parent.absolute()} on host {where} (rank {rank}) isn't the folder "
            f"that host {seen[0][0]} (rank 0) writes to. Choose a folder on a file system that all "
            "hosts mount: every rank writes its part of a checkpoint there. Is there none? "
            "shared_storage: false sends all parts to rank 0's host."
        )


def _sees(place: Path, token: str) -> bool:
    """Whether the file is there; one that can't be read isn't, and no rank waits for this one."""
    try:
        return place.read_text() == token
    except (OSError, UnicodeDecodeError):
        return False
