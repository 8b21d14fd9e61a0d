"""Two hosts with a network of their own: namespaces of this machine. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launches import Launched
from tests.helpers.runs import losses, steps_in, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

ADDRESSES = ("10.177.0.1", "10.177.0.2")


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    names = (f"legato-a-{os.getpid()}", f"legato-b-{os.getpid()}")
    if shutil.which("ip") is None or not ip("netns", "add", names[0]):
        pytest.skip("network namespaces can't be made here")
    try:
        assert ip("netns", "add", names[1])
        cable = [*("link", "add", "eth-a", "netns", names[0]), *("type", "veth", "peer", "name")]
        assert ip(*cable, "eth-b", "netns", names[1])
        for name, end, address in zip(names, ("eth-a", "eth-b"), ADDRESSES, strict=True):
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            assert ip("-n", name, "link", "set", end, "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def start(config: Path, host: str, number: int, *, prepare: str = "true") -> Launched:
    """``legato run`` on one of the hosts, which has its own name; ``prepare`` runs there first."""
    inside = f'hostname host-{number}; {prepare} && exec "$@"'
    return Launched(
        config,
        *("--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
        *(f"--master-addr={ADDRESSES[0]}", "--master-port=29517"),
        command=(
            *("ip", "netns", "exec", host, "unshare", "--uts", "--mount"),
            *("sh", "-c", inside, "sh", sys.executable, "-m", "legato", "run"),
        ),
    )


def config_in(folder: Path, model: Path, **changes: object) -> Path:
    recipe = "full_finetune_distributed"
    return write_config(folder, model=model, recipe=recipe, max_steps=2, **changes)


def test_two_hosts_train_one_model_as_one_host_does(
    tmp_path: Path, tiny_model_dir: Path, hosts: tuple[str, str]
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    runs = [start(config, host, number) for number, host in enumerate(hosts)]
    texts = [run.succeed() for run in runs]
    assert "2 x cpu" in texts[0]
    assert "step 2/2" not in texts[1]
    assert steps_in(tmp_path / "out") == [2]
    one_host = Launched(config, output_dir=tmp_path / "one")
    one_host.succeed()
    assert losses(tmp_path / "out") == losses(tmp_path / "one")


def test_hosts_that_do_not_share_a_disk_are_refused_by_name(
    tmp_path: Path, tiny_model_dir: Path, hosts: tuple[str, str]
) -> None:
    (tmp_path / "out").mkdir()
    config = config_in(tmp_path, tiny_model_dir)
    own_disk = f"mount -t tmpfs none {tmp_path / 'out'}"
    runs = [
        start(config, host, number, prepare=own_disk if number else "true")
        for number, host in enumerate(hosts)
    ]
    for run in runs:
        code, text = run.end()
        assert code == 2, text
        assert f"output_dir: {tmp_path / 'out'} on host host-1 (rank 1) isn't the folder" in text
