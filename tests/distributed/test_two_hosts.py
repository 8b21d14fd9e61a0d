"""Two hosts with a network of their own: namespaces of this machine. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.launches import Launched
from tests.helpers.runs import legato, losses, steps_in, write_config

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


def start(config: Path, host: str, number: int, *changes: str, prepare: str = "true") -> Launched:
    """``legato run`` on one of the hosts, which has its own name; ``prepare`` runs there first."""
    inside = f'hostname host-{number}; {prepare} && exec "$@"'
    return Launched(
        config,
        *changes,
        *("--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
        *(f"--master-addr={ADDRESSES[0]}", "--master-port=29517"),
        command=(
            *("ip", "netns", "exec", host, "unshare", "--uts", "--mount"),
            *("sh", "-c", inside, "sh", sys.executable, "-m", "legato", "run"),
        ),
    )


def config_in(folder: Path, model: Path, **changes: object) -> Path:
    values = {"recipe": "full_finetune_distributed", "max_steps": 2} | changes
    return write_config(folder, model=model, **values)  # type: ignore[arg-type]


def test_two_hosts_train_one_model_as_one_host_does(
    tmp_path: Path, tiny_model_dir: Path, hosts: tuple[str, str]
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    runs = [start(config, host, number) for number, host in enumerate(hosts)]
    texts = [run.succeed() for run in runs]
    assert "2 x cpu" in texts[0]
    assert "step 2/2" not in texts[1]
    assert steps_in(tmp_path / "out") == [2]
    alone = [f"output_dir={tmp_path / 'one'}", "recipe=full_finetune_single_device"]
    assert legato("run", "--config", config, "batch_size=4", *alone) == 0
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_hosts_that_share_no_disk_save_to_the_first_and_resume_from_it(
    tmp_path: Path, tiny_model_dir: Path, hosts: tuple[str, str]
) -> None:
    config = config_in(tmp_path, tiny_model_dir, shared_storage=False)
    (tmp_path / "out").mkdir()
    own_disk = f"mkdir -p {tmp_path}/disk && mount --bind {tmp_path}/disk {tmp_path}/out"

    def run(last: int) -> None:
        runs = [
            start(config, host, number, f"stop_after_step={last}", prepare=prepare)
            for number, (host, prepare) in enumerate(zip(hosts, ("true", own_disk), strict=True))
        ]
        for each in runs:
            each.succeed()

    run(1)
    assert steps_in(tmp_path / "disk") == []
    run(2)
    assert steps_in(tmp_path / "out") == [1, 2]
    assert steps_in(tmp_path / "disk" / ".source") == [1]
    whole = [f"output_dir={tmp_path / 'whole'}", "recipe=full_finetune_single_device"]
    assert legato("run", "--config", config, "~shared_storage", "batch_size=4", *whole) == 0
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.parametrize(
    ("hidden", "messages"),
    [
        (
            "out",
            [
                "rank 0 failed first: output_dir: {folder} on host host-1 (rank 1) isn't",
                "rank 1 failed first: output_dir: {folder} on host host-1 (rank 1) isn't",
            ],
        ),
        (
            "model",
            [
                "rank 1 on another host failed first: {config}:13: model: {folder}: has no",
                "rank 1 failed first: {config}:13: model: {folder}: has no",
            ],
        ),
    ],
)
def test_what_one_host_does_not_see_is_named_on_both_and_not_tried_again(
    tmp_path: Path, hosts: tuple[str, str], hidden: str, messages: list[str]
) -> None:
    folder = tmp_path / hidden
    tiny.write_model(tmp_path / "model")
    folder.mkdir(exist_ok=True)
    config = config_in(tmp_path, tmp_path / "model")
    own_disk = f"mount -t tmpfs none {folder}"
    runs = [
        start(config, host, number, "--max-restarts=2", prepare=own_disk if number else "true")
        for number, host in enumerate(hosts)
    ]
    texts = [run.fail() for run in runs]
    for (_, text), message in zip(texts, messages, strict=True):
        assert f"error: {message.format(folder=folder, config=config)}" in text, "\n".join(
            text for _, text in texts
        )
    assert "step 1" not in texts[0][1]
    log = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    assert log.count(" attempt ") <= 2
