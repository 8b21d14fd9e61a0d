"""One contract, held by every storage with a folder tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.storage import FileInfo, LocalStorage, MemoryStorage, Storage

Fresh = tuple[Storage, str]


@pytest.fixture(params=["local", "memory"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    storage: Storage = LocalStorage() if request.param == "local" else MemoryStorage()
    root = str(tmp_path)
    storage.make_folder(root)
    return storage, root


def test_a_file_has_its_size_from_the_start_and_bytes_land_at_their_offsets(fresh: Fresh) -> None:
    storage, root = fresh
    path = f"{root}/a"
    storage.create_file(path, 10)
    assert storage.stat(path) == FileInfo(is_folder=False, size_bytes=10)
    storage.write_at(path, 6, b"tail")
    storage.write_at(path, 0, memoryview(b"he"))
    storage.write_at(path, 2, bytearray(b"ad"))
    storage.sync_file(path)
    assert storage.read_bytes(path) == b"head\0\0tail"


def test_creating_a_file_again_empties_it(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/a", b"old and long")
    storage.create_file(f"{root}/a", 0)
    assert storage.read_bytes(f"{root}/a") == b""
    storage.write_bytes(f"{root}/a", b"old and long")
    storage.create_file(f"{root}/a", 3)
    assert storage.read_bytes(f"{root}/a") == b"\0\0\0"


def test_write_bytes_replaces_a_longer_file(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/a", b"a long text")
    storage.write_bytes(f"{root}/a", b"short")
    assert storage.read_bytes(f"{root}/a") == b"short"


def test_writing_at_an_offset_of_a_file_that_was_never_created_fails(fresh: Fresh) -> None:
    storage, root = fresh
    with pytest.raises(FileNotFoundError):
        storage.write_at(f"{root}/a", 0, b"x")


def test_reading_a_part_fills_the_buffer(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/a", b"0123456789")
    buffer = bytearray(4)
    storage.read_into(f"{root}/a", 3, memoryview(buffer))
    assert buffer == b"3456"


def test_reading_past_the_end_says_so_instead_of_returning_less(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/a", b"0123456789")
    with pytest.raises(EOFError, match="2 bytes too early"):
        storage.read_into(f"{root}/a", 8, memoryview(bytearray(4)))


def test_folders_are_listed_by_name_and_an_absent_one_is_empty(fresh: Fresh) -> None:
    storage, root = fresh
    storage.make_folder(f"{root}/b/c")
    storage.make_folder(f"{root}/b")
    storage.write_bytes(f"{root}/b/a", b"")
    storage.sync_folder(f"{root}/b")
    assert storage.list_folder(f"{root}/b") == ["a", "c"]
    assert storage.list_folder(f"{root}/nothing") == []
    info = storage.stat(f"{root}/b")
    assert info is not None
    assert info.is_folder
    assert storage.stat(f"{root}/nothing") is None
    assert storage.stat(f"{root}/b/a/below a file") is None


def test_renaming_a_folder_takes_its_content_along(fresh: Fresh) -> None:
    storage, root = fresh
    storage.make_folder(f"{root}/tmp/state")
    storage.write_bytes(f"{root}/tmp/state/x", b"x")
    storage.rename(f"{root}/tmp", f"{root}/step_1")
    assert storage.read_bytes(f"{root}/step_1/state/x") == b"x"
    assert storage.list_folder(root) == ["step_1"]


def test_a_folder_never_replaces_a_filled_one(fresh: Fresh) -> None:
    storage, root = fresh
    storage.make_folder(f"{root}/tmp")
    storage.make_folder(f"{root}/step_1")
    storage.write_bytes(f"{root}/step_1/x", b"x")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        storage.rename(f"{root}/tmp", f"{root}/step_1")
    assert caught.value.errno == errno.ENOTEMPTY
    assert storage.read_bytes(f"{root}/step_1/x") == b"x"


def test_a_renamed_file_replaces_the_one_in_its_place(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/new", b"new")
    storage.write_bytes(f"{root}/old", b"old")
    storage.rename(f"{root}/new", f"{root}/old")
    assert storage.read_bytes(f"{root}/old") == b"new"
    assert storage.list_folder(root) == ["old"]


@pytest.mark.parametrize(
    "verb",
    [
        lambda storage, path: storage.rename(path, path + "-other"),
        lambda storage, path: storage.remove_file(path),
        lambda storage, path: storage.read_bytes(path),
        lambda storage, path: storage.sync_file(path),
        lambda storage, path: storage.sync_folder(path),
        lambda storage, path: storage.create_file(path + "/below", 1),
    ],
)
def test_what_is_absent_is_a_file_not_found_error(
    fresh: Fresh, verb: Callable[[Storage, str], None]
) -> None:
    storage, root = fresh
    with pytest.raises(FileNotFoundError):
        verb(storage, f"{root}/absent")


def test_removing_a_tree_leaves_what_its_links_point_at(fresh: Fresh) -> None:
    storage, root = fresh
    storage.make_folder(f"{root}/kept")
    storage.write_bytes(f"{root}/kept/x", b"x")
    storage.make_folder(f"{root}/gone/below")
    storage.write_bytes(f"{root}/gone/below/y", b"y")
    assert storage.link("../kept", f"{root}/gone/to_kept")
    storage.remove_tree(f"{root}/gone")
    storage.remove_tree(f"{root}/gone")
    assert storage.list_folder(root) == ["kept"]
    assert storage.read_bytes(f"{root}/kept/x") == b"x"


def test_a_link_is_followed_replaced_and_removed_alone(fresh: Fresh) -> None:
    storage, root = fresh
    for name in ("step_1", "step_2"):
        storage.make_folder(f"{root}/{name}")
        storage.write_bytes(f"{root}/{name}/x", name.encode())
    assert storage.link("step_1", f"{root}/latest")
    assert storage.read_bytes(f"{root}/latest/x") == b"step_1"
    assert storage.link("step_2", f"{root}/latest")
    assert storage.read_bytes(f"{root}/latest/x") == b"step_2"
    assert storage.list_folder(root) == ["latest", "step_1", "step_2"]
    storage.remove_file(f"{root}/latest")
    assert storage.list_folder(root) == ["step_1", "step_2"]


def test_a_link_never_takes_the_place_of_a_file_or_a_folder(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/latest", b"somebody's own")
    storage.make_folder(f"{root}/best")
    for name in ("latest", "best"):
        with pytest.raises(FileExistsError):
            storage.link("step_1", f"{root}/{name}")
    assert storage.list_folder(root) == ["best", "latest"]
    assert storage.read_bytes(f"{root}/latest") == b"somebody's own"


def test_a_link_in_a_circle_is_nothing_and_cant_be_read(fresh: Fresh) -> None:
    storage, root = fresh
    assert storage.link("latest", f"{root}/latest")
    assert storage.stat(f"{root}/latest") is None
    with pytest.raises(OSError, match="symbolic links"):
        storage.read_bytes(f"{root}/latest")


def test_a_dangling_link_is_nothing(fresh: Fresh) -> None:
    storage, root = fresh
    assert storage.link("step_9", f"{root}/latest")
    assert storage.stat(f"{root}/latest") is None


def test_a_file_in_the_way_of_a_folder_is_an_error(fresh: Fresh) -> None:
    storage, root = fresh
    storage.write_bytes(f"{root}/a", b"")
    with pytest.raises(OSError):  # noqa: PT011
        storage.make_folder(f"{root}/a")
    with pytest.raises(OSError):  # noqa: PT011
        storage.make_folder(f"{root}/a/b")


def test_local_files_are_made_with_their_blocks_claimed(tmp_path: Path) -> None:
    LocalStorage().create_file(str(tmp_path / "a"), 1 << 20)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 20


def test_a_file_larger_than_the_disk_fails_before_a_byte_is_written(tmp_path: Path) -> None:
    free = LocalStorage().free_bytes(str(tmp_path))
    assert free is not None
    with pytest.raises(OSError, match="big") as caught:
        LocalStorage().create_file(str(tmp_path / "big"), free * 2 + (1 << 40))
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "big").stat().st_blocks == 0


def test_a_claim_that_fails_halfway_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(fd: int, offset: int, size: int) -> None:
        os.pwrite(fd, bytes(size // 2), offset)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(OSError, match="full"):
        LocalStorage().create_file(str(tmp_path / "a"), 1 << 16)
    assert (tmp_path / "a").stat().st_size == 0


def test_without_fallocate_a_file_still_gets_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    LocalStorage().create_file(str(tmp_path / "a"), 12)
    assert (tmp_path / "a").stat().st_size == 12


def test_a_write_that_the_system_cuts_short_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:2]], offset))
    storage, path = LocalStorage(), str(tmp_path / "a")
    storage.create_file(path, 10)
    storage.write_at(path, 0, b"0123456789")
    buffer = bytearray(10)
    storage.read_into(path, 0, memoryview(buffer))
    assert buffer == b"0123456789"


def test_where_links_are_refused_link_says_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(target: str, path: str) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "symlink", refused)
    assert LocalStorage().link("step_1", str(tmp_path / "latest")) is False
    assert os.listdir(tmp_path) == []


def test_free_bytes_are_known_for_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    assert LocalStorage().free_bytes(str(tmp_path / "not" / "yet")) == LocalStorage().free_bytes(
        str(tmp_path)
    )


def test_memory_paths_are_absolute() -> None:
    with pytest.raises(ValueError, match="absolute"):
        MemoryStorage().write_bytes("relative/name", b"")


@pytest.mark.parametrize("has_call", [True, False])
def test_a_write_of_several_pieces_arrives_whole_at_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    """Where the system can begin writing back early, and where it can't (macOS)."""
    if not has_call:
        monkeypatch.setattr("legato.storage.local._sync_file_range", None)
    data = bytes(range(256)) * (17 * 4096)  # 17 MiB and a bit: three pieces
    storage, path = LocalStorage(), str(tmp_path / "file")
    storage.create_file(path, len(data) + 7)
    storage.write_at(path, 7, data)
    storage.sync_file(path)
    assert Path(path).read_bytes() == bytes(7) + data


def is_cached(path: str, offset: int) -> bool:
    """Whether a page of a file lies in memory, by a read that doesn't wait for the disk."""
    with open(path, "rb", buffering=0) as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                pytest.skip("this file system can't tell")
            raise
    return True


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what is cached")
def test_what_was_written_doesnt_stay_in_the_page_cache(tmp_path: Path) -> None:
    path, mebibyte = str(tmp_path / "file"), 1024**2
    storage = LocalStorage()
    storage.create_file(path, 96 * mebibyte)
    storage.write_at(path, 0, bytes(96 * mebibyte))
    assert not is_cached(path, 4 * mebibyte)  # more than 64 MiB behind
    assert is_cached(path, 95 * mebibyte)
    storage.sync_file(path)
    assert not is_cached(path, 95 * mebibyte)
