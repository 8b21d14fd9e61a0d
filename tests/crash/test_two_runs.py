"""Two runs on one output_dir: the second is refused, and a lock dies with its owner."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from legato.checkpoint import Checkpointer
from legato.checkpoint.lock import OutputDirLock
from legato.errors import CheckpointError, CheckpointNotFoundError, OutputDirLockedError
from tests.helpers.loops import Loop

pytestmark = pytest.mark.crash

FORK = multiprocessing.get_context("fork")


def hold(out: str, pipe: Connection, worker_seconds: float) -> None:
    """Hold the lock; with a forked child that outlives the owner, as data-loader workers may."""
    lock = OutputDirLock(out)
    lock.acquire()
    lock.write(run_id="abc", branch=0, now=time.time())
    if worker_seconds and os.fork() == 0:
        time.sleep(worker_seconds)
        os._exit(0)
    pipe.send("held")
    pipe.recv()


def holder(out: Path, worker_seconds: float = 0.0) -> tuple[multiprocessing.Process, Connection]:
    out.mkdir(exist_ok=True)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(str(out), theirs, worker_seconds))
    process.start()
    assert ours.recv() == "held"
    return process, ours  # type: ignore[return-value]


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    process, pipe = holder(tmp_path / "out")
    (tmp_path / "out" / ".step_5.tmp-abc").mkdir()
    with pytest.raises(OutputDirLockedError, match=f"in use by process {process.pid}") as caught:
        Checkpointer(tmp_path / "out")
    assert caught.value.facts["holder"]["run_id"] == "abc"
    # It isn't ours to clean.
    assert (tmp_path / "out" / ".step_5.tmp-abc").exists()
    pipe.send("end")
    process.join()
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(Loop().state, step=0)
        held = json.loads((tmp_path / "out" / ".lock").read_bytes())
        assert held["pid"] == os.getpid()
        assert held["run_id"] == checkpointer.run_id
    assert not (tmp_path / "out" / ".step_5.tmp-abc").exists()


def test_a_restarted_rank_waits_for_the_one_before(tmp_path: Path) -> None:
    process, pipe = holder(tmp_path / "out")
    began = time.monotonic()
    with pytest.raises(OutputDirLockedError):
        Checkpointer(tmp_path / "out", lock_wait_seconds=0.6)
    assert time.monotonic() - began >= 0.6
    pipe.send("end")
    with Checkpointer(tmp_path / "out", lock_wait_seconds=30.0):
        pass
    process.join()


def test_the_lock_of_a_killed_run_is_free_though_its_workers_live(tmp_path: Path) -> None:
    process, _ = holder(tmp_path / "out", worker_seconds=5.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Checkpointer(tmp_path / "out"):
        pass


def test_an_output_dir_that_was_deleted_is_made_again_and_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    loop = Loop().run_to(1)
    with Checkpointer(out) as checkpointer:
        checkpointer.save(loop.state, step=1).result()
        for step in (2, 2):  # the second time it is the last step's turn, which was saved
            shutil.rmtree(out)
            caplog.clear()
            checkpointer.save(loop.run_to(2).state, step=step).result()
            assert f"{out}/.lock has gone: was output_dir deleted" in caplog.text
            assert sorted(p.name for p in out.iterdir()) == [".lock", "latest", "step_2"]
            holder = json.loads((out / ".lock").read_text())
            assert (holder["pid"], holder["run_id"]) == (os.getpid(), checkpointer.run_id)
        caplog.clear()
        checkpointer.save(loop.run_to(3).state, step=3).result()
        assert caplog.text == ""
        refused = FORK.Process(target=hold, args=(str(out), FORK.Pipe()[1], 0.0))
        refused.start()
        refused.join()
        assert refused.exitcode == 1


def test_an_output_dir_that_another_run_has_taken_over_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Checkpointer(out) as checkpointer:
        checkpointer.save(Loop().run_to(1).state, step=1).result()
        out.rename(tmp_path / "moved")
        process, pipe = holder(out)
        checkpointer.save(Loop().run_to(2).state, step=2).wait()
        with pytest.raises(OutputDirLockedError, match=f"in use by process {process.pid}"):
            checkpointer.poll()
        pipe.send("end")
        process.join()
    assert [p.name for p in out.iterdir()] == [".lock"]
    assert (tmp_path / "moved" / "step_1").is_dir()


def test_a_run_that_never_began_leaves_no_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(CheckpointNotFoundError):
        Checkpointer(out, resume=tmp_path / "absent")
    assert [p.name for p in out.iterdir()] == ["mine"]
    (out / ".lock").mkdir()
    with pytest.raises(CheckpointError, match=r"\.lock is a folder"):
        Checkpointer(out)


def test_a_checkpointer_gives_its_lock_back_when_opening_fails(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(Loop().state, step=3)
    with pytest.raises(FileExistsError):
        Checkpointer(tmp_path / "out", resume=False)
    process, pipe = holder(tmp_path / "out")
    pipe.send("end")
    process.join()
