from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from legato.checkpoint.background import BackgroundThread
from legato.checkpoint.records import Committed, PendingSave


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

    background = BackgroundThread()
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
    background = BackgroundThread()
    background.submit(save, pending=PendingSave(step=1, reason="interval"))
    background.stop()
    assert found == [min(before + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_sandbox_that_forbids_priorities_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "setpriority", forbidden)
    BackgroundThread().stop()
