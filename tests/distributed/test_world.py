"""What several ranks decide together."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from legato.errors import ConfigError, PeerLostError
from legato.parallel.world import World
from legato.train.signals import Request, StopSignals
from tests.helpers import spawn

pytestmark = pytest.mark.distributed


def sums(rank: int) -> tuple[list[float], list[float], list[str]]:
    with World.join("cpu", distributed=True, environment={}) as world:
        # 0.1 + 0.2 + 0.3 isn't 0.3 + 0.2 + 0.1: the order has to be the same everywhere.
        added = world.sum_over_ranks([0.1 * (rank + 1), float("nan") if rank == 1 else 1.0])
        largest = world.agree([rank, -rank])
        return added, largest, world.gather(f"rank {rank}")


def test_sums_have_the_same_bits_on_every_rank() -> None:
    results = spawn.run(sums, 3)
    assert {added[0].hex() for added, _, _ in results} == {(0.1 + 0.2 + 0.1 * 3).hex()}
    assert all(added[1] != added[1] for added, _, _ in results)
    assert all(largest == [2, 0] for _, largest, _ in results)
    assert all(texts == ["rank 0", "rank 1", "rank 2"] for _, _, texts in results)


def uses_what_is_there(rank: int) -> tuple[int, int, bool]:
    with World.join("cpu", distributed=True, environment={}) as world:
        facts = (world.rank, world.world_size)
    return *facts, dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left() -> None:
    assert spawn.run(uses_what_is_there, 2) == [(0, 2, True), (1, 2, True)]


def second_rank_fails(rank: int) -> str:
    def work() -> str:
        if rank == 1:
            raise FileNotFoundError(2, "No such file", "/models/base")
        return "fine"

    def refuse() -> None:
        raise ConfigError(["epochs: 0", "seed: -1"])

    with World.join("cpu", distributed=True, environment={}) as world:
        with pytest.raises(ConfigError) as caught:
            world.control.on_main(refuse)
        assert caught.value.problems == ["epochs: 0", "seed: -1"]
        try:
            return world.on_every_rank(work)
        except (PeerLostError, FileNotFoundError) as error:
            return f"{type(error).__name__}: {error}"


def test_where_one_rank_fails_all_do_and_say_which() -> None:
    own = "FileNotFoundError: [Errno 2] No such file: '/models/base'"
    assert spawn.run(second_rank_fails, 2) == [f"PeerLostError: rank 1: {own}", own]


def dies_alone(rank: int) -> str:
    with World.join("cpu", distributed=True, environment={}) as world:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            world.agree([0])
        except RuntimeError:
            assert time.monotonic() - began < 20
            raise
    return "never"


def survivors(rank: int) -> str:
    try:
        return dies_alone(rank)
    except PeerLostError as error:
        return str(error)


def test_a_rank_that_dies_is_noticed_by_the_others() -> None:
    said, _ = spawn.run(survivors, 2, may_die={1})
    assert said.startswith("rank 0 lost another rank: ")


def requests(rank: int) -> list[Request | bool]:
    with (
        World.join("cpu", distributed=True, environment={}) as world,
        StopSignals(agree=world.agree) as signals,
    ):
        answers: list[Request | bool] = [signals.poll()]
        if rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        answers += [signals.poll(), signals.poll()]
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return [*answers, signals.stop_requested(), signals.poll()]


def test_a_signal_to_any_rank_is_one_request_that_all_hear_at_once() -> None:
    expected = [
        Request(save=False, stop=None),
        Request(save=True, stop=None),
        Request(save=False, stop=None),
        True,
        Request(save=True, stop=signal.SIGTERM),
    ]
    assert spawn.run(requests, 2) == [expected, expected]
