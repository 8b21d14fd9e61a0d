"""How the processes of a run find each other: at a store first, then as a process group.

The store is where somebody who doesn't come is missed by number, and where one that can't take part
says so: a process group would wait for it to the end of its patience, and then name nobody.

A launcher keeps one store over all attempts, and launchers of several hosts don't count these
alike: one that restarts its ranks because another host's failed doesn't count that. So each rank
asks rank 0 at the store which meeting this is, under a name that nobody had before, and the answer
is what everything else is kept under. What an earlier attempt left answers nobody.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from legato.errors import PeerLostError, StopRequested, WorldError, first_line
from legato.parallel.placement import Placement, is_port_in_use
from legato.parallel.reports import RankEnd, launch_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEET_SECONDS = 300.0
"""How long the first one waits for the last one to start."""
SAY_SECONDS = 30.0
"""How often it says whom it waits for."""
_HEARD_SECONDS = 10.0
_ANSWER_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.1
_ALL_HERE = "all here"
_OVER = "over"
_STOPPED = "stopped"
_CHOOSE = "Choose another one: --master-port for legato run and torchrun, MASTER_PORT elsewhere."


def meet(placement: Placement, prepare: Callable[[], T]) -> tuple[Any, T]:
    """Collective: call ``prepare``; go on when every rank has, or fail on all where one failed.

    Args:
        placement: Who is to come, and where.
        prepare: What each does by itself to take part, such as finding its GPU.

    Returns:
        The store, with room for this attempt alone, and what ``prepare`` returned.

    Raises:
        WorldError: The place can't be reached, or somebody didn't come; ``.missing`` has the ranks.
        PeerLostError: ``prepare`` failed on another rank; ``.rank``. A rank's own error is raised
            as it is. With ``.is_over`` a rank of another host has ended, and would again.
        StopRequested: Another host was stopped before its ranks had started.
    """
    if placement.world_size == 1:
        return dist.HashStore(), prepare()  # type: ignore[attr-defined]
    try:
        meeting = _Meeting(placement)
        value, error = None, None
        try:
            value = prepare()
        except Exception as caught:
            error = caught
        texts = meeting.gather("" if error is None else f"{type(error).__name__}: {error}")
    except dist.DistError as error:
        raise _cannot_meet(placement, error) from error
    if error is not None:
        raise error
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    if failed is not None:
        raise PeerLostError(f"rank {failed}: {texts[failed]}", rank=failed)
    return meeting.store, value  # type: ignore[return-value]


def init_process_group(store: Any, placement: Placement, device: torch.device) -> None:
    """Collective: make the default group of ranks that have met.

    Args:
        store: As :func:`meet` returns it.
        placement: This rank's.
        device: Where it computes.

    Raises:
        WorldError: Somebody has gone since, or the network between the hosts doesn't let gloo
            through.
    """
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=placement.rank,
            world_size=placement.world_size,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise _cannot_meet(placement, error) from error


def announce_end(placement: Placement, end: RankEnd) -> None:
    """Tell ranks of other hosts, which a launcher may restart, that there is nothing to do.

    Args:
        placement: This rank's.
        end: How it ended, and would again.
    """
    if _may_be_over(placement):
        with suppress(dist.DistError, WorldError):
            _shared_part(_connect(placement)).set(_OVER, json.dumps(asdict(end)))


class StopBoard:
    """Where launchers tell each other, and each other's ranks, of a signal that has come too early.

    Once ranks have met, one that is told to stop tells the others. Before, nobody would: hosts
    that wait for one that was stopped would wait to the end of torch's patience.

    Args:
        address: Host where the launchers meet.
        port: Port there, of a ``TCPStore``.
    """

    def __init__(self, address: str, port: int) -> None:
        self._place = Placement(rank=0, world_size=2, address=address, port=port)
        self._shared: Any = None

    def post(self) -> bool:
        """Say that this host has been stopped; whether the place is there."""

        def write(shared: Any) -> bool:
            shared.set(_STOPPED, "")
            return True

        return self._ask(write)

    def is_posted(self) -> bool:
        """Whether another host has been stopped."""
        return self._ask(lambda shared: bool(shared.check([_STOPPED])))

    def _ask(self, do: Callable[[Any], bool]) -> bool:
        try:
            if self._shared is None:
                # torch would wait for a host that isn't there yet.
                address = (self._place.address, self._place.port)
                socket.create_connection(address, timeout=_LOOK_SECONDS).close()
                self._shared = _shared_part(_connect(self._place))
            return do(self._shared)
        except (OSError, RuntimeError):
            self._shared = None
            return False


def _may_be_over(placement: Placement) -> bool:
    """Whether ranks of several launchers of ours meet; one of them has a folder for that."""
    return placement.has_other_hosts and placement.meets_at_agent and launch_folder() is not None


class _Meeting:
    """One attempt's part of the store.

    Args:
        placement: Who is to come, and where.

    Attributes:
        store: Holds what this attempt says, and nothing else.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._began = self._said = time.monotonic()
        self._shared = _shared_part(_open_store(placement))
        self._refuse_if_over()
        self._names = [""] * placement.world_size
        name = uuid.uuid4().hex
        if placement.rank:
            self._shared.set(_asks(placement.rank), name)
            self._wait_for(self._shared, _answer(name), lambda: [0])
            name = self._shared.get(_answer(name)).decode()
        self._name = name
        self.store = dist.PrefixStore(name, self._shared)  # type: ignore[attr-defined]

    def gather(self, text: str) -> list[str]:
        """Collective: every rank's text, by rank."""
        ranks = range(self._placement.world_size)
        self.store.set(_here(self._placement.rank), text)
        if self._placement.rank:
            self._wait_for(self.store, _ALL_HERE, self._missing)
        else:
            self._welcome()
        texts = [self.store.get(_here(rank)).decode() for rank in ranks]
        self.store.set(_heard(self._placement.rank), "")
        if any(texts):
            # Rank 0 may serve the store: it stays until the others have read why.
            with suppress(dist.DistError):
                self.store.wait(
                    [_heard(rank) for rank in ranks], dt.timedelta(seconds=_HEARD_SECONDS)
                )
        return texts

    def _welcome(self) -> None:
        """Rank 0: answer each rank that asks, until all are here."""
        missing = self._missing()
        while missing:
            for rank in missing:
                self._answer(rank)
            missing = [rank for rank in missing if not self.store.check([_here(rank)])]
            if missing:
                self._patience(missing)
                time.sleep(_POLL_SECONDS)
        self.store.set(_ALL_HERE, "")

    def _answer(self, rank: int) -> None:
        if not self._shared.check([_asks(rank)]):
            return
        # One that an earlier attempt left is answered too; the next look finds the new one.
        name = self._shared.get(_asks(rank)).decode()
        if name != self._names[rank]:
            self._shared.set(_answer(name), self._name)
            self._names[rank] = name

    def _refuse_if_over(self) -> None:
        if not _may_be_over(self._placement):
            return
        if self._shared.check([_STOPPED]):
            raise StopRequested(signal.SIGTERM)
        if self._shared.check([_OVER]):
            end = RankEnd(**json.loads(self._shared.get(_OVER)))
            raise PeerLostError(end.message, rank=end.rank, exit_code=end.exit_code, is_over=True)

    def _missing(self) -> list[int]:
        ranks = range(self._placement.world_size)
        return [rank for rank in ranks if not self.store.check([_here(rank)])]

    def _wait_for(self, store: Any, key: str, missing: Callable[[], list[int]]) -> None:
        """Until ``key`` is there; ``missing`` names those without whom it won't come."""
        while True:
            try:
                store.wait([key], dt.timedelta(seconds=SAY_SECONDS))
                return
            except dist.DistStoreError:
                self._patience(missing())

    def _patience(self, missing: list[int]) -> None:
        """Say now and then who isn't here; an error at the end."""
        self._refuse_if_over()
        now, placement = time.monotonic(), self._placement
        if now - self._began >= MEET_SECONDS:
            raise WorldError(
                f"{_ranks(missing)} of {placement.world_size} didn't come to "
                f"{placement.address}:{placement.port} within {MEET_SECONDS:.0f} s: it has "
                "ended, which its own host's messages tell, or was never started.",
                missing=missing,
            )
        if now - self._said >= SAY_SECONDS:
            self._said = now
            _say_waiting(placement, _ranks(missing), now - self._began)


