"""A launcher that waits for other hosts says where, and ends when it is told to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore

from legato.parallel import hosts
from legato.parallel.hosts import HostWatch, waiting_text
from legato.parallel.launch import plan_launch
from legato.parallel.meeting import StopBoard
from tests.helpers.launches import free_port


@pytest.mark.parametrize(
    ("options", "place", "limit"),
    [
        (["--master-addr=10.0.0.1", "--master-port=29517"], "10.0.0.1:29517", "timeout=900"),
        (["--rdzv-conf=timeout=60"], "127.0.0.1:29500", "timeout=60"),
        (["--rdzv-endpoint=b:7"], "b:7", "timeout=900"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:1"], "a:1", "join_timeout=600"),
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-conf=timeout=9,join_timeout=50"],
            "a:1",
            "join_timeout=50",
        ),
    ],
)
def test_the_place_and_the_end_of_the_wait_are_named(
    options: list[str], place: str, limit: str
) -> None:
    arguments = plan_launch(["--nnodes=2", *options], ["run"]).arguments
    assert waiting_text(arguments, seconds=30.2) == (
        f"waiting at {place} for the other hosts, 2 in all: 30 s so far, at most "
        f"{limit.partition('=')[2]} s (--rdzv-conf={limit})"
    )


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that Python's handler of SIGTERM was called with."""
    numbers: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, old)


def watch(
    *, is_waiting: bool, said: threading.Event, ended: threading.Event, **more: Any
) -> HostWatch:
    return HostWatch(
        say=lambda seconds: said.set(),
        is_waiting=lambda: is_waiting,
        give_up=lambda number: ended.set(),
        say_seconds=0.01,
        look_seconds=0.01,
        **more,
    )


def test_it_speaks_only_while_nothing_runs() -> None:
    said, ended = threading.Event(), threading.Event()
    with watch(is_waiting=True, said=said, ended=ended):
        assert said.wait(10)
    said.clear()
    with watch(is_waiting=False, said=said, ended=ended):
        assert not said.wait(0.2)
    assert not ended.is_set()


def test_a_stop_that_the_main_thread_does_not_get_to_ends_the_process(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_HANDLER_SECONDS", 0.01)
    said, ended = threading.Event(), threading.Event()
    with watch(is_waiting=True, said=said, ended=ended):
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(10)
    assert handled == [signal.SIGTERM]


def test_hosts_hear_of_a_stop_while_they_meet_and_end_too(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_HANDLER_SECONDS", 0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [StopBoard("127.0.0.1", store.port) for _ in range(2)]
    said, ended = threading.Event(), threading.Event()
    with watch(is_waiting=True, said=said, ended=ended, is_stopped=boards[1].is_posted):
        assert said.wait(10)
    assert not handled
    with watch(is_waiting=True, said=said, ended=ended, tell=boards[0].post):
        signal.raise_signal(signal.SIGTERM)
    assert not ended.is_set()
    with watch(is_waiting=True, said=said, ended=ended, is_stopped=boards[1].is_posted):
        assert ended.wait(10)
    assert handled == [signal.SIGTERM, signal.SIGTERM]


def test_a_place_where_nobody_serves_a_store_tells_and_is_told_nothing() -> None:
    board = StopBoard("127.0.0.1", free_port())
    assert not board.is_posted()
    assert not board.post()


def test_a_stop_that_ends_the_block_is_left_to_its_handler(handled: list[int]) -> None:
    said, ended = threading.Event(), threading.Event()
    with watch(is_waiting=True, said=said, ended=ended):
        signal.raise_signal(signal.SIGTERM)
    with watch(is_waiting=False, said=said, ended=ended):
        signal.raise_signal(signal.SIGTERM)
        assert not ended.wait(0.2)
    assert handled == [signal.SIGTERM, signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1
