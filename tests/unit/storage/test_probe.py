"""The probe tells disks that take shared writes from mounts that lose them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import fsspec

from legato.storage import LocalStorage, MemoryStorage, RemoteStorage, Storage
from legato.storage import probe_positioned_writes as probe
from legato.storage.base import Buffer
from tests.helpers.faults import FaultyStorage


class LastWriterWins(MemoryStorage):
    """Like some mounts of object stores: each write replaces what others wrote before."""

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        self.create_file(path, len(self.read_bytes(path)))
        super().write_at(path, offset, data)


def memory(storage: MemoryStorage) -> MemoryStorage:
    storage.make_folder("/f")
    return storage


def probe_from_threads(storage: Storage, folder: str, world_size: int) -> list[bool]:
    barrier = threading.Barrier(world_size)
    verdicts = [False] * world_size

    def rank(number: int) -> None:
        verdicts[number] = probe(
            storage, folder, rank=number, world_size=world_size, barrier=barrier.wait
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return verdicts


def test_a_disk_takes_shared_writes_and_is_left_as_it_was(tmp_path: Path) -> None:
    assert probe(LocalStorage(), str(tmp_path)) is True
    assert probe_from_threads(LocalStorage(), str(tmp_path), 4) == [True] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_mount_where_the_last_writer_wins_is_found_out() -> None:
    assert probe(memory(LastWriterWins()), "/f") is False
    assert probe_from_threads(memory(LastWriterWins()), "/f", 2) == [False, False]


def test_a_store_that_says_no_is_believed() -> None:
    assert probe(RemoteStorage(fsspec.filesystem("memory")), "/f") is False


def test_an_error_at_any_operation_is_a_no_and_no_hang() -> None:
    for number in (1, 2, 3):
        storage = FaultyStorage(memory(MemoryStorage()), fail_at=number, num_failures=3)
        storage.error = OSError(errno.EIO, "broken")
        verdicts = probe_from_threads(storage, "/f", 2)
        assert len(verdicts) == 2
        assert False in verdicts