def _open_store(placement: Placement) -> Any:
    """Serve the store, or reach it."""
    serves = placement.rank == 0 and not placement.meets_at_agent
    if not serves:
        _wait_for_port(placement)
    return _connect(placement, serves=serves)


def _connect(placement: Placement, *, serves: bool = False) -> Any:
    """Serve or reach the store; WorldError where what listens there isn't one.

    In a thread, because torch waits without an end for an answer that another program won't give.
    """
    stores: list[Any] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            stores.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    placement.address,
                    placement.port,
                    is_master=serves,
                    timeout=dt.timedelta(seconds=MEET_SECONDS),
                    multi_tenant=True,
                )
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="legato-store", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if errors:
        raise errors[0]
    if not stores:
        raise WorldError(
            f"rank {placement.rank} of {placement.world_size} gets no answer at "
            f"{placement.address}:{placement.port}: another program has that port. {_CHOOSE}",
            port=placement.port,
        )
    return stores[0]


def _shared_part(store: Any) -> Any:
    """What ranks of all attempts see, apart from what others keep in the store."""
    return dist.PrefixStore("legato", store)  # type: ignore[attr-defined]


def _wait_for_port(placement: Placement) -> None:
    """Until the store is served: torch would wait without a word, and end with a C++ stack."""
    began = said = time.monotonic()
    while True:
        try:
            socket.create_connection((placement.address, placement.port), timeout=5.0).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now - began >= MEET_SECONDS:
                raise _cannot_meet(placement, error) from error
            if now - said >= SAY_SECONDS:
                said = now
                whom = f"rank 0, which doesn't answer yet ({first_line(error)})"
                _say_waiting(placement, whom, now - began)
            time.sleep(_POLL_SECONDS)


def _say_waiting(placement: Placement, whom: str, waited: float) -> None:
    logger.info(
        "rank %d of %d waits at %s:%d for %s: %.0f s so far, at most %.0f s",
        *(placement.rank, placement.world_size, placement.address, placement.port),
        *(whom, waited, MEET_SECONDS),
    )


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 1, 2, 5``; the first ten of many."""
    named = ", ".join(map(str, ranks[:10]))
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _asks(rank: int) -> str:
    return f"asks/{rank}"


def _answer(name: str) -> str:
    return f"answer/{name}"


def _here(rank: int) -> str:
    return f"here/{rank}"


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _cannot_meet(placement: Placement, error: Exception) -> WorldError:
    if is_port_in_use(error):
        return WorldError(
            f"port {placement.port} on {placement.address} is in use. {_CHOOSE}",
            port=placement.port,
        )
    return WorldError(
        f"rank {placement.rank} of {placement.world_size} can't meet the others at "
        f"{placement.address}:{placement.port}: {first_line(error)}"
    )
