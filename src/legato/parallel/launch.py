"""``legato run`` as its own torchrun: torch's elastic launcher in this process, signals ours.

torchrun alone kills a save that takes longer than 30 seconds, dies of SIGUSR1 and leaves its
workers behind, restarts workers that were asked to stop, and ends with 1 whatever happened. torch
is imported only when something is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from legato.errors import StopRequested, UsageError, WorldError, first_line
from legato.parallel.handlers import handlers_taken
from legato.parallel.hosts import HostWatch, end_process, stop_board, waiting_text
from legato.parallel.placement import is_port_in_use
from legato.parallel.reports import (
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    Death,
    ask_to_save,
    ask_to_stop,
    conclude,
    read_ends,
)
from legato.parallel.terminal import leave_closed_terminal

if TYPE_CHECKING:
    from legato.parallel.meeting import StopBoard

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 600
"""How long processes that were asked to stop may take for their step and their last checkpoint, not
counting the time that a save which fails is tried again.
"""

# torchrun's options; the names with underscores are the same ones.
_WITH_VALUE = frozenset(
    {
        "nnodes",
        "nproc-per-node",
        "node-rank",
        "master-addr",
        "master-port",
        "local-addr",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "rdzv-conf",
        "max-restarts",
        "monitor-interval",
        "shutdown-timeout",
        "event-log-handler",
        "role",
        "numa-binding",
        "log-dir",
        "redirects",
        "tee",
        "local-ranks-filter",
        "duplicate-stdout-filters",
        "duplicate-stderr-filters",
    }
)
_FLAGS = frozenset({"standalone", "virtual-local-rank"})
OPTIONS = tuple(f"--{name}" for name in sorted(_WITH_VALUE | _FLAGS))
"""torchrun's options, as `legato run` takes them."""

_SHORT = {"-r": "redirects", "-t": "tee"}
_OURS = {
    "signals-to-handle": "legato run passes SIGTERM, SIGINT, SIGHUP and SIGUSR1 on by itself",
    "start-method": "the processes are commands, which aren't forked",
}


@dataclass(frozen=True)
class LaunchPlan:
    """What torchrun's options ask for.

    Attributes:
        arguments: torch's own reading of them.
        num_processes: Processes on all hosts.
        num_hosts: How many hosts.
    """

    arguments: argparse.Namespace
    num_processes: int
    num_hosts: int


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell torchrun's options from the rest of a command line, wherever they stand.

    Args:
        words: What was typed after ``legato run``.

    Returns:
        The options, each as ``--name=value``, and the other words in their order.

    Raises:
        UsageError: An option that has no value, or that means nothing here.
    """
    options: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        typed, is_joined, value = word.partition("=")
        name = _SHORT.get(typed) or typed.removeprefix("--").replace("_", "-")
        if not word.startswith("-") or name not in _WITH_VALUE | _FLAGS | _OURS.keys():
            rest.append(word)
        elif name in _OURS:
            raise UsageError(f"{typed}: {_OURS[name]}; leave it out")
        elif name in _FLAGS:
            options.append(f"--{name}")
        else:
            found = value if is_joined else next(remaining, None)
            if found is None:
                raise UsageError(f"{typed}: its value is missing")
            options.append(f"--{name}={found}")
    return options, rest


def is_asked_for(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether processes are to be launched: by options, or by torchrun's variables (Kubeflow)."""
    return bool(options) or any(name.startswith("PET_") for name in environment)


