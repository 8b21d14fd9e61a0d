"""The few words that ranks exchange: JSON and numbers, over gloo groups of their own."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from legato import errors
from legato.errors import ConfigError, LegatoError, PeerLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Peers:
    """Ranks that talk to each other; one process alone is a group of one and sends nothing.

    Collectives of one `Peers` come from one thread: the background thread and the main thread
    each have their own.

    Args:
        group: A gloo group, or None for a single process.

    Attributes:
        rank: This process's number in the group.
        size: Number of processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def beside(
        cls, group: dist.ProcessGroup | None, *, timeout_seconds: float | None = None
    ) -> Peers:
        """Collective: a new gloo group of the same ranks as ``group``; None: a single process.

        Args:
            group: Any group of this process's.
            timeout_seconds: How long a collective may take; None: torch's default.

        Returns:
            The peers. ``close()`` ends their group.
        """
        if group is None:
            return cls()
        timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
        ranks = dist.get_process_group_ranks(group)
        return cls(dist.new_group(ranks, backend="gloo", timeout=timeout))

    @property
    def is_main(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's JSON ``value``, by rank, on every rank."""
        if self.group is None:
            return [value]
        payload = _to_tensor(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self.group)
        return [_from_tensor(data[: int(size)]) for data, size in zip(received, sizes, strict=True)]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Collective: every rank's ``values``, as many on each, by rank; one small message."""
        if self.group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        received = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(received, mine, group=self.group)
        return [theirs.tolist() for theirs in received]

    def broadcast(self, value: Any) -> Any:
        """Collective: rank 0's JSON ``value``, on every rank."""
        if self.group is None:
            return value
        payload = _to_tensor(value) if self.is_main else torch.zeros(0, dtype=torch.uint8)
        size = torch.tensor([payload.numel()])
        dist.broadcast(size, group=self.group, group_src=0)
        if not self.is_main:
            payload = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(payload, group=self.group, group_src=0)
        return _from_tensor(payload)

    def all_true(self, flag: bool) -> bool:
        """Collective: whether ``flag`` holds on every rank."""
        if self.group is None:
            return flag
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.group)
        return bool(value.item())

    def send(self, data: Tensor, *, to: int) -> None:
        """Send a uint8 tensor to rank ``to``, which is receiving it; returns when it has it."""
        dist.send(data.contiguous(), group=self.group, group_dst=to)

    def receive(self, num_bytes: int, *, sender: int) -> Tensor:
        """Wait for ``num_bytes`` that rank ``sender`` sends."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        dist.recv(data, group=self.group, group_src=sender)
        return data

    def on_main(
        self, decide: Callable[[], Any], *, fallback: type[LegatoError] = LegatoError
    ) -> Any:
        """Collective: call ``decide`` on rank 0; every rank gets its JSON value, or its error.

        Args:
            decide: Called on rank 0 only.
            fallback: What other ranks raise where rank 0's error isn't one of Legato's own. Of an
                own one they get message, problems and the facts that are JSON values.

        Returns:
            What ``decide`` returned.
        """
        if self.group is None:
            return decide()
        if not self.is_main:
            outcome = self.broadcast(None)
            if "error" in outcome:
                raise _rebuilt(outcome, fallback)
            return outcome["value"]
        try:
            value = decide()
        except Exception as error:
            self.broadcast(_retold(error))
            raise
        try:
            self.broadcast({"value": value})
        except RuntimeError as error:
            # What is done is done, whoever else is gone by now.
            logger.warning("not every rank heard what rank 0 did: %s", error)
        return value

    def on_every_rank(self, do: Callable[[], T]) -> T:
        """Collective: call ``do``; where it fails on one rank, it fails on all, and says where.

        Args:
            do: Called on every rank; talks to no other rank.

        Returns:
            What this rank's ``do`` returned.

        Raises:
            PeerLostError: It failed on another rank; ``.rank``. A rank's own error is raised as
                it is.
        """
        return self.on_every_rank_saying(do, word=lambda _: 0.0)[0]

    def on_every_rank_saying(
        self, do: Callable[[], T], *, word: Callable[[T], float]
    ) -> tuple[T, list[float]]:
        """Collective: :meth:`on_every_rank`, and a number that each rank says in the same message.

        Args:
            do: Called on every rank; talks to no other rank.
            word: What this rank says of what its ``do`` returned.

        Returns:
            What this rank's ``do`` returned, and every rank's word, by rank.

        Raises:
            PeerLostError: It failed on another rank; ``.rank``. A rank's own error is raised as
                it is.
        """
        if self.group is None:
            value = do()
            return value, [word(value)]
        try:
            value = do()
            mine, error = word(value), None
        except Exception as caught:
            mine, error = 0.0, caught
        said = self.gather_numbers([mine, float(error is not None)])
        if any(failed for _, failed in said):
            texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise PeerLostError(f"rank {rank}: {text}", rank=rank)
        return value, [theirs for theirs, _ in said]

    def on_every_rank_alike(
        self, do: Callable[[], T], *, fact: Callable[[T], Any]
    ) -> tuple[T, list[Any]]:
        """Collective: :meth:`on_every_rank`, and whether what it made is the same on all ranks.

        Args:
            do: Called on every rank; talks to no other rank.
            fact: A JSON value that must be the same on all.

        Returns:
            What this rank's ``do`` returned, and the facts by rank where they differ; where they
            are the same, which one small message tells, an empty list.

        Raises:
            PeerLostError: It failed on another rank; ``.rank``. A rank's own error is raised as
                it is.
        """
        value, digests = self.on_every_rank_saying(do, word=lambda made: _digest(fact(made)))
        return value, self.gather(fact(value)) if len(set(digests)) > 1 else []

    def close(self) -> None:
        """End the group; without effect once the process group is gone."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)


def _digest(value: Any) -> float:
    """Of a JSON value: 48 bits, which a float holds exactly."""
    found = blake2b(json.dumps(value).encode(), digest_size=6)
    return float(int.from_bytes(found.digest(), "big"))


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def _retold(error: Exception) -> dict[str, Any]:
    """What the other ranks need to raise the like of it."""
    facts = error.facts if isinstance(error, LegatoError) else {}
    return {
        "error": type(error).__name__,
        "text": str(error),
        "problems": error.problems if isinstance(error, ConfigError) else None,
        "facts": {name: value for name, value in facts.items() if _is_json(value)},
    }


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _rebuilt(told: Mapping[str, Any], fallback: type[LegatoError]) -> LegatoError:
    name, text = told["error"], told["text"]
    if told["problems"] is not None:
        return ConfigError(told["problems"])
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, LegatoError):
        return kind(text, **told["facts"])
    return fallback(f"rank 0: {name}: {text}", rank=0)
