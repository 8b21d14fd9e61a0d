"""Processes that work ahead: order, errors, and how they and the run end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import psutil
import pytest

from legato.data.workers import map_ahead
from legato.errors import DataError


def slow_for_even(number: int) -> int:
    time.sleep(0.01 * (number % 2 == 0))
    return number * number


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_items(num_workers: int) -> None:
    found = map_ahead(slow_for_even, range(20), num_workers=num_workers, ahead=6)
    assert list(found) == [number * number for number in range(20)]


def test_no_more_is_read_than_was_allowed_to_be_ahead() -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with closing(map_ahead(slow_for_even, items(), num_workers=2, ahead=6)) as results:
        assert next(results) == 0
        assert read == list(range(7))


def fails_at_3(number: int) -> int:
    if number == 3:
        raise DataError("a.jsonl:4: broken", path="a.jsonl:4")
    return number


def test_an_error_is_raised_at_its_items_turn_with_its_facts() -> None:
    results = map_ahead(fails_at_3, range(9), num_workers=2, ahead=9)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"^a\.jsonl:4: broken$") as caught:
        next(results)
    assert caught.value.facts == {"path": "a.jsonl:4"}


def kills_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_process_that_was_killed_is_one_error_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"one of 2 processes .*\. Set num_workers lower"):
        list(map_ahead(kills_itself, range(9), num_workers=2, ahead=9))


def gets_the_runs_signals(number: int) -> int:
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), name)
    return number


def test_signals_to_the_whole_group_are_the_runs_to_answer() -> None:
    found = map_ahead(gets_the_runs_signals, range(4), num_workers=2, ahead=4)
    assert list(found) == [0, 1, 2, 3]


def own_pid(number: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def a_run(pids: Connection) -> None:
    results = map_ahead(own_pid, range(1000), num_workers=2, ahead=10)
    pids.send({next(results) for _ in range(6)})
    time.sleep(60)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_that_was_killed_leaves_no_process_behind() -> None:
    here, there = multiprocessing.Pipe()
    run = multiprocessing.get_context("fork").Process(target=a_run, args=(there,))
    run.start()
    assert here.poll(30)
    pids = here.recv()
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    run.kill()
    run.join()
    limit = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < limit, "still there"
        time.sleep(0.02)
