"""A full or failing disk at every operation of a save; a really full disk."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint import saver as saver_module
from legato.errors import CheckpointWriteError
from legato.storage import MemoryStorage
from tests.helpers.faults import FaultyStorage
from tests.helpers.loops import Loop, assert_same

pytestmark = pytest.mark.crash


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once, and don't sleep between two tries."""
    monkeypatch.setattr(saver_module, "RETRY_SECONDS", 0.0)


@pytest.mark.usefixtures("no_rest")
@pytest.mark.parametrize(("error", "halfway"), [(errno.ENOSPC, True), (errno.EIO, False)])
@pytest.mark.parametrize("num_failures", [1, math.inf], ids=["once", "from then on"])
def test_a_fault_at_any_operation_of_a_save_loses_nothing(
    error: int, halfway: bool, num_failures: float
) -> None:
    """Two good saves, then one with a fault at operation k, for every k; it is retried after.

    A disk that stays broken refuses the cleaning up as well; then it is mended.
    """
    loops = [Loop().run_to(step) for step in (1, 2, 3)]
    k, reached = 0, True
    while reached:
        k += 1
        disk = MemoryStorage()
        storage = FaultyStorage(
            disk,
            fail_at=None,
            error=OSError(error, os.strerror(error)),
            halfway=halfway,
            num_failures=num_failures,
        )
        with Checkpointer("/out", storage=storage, keep=KeepLast(2)) as checkpointer:
            for loop in loops[:2]:
                checkpointer.save(loop.state, step=loop.counter.step).result()
            storage.fail_at = storage.num_operations + k
            checkpointer.save(loops[2].state, step=3).wait()
            reached = storage.num_operations >= storage.fail_at
            storage.fail_at = None
            # Whether or not the save came through: what is there is whole, and the newest is there.
            infos = checkpointer.steps()
            assert all(info.is_complete for info in infos), (k, infos)
            assert max(info.step for info in infos) >= 2, k
            checkpointer.drain()
            assert checkpointer.poll()[-1].error is None, k
        resumed = Loop()
        with Checkpointer(
            "/out", storage=disk, keep=KeepLast(2), verify_on_load=True
        ) as checkpointer:
            assert checkpointer.restore(resumed.state) == {"step": 3, "notes": []}
        assert_same(resumed.tensors(), loops[2].tensors())
        leftovers = [n for n in disk.list_folder("/out") if n.startswith(".")]
        assert leftovers == [], k
    assert k > 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount a small tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def steps_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if "step" in p.name)


def test_a_disk_that_is_really_full_keeps_what_is_complete(small_disk: Path) -> None:
    loop = Loop().run_to(1)
    out = small_disk / "out"
    with Checkpointer(out, final_save_patience_seconds=0.0) as checkpointer:
        checkpointer.save(loop.state, step=1).result()
        expected = loop.tensors()
        (small_disk / "filler").write_bytes(b"")
        with (small_disk / "filler").open("wb") as filler:
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            filler.write(b"x" * (free - 4096))
        pending = checkpointer.save(loop.state, step=loop.step())
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            pending.result()
        assert steps_in(out) == ["step_1"]
        (small_disk / "filler").unlink()
        checkpointer.drain()
        assert steps_in(out) == ["step_1", "step_2"]
    resumed = Loop()
    with Checkpointer(small_disk / "other", resume=out / "step_1") as checkpointer:
        checkpointer.restore(resumed.state)
    assert_same(resumed.tensors(), expected)


def test_a_new_output_dir_on_a_full_disk_is_an_error_of_its_own(small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(
        CheckpointWriteError, match=r"out can't be written to: .*No space"
    ) as caught:
        Checkpointer(small_disk / "out")
    assert caught.value.exit_code == 3
    assert not (small_disk / "out" / ".lock").exists()


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"Not a directory|File exists"):
        Checkpointer(tmp_path / "file" / "out")


def set_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def test_a_read_only_disk_is_an_error_at_a_first_start_and_at_a_resume(small_disk: Path) -> None:
    out, loop = small_disk / "out", Loop().run_to(1)
    with Checkpointer(out) as checkpointer:
        checkpointer.save(loop.state, step=1).result()
    set_read_only(small_disk)
    for folder in (small_disk / "new", out):
        with pytest.raises(
            CheckpointWriteError, match=r"can't be written to: .*Read-only file system"
        ) as caught:
            Checkpointer(folder)
        assert caught.value.exit_code == 3
    # Whoever only reads may: a run elsewhere goes on from the step.
    resumed = Loop()
    with Checkpointer(small_disk.parent / "other", resume=out / "step_1") as checkpointer:
        assert checkpointer.restore(resumed.state) == {"step": 1, "notes": []}
    assert_same(resumed.tensors(), loop.tensors())