def plan_launch(
    options: Sequence[str], words: Sequence[str], *, patience_seconds: float = 0.0
) -> LaunchPlan:
    """Read torchrun's options as torch does.

    Args:
        options: As :func:`split_options` gives them.
        words: What each process gets to run, after ``python -m legato``.
        patience_seconds: How long a last save that fails is tried again, which is more time until
            processes that were asked to stop are killed.

    Returns:
        The plan.

    Raises:
        UsageError: torch can't make sense of them.
    """
    from torch.distributed.run import determine_local_world_size, parse_args, parse_min_max_nnodes

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parse_args(  # type: ignore[no-untyped-call]
                [*options, "--module", "legato", *words]
            )
    except SystemExit as error:
        lines = said.getvalue().strip().splitlines() or ["torchrun's options can't be read"]
        raise UsageError(lines[-1].partition("error: ")[2] or lines[-1]) from error
    try:
        min_hosts, max_hosts = parse_min_max_nnodes(arguments.nnodes)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes={arguments.nnodes}: expected a number of hosts") from error
    try:
        per_host = determine_local_world_size(arguments.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"--nproc-per-node={arguments.nproc_per_node}: expected a number of processes, or "
            f"gpu, cpu, auto: one for each. torch says: {first_line(error)}"
        ) from error
    if min_hosts != max_hosts:
        raise UsageError(
            f"--nnodes={arguments.nnodes}: a range isn't taken: after a host has joined or left, "
            "torch's launchers don't find each other again. Give one number; when hosts come or "
            "go, start the same command with another one: it goes on from the newest checkpoint"
        )
    if min_hosts < 1 or per_host < 1:
        raise UsageError(
            f"--nnodes={arguments.nnodes} --nproc-per-node={per_host}: expected 1 or more"
        )
    if max_hosts == 1 and not _names_a_meeting_place(arguments):
        arguments.standalone = True  # a free port, instead of one that may be in use
    arguments.nproc_per_node = str(per_host)
    # Not none: torch would take its default. SIGQUIT stays torch's.
    arguments.signals_to_handle = "SIGQUIT"
    if arguments.shutdown_timeout is None:
        arguments.shutdown_timeout = SHUTDOWN_SECONDS + math.ceil(patience_seconds)
    return LaunchPlan(arguments, num_processes=min_hosts * per_host, num_hosts=max_hosts)


def _names_a_meeting_place(arguments: argparse.Namespace) -> bool:
    return bool(
        arguments.rdzv_endpoint or arguments.rdzv_backend != "static" or arguments.master_port
    )


