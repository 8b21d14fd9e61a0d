"""Process facts, and the few things that all processes of a run decide together.

The trainer and the checkpointer take a world as a value, so that several ranks are another value
and not another loop.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from legato.errors import ConfigError, PeerLostError, first_line
from legato.parallel.meeting import init_process_group, meet
from legato.parallel.peers import Peers
from legato.parallel.placement import Placement, find_placement

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What gloo says when the other side has gone is a RuntimeError like any other.
_LOST = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class World:
    """The facts of this process, and its line to the others.

    Attributes:
        rank: This process's number, from 0.
        world_size: Number of processes.
        device: Where this process computes.
        group: The ranks as a training group; None: this process has no group.
        control: The same ranks over gloo, for the main thread.
        attempt: How often a launcher restarted its ranks, the most of all hosts.
        launch_id: Name of the launch; None: it has none.
        local_world_size: Number of processes on this host.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: Peers = field(default_factory=Peers)
    attempt: int = 0
    launch_id: str | None = None
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank decides and reports for all."""
        return self.rank == 0

    @classmethod
    def single(cls, device: str = "auto") -> World:
        """A world of one process on ``device``, without a group; see :func:`pick_device`."""
        return cls(rank=0, world_size=1, device=pick_device(device))

    @classmethod
    @contextmanager
    def join(
        cls, device: str, *, distributed: bool, environment: Mapping[str, str] = os.environ
    ) -> Iterator[World]:
        """Collective: meet the other processes; leave them when the block ends, however it ends.

        Args:
            device: A config's ``device``.
            distributed: Make a process group, also for a world of one. Without it, this process
                must be alone, and stays free of any group.
            environment: Who the others are: see :func:`find_placement`. A process group that is
                there already is used, and left as it is.

        Yields:
            World: This process and the others.

        Raises:
            WorldError: The processes can't meet.
            PeerLostError: Another process has gone in the meantime, or ``device`` isn't there.
            ConfigError: ``device`` isn't here.
        """
        placement = find_placement(environment) or Placement(rank=0, world_size=1)
        if not distributed:
            yield cls.single(device)
            return
        is_ours = not dist.is_initialized()
        with _gloo_interface(placement):
            if is_ours:
                # A host without its GPU says so to all, who would wait for it in vain.
                store, where = meet(placement, lambda: pick_device(device, placement))
                init_process_group(store, placement, where)
            else:
                where = pick_device(device, placement)
            try:
                yield from cls._joined(placement, where)
            finally:
                if is_ours:
                    # Without it gloo's threads may end the process with SIGABRT.
                    dist.destroy_process_group()

    @classmethod
    def _joined(cls, placement: Placement, device: torch.device) -> Iterator[World]:
        control = Peers.beside(dist.group.WORLD)
        world = cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=device,
            group=dist.group.WORLD,
            control=control,
            # A launcher that restarts its ranks for another host's sake doesn't count that.
            attempt=int(max(each[0] for each in control.gather_numbers([placement.attempt]))),
            launch_id=placement.launch_id,
            local_world_size=placement.local_world_size,
        )
        try:
            yield world
            control.all_true(True)  # rank 0 may serve the store: nobody leaves while it is needed
        except RuntimeError as error:
            if is_lost_peer(error):
                raise PeerLostError(
                    f"rank {world.rank} lost another rank: {first_line(error)}. The log of the one "
                    "that failed first says why."
                ) from error
            raise
        finally:
            with suppress(RuntimeError):
                control.close()

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Collective: each of ``values`` added up over all ranks; the same bits on every rank."""
        return [sum(column) for column in zip(*self.control.gather_numbers(values), strict=True)]

    def agree(self, values: Sequence[float]) -> list[float]:
        """Collective: the largest of each of ``values`` over all ranks."""
        return [max(column) for column in zip(*self.control.gather_numbers(values), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's JSON ``value``, by rank."""
        return self.control.gather(value)

    def on_every_rank(self, do: Callable[[], T]) -> T:
        """Collective: call ``do``; see :meth:`Peers.on_every_rank`."""
        return self.control.on_every_rank(do)

    def on_rank_0(self, do: Callable[[], object]) -> None:
        """Collective: call ``do`` on rank 0; where it fails, :meth:`on_every_rank` says so on all.

        Args:
            do: Called on rank 0 only; talks to no other rank.

        Raises:
            PeerLostError: It failed, on the ranks that aren't rank 0.
        """
        self.on_every_rank(do if self.is_main else lambda: None)

    def on_every_rank_alike(
        self, do: Callable[[], T], *, fact: Callable[[T], Any]
    ) -> tuple[T, list[Any]]:
        """Collective: call ``do``, and compare; see :meth:`Peers.on_every_rank_alike`."""
        return self.control.on_every_rank_alike(do, fact=fact)


@contextmanager
def _gloo_interface(placement: Placement) -> Iterator[None]:
    """Have gloo use the network that leads to the others, unless the environment names one.

    By itself it takes the interface that the host's own name leads to: on many hosts, loopback.
    """
    name = "GLOO_SOCKET_IFNAME"
    interface = interface_towards(placement.address) if placement.has_other_hosts else None
    if interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def interface_towards(address: str) -> str | None:
    """The network interface of this host that leads to ``address``; None: it can't be told."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # chooses a route, sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is what a rank notices of another one's end, and no fault of its own."""
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def pick_device(name: str, placement: Placement | None = None) -> torch.device:
    """The device that a config's ``device`` means; a GPU becomes the current one.

    Args:
        name: ``auto`` (cuda, else mps, else cpu) or a torch device such as ``cuda:0``.
        placement: Among other processes: each one of a host takes the GPU of its local rank.

    Returns:
        A device that exists on this machine.

    Raises:
        ConfigError: The name isn't a device, this machine doesn't have it, or several processes
            would share it.
    """
    several = placement is not None and placement.local_world_size > 1
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            # gloo can't carry what is on an Apple GPU.
            alone = placement is None or placement.world_size == 1
            return torch.device("mps" if alone and torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device: expected auto, cpu, mps, cuda or cuda:N, found {name!r}"
        ) from error
    if device.type == "cuda":
        return _pick_gpu(device, placement)
    if device.type == "mps":
        if several:
            raise ConfigError("device: mps is one GPU; several processes can't share it. Use cpu.")
        if not torch.backends.mps.is_available():
            raise ConfigError("device: mps isn't here: torch sees no Apple GPU. Use device=auto.")
    elif device.type != "cpu":
        raise ConfigError(f"device: expected auto, cpu, mps, cuda or cuda:N, found {name!r}")
    return device


def _pick_gpu(device: torch.device, placement: Placement | None) -> torch.device:
    count, is_numbered = torch.cuda.device_count(), ":" in str(device)
    if placement is not None and placement.local_world_size > 1:
        if is_numbered:
            raise ConfigError(
                f"device: {device} is one GPU, and {placement.local_world_size} processes run on "
                "this host. Use device=cuda: each takes its own."
            )
        index = 0 if placement.sees_own_gpu else placement.local_rank
        if index >= count:
            raise ConfigError(
                f"device: {placement.local_world_size} processes run on this host, and torch sees "
                f"{count} CUDA devices: one each. Start as many processes as there are GPUs."
            )
        device, is_numbered = torch.device("cuda", index), True
    if count == 0 or (is_numbered and device.index >= count):
        raise ConfigError(
            f"device: {device} isn't here: torch sees {count} CUDA devices. "
            "Use device=auto, or install a torch build for this machine's GPU."
        )
    if not is_numbered:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device
