"""The helper that every distributed test stands on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.spawn import run

pytestmark = pytest.mark.distributed


def sum_of_ranks(rank: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value)


def second_rank_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def second_rank_is_killed(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def sleeps_for_ever(rank: int) -> None:
    time.sleep(600)


def test_every_rank_returns_its_result() -> None:
    assert run(sum_of_ranks, 2, 10) == [21, 21]


def test_one_failing_rank_fails_the_run_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2: raised") as caught:
        run(second_rank_raises, 2)
    assert "ValueError: rank one is unhappy" in str(caught.value)


def test_a_rank_that_may_die_may_be_killed() -> None:
    assert run(second_rank_is_killed, 2, may_die={1}) == ["survived", None]


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit_and_says_where() -> None:
    with pytest.raises(AssertionError, match="sleeps_for_ever"):
        run(sleeps_for_ever, 2, timeout_seconds=15)
