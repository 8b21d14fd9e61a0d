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
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long the others may go on when one rank has failed: they may wait for it in a collective.
_GRACE_SECONDS = 10.0


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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        with _child_environment():
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_worker,
                    args=(fn, rank, world_size, folder, args, sender, timeout_seconds),
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


@contextlib.contextmanager
def _child_environment() -> Iterator[None]:
    """Children import torch before any code of ours runs, so its threads are set from here."""
    values = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    pipe: Connection,
    timeout_seconds: float,
) -> None:
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
