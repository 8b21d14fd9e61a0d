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

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint.lock import OutputDirLock, look_at_lock
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
    for look in (look_at_lock, Checkpointer):
        with pytest.raises(OutputDirLockedError, match=f"by process {process.pid}") as caught:
            look(tmp_path / "out")
        assert caught.value.facts["holder"]["run_id"] == "abc"
    # It isn't ours to clean.
    assert (tmp_path / "out" / ".step_5.tmp-abc").exists()
    pipe.send("end")
    process.join()
    assert look_at_lock(tmp_path / "out")["run_id"] == "abc"
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


def run_another(out: Path) -> str:
    """Another process' run, from its beginning to its end: step 2; returns its run_id."""
    ours, theirs = FORK.Pipe()

    def run() -> None:
        with Checkpointer(out) as checkpointer:
            checkpointer.save(Loop().run_to(2).state, step=2).result()
            theirs.send(checkpointer.run_id)

    process = FORK.Process(target=run)
    process.start()
    theirs.close()
    process.join()
    return str(ours.recv())


def test_an_output_dir_where_another_run_has_ended_is_let_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(Loop().run_to(2).state, step=2).result()
        assert checkpointer.holds_output_dir
        out.rename(tmp_path / "moved")
        run_id = run_another(out)
        assert not checkpointer.holds_output_dir
        checkpointer.save(Loop().run_to(3).state, step=3).wait()
        with pytest.raises(
            OutputDirLockedError, match=f"run {run_id} .* has used the one"
        ) as caught:
            checkpointer.poll()
        assert caught.value.facts["holder"]["run_id"] == run_id
    assert sorted(p.name for p in out.iterdir()) == [".lock", "latest", "step_2"]
    assert json.loads((out / "step_2" / "manifest.json").read_bytes())["run_id"] == run_id
    assert json.loads((out / ".lock").read_bytes())["run_id"] == run_id
    assert (tmp_path / "moved" / "step_2").is_dir()


def test_a_folder_that_was_moved_away_and_back_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Checkpointer(out) as checkpointer:
        shutil.copytree(out, tmp_path / "copy")
        shutil.rmtree(out)
        (tmp_path / "copy").rename(out)
        checkpointer.save(Loop().run_to(3).state, step=3).result()
    assert (out / "step_3").is_dir()


def test_a_step_that_another_run_wrote_is_never_pruned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    run_id = run_another(tmp_path / "other")
    with Checkpointer(out, keep=KeepLast(1), keep_last_n_states=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(Loop().run_to(step).state, step=step).result()
        shutil.rmtree(out / "step_2")
        (tmp_path / "other" / "step_2").rename(out / "step_2")
        for step in (3, 4):
            checkpointer.save(Loop().run_to(step).state, step=step).result()
    assert sorted(p.name for p in out.glob("step_*")) == ["step_2", "step_4"]
    assert (out / "step_2" / "state").is_dir()
    assert caplog.text.count(f"step_2 was written by run {run_id}, not by this one") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step_2", r"step_2 is a file; a run saves its step in a folder of that name"),
        (".lock", r"\.lock isn't a lock that Legato wrote; .* Move it away"),
    ],
)
def test_somebodys_own_file_in_the_way_is_named_and_let_alone(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).write_text("my own notes")
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "my own notes"


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


def test_a_mount_that_numbers_its_files_anew_costs_neither_lock_nor_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = OutputDirLock(str(tmp_path))
    lock.acquire()
    lock.write(run_id="a", branch=0, now=0.0)
    (tmp_path / "renumbered").write_bytes((tmp_path / ".lock").read_bytes())
    (tmp_path / "renumbered").replace(tmp_path / ".lock")
    assert not lock.is_kept()
    lock.keep()
    assert lock.is_kept()
    assert not caplog.records
    lock.release()
