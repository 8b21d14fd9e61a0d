"""Which process of how many, as launchers say it in the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from legato.errors import WorldError
from legato.parallel.placement import Placement, find_placement, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-12",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# Taken from `srun env` of a step with 3 tasks on 2 nodes.
SRUN = {
    "SLURM_JOB_ID": "40017",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def test_a_process_that_was_started_alone_has_no_placement() -> None:
    assert find_placement({}) is None
    assert find_placement({"WORLD_SIZE": "4"}) is None


def test_torchruns_variables_are_read() -> None:
    assert find_placement(TORCHRUN) == Placement(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        address="gpu07",
        port=29511,
        attempt=2,
        has_agent=True,
        launch_id="job-12",
        meets_at_agent=True,
    )


def test_the_name_that_torchrun_gives_to_every_launch_is_no_name() -> None:
    nameless = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    folder = "/tmp/torchelastic_a1/none_b2"
    for attempt in (0, 1):
        file = {"TORCHELASTIC_ERROR_FILE": f"{folder}/attempt_{attempt}/3/error.json"}
        by_torch = find_placement(nameless | file)
        assert by_torch is not None
        assert by_torch.launch_id == folder
    ours = find_placement(nameless | {"LEGATO_LAUNCH_FOLDER": "/tmp/legato-launch-x"})
    assert ours is not None
    assert ours.launch_id == "/tmp/legato-launch-x"


def test_a_nameless_launch_that_keeps_no_logs_is_known_by_the_process_that_restarts_its_ranks() -> (
    None
):
    code = "import os; from legato.parallel.placement import *; print(find_placement(os.environ))"
    environment = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": ""}
    attempts = [
        subprocess.check_output(
            [sys.executable, "-c", code],
            env=os.environ | environment | {"TORCHELASTIC_RESTART_COUNT": "0"},
            text=True,
        )
        for _ in range(2)
    ]
    assert attempts[0] == attempts[1]
    assert f"launch_id='process {os.getpid()} of 1" in attempts[0]
    here = find_placement(environment)
    assert here is not None
    assert here.launch_id is not None
    assert here.launch_id not in attempts[0]


def test_rank_and_world_size_alone_are_enough() -> None:
    assert find_placement({"RANK": "1", "WORLD_SIZE": "2"}) == Placement(rank=1, world_size=2)


def test_sruns_variables_are_read() -> None:
    assert find_placement(SRUN) == Placement(
        rank=2, world_size=3, local_rank=0, local_world_size=1, address="gpu07", port=25017
    )
    first = find_placement(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert (first.rank, first.local_world_size) == (0, 2)


def test_a_batch_script_by_itself_is_no_process_of_many() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_placement(batch) is None


def test_what_torchrun_sets_inside_of_srun_counts() -> None:
    found = find_placement(SRUN | TORCHRUN)
    assert found is not None
    assert found.rank == 5


def test_a_slurm_task_that_sees_its_own_gpu_alone_is_told_apart() -> None:
    for visible, own in (("3", True), ("0,1", False)):
        found = find_placement(SRUN | {"CUDA_VISIBLE_DEVICES": visible})
        assert found is not None
        assert found.sees_own_gpu is own


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,cpu1", "gpu07"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[12,07]-ib,cpu[1-2]", "gpu12-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": ""}, "RANK=''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=8"),
    ],
)
def test_variables_that_do_not_fit_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        find_placement(TORCHRUN | changes)
