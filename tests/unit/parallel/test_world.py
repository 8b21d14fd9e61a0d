"""A process alone: no group, the same answers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from legato.errors import ConfigError, PeerLostError, WorldError
from legato.parallel.placement import Placement
from legato.parallel.world import World, interface_towards, is_lost_peer, pick_device


def test_alone_everything_is_this_ranks_own() -> None:
    world = World.single("cpu")
    assert world.is_main
    assert (world.rank, world.world_size, world.group) == (0, 1, None)
    assert world.sum_over_ranks([1.5, 2]) == [1.5, 2]
    assert world.agree([0.0, 15.0]) == [0.0, 15.0]
    assert world.gather({"a": [1]}) == [{"a": [1]}]
    assert world.on_every_rank(lambda: "made") == "made"


def test_alone_an_error_comes_as_it_is() -> None:
    def fail() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        World.single("cpu").on_every_rank(fail)


def test_a_single_device_run_has_no_group() -> None:
    with World.join("cpu", distributed=False, environment={}) as world:
        assert world.group is None
        assert not dist.is_initialized()


def test_a_world_of_one_has_a_group_until_it_is_left() -> None:
    with World.join("cpu", distributed=True, environment={}) as world:
        assert (world.rank, world.world_size) == (0, 1)
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_world_is_left_when_an_error_leaves_it() -> None:
    with pytest.raises(KeyError), World.join("cpu", distributed=True, environment={}):
        raise KeyError("x")
    assert not dist.is_initialized()


def test_what_gloo_says_of_a_lost_rank_becomes_a_named_error() -> None:
    said = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
        "[127.0.0.1]:3745\nC++ stack"
    )
    with (
        pytest.raises(PeerLostError, match=r"^rank 0 lost another rank: .*3745\. The log"),
        World.join("cpu", distributed=True, environment={}),
    ):
        raise RuntimeError(said)


def test_other_errors_stay_what_they_are() -> None:
    assert not is_lost_peer(RuntimeError("CUDA out of memory"))
    assert not is_lost_peer(ValueError("gloo/transport"))
    assert is_lost_peer(dist.DistBackendError("NCCL communicator was aborted"))


def test_a_port_that_is_in_use_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
        with (
            pytest.raises(WorldError, match=f"port {port} on 127.0.0.1 is in use"),
            World.join("cpu", distributed=True, environment=where),
        ):
            raise AssertionError


def on_host(**facts: int) -> Placement:
    return Placement(**{"rank": 0, "world_size": 2, "local_world_size": 2} | facts)


def test_processes_of_one_host_do_not_share_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "mps"
    assert pick_device("auto", on_host()).type == "cpu"
    with pytest.raises(ConfigError, match="several processes can't share it"):
        pick_device("mps", on_host())


def test_each_process_of_a_host_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("auto", on_host(local_rank=1)) == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ConfigError, match="cuda:0 is one GPU, and 2 processes"):
        pick_device("cuda:0", on_host())
    with pytest.raises(ConfigError, match="3 processes run on this host, and torch sees 2"):
        pick_device("cuda", on_host(local_rank=2, local_world_size=3))
    own = Placement(rank=1, world_size=2, local_rank=1, local_world_size=2, sees_own_gpu=True)
    assert pick_device("cuda", own) == torch.device("cuda:0")


def test_the_interface_that_leads_to_a_host_is_found() -> None:
    assert interface_towards("127.0.0.1") in ("lo", "lo0")
    assert interface_towards("no-such-host.invalid") is None
