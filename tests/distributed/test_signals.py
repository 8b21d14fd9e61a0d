"""Signals to a run of several processes: one save at one step, and the right exit code."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.launches import Launched, held_at_their_start
from tests.helpers.runs import losses, steps_in, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def endless(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A run that ends only when it is asked to, and saves only then."""
    return write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="lora_finetune_distributed",
        epochs=None,
        max_steps=100_000,
        save_every_n_train_steps=None,
    )


def test_a_stop_signal_to_the_launcher_saves_once_and_the_same_command_goes_on(
    endless: Path,
) -> None:
    run = Launched(endless)
    run.wait_for_step(3)
    run.send(signal.SIGTERM)
    assert run.end()[0] == 143
    [step] = steps_in(run.output_dir)
    assert max(losses(run.output_dir)) == step
    run = Launched(endless)
    run.wait_for_step(step + 2)
    run.stop_reading()  # Ctrl-C ends the `tee` of a pipe too
    run.wait_for_step(max(run.logged_steps()) + 3)
    run.send(signal.SIGINT)
    assert run.end()[0] == 130
    assert steps_in(run.output_dir) == [step, max(losses(run.output_dir))]
    assert run.logged_steps() == list(range(1, max(run.logged_steps()) + 1))


def test_a_stop_signal_to_one_rank_stops_all_at_one_step_and_nobody_restarts_them(
    endless: Path,
) -> None:
    run = Launched(endless, "--max-restarts=2")
    run.wait_for_step(3)
    run.send(signal.SIGTERM, rank=1)
    code, output = run.end()
    assert code == 143, output
    [step] = steps_in(run.output_dir)
    assert run.logged_steps() == list(range(1, step + 1))


def test_sigusr1_to_the_launcher_or_to_a_rank_saves_once_and_goes_on(endless: Path) -> None:
    run = Launched(endless)
    run.wait_until((run.output_dir / "logs" / "rank_1.log").exists, "the start of rank 1")
    run.send(signal.SIGUSR1)  # while they start
    run.send(signal.SIGUSR1, rank=1)
    run.wait_until(lambda: steps_in(run.output_dir) == [1], "the save of the first step")
    run.wait_for_step(4)
    assert steps_in(run.output_dir) == [1]
    run.send(signal.SIGUSR1, rank=1)
    run.wait_until(lambda: len(steps_in(run.output_dir)) == 2, "the second save")
    (run.output_dir / "SAVE").touch()
    run.wait_until(lambda: len(steps_in(run.output_dir)) == 3, "the third save")
    last = steps_in(run.output_dir)[-1]
    run.wait_for_step(last + 3)
    assert len(steps_in(run.output_dir)) == 3
    run.send(signal.SIGTERM)
    assert run.end()[0] == 143


# A disk that is full, put into the processes by a module that Python imports at its start.
FULL = """
import os
def full(sync):
    def refuse(fd):
        if "/.step_" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        sync(fd)
    return refuse
os.fsync, os.fdatasync = full(os.fsync), full(os.fdatasync)
"""


def test_a_last_checkpoint_that_cannot_be_written_ends_the_launcher_with_3(
    endless: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FULL)
    paths = [str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = Launched(
        endless,
        "final_save_patience_seconds=1",
        environment={"PYTHONPATH": os.pathsep.join(paths)},
    )
    run.wait_for_step(2)
    run.send(signal.SIGTERM)
    code, output = run.end(within_seconds=60)
    assert code == 3, output
    assert "No space left on device" in output[output.index("error: ") :]
    assert steps_in(run.output_dir) == []


def test_a_second_sigint_ends_all_at_once(endless: Path) -> None:
    run = Launched(endless)
    run.wait_for_step(2)
    workers = run.workers()
    # A rank that doesn't answer: it can't save, and the other one waits for it.
    workers[1].suspend()
    run.send(signal.SIGINT)
    time.sleep(0.5)  # two pending signals would be one
    assert run.process.poll() is None
    run.send(signal.SIGINT)
    assert run.end(within_seconds=20)[0] == 130
    assert steps_in(run.output_dir) == []


def test_a_signal_while_the_processes_start_ends_them_and_nobody_restarts_them(
    endless: Path,
) -> None:
    run = Launched(endless, "--max-restarts=3")
    run.wait_until(lambda: len(run.workers()) == 2, "the start of both processes")
    run.send(signal.SIGTERM)
    code, output = run.end(within_seconds=60)
    assert code == 143, output


def test_ctrl_c_while_the_processes_import_is_no_failure_of_theirs(endless: Path) -> None:
    run = Launched(endless)
    logs = [run.output_dir / "logs" / f"rank_{rank}.log" for rank in range(2)]
    run.wait_until(lambda: all(log.exists() for log in logs), "the start of both ranks")
    run.send(signal.SIGINT)
    code, output = run.end(within_seconds=60)
    assert code == 130, output
    assert "failed" not in output


def test_when_the_launcher_is_killed_the_ranks_save_and_end(endless: Path) -> None:
    run = Launched(endless)
    run.wait_for_step(3)
    workers = list(run.workers().values())
    run.send(signal.SIGKILL)
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
    run.process.communicate()
    assert steps_in(run.output_dir) == [max(losses(run.output_dir))]


def is_left(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_when_the_launcher_is_killed_while_the_ranks_import_they_end(
    endless: Path, tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    go = tmp_path / "go"
    held = held_at_their_start(tmp_path / "site", until=go)
    run = Launched(endless, environment={"TMPDIR": str(place), **held})
    run.wait_until(lambda: len(run.workers()) == 2, "the start of both processes")
    workers = list(run.workers().values())
    run.send(signal.SIGKILL)
    run.process.wait()
    go.touch()
    run.process.communicate(timeout=120)  # their output is open until both end
    deadline = time.monotonic() + 30
    while any(is_left(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_left(worker) for worker in workers)
    assert list(place.iterdir()) == []


def test_the_launchers_folder_may_go_and_signals_still_save(endless: Path, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    run = Launched(endless, environment={"TMPDIR": str(place)})
    run.wait_for_step(2)
    [folder] = place.glob("legato-launch-*")
    shutil.rmtree(folder)  # as whatever tidies temporary files up
    run.send(signal.SIGUSR1)
    run.wait_until(lambda: len(steps_in(run.output_dir)) == 1, "the save")
    run.wait_for_step(max(run.logged_steps()) + 2)
    shutil.rmtree(folder)
    run.send(signal.SIGTERM)
    code, output = run.end()
    assert code == 143, output
    assert len(steps_in(run.output_dir)) == 2
    assert list(place.iterdir()) == []
