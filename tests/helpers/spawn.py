"""Run a function on several gloo ranks, each a process of its own, within a time limit."""

from __future__ import annotations

import contextlib
import datetime as dt
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long the others may go on when one rank has failed: they may wait for it in a collective.
_GRACE_SECONDS = 10.0


def context() -> ForkServerContext:
    """Starts processes in milliseconds, each forked from a server that has imported torch.

    The server has started no thread, and has nothing of the process that runs the tests.
    """
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.helpers.preloaded"])
    return found


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank; return what each returned, by rank.

    ``fn`` is a function of a module (the processes import it); the default process group is gloo.
    A rank in ``may_die`` may be killed: its result is ``None``. Any other end than a return fails
    with the traceback of every rank, and with where each one hung.
    """
    server = context()
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        # A child's is that of the server's start until it is told another.
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(world_size):
            receiver, sender = server.Pipe(duplex=False)
            process = server.Process(
                target=_worker,
                args=(fn, rank, world_size, folder, args, sender, timeout_seconds, environment),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            reports = _collect(pipes, timeout_seconds, may_die)
        finally:
            for process in processes:
                process.join(timeout=2.0 if process.exitcode is None else None)
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = [
            f"--- rank {rank} of {world_size}: {_ending(reports.get(rank), process.exitcode)}\n"
            + (Path(folder) / f"hang-{rank}").read_text()
            for rank, process in enumerate(processes)
            if not (reports.get(rank, ("", None))[0] == "returned" or rank in may_die)
        ]
    if failures:
        raise AssertionError(f"{fn.__name__} failed:\n" + "\n".join(failures))
    return [reports.get(rank, ("", None))[1] for rank in range(world_size)]


def _collect(
    pipes: list[Connection], timeout_seconds: float, may_die: Collection[int]
) -> dict[int, tuple[str, Any]]:
    reports: dict[int, tuple[str, Any]] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_seconds
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            with contextlib.suppress(EOFError):
                reports[rank] = pipe.recv()
            failed = reports.get(rank, ("died", None))[0] != "returned" and rank not in may_die
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return reports


def _ending(report: tuple[str, Any] | None, exitcode: int | None) -> str:
    if report is None:
        return f"no report, exit code {exitcode}"
    return f"{report[0]}\n{report[1]}"


def _worker(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    pipe: Connection,
    timeout_seconds: float,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (Path(folder) / f"hang-{rank}").open("w") as hang_file:
        faulthandler.dump_traceback_later(max(timeout_seconds - 2.0, 0.5), file=hang_file)
        try:
            # A file, not a port: ports race with whatever else runs here.
            store = dist.FileStore(f"{folder}/store", world_size)
            limit = dt.timedelta(seconds=timeout_seconds)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
            )
            report = ("returned", fn(rank, *args))
        except BaseException:  # torch's CheckpointException is no Exception
            report = ("raised", traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(report)
