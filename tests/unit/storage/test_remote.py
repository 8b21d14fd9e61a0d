"""A store without renames, links or shared writes, stood for by fsspec's own memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from legato.errors import MissingDependencyError
from legato.storage import FileInfo, LocalStorage, RemoteStorage, open_storage

ROOT = "/run"


@pytest.fixture
def storage() -> Iterator[RemoteStorage]:
    filesystem = fsspec.filesystem("memory")
    yield RemoteStorage(filesystem)
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_a_file_is_whole_when_it_is_synced(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 10)
    storage.write_at(f"{ROOT}/a", 0, b"01234")
    storage.write_at(f"{ROOT}/a", 5, memoryview(b"56789"))
    storage.sync_file(f"{ROOT}/a")
    assert storage.read_bytes(f"{ROOT}/a") == b"0123456789"
    assert storage.stat(f"{ROOT}/a") == FileInfo(is_folder=False, size_bytes=10)
    storage.sync_file(f"{ROOT}/a")


def test_pieces_that_come_early_wait_for_their_turn(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 9)
    for offset in (6, 3, 0):
        storage.write_at(f"{ROOT}/a", offset, b"012345678"[offset : offset + 3])
    storage.sync_file(f"{ROOT}/a")
    assert storage.read_bytes(f"{ROOT}/a") == b"012345678"


def test_a_file_with_a_gap_is_an_error(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 9)
    storage.write_at(f"{ROOT}/a", 0, b"012")
    storage.write_at(f"{ROOT}/a", 6, b"678")
    with pytest.raises(OSError, match="3 of 9 bytes") as caught:
        storage.sync_file(f"{ROOT}/a")
    assert caught.value.errno == errno.EIO


def test_what_is_sent_cant_be_written_again(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 9)
    storage.write_at(f"{ROOT}/a", 0, b"012")
    with pytest.raises(OSError, match="sent already"):
        storage.write_at(f"{ROOT}/a", 0, b"012")
    with pytest.raises(OSError, match="past the end"):
        storage.write_at(f"{ROOT}/a", 8, b"89")


def test_too_many_early_bytes_are_refused_before_memory_is_full(
    storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.storage.remote._MAX_WAITING_BYTES", 5)
    storage.create_file(f"{ROOT}/a", 20)
    storage.write_at(f"{ROOT}/a", 10, b"01234")
    with pytest.raises(OSError, match="waits for byte 0"):
        storage.write_at(f"{ROOT}/a", 15, b"5")


def test_creating_a_file_again_forgets_the_first_try(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 4)
    storage.write_at(f"{ROOT}/a", 0, b"xx")
    storage.create_file(f"{ROOT}/a", 2)
    storage.write_at(f"{ROOT}/a", 0, b"ok")
    storage.sync_file(f"{ROOT}/a")
    assert storage.read_bytes(f"{ROOT}/a") == b"ok"


def test_an_empty_file_may_be_created(storage: RemoteStorage) -> None:
    storage.create_file(f"{ROOT}/a", 0)
    storage.sync_file(f"{ROOT}/a")
    assert storage.read_bytes(f"{ROOT}/a") == b""


def test_folders_are_listed_and_removed_with_what_is_under_way(storage: RemoteStorage) -> None:
    storage.make_folder(f"{ROOT}/step_1")
    storage.write_bytes(f"{ROOT}/step_1/b", b"b")
    storage.write_bytes(f"{ROOT}/step_1/state/c", b"c")
    assert storage.list_folder(f"{ROOT}/step_1") == ["b", "state"]
    assert storage.list_folder(ROOT) == ["step_1"]
    info = storage.stat(f"{ROOT}/step_1")
    assert info is not None
    assert info.is_folder
    storage.create_file(f"{ROOT}/step_1/d", 4)
    storage.remove_tree(f"{ROOT}/step_1")
    storage.remove_tree(f"{ROOT}/step_1")
    assert storage.list_folder(f"{ROOT}/step_1") == []
    with pytest.raises(FileNotFoundError):
        storage.write_at(f"{ROOT}/step_1/d", 0, b"dddd")


def test_a_part_is_read_and_an_early_end_is_said(storage: RemoteStorage) -> None:
    storage.write_bytes(f"{ROOT}/a", b"0123456789")
    buffer = bytearray(4)
    storage.read_into(f"{ROOT}/a", 3, memoryview(buffer))
    assert buffer == b"3456"
    storage.read_into(f"{ROOT}/a", 10, memoryview(b""))
    with pytest.raises(EOFError, match="2 bytes too early"):
        storage.read_into(f"{ROOT}/a", 8, memoryview(buffer))


def test_renames_copy_and_never_replace_a_filled_folder(storage: RemoteStorage) -> None:
    storage.write_bytes(f"{ROOT}/a/x", b"x")
    storage.write_bytes(f"{ROOT}/b/y", b"y")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        storage.rename(f"{ROOT}/a", f"{ROOT}/b")
    assert caught.value.errno == errno.ENOTEMPTY
    storage.rename(f"{ROOT}/a", f"{ROOT}/c")
    assert storage.read_bytes(f"{ROOT}/c/x") == b"x"
    storage.rename(f"{ROOT}/c/x", f"{ROOT}/b/y")
    assert storage.read_bytes(f"{ROOT}/b/y") == b"x"
    with pytest.raises(FileNotFoundError):
        storage.rename(f"{ROOT}/absent", f"{ROOT}/d")


def test_what_is_absent_is_a_file_not_found_error(storage: RemoteStorage) -> None:
    for verb in (storage.read_bytes, storage.remove_file, storage.sync_file):
        with pytest.raises(FileNotFoundError):
            verb(f"{ROOT}/absent")
    assert storage.stat(f"{ROOT}/absent") is None
    assert storage.list_folder(f"{ROOT}/absent") == []


def test_there_are_no_links_and_no_known_free_space(storage: RemoteStorage) -> None:
    assert storage.link("step_1", f"{ROOT}/latest") is False
    assert storage.free_bytes(ROOT) is None
    assert (storage.positioned_shared_writes, storage.atomic_rename) == (False, False)


class BrokenStore:
    """A client that raises what no disk would."""

    root_marker = ""

    def __getattr__(self, name: str) -> object:
        def verb(*args: object, **options: object) -> None:
            raise RuntimeError("403: access denied")

        return verb


def test_whatever_a_client_raises_is_an_os_error() -> None:
    storage = RemoteStorage(BrokenStore())
    with pytest.raises(OSError, match="RuntimeError: 403") as caught:
        storage.write_bytes("/bucket/a", b"")
    assert caught.value.filename == "/bucket/a"


def test_a_bucket_is_named_without_a_leading_slash() -> None:
    seen = []

    class Bucket(BrokenStore):
        def invalidate_cache(self) -> None:
            pass

        def pipe_file(self, key: str, data: bytes) -> None:
            seen.append(key)

    RemoteStorage(Bucket()).write_bytes("/bucket/run/a", b"")
    assert seen == ["bucket/run/a"]


def test_a_location_is_a_path_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for location in ("out", str(tmp_path / "out"), f"file://{tmp_path}/out"):
        storage, path = open_storage(location)
        assert isinstance(storage, LocalStorage)
        assert path == str(tmp_path / "out")
    storage, path = open_storage("memory://run/out")
    assert isinstance(storage, RemoteStorage)
    assert path == "/run/out"


def test_a_protocol_that_nothing_speaks_is_an_error_with_its_name() -> None:
    with pytest.raises(MissingDependencyError, match="nonsense"):
        open_storage("nonsense://bucket/run")
