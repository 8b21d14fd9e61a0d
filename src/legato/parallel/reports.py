"""How each process of a launched run ended, told to its launcher in a folder that both know.

A launcher sees exit codes and whom the kernel killed; it doesn't see which of two errors came
first, nor that one of them is only the echo of the other. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER_VARIABLE = "LEGATO_LAUNCH_FOLDER"
_STOP_FILE = "stop"

# A kill is noticed after the fact: by the others at once, by the launcher at its next look.
_NOTICED_LATE_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one process ended.

    Attributes:
        rank: Which one.
        how: ``done``; ``stopped`` by a signal after a save; ``failed`` by an error of its own;
            ``lost``: by the end of another one.
        time: Seconds since 1970.
        exit_code: What the command is to end with.
        message: The error's; empty if there is none.
        is_final: A restart would end in the same way.
    """

    rank: int
    how: Literal["done", "stopped", "failed", "lost"]
    time: float
    exit_code: int = 0
    message: str = ""
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class Death:
    """What the launcher saw of a process that failed.

    Attributes:
        exit_code: As ``subprocess`` has it: below zero for a signal.
        time: When it was noticed, seconds since 1970.
    """

    exit_code: int
    time: float


def write_end(folder: str, end: RankEnd) -> None:
    """Leave ``end`` for the launcher."""
    path = Path(folder, f"rank_{end.rank}.json")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(end)), encoding="utf-8")
    temporary.replace(path)


def clear_end(folder: str, rank: int) -> None:
    """Forget how ``rank`` ended: it was restarted."""
    Path(folder, f"rank_{rank}.json").unlink(missing_ok=True)


def read_ends(folder: str) -> list[RankEnd]:
    """Every end that was left, by rank."""
    ends = [RankEnd(**json.loads(path.read_text())) for path in Path(folder).glob("rank_*.json")]
    return sorted(ends, key=lambda end: end.rank)


def ask_to_stop(folder: str, number: int) -> None:
    """Have processes that are started from now on end at once: signal ``number`` came."""
    Path(folder, _STOP_FILE).write_text(str(number))


def is_over(folder: str) -> bool:
    """Whether a process that is started now has nothing to do."""
    if Path(folder, _STOP_FILE).exists():
        return True
    return any(end.is_final for end in read_ends(folder))


def first_failure(
    ends: Sequence[RankEnd], deaths: Mapping[int, Death]
) -> tuple[int, RankEnd | None] | None:
    """Which process failed first, by itself.

    Args:
        ends: What the processes told.
        deaths: What the launcher saw, by rank.

    Returns:
        Its rank, and what it told; None where it was killed before it could. None if none failed.
    """
    told = {end.rank: end for end in ends}
    times: dict[int, float] = {}
    for end in ends:
        if end.how == "failed":
            times[end.rank] = end.time
    for rank, death in deaths.items():
        # SIGTERM is how the launcher ends those that are left.
        if rank not in told and death.exit_code != -15:
            times[rank] = death.time - _NOTICED_LATE_SECONDS
    if not times:
        times = {end.rank: end.time for end in ends if end.how == "lost"}
        times |= {rank: death.time for rank, death in deaths.items() if rank not in times}
    if not times:
        return None
    rank = min(times, key=lambda rank: (times[rank], rank))
    return rank, told.get(rank)


def launch_folder() -> str | None:
    """The folder of the launcher that started this process; None: another one did."""
    return os.environ.get(FOLDER_VARIABLE)
