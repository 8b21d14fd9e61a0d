"""Ranks at the store: who is missing is named, and why one can't take part is told to all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from legato.errors import ConfigError, PeerLostError, StopRequested, WorldError
from legato.parallel import meeting
from legato.parallel.meeting import StopBoard, announce_end, meet
from legato.parallel.placement import Placement
from legato.parallel.reports import FOLDER_VARIABLE, RankEnd
from tests.helpers.launches import free_port


def placements(world_size: int) -> list[Placement]:
    port = free_port()
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


def test_a_port_that_another_program_listens_at_is_named_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 1.0)
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()  # takes connections, and never says a word
        port = foreign.getsockname()[1]
        ranks = [Placement(rank=rank, world_size=2, port=port) for rank in range(2)]
        began = time.monotonic()
        with pytest.raises(WorldError, match=f"port {port} on 127.0.0.1 is in use"):
            meet(ranks[0], lambda: "a")
        with pytest.raises(WorldError, match=rf"rank 1 .* no answer at .*:{port}: another"):
            meet(ranks[1], lambda: "b")
        assert time.monotonic() - began < 10


def test_what_an_earlier_attempt_left_in_a_launchers_store_answers_nobody() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As on two hosts: after a restart their launchers have counted to different numbers.
    for attempts in ((0, 0), (1, 0), (1, 2)):
        ranks = [
            Placement(
                rank=rank,
                world_size=2,
                port=store.port,
                attempt=attempts[rank],
                has_agent=True,
                meets_at_agent=True,
            )
            for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda placement: meet(placement, lambda: "here"), ranks))
        stores = [store for store, _ in found]
        assert not stores[0].check(["note"])
        stores[1].set("note", "of this attempt")
        assert stores[0].get("note") == b"of this attempt"


def test_a_rank_of_another_host_that_would_fail_again_is_told_of_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        Placement(rank=rank, world_size=2, port=store.port, has_agent=True, meets_at_agent=True)
        for rank in range(2)
    )
    end = RankEnd(rank=1, how="failed", time=1.0, exit_code=2, message="no model", is_final=True)
    announce_end(second, end)
    with pytest.raises(PeerLostError, match=r"^no model$") as caught:
        meet(first, lambda: "a")
    assert caught.value.facts == {"rank": 1, "exit_code": 2, "is_over": True}
    assert caught.value.exit_code == 2


def test_a_host_that_was_stopped_before_its_ranks_had_started_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert StopBoard("127.0.0.1", store.port).post()
    first = Placement(rank=0, world_size=2, port=store.port, has_agent=True, meets_at_agent=True)
    with pytest.raises(StopRequested) as caught:
        meet(first, lambda: "a")
    assert caught.value.exit_code == 143
