"""The same against the S3 protocol, spoken by a server on loopback (needs s3fs and moto)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint.lifecycle import RunFolder
from legato.storage import FileInfo, RemoteStorage
from tests.helpers import s3
from tests.helpers.loops import Loop, assert_same
from tests.helpers.s3 import PART_BYTES

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

ROOT = "/bucket/run"


@pytest.fixture
def filesystem() -> Iterator[Any]:
    with s3.serving() as address:
        yield s3.connect(address)


def test_a_file_in_parts_appears_whole_when_it_is_synced(filesystem: Any) -> None:
    storage = RemoteStorage(filesystem)
    content = bytes(range(256)) * (3 * PART_BYTES // 256) + b"tail"
    storage.create_file(f"{ROOT}/a", len(content))
    half = len(content) // 2
    storage.write_at(f"{ROOT}/a", half, content[half:])
    storage.write_at(f"{ROOT}/a", 0, content[:half])
    assert storage.stat(f"{ROOT}/a") is None
    storage.sync_file(f"{ROOT}/a")
    assert storage.stat(f"{ROOT}/a") == FileInfo(is_folder=False, size_bytes=len(content))
    assert storage.read_bytes(f"{ROOT}/a") == content
    buffer = bytearray(4)
    storage.read_into(f"{ROOT}/a", len(content) - 4, memoryview(buffer))
    assert buffer == b"tail"
    with pytest.raises(EOFError):
        storage.read_into(f"{ROOT}/a", len(content) - 2, memoryview(buffer))


def test_a_small_file_and_an_empty_one_too(filesystem: Any) -> None:
    storage = RemoteStorage(filesystem)
    for name, content in (("small", b"12345"), ("empty", b"")):
        storage.create_file(f"{ROOT}/{name}", len(content))
        storage.write_at(f"{ROOT}/{name}", 0, content)
        assert storage.stat(f"{ROOT}/{name}") is None
        storage.sync_file(f"{ROOT}/{name}")
        assert storage.read_bytes(f"{ROOT}/{name}") == content


def test_a_dropped_file_never_appears(filesystem: Any) -> None:
    storage = RemoteStorage(filesystem)
    storage.make_folder(f"{ROOT}/step_1")
    storage.create_file(f"{ROOT}/step_1/a", 2 * PART_BYTES)
    storage.write_at(f"{ROOT}/step_1/a", 0, bytes(PART_BYTES + 1))
    storage.remove_tree(f"{ROOT}/step_1")
    assert storage.list_folder(ROOT) == []


def test_folders_are_listed_renamed_and_removed(filesystem: Any) -> None:
    storage = RemoteStorage(filesystem)
    storage.write_bytes(f"{ROOT}/step_1/b", b"b")
    storage.write_bytes(f"{ROOT}/step_1/state/c", b"c")
    assert storage.list_folder(f"{ROOT}/step_1") == ["b", "state"]
    storage.rename(f"{ROOT}/step_1/b", f"{ROOT}/step_1/d")
    assert storage.list_folder(f"{ROOT}/step_1") == ["d", "state"]
    storage.rename(f"{ROOT}/step_1", f"{ROOT}/moved")
    assert storage.list_folder(ROOT) == ["moved"]
    assert storage.read_bytes(f"{ROOT}/moved/state/c") == b"c"
    storage.remove_tree(f"{ROOT}/moved")
    assert storage.list_folder(ROOT) == []
    assert storage.stat(f"{ROOT}/moved") is None


def test_a_run_saves_prunes_and_resumes_on_a_bucket(filesystem: Any) -> None:
    storage = RemoteStorage(filesystem)
    with Checkpointer(ROOT, storage=storage, keep=KeepLast(2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(Loop().run_to(step).state, step=step)
    RunFolder(storage, ROOT).reserve(4, run_id=checkpointer.run_id, branch=0, saved_at=0.0)
    resumed = Loop()
    with Checkpointer(ROOT, storage=storage, verify_on_load=True) as checkpointer:
        assert storage.list_folder(ROOT) == ["step_2", "step_3"]
        assert checkpointer.restore(resumed.state) == {"step": 3, "notes": []}
    assert_same(resumed.tensors(), Loop().run_to(3).tensors())
