"""One of several processes of a run: its log, its end, and whom it tells."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import typer

from legato.cli.errors import INTERRUPTED, LESS_MEMORY, is_out_of_memory
from legato.errors import LegatoError, PeerLostError, StopRequested, WorldError
from legato.parallel.placement import Placement
from legato.parallel.reports import (
    RankEnd,
    clear_end,
    is_orphaned,
    is_over,
    launch_folder,
    remove_orphaned,
    write_end,
)
from legato.storage.writing import writing_to

LOGS_FOLDER = "logs"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RESTARTED_SECONDS = 3.0


@contextlib.contextmanager
def as_rank(placement: Placement, *, output_dir: str) -> Iterator[None]:
    """Run the block as one process of many.

    Rank 0 speaks to the terminal; what the others say, and every rank's traceback, goes to
    ``output_dir/logs/rank_<n>.log``. Where ``legato run`` launched the processes, each one's end is
    left for it to tell. Elastic agents restart what doesn't end with 0: a process that stopped on
    request does.

    Args:
        placement: Which process this is.
        output_dir: The run's.

    Yields:
        None: the block is the training.

    Raises:
        Exit: How the process is to end, where the launcher speaks for it.
    """
    folder = launch_folder()
    if folder is not None:
        if is_over(folder):
            raise typer.Exit(0)
        clear_end(folder, placement.rank)
        _stop_with_launcher()
        if is_orphaned():  # it was killed before
            remove_orphaned(folder)
            raise typer.Exit(128 + signal.SIGTERM)
    log: TextIO | None = None
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(remove_orphaned, folder)
        try:
            log = stack.enter_context(_rank_log(placement, Path(output_dir, LOGS_FOLDER)))
            yield
        except BaseException as error:
            end = _end_of(error, rank=placement.rank)
            if log is not None and end.how in ("failed", "lost"):
                with contextlib.suppress(OSError):  # a full disk is what may have gone wrong
                    log.write(end.traceback)
                    log.flush()
            if folder is not None:
                _tell(folder, placement, end)
            if end.how == "stopped" and placement.has_agent:
                raise typer.Exit(0) from error
            if end.how == "lost" and end.is_final:
                # Agents that still wait for ours in a new round of theirs restart this process
                # at once. If none does, the others' have ended with 0, and ours is to follow.
                time.sleep(_RESTARTED_SECONDS)
                raise typer.Exit(0) from error
            if folder is not None:
                raise typer.Exit(end.exit_code) from error
            raise
    if folder is not None:
        write_end(folder, RankEnd(rank=placement.rank, how="done", time=time.time()))


def _tell(folder: str, placement: Placement, end: RankEnd) -> None:
    """Leave ``end`` for the launcher, and for other hosts where a restart is of no use to them."""
    write_end(folder, end)
    if end.how == "failed" and end.is_final:
        from legato.parallel.meeting import announce_end

        announce_end(placement, end)


def _end_of(error: BaseException, *, rank: int) -> RankEnd:
    now = time.time()
    if isinstance(error, StopRequested):
        return RankEnd(rank=rank, how="stopped", time=now, exit_code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C before training takes signals
        return RankEnd(rank=rank, how="stopped", time=now, exit_code=INTERRUPTED)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, PeerLostError) or (
        isinstance(error, LegatoError) and error.facts.get("rank", rank) != rank
    ):
        return RankEnd(
            rank=rank,
            how="lost",
            time=now,
            exit_code=error.exit_code,
            message=error.message,
            is_final=error.facts.get("is_over", False),
            lost_rank=error.facts.get("rank"),
            traceback=text,
        )
    if isinstance(error, LegatoError):
        # What is refused on purpose would be refused again; hosts that can't meet may yet do so.
        return RankEnd(
            rank=rank,
            how="failed",
            time=now,
            exit_code=error.exit_code,
            message=error.message,
            is_final=not isinstance(error, WorldError),
            traceback=text,
        )
    message = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        message = f"{message}\n{LESS_MEMORY}"
    return RankEnd(rank=rank, how="failed", time=now, exit_code=1, message=message, traceback=text)


@contextlib.contextmanager
def _rank_log(placement: Placement, folder: Path) -> Iterator[TextIO]:
    """Open this rank's log; all ranks but 0 write nowhere else from now on."""
    log = _open_log(placement, folder)
    handler = logging.StreamHandler(log)
    try:
        faulthandler.enable(log)
        if placement.rank:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        else:
            logging.getLogger("legato").addHandler(handler)
        yield log
    finally:
        faulthandler.disable()
        logging.getLogger("legato").removeHandler(handler)  # it would write to a closed file
        with contextlib.suppress(OSError):  # what a full disk didn't take
            log.close()


def _open_log(placement: Placement, folder: Path) -> TextIO:
    with writing_to(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / f"rank_{placement.rank}.log").open("a", encoding="utf-8")
        try:
            log.write(
                f"--- rank {placement.rank} of {placement.world_size}, process {os.getpid()}, "
                f"attempt {placement.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            )
            log.flush()
        except OSError:
            with contextlib.suppress(OSError):
                log.close()
            raise
    return log


def _stop_with_launcher() -> None:
    """Get SIGTERM when the launcher is killed: nobody else would end us. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
