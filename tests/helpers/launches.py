"""Runs of several processes through the real command, and what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from legato.report.metrics import read_events

# A start costs seconds of imports on every rank, and CI's two cores are shared.
TIMEOUT_SECONDS = 240.0
# multiprocessing's own helper ends when it notices that nobody is left.
ORPHAN_SECONDS = 2.0
# Until all have ended of a run one of whose ranks has failed.
FAILED_SECONDS = 30.0
MARK = "LEGATO_TEST_LAUNCH"


_KILL = """
import os, re, signal
kills = {kills}
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
rank, verb, path = kills.get(attempt, (None, "", ""))
if rank is not None and os.environ.get("RANK") == str(rank):
    from legato.storage import LocalStorage
    real = getattr(LocalStorage, verb)
    def kill(self, *arguments):
        if re.search(path, str(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)
    setattr(LocalStorage, verb, kill)
"""


def killed_in_a_save(folder: Path, kills: Mapping[int, tuple[int, str, str]]) -> dict[str, str]:
    """Environment in which ranks are killed while they save, by the storage's verb for a path.

    By a module in ``folder`` that Python imports at its start.

    Args:
        folder: Is made.
        kills: Attempt -> the rank that is killed in it, the verb, and a regular expression that
            finds something in the verb's first path; 0 is the attempt before any restart.

    Returns:
        What the launcher is to have besides.
    """
    return _run_first(folder, _KILL.format(kills=repr(dict(kills))))


_HOLD = """
import os, time
while "RANK" in os.environ and not os.path.exists({file!r}):
    time.sleep(0.01)
"""


def held_at_their_start(folder: Path, *, until: Path) -> dict[str, str]:
    """Environment in which ranks do nothing at all until a file is there.

    Args:
        folder: Is made.
        until: The file.

    Returns:
        What the launcher is to have besides.
    """
    return _run_first(folder, _HOLD.format(file=str(until)))


def _run_first(folder: Path, code: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Launched:
    """``legato run --nproc-per-node N ...`` in a process of its own."""

    def __init__(
        self,
        config: Path,
        *arguments: object,
        num_processes: int = 2,
        output_dir: Path | None = None,
        command: tuple[str, ...] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output_dir = output_dir or config.parent / "out"
        words = command or (
            *(sys.executable, "-m", "legato", "run"),
            *(f"--nproc-per-node={num_processes}",) * (num_processes > 0),
        )
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [
                *words,
                *("--config", str(config), f"output_dir={self.output_dir}"),
                *map(str, arguments),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", MARK: self._mark} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def workers(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                rank = child.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None:
                found[int(rank)] = child
        return found

    def left(self) -> list[psutil.Process]:
        """Every process that this run has started, in however many steps, and that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self._mark
            except (psutil.Error, OSError):  # ended, or somebody else's
                continue
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def wait_for_step(self, step: int) -> None:
        """Until ``step`` was logged in this output_dir, by whatever attempt."""
        self.wait_until(lambda: max(self.logged_steps(), default=0) >= step, f"step {step}")

    def wait_until(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"ended before {what}:\n{self.end()[1]}")
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"{what} wasn't reached:\n{self.end()[1]}")
            time.sleep(0.02)

    def logged_steps(self) -> list[int]:
        """Steps in metrics.jsonl, in the order they were taken; a repeated one is there twice."""
        path = self.output_dir / "metrics.jsonl"
        if not path.exists():
            return []
        return [event["step"] for event in read_events(path) if event["event"] == "step"]

    def send(self, number: signal.Signals, *, rank: int | None = None) -> None:
        """A signal to the launcher, or to one rank."""
        target = psutil.Process(self.process.pid) if rank is None else self.workers()[rank]
        target.send_signal(number)

    def stop_reading(self) -> None:
        """Leave what is said from now on to nobody, as a ``tee`` that was ended."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stdout = None

    def end(self, *, within_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str]:
        """Wait for the end; the exit code and what was said. Nobody may be left."""
        try:
            output, _ = self.process.communicate(timeout=within_seconds)
        except subprocess.TimeoutExpired:
            for each in self.left():
                each.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"still running after {within_seconds} s:\n{output}") from None
        _, orphans = psutil.wait_procs(self.left(), timeout=ORPHAN_SECONDS)
        assert not orphans, f"left behind: {orphans}"
        return self.process.returncode, output

    def fail(self) -> tuple[int, str]:
        """Wait for a bad end, which comes soon after a rank's first error; as ``end``."""
        code, output = self.end()
        assert code != 0, output
        logs = [path for path in self.output_dir.glob("logs/*") if "Traceback" in path.read_text()]
        if logs:  # written to when the rank failed
            since = time.time() - min(path.stat().st_mtime for path in logs)
            assert since < FAILED_SECONDS, output
        return code, output

    def succeed(self) -> str:
        """Wait for a good end; what was said."""
        code, output = self.end()
        assert code == 0, output
        return output
