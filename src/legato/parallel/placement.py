"""Which process of how many this is, as whatever started it says in the environment.

Imports no torch: the command line asks before anything heavy is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from legato.errors import WorldError
from legato.parallel.reports import FOLDER_VARIABLE

# Slurm names no port. Two jobs on one host get different ones unless their numbers are this far
# apart; above the ports that services use, below those that the kernel hands out.
_SLURM_FIRST_PORT = 15000
_SLURM_NUM_PORTS = 15000


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A process among the processes of one run.

    Attributes:
        rank: Its number, from 0.
        world_size: How many there are.
        local_rank: Its number on this host, from 0.
        local_world_size: How many are on this host.
        address: Host where they meet.
        port: Port there.
        attempt: How often the launcher restarted them; 0 at first.
        has_agent: An elastic agent watches this process, and restarts all when one fails.
        launch_id: Name of the launch, the same for all its attempts and for no other launch; None:
            it has none.
        meets_at_agent: The launcher serves the port; else rank 0 does.
        sees_own_gpu: Of this host's GPUs, this process sees its own alone.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    attempt: int = 0
    has_agent: bool = False
    launch_id: str | None = None
    meets_at_agent: bool = False
    sees_own_gpu: bool = False

    @property
    def has_other_hosts(self) -> bool:
        """Whether some of the processes are on other hosts."""
        return self.world_size > self.local_world_size


def find_placement(environment: Mapping[str, str]) -> Placement | None:
    """Read the environment as torchrun or srun set it.

    Args:
        environment: ``os.environ``.

    Returns:
        The placement; None in a process that was started alone.

    Raises:
        WorldError: The variables don't fit together; ``.variable``.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _checked(_from_torchrun(environment))
    # These two only srun sets: a batch script by itself isn't a process of many.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _checked(_from_slurm(environment))
    return None


def _from_torchrun(environment: Mapping[str, str]) -> Placement:
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":  # torchrun's default
        run_id = (
            environment.get(FOLDER_VARIABLE) or _launch_folder_of_torch(environment) or _parent()
        )
    return Placement(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environment, "MASTER_PORT", 29500),
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        has_agent="TORCHELASTIC_RUN_ID" in environment,
        launch_id=run_id,
        meets_at_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _launch_folder_of_torch(environment: Mapping[str, str]) -> str | None:
    """The folder that an agent makes for its launch: ``<folder>/attempt_2/0/error.json``."""
    parts = environment.get("TORCHELASTIC_ERROR_FILE", "").rsplit("/", 3)
    return parts[0] if len(parts) == 4 and parts[1].startswith("attempt_") else None


def _parent() -> str:
    """The process that started this one, for an agent without a folder: ``--log-dir=/dev/null``."""
    parent = psutil.Process(os.getppid())
    return f"process {parent.pid} of {parent.create_time():.0f}"


def _from_slurm(environment: Mapping[str, str]) -> Placement:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    port = _SLURM_FIRST_PORT + _number(environment, "SLURM_JOB_ID", 0) % _SLURM_NUM_PORTS
    return Placement(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=_tasks_here(environment),
        address=environment.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        port=_number(environment, "MASTER_PORT", port),
        sees_own_gpu="," not in environment.get("CUDA_VISIBLE_DEVICES", ","),
    )


def is_port_in_use(error: Exception) -> bool:
    """Whether torch says that somebody else listens at the port where the processes are to meet."""
    return "EADDRINUSE" in str(error) or "in use" in str(error)


def first_host(nodes: str) -> str:
    """The first name of a Slurm list of nodes: ``gpu[07-09,12],cpu1`` -> ``gpu07``."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_here(environment: Mapping[str, str]) -> int:
    """``SLURM_STEP_TASKS_PER_NODE`` is such as ``4(x2),3``: by node, runs of equal ones folded."""
    node = _number(environment, "SLURM_NODEID", 0)
    counts: list[int] = []
    for count, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _number(environment: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = environment.get(variable)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise WorldError(
            f"{variable}={text!r} in the environment: expected a whole number, as torchrun sets it",
            variable=variable,
        ) from error


def _checked(placement: Placement) -> Placement:
    if not 0 <= placement.rank < placement.world_size:
        raise WorldError(
            f"RANK={placement.rank} and WORLD_SIZE={placement.world_size} in the environment: the "
            "rank must be below the world size. Were they left over from another run?",
            variable="RANK",
        )
    return placement
