"""A save that fails: nothing is lost, nothing half-made is visible, and it is said and retried."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest
import torch

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint import saver as saver_module
from legato.checkpoint.records import PendingSave
from legato.checkpoint.threads import BackgroundThreads
from legato.errors import CheckpointExistsError, CheckpointWriteError
from legato.storage import LocalStorage
from tests.helpers.faults import FaultyStorage, Operation
from tests.helpers.loops import Loop, assert_same


class FailingCommits(FaultyStorage):
    """Fails the first ``num_failures`` renames of a step folder, with a full disk."""

    def __init__(self, num_failures: int) -> None:
        super().__init__(LocalStorage(), fail_at=None)
        self.left = num_failures

    def before(self, operation: Operation, number: int, half: object) -> None:
        if operation.name == "rename" and "/step_" in operation.path and self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and don't sleep between two tries."""
    monkeypatch.setattr(saver_module, "RETRY_SECONDS", 0.0)


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in ("latest", ".lock"))


def restored(folder: Path, step: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    loop = Loop()
    with Checkpointer(tmp_path / f"other_{step}", resume=folder / f"step_{step}") as checkpointer:
        checkpointer.restore(loop.state)
    return loop.tensors()


@pytest.mark.usefixtures("no_rest")
def test_a_failed_save_is_told_and_its_snapshot_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = FailingCommits(1)
    loop = Loop()
    with Checkpointer(tmp_path / "out", storage=storage) as checkpointer:
        checkpointer.save(loop.state, step=loop.step()).wait()
        assert visible(tmp_path / "out") == []
        expected = loop.tensors()
        (record,) = checkpointer.poll()
        assert record.error is not None
        assert "No space left on device" in record.error
        assert record.will_retry
        assert record.path is None
        assert "step 1 could not be saved" in caplog.text
        loop.step()
        assert checkpointer.in_flight == 1
        assert checkpointer.poll() == []
        checkpointer.drain()
        (record,) = checkpointer.poll()
        assert (record.step, record.error) == (1, None)
    assert_same(restored(tmp_path / "out", 1, tmp_path), expected)


@pytest.mark.usefixtures("no_rest")
def test_the_next_save_first_tries_the_failed_one_again(tmp_path: Path) -> None:
    loop, expected = Loop(), {}
    with Checkpointer(tmp_path / "out", storage=FailingCommits(1)) as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            checkpointer.save(loop.state, step=step)
            expected[step] = loop.tensors()
        checkpointer.drain()
        records = checkpointer.poll()
    assert [(r.step, r.error is None) for r in records] == [
        (1, False), (1, True), (2, True), (3, True),
    ]  # fmt: skip
    for step in (1, 2, 3):
        assert_same(restored(tmp_path / "out", step, tmp_path), expected[step])


@pytest.mark.usefixtures("no_rest")
def test_a_save_that_fails_again_is_given_up_for_the_newer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with Checkpointer(tmp_path / "out", storage=FailingCommits(2)) as checkpointer:
        first = checkpointer.save(loop.state, step=loop.step())
        checkpointer.save(loop.state, step=loop.step())
        assert "step 1 is given up: step 2 takes its place" in caplog.text
        with pytest.raises(CheckpointWriteError, match="step 1 could not be saved"):
            first.result()
    assert visible(tmp_path / "out") == ["step_2"]


def test_a_failed_save_raises_at_the_next_call_if_asked_to(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(
        tmp_path / "out", storage=FailingCommits(1), on_save_error="raise"
    ) as checkpointer:
        checkpointer.save(loop.state, step=loop.step()).wait()
        with pytest.raises(CheckpointWriteError, match="step 1 could not be saved") as caught:
            checkpointer.poll()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.exit_code == 3
        assert [r.error is None for r in checkpointer.poll()] == [False]
        checkpointer.save(loop.state, step=loop.step())
    assert visible(tmp_path / "out") == ["step_2"]


@pytest.mark.usefixtures("no_rest")
def test_the_final_save_is_retried_until_patience_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    storage = FailingCommits(5)
    with Checkpointer(tmp_path / "out", storage=storage) as checkpointer:
        checkpointer.save(loop.state, step=loop.step(), reason="final")
    assert storage.left == 0
    assert visible(tmp_path / "out") == ["step_1"]
    assert "make room in" in caplog.text

    storage = FailingCommits(10**9)
    checkpointer = Checkpointer(tmp_path / "full", storage=storage, final_save_patience_seconds=0.2)
    checkpointer.save(loop.state, step=1, reason="final")
    with pytest.raises(CheckpointWriteError, match="No space left") as caught:
        checkpointer.close()
    assert caught.value.exit_code == 3
    assert visible(tmp_path / "full") == []


@pytest.mark.usefixtures("no_rest")
@pytest.mark.parametrize("instant", ["before the save", "during the save"])
def test_a_complete_step_that_somebody_put_there_meanwhile_is_never_overwritten(
    tmp_path: Path, instant: str
) -> None:
    out = tmp_path / "out"
    with Checkpointer(tmp_path / "foreign") as foreign:
        foreign.save(Loop().state, step=2)

    def put() -> None:
        if not (out / "step_2").exists():
            shutil.copytree(tmp_path / "foreign" / "step_2", out / "step_2")

    class Busy(FaultyStorage):
        def before(self, operation: Operation, number: int, half: object) -> None:
            if "step_2.tmp" in operation.path and operation.path.endswith("manifest.json"):
                put()

    loop = Loop()
    storage = Busy(LocalStorage(), fail_at=None) if "during" in instant else LocalStorage()
    with Checkpointer(out, storage=storage, final_save_patience_seconds=0.0) as checkpointer:
        checkpointer.save(loop.state, step=loop.step()).result()
        if "before" in instant:
            put()
        with pytest.raises(CheckpointExistsError, match="step_2 is there already"):
            checkpointer.save(loop.state, step=loop.step()).result()
        found = checkpointer.steps()[-1].manifest
        assert found is not None
        assert found.run_id == foreign.run_id
        checkpointer.save(loop.state, step=loop.step()).result()
    assert visible(out) == ["step_1", "step_2", "step_3"]


def test_without_memory_for_a_copy_saves_are_written_while_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    loop = Loop()
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            pending = checkpointer.save(loop.state, step=step)
            assert pending.done
            assert pending.staged_bytes == 0
    assert "while training stands still" in caplog.text
    assert_same(restored(tmp_path / "out", 3, tmp_path), loop.tensors())


def test_a_final_save_that_cannot_be_tried_again_is_an_error_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    loop = Loop()
    checkpointer = Checkpointer(tmp_path / "out", storage=FailingCommits(1))
    checkpointer.save(loop.state, step=loop.step())
    checkpointer.save(loop.state, step=loop.step())  # makes up for the one before
    checkpointer.close()
    checkpointer = Checkpointer(tmp_path / "out", storage=FailingCommits(1))
    checkpointer.save(loop.state, step=loop.step())
    with pytest.raises(CheckpointWriteError, match="step 3 could not be saved") as caught:
        checkpointer.close()
    assert caught.value.exit_code == 3
    assert visible(tmp_path / "out") == ["step_2"]


def test_synchronous_saves_are_on_disk_when_save_returns(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(tmp_path / "out", asynchronous=False, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            checkpointer.save(loop.state, step=step)
            assert visible(tmp_path / "out") == [f"step_{step}"]


def test_a_folder_that_vanishes_before_pruning_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    caplog.set_level(logging.WARNING)
    with Checkpointer(tmp_path / "out", keep=KeepLast(2)) as checkpointer:
        for _ in (1, 2):
            checkpointer.save(loop.state, step=loop.step()).result()
        LocalStorage().remove_tree(str(tmp_path / "out" / "step_1"))
        checkpointer.save(loop.state, step=loop.step()).result()
    assert visible(tmp_path / "out") == ["step_2", "step_3"]
    assert caplog.records == []


class TakingAway(FaultyStorage):
    """Somebody's script moves each step away as soon as it has its name."""

    def __init__(self, target: Path) -> None:
        super().__init__(LocalStorage(), fail_at=None)
        self.target = target

    def before(self, operation: Operation, number: int, half: object) -> None:
        if operation.name == "sync_folder":
            for step in Path(operation.path).glob("step_*"):
                step.rename(self.target / f"{step.name}-{number}")


def test_steps_that_are_moved_away_as_soon_as_they_are_there_are_no_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "moved").mkdir()
    loop = Loop()
    storage = TakingAway(tmp_path / "moved")
    with Checkpointer(tmp_path / "out", keep=KeepLast(1), storage=storage) as checkpointer:
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step())
        checkpointer.save(loop.state, step=3, metrics={"eval_loss": 1.0})
        checkpointer.drain()
        assert [(r.step, r.error) for r in checkpointer.poll()] == [
            (1, None), (2, None), (3, None), (3, None),
        ]  # fmt: skip
    moved = sorted(path.name.split("-")[0] for path in (tmp_path / "moved").iterdir())
    assert moved == ["step_1", "step_2", "step_3", "step_3"]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"step_3 has gone from {tmp_path / 'out'}: it is saved again"
    ]


def test_nothing_that_goes_wrong_after_the_commit_fails_the_save_or_keeps_anyone_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange(FaultyStorage):
        def before(self, operation: Operation, number: int, half: object) -> None:
            if operation.name == "link" or operation.path.endswith(".new"):
                raise RuntimeError("what is this?")

    loop = Loop()
    storage = Strange(LocalStorage(), fail_at=None)
    with Checkpointer(tmp_path / "out", storage=storage) as checkpointer:
        checkpointer.save(loop.state, step=loop.step()).result(timeout_seconds=60)
        assert "cleaning up after step 1 failed: RuntimeError: what is this?" in caplog.text
        again = checkpointer.save(loop.state, step=1, metrics={"eval_loss": 1.0})
        assert again.result(timeout_seconds=60).manifest.metrics == {}
        assert "step_1: its metrics could not be added: what is this?" in caplog.text
    assert visible(tmp_path / "out") == ["step_1"]


def test_whatever_a_task_raises_reaches_who_waits_and_the_thread_goes_on() -> None:
    def fail() -> NoReturn:
        raise SystemExit("not an Exception")

    thread = BackgroundThreads()
    for _ in (1, 2):
        pending = PendingSave(step=1, reason="interval")
        thread.submit(fail, pending=pending)
        with pytest.raises(CheckpointWriteError, match="not an Exception"):
            pending.result(timeout_seconds=60)
    thread.stop()


def test_a_step_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Undeletable(FaultyStorage):
        def before(self, operation: Operation, number: int, half: object) -> None:
            if operation.name == "remove_file":
                raise OSError(errno.EACCES, "not yours")

    loop = Loop()
    storage = Undeletable(LocalStorage(), fail_at=None)
    with Checkpointer(tmp_path / "out", keep=KeepLast(1), storage=storage) as checkpointer:
        for _ in (1, 2, 3):
            checkpointer.save(loop.state, step=loop.step()).result()
    assert [n for n in visible(tmp_path / "out") if n.startswith("step")] == ["step_3"]
    assert "step_1 could not be pruned" in caplog.text
    with Checkpointer(tmp_path / "out") as checkpointer:
        pass
    assert visible(tmp_path / "out") == ["step_3"]
