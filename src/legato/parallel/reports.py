"""How each process of a launched run ended, told to its launcher in a folder that both know.

A launcher sees exit codes and whom the kernel killed; it doesn't see which of two errors came
first, nor that one of them is only the echo of the other. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from legato.errors import CheckpointWriteError, RunFailedError, StopRequested

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "LEGATO_LAUNCH_FOLDER"
LAUNCHER_VARIABLE = "LEGATO_LAUNCHER_PID"
SAVE_FILE = "save"
"""A wish for a checkpoint, in the folder of the launch; whoever takes it away answers it."""
_STOP_FILE = "stop"

# A kill is noticed after the fact: by the others at once, by the launcher at its next look.
_NOTICED_LATE_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one process ended.

    Attributes:
        rank: Which one.
        how: ``done``; ``stopped`` by a signal, after a save where a step was done; ``failed`` by an
            error of its own; ``lost``: by the end of another one.
        time: Seconds since 1970.
        exit_code: What the command is to end with.
        message: The error's; empty if there is none.
        is_final: A restart would end in the same way.
        lost_rank: Whose end ``lost`` this one; None: it can't be told.
        traceback: The error's, as Python prints it; empty if there is none.
    """

    rank: int
    how: Literal["done", "stopped", "failed", "lost"]
    time: float
    exit_code: int = 0
    message: str = ""
    is_final: bool = False
    lost_rank: int | None = None
    traceback: str = ""


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
    """Leave ``end`` for the launcher; without room for it, that is only said."""
    if is_orphaned():
        return
    path = Path(folder, f"rank_{end.rank}.json")
    temporary = path.with_suffix(".tmp")
    try:
        _make_again(folder)
        temporary.write_text(json.dumps(asdict(end)), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # what is done is done: the exit code says the most of it
        logger.warning("the launcher isn't told how rank %d ended: %s", end.rank, error)


def remove_orphaned(folder: str) -> None:
    """Remove the launcher's folder where it can't any more."""
    if is_orphaned():
        shutil.rmtree(folder, ignore_errors=True)


def is_orphaned() -> bool:
    """Whether the launcher that started this process is gone."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    return launcher is not None and os.getppid() != int(launcher)


def _make_again(folder: str) -> None:
    """Whoever tidies the place of temporary files up may have taken it away."""
    os.makedirs(folder, mode=0o700, exist_ok=True)


def clear_end(folder: str, rank: int) -> None:
    """Forget how ``rank`` ended: it was restarted."""
    Path(folder, f"rank_{rank}.json").unlink(missing_ok=True)


def read_ends(folder: str) -> list[RankEnd]:
    """Every end that was left, by rank."""
    ends = [RankEnd(**json.loads(path.read_text())) for path in Path(folder).glob("rank_*.json")]
    return sorted(ends, key=lambda end: end.rank)


def ask_to_stop(folder: str, number: int) -> None:
    """Have processes that are started from now on end at once: signal ``number`` came."""
    # An error would end the launcher, and with it those that are about to save.
    try:
        _make_again(folder)
        Path(folder, _STOP_FILE).write_text(str(number))
    except OSError as error:
        logger.warning("processes that just start aren't told to stop: %s", error)


def ask_to_save(folder: str) -> None:
    """Have the processes save at the end of their step, or of their first one."""
    try:
        _make_again(folder)
        Path(folder, SAVE_FILE).touch()
    except OSError as error:
        logger.warning("the processes can't be asked to save: %s", error)


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


def conclude(
    ends: Sequence[RankEnd],
    deaths: Mapping[int, Death],
    *,
    stopped_by: int | None,
    is_killed_late: bool,
    has_other_hosts: bool,
    logs: Path,
) -> None:
    """Say how a launch ended, by an exception unless it is done.

    Args:
        ends: What this host's processes told.
        deaths: What the launcher saw, by rank.
        stopped_by: The signal that the launcher passed on; None: it got none.
        is_killed_late: It killed what hadn't ended within the shutdown timeout.
        has_other_hosts: Whether a process that isn't among these may have failed.
        logs: Folder of the ranks' logs.

    Raises:
        StopRequested: A signal ended the run, after a checkpoint, or before one was of use.
        RunFailedError: It failed; ``.rank`` failed first, ``.exit_code``; its traceback is a note.
        CheckpointWriteError: The last checkpoint wasn't on disk in time.
    """
    stops = [end.exit_code - 128 for end in ends if end.how == "stopped"]
    failed = [end for end in ends if end.how == "failed"]
    if stopped_by is not None and not failed:
        if is_killed_late and not stops:
            raise CheckpointWriteError(
                "the processes were killed before their last checkpoint was on disk: they took "
                f"longer after {signal.Signals(stopped_by).name} than --shutdown-timeout, in "
                "seconds, lets them. The newest complete checkpoint is the last one."
            )
        raise StopRequested(stopped_by)
    found = first_failure(ends, deaths)
    if found is not None:
        error = _failure(*found, ends, deaths, has_other_hosts=has_other_hosts, logs=logs)
        end = found[1]
        if end is not None and end.traceback:
            error.add_note(f"\nrank {end.rank}: {end.traceback}")
        raise error
    if stops:
        raise StopRequested(stops[0])


def _failure(
    rank: int,
    end: RankEnd | None,
    ends: Sequence[RankEnd],
    deaths: Mapping[int, Death],
    *,
    has_other_hosts: bool,
    logs: Path,
) -> RunFailedError:
    if end is None:
        who, what, exit_code = f"rank {rank}", _how_it_died(deaths[rank].exit_code), 1
    else:
        who, what, exit_code = f"rank {rank}", end.message, end.exit_code
        # A config that every rank refuses isn't one rank's fault, and needs no traceback.
        messages = [each.message for each in ends if each.how == "failed"]
        if end.is_final and len(messages) > 1 and len(set(messages)) == 1:
            return RunFailedError(what, rank=rank, exit_code=exit_code)
        if end.how == "lost" and has_other_hosts:  # none of ours failed by itself
            if end.lost_rank is None:
                what = f"a rank of another host failed first: {what}"
                return RunFailedError(what, rank=None, exit_code=exit_code)
            rank, who = end.lost_rank, f"rank {end.lost_rank} on another host"
            what = what.removeprefix(f"rank {rank}: ")
    log = logs / f"rank_{rank}.log"
    where = f"\nIts log: {log}" if log.exists() else ""
    return RunFailedError(f"{who} failed first: {what}{where}", rank=rank, exit_code=exit_code)


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended with exit code {exit_code} and said nothing"
    name = signal.Signals(-exit_code).name if -exit_code in list(signal.Signals) else -exit_code
    hint = " (out of memory, perhaps)" if exit_code == -signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"


def launch_folder() -> str | None:
    """The folder of the launcher that started this process; None: another one did."""
    return os.environ.get(FOLDER_VARIABLE)
