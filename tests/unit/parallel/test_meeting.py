"""Ranks at the store: who is missing is named, and why one can't take part is told to all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from legato.errors import ConfigError, PeerLostError, WorldError
from legato.parallel import meeting
from legato.parallel.meeting import meet
from legato.parallel.placement import Placement


def placements(world_size: int) -> list[Placement]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [Placement(rank=rank, world_size=world_size, port=port) for rank in range(world_size)]


def no_gpu() -> str:
    raise ConfigError("device: cuda isn't here")


def outcomes(*prepares: Callable[[], str]) -> list[Any]:
    """What ``meet`` gave each rank, a thread of its own: a value, or an error."""
    stores = []

    def one(placement: Placement) -> Any:
        try:
            store, value = meet(placement, prepares[placement.rank])
            stores.append(store)  # rank 0 serves it until all have met
            return value
        except (WorldError, ConfigError) as error:
            return error

    with ThreadPoolExecutor(len(prepares)) as threads:
        return list(threads.map(one, placements(len(prepares))))


def test_ranks_that_are_all_there_go_on() -> None:
    assert outcomes(lambda: "a", lambda: "b", lambda: "c") == ["a", "b", "c"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_take_part_ends_all_at_once_and_is_named(rank: int) -> None:
    prepares: list[Callable[[], str]] = [lambda: "a", lambda: "b"]
    prepares[rank] = no_gpu
    found = outcomes(*prepares)
    assert isinstance(found[rank], ConfigError)
    other = found[1 - rank]
    assert isinstance(other, PeerLostError)
    assert str(other) == f"rank {rank}: ConfigError: device: cuda isn't here"
    assert other.rank == rank  # type: ignore[attr-defined]


def test_ranks_that_do_not_come_are_named_while_waiting_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "MEET_SECONDS", 0.25)
    first = placements(3)[0]
    with caplog.at_level("INFO"), pytest.raises(WorldError) as caught:
        meet(first, lambda: "a")
    assert caught.value.missing == [1, 2]  # type: ignore[attr-defined]
    assert f"ranks 1, 2 of 3 didn't come to 127.0.0.1:{first.port} within 0 s" in str(caught.value)
    assert f"rank 0 of 3 waits at 127.0.0.1:{first.port} for ranks 1, 2: 0 s so far" in caplog.text


def test_a_rank_0_that_does_not_serve_the_store_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "MEET_SECONDS", 0.3)
    last = placements(2)[1]
    with caplog.at_level("INFO"), pytest.raises(WorldError, match="rank 1 of 2 can't meet"):
        meet(last, lambda: "b")
    assert "for rank 0, which doesn't answer yet" in caplog.text
