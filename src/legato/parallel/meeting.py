"""How the processes of a run find each other: at a store first, then as a process group.

The store is where somebody who doesn't come is missed by number, and where one that can't take part
says so: a process group would wait for it to the end of its patience, and then name nobody.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from legato.errors import PeerLostError, WorldError, first_line
from legato.parallel.placement import Placement, is_port_in_use

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEET_SECONDS = 300.0
"""How long the first one waits for the last one to start."""
SAY_SECONDS = 30.0
"""How often it says whom it waits for."""
_HEARD_SECONDS = 10.0
_POLL_SECONDS = 0.1


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
            as it is.
    """
    if placement.world_size == 1:
        return dist.HashStore(), prepare()  # type: ignore[attr-defined]
    try:
        store = _open_store(placement)
        value, error = None, None
        try:
            value = prepare()
        except Exception as caught:
            error = caught
        text = "" if error is None else f"{type(error).__name__}: {error}"
        store.set(_here(placement.rank), text)
        _wait_for_all(store, placement)
        texts = [store.get(_here(rank)).decode() for rank in range(placement.world_size)]
        store.set(_heard(placement.rank), "")
        failed = next((rank for rank, text in enumerate(texts) if text), None)
        if failed is not None:
            # Rank 0 may serve the store: it stays until the others have read why.
            keys = [_heard(rank) for rank in range(placement.world_size)]
            with suppress(dist.DistError):
                store.wait(keys, dt.timedelta(seconds=_HEARD_SECONDS))
    except dist.DistError as error:
        raise _cannot_meet(placement, error) from error
    if error is not None:
        raise error
    if failed is not None:
        raise PeerLostError(f"rank {failed}: {texts[failed]}", rank=failed)
    return store, value  # type: ignore[return-value]


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


def _open_store(placement: Placement) -> Any:
    """Serve the store, or reach it."""
    serves = placement.rank == 0 and not placement.meets_at_agent
    if not serves:
        _wait_for_port(placement)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        placement.address,
        placement.port,
        is_master=serves,
        timeout=dt.timedelta(seconds=MEET_SECONDS),
        multi_tenant=True,
    )
    # The launcher keeps one store over all attempts: without a prefix of its own an attempt
    # meets the gloo addresses of dead processes (17 of 42 restarts failed, measured).
    prefix = f"legato/{placement.attempt}/{placement.world_size}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


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


def _wait_for_all(store: Any, placement: Placement) -> None:
    missing = list(range(placement.world_size))
    began = time.monotonic()
    while missing:
        try:
            store.wait([_here(rank) for rank in missing], dt.timedelta(seconds=SAY_SECONDS))
            return
        except dist.DistStoreError as error:
            missing = [rank for rank in missing if not store.check([_here(rank)])]
            waited = time.monotonic() - began
            if missing and waited >= MEET_SECONDS:
                raise WorldError(
                    f"{_ranks(missing)} of {placement.world_size} didn't come to "
                    f"{placement.address}:{placement.port} within {MEET_SECONDS:.0f} s: it has "
                    "ended, which its own host's messages tell, or was never started.",
                    missing=missing,
                ) from error
            if missing:
                _say_waiting(placement, _ranks(missing), waited)


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


def _here(rank: int) -> str:
    return f"here/{rank}"


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _cannot_meet(placement: Placement, error: Exception) -> WorldError:
    if is_port_in_use(error):
        return WorldError(
            f"port {placement.port} on {placement.address} is in use. Choose another one: "
            "--master-port for legato run and torchrun, MASTER_PORT elsewhere.",
            port=placement.port,
        )
    return WorldError(
        f"rank {placement.rank} of {placement.world_size} can't meet the others at "
        f"{placement.address}:{placement.port}: {first_line(error)}"
    )
