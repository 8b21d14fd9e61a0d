"""The fakes that crash tests stand on: each loses, fails or kills exactly what it says."""

from __future__ import annotations

import errno
import multiprocessing
import signal
from pathlib import Path

import pytest

from legato.storage import LocalStorage, MemoryStorage
from tests.helpers.faults import (
    FaultyStorage,
    KillingStorage,
    LossyStorage,
    Operation,
    RecordingStorage,
)


def lossy() -> LossyStorage:
    storage = LossyStorage()
    storage.make_folder("/out")
    storage.settle()
    return storage


def test_power_loss_drops_bytes_and_names_that_were_never_synced() -> None:
    storage = lossy()
    storage.write_bytes("/out/synced", b"kept")
    storage.sync_file("/out/synced")
    storage.write_bytes("/out/bytes_unsynced", b"lost")
    storage.sync_folder("/out")
    storage.write_bytes("/out/name_unsynced", b"lost")
    storage.sync_file("/out/name_unsynced")
    storage.power_loss()
    assert storage.list_folder("/out") == ["bytes_unsynced", "synced"]
    assert storage.read_bytes("/out/synced") == b"kept"
    assert storage.read_bytes("/out/bytes_unsynced") == b""


def test_power_loss_returns_a_file_to_what_it_was_when_synced() -> None:
    storage = lossy()
    storage.write_bytes("/out/a", b"first")
    storage.settle()
    storage.write_bytes("/out/a", b"second")
    storage.power_loss()
    assert storage.read_bytes("/out/a") == b"first"


def test_power_loss_undoes_renames_and_removals_until_the_folder_is_synced() -> None:
    storage = lossy()
    storage.make_folder("/out/tmp")
    storage.write_bytes("/out/old", b"old")
    storage.settle()
    storage.rename("/out/tmp", "/out/step_1")
    storage.remove_file("/out/old")
    storage.power_loss()
    assert storage.list_folder("/out") == ["old", "tmp"]
    storage.rename("/out/tmp", "/out/step_1")
    storage.remove_file("/out/old")
    storage.sync_folder("/out")
    storage.power_loss()
    assert storage.list_folder("/out") == ["step_1"]


def test_power_loss_after_the_journal_keeps_names_and_loses_bytes() -> None:
    storage = lossy()
    storage.write_bytes("/out/a", b"lost")
    storage.power_loss(names_survive=True)
    assert storage.read_bytes("/out/a") == b""


def test_a_faulty_storage_fails_once_then_works() -> None:
    storage = FaultyStorage(MemoryStorage(), fail_at=2)
    storage.make_folder("/out")
    with pytest.raises(OSError, match="No space") as caught:
        storage.write_bytes("/out/a", b"x")
    assert caught.value.errno == errno.ENOSPC
    storage.write_bytes("/out/a", b"x")
    assert storage.read_bytes("/out/a") == b"x"


def test_a_broken_disk_stays_broken_and_may_take_half_a_write() -> None:
    storage = FaultyStorage.from_then_on(
        MemoryStorage(), fail_at=2, error=OSError(errno.EIO, "broken"), halfway=True
    )
    storage.make_folder("/out")
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            storage.write_bytes("/out/a", b"four")
    assert storage.read_bytes("/out/a") == b"fo"


def test_removing_a_tree_is_one_operation_per_entry(tmp_path: Path) -> None:
    storage = RecordingStorage(LocalStorage())
    root = str(tmp_path)
    storage.inner.make_folder(f"{root}/t/below")
    storage.inner.write_bytes(f"{root}/t/below/x", b"")
    storage.inner.link("below", f"{root}/t/link")
    storage.remove_tree(f"{root}/t")
    assert storage.operations == [
        Operation("remove_file", f"{root}/t/below/x"),
        Operation("remove_tree", f"{root}/t/below"),
        Operation("remove_file", f"{root}/t/link"),
        Operation("remove_tree", f"{root}/t"),
    ]
    assert storage.list_folder(root) == []


def write_three_files(root: str, kill_at: int) -> None:
    storage = KillingStorage(LocalStorage(), kill_at=kill_at, halfway=True)
    for name in ("a", "b", "c"):
        storage.write_bytes(f"{root}/{name}", b"1234")


def test_a_killing_storage_kills_at_its_operation_and_leaves_half_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=write_three_files, args=(str(tmp_path), 2))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"1234",
        "b": b"12",
    }