def launch(plan: LaunchPlan, *, logs: Path) -> None:
    """Run the processes until all have ended; restart them as the options say.

    Args:
        plan: What to run.
        logs: Folder of the ranks' logs, for the message.

    Raises:
        StopRequested: A signal ended the run, after a checkpoint.
        RunFailedError: It failed; ``.rank`` failed first, ``.exit_code``.
        CheckpointWriteError: The last save took longer than the shutdown timeout.
        WorldError: The launcher itself can't do its work: a port in use, hosts that don't come.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    deaths: dict[int, Death] = {}
    board = stop_board(plan.arguments) if plan.num_hosts > 1 else None
    with (
        tempfile.TemporaryDirectory(prefix="legato-launch-") as folder,
        _environment(plan, folder),
        _Signals(folder, shutdown_seconds=plan.arguments.shutdown_timeout) as signals,
        _watching_hosts(plan, folder, board),
    ):
        if plan.arguments.log_dir is None:
            plan.arguments.log_dir = str(Path(folder, "torch"))
        try:
            run(plan.arguments)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            deaths = {
                rank: Death(exit_code=failure.exitcode, time=float(failure.timestamp))
                for rank, failure in error.failures.items()
            }
        except SignalException as error:  # SIGQUIT
            raise StopRequested(int(error.sigval)) from error
        except (RuntimeError, OSError, RendezvousError) as error:
            # Another host's launcher ends the hosts' meeting when its own processes have failed,
            # or when it is stopped.
            if board is not None and board.is_posted():
                raise StopRequested(signal.SIGTERM) from error
            if not any(end.how in ("failed", "lost") for end in read_ends(folder)):
                raise _cannot_launch(plan, error) from error
        finally:
            signals.kill_workers()
        ends = read_ends(folder)
    conclude(
        ends,
        deaths,
        stopped_by=signals.stop,
        is_killed_late=signals.is_late,
        has_other_hosts=plan.num_hosts > 1,
        logs=logs,
    )


@contextlib.contextmanager
def _environment(plan: LaunchPlan, folder: str) -> Iterator[None]:
    """What the processes inherit; put back afterwards."""
    per_host = int(plan.arguments.nproc_per_node)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    values = {FOLDER_VARIABLE: folder, LAUNCHER_VARIABLE: str(os.getpid())}
    if "OMP_NUM_THREADS" not in os.environ:
        # torchrun sets 1, which leaves most of a host idle that has more cores than processes.
        values["OMP_NUM_THREADS"] = str(max(1, num_cores // per_host))
    before = dict(os.environ)
    os.environ.update(values)
    if "LOGLEVEL" not in before:
        # What went wrong is said once, by us.
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _watching_hosts(
    plan: LaunchPlan, folder: str, board: StopBoard | None
) -> contextlib.AbstractContextManager[object]:
    """Say whom torch waits for, where there are other hosts to wait for."""
    if plan.num_hosts == 1 or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()

    def say(seconds: float) -> None:
        if read_ends(folder):
            logger.info("done on this host; the others aren't yet")
        else:
            logger.info("%s", waiting_text(plan.arguments, seconds=seconds))

    def give_up(number: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        end_process(number)

    return HostWatch(
        say=say,
        is_waiting=lambda: not _workers(),
        give_up=give_up,
        tell=board.post if board else lambda: False,
        is_stopped=board.is_posted if board else lambda: False,
    )


class _Signals:
    """Passes signals on to the processes, in place of torch's own handlers.

    ====================  =======================================================================
    SIGTERM, SIGINT,      to every process, once: save and stop; killed if they take too long
    SIGHUP                (one that is ignored stays so: nohup)
    a second SIGINT       all processes are killed
    SIGUSR1               a note for the processes, also for those that just start: every rank saves
    ====================  =======================================================================
    """

    def __init__(self, folder: str, *, shutdown_seconds: float) -> None:
        self.stop: int | None = None
        self.is_late = False
        self._folder = folder
        self._shutdown_seconds = shutdown_seconds
        self._timer: threading.Timer | None = None
        self._taken = contextlib.ExitStack()

    def __enter__(self) -> _Signals:
        handlers = {
            signal.SIGTERM: self._on_stop,
            signal.SIGHUP: self._on_stop,
            signal.SIGINT: self._on_stop,
            signal.SIGUSR1: self._on_save,
        }
        self._taken.enter_context(handlers_taken(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._taken.close()

    def kill_workers(self) -> None:
        """Leave nobody behind."""
        for worker in _workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if self.stop is None:
            self.stop = number
            # First the note, then the signal: one that is just being started reads it.
            ask_to_stop(self._folder, number)
            workers = _workers()
            if not workers:  # the hosts are still looking for each other
                raise StopRequested(number)
            _send(workers, number)
            self._timer = threading.Timer(self._shutdown_seconds, self._kill_late)
            self._timer.daemon = True
            self._timer.start()
        elif number == signal.SIGINT:
            self.kill_workers()

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        ask_to_save(self._folder)

    def _kill_late(self) -> None:
        self.is_late = True
        self.kill_workers()


def _workers() -> list[psutil.Process]:
    """The launched processes: this one starts no others."""
    return psutil.Process().children()


def _send(workers: Sequence[psutil.Process], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(number)


def _cannot_launch(plan: LaunchPlan, error: Exception) -> WorldError:
    if is_port_in_use(error):
        return WorldError(
            f"port {plan.arguments.master_port} is in use, by another run perhaps. Choose another "
            "one with --master-port; on one host leave it out, and a free one is taken."
        )
    return WorldError(f"the processes can't be launched: {first_line(error)}")
