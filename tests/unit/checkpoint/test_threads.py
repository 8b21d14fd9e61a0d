from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from legato.checkpoint import Checkpointer
from legato.checkpoint.records import Committed, PendingSave
from legato.checkpoint.threads import BackgroundThreads
from legato.storage import LocalStorage
from legato.storage.base import Buffer


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_what_is_written_is_computed_by_one_thread_and_training_keeps_its_own() -> None:
    found: list[int] = []

    def save() -> Committed:
        found.append(torch.get_num_threads())
        raise OSError("no disk")

    background = BackgroundThreads()
    background.submit(save, pending=PendingSave(step=1, reason="interval"))
    background.stop()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
def test_writing_steps_back_behind_training() -> None:
    found: list[int] = []

    def save() -> Committed:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise OSError("no disk")

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    background = BackgroundThreads()
    background.submit(save, pending=PendingSave(step=1, reason="interval"))
    background.stop()
    assert found == [min(before + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
def test_what_somebody_waits_for_steps_back_no_more() -> None:
    found: list[int] = []
    first_step = threading.Event()

    def steps() -> Iterator[None]:
        for number in range(4):
            if number == 2:
                first_step.set()
                while not pending.is_awaited:
                    time.sleep(0.001)
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            yield
        raise OSError("no disk")

    def save() -> Committed:
        background.work_off(steps(), pending=pending)
        raise AssertionError("what a step raises is raised")

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    pending = PendingSave(step=1, reason="interval")
    background = BackgroundThreads()
    background.submit(save, pending=pending)
    assert first_step.wait(timeout=60)
    assert pending.wait(timeout_seconds=60)
    background.stop()
    assert isinstance(pending.error, OSError)
    behind = min(mine + 10, 19)
    assert found == [behind, behind, behind, mine]  # the third was begun before
    assert not pending.is_awaited


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
@pytest.mark.parametrize("positioned_shared_writes", [True, False])
def test_a_save_that_somebody_waits_for_is_written_at_trainings_priority(
    tmp_path: Path, positioned_shared_writes: bool
) -> None:
    found: list[int] = []
    waited_for: list[PendingSave] = []

    class Watched(LocalStorage):
        def make_folder(self, path: str) -> None:
            while ".step_2.tmp" in path and not (waited_for and waited_for[0].is_awaited):
                time.sleep(0.001)
            super().make_folder(path)

        def write_at(self, path: str, offset: int, data: Buffer) -> None:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().write_at(path, offset, data)

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    model = torch.nn.Linear(4, 4)
    storage = Watched(positioned_shared_writes=positioned_shared_writes)
    with Checkpointer(tmp_path / "out", storage=storage) as checkpointer:
        saved = checkpointer.save({"model": model}, step=1)
        while not saved.done:
            time.sleep(0.001)
        assert set(found) == {min(mine + 10, 19)}
        found.clear()
        with torch.no_grad():
            model.weight.add_(1)
        waited_for.append(checkpointer.save({"model": model}, step=2))
        waited_for[0].result(timeout_seconds=60)
    assert found[-1] == mine


def test_a_sandbox_that_forbids_priorities_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", forbidden)
    BackgroundThreads().stop()
