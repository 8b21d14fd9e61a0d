"""Storages that fail, kill, slow down, record or lose power at a chosen operation.

An operation is a call that changes something or makes it durable; they are counted from 1 on.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import posixpath
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from legato.storage import FileInfo, MemoryStorage, Storage
from legato.storage.base import Buffer
from legato.storage.memory import File, Folder


@dataclass(frozen=True)
class Operation:
    """One call: ``name`` of the verb, the path it changes, and the source of a rename or link."""

    name: str
    path: str
    source: str | None = None


class StorageWrapper:
    """Passes every call on to ``inner``; counts the changing ones and announces each to `before`.

    ``remove_tree`` is taken apart into the removals it consists of, each an operation.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.num_operations = 0
        self._lock = threading.Lock()

    @property
    def positioned_shared_writes(self) -> bool:
        return self.inner.positioned_shared_writes

    @property
    def atomic_rename(self) -> bool:
        return self.inner.atomic_rename

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        """Called before operation ``number``; ``half()`` does as much of it as a crash may."""

    def _change(self, operation: Operation, half: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self.num_operations += 1
            number = self.num_operations
        self.before(operation, number, half)

    def make_folder(self, path: str) -> None:
        self._change(Operation("make_folder", path))
        self.inner.make_folder(path)

    def create_file(self, path: str, size_bytes: int) -> None:
        self._change(
            Operation("create_file", path), lambda: self.inner.create_file(path, size_bytes // 2)
        )
        self.inner.create_file(path, size_bytes)

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        part = memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2]
        self._change(
            Operation("write_at", path), lambda: self.inner.write_at(path, offset, bytes(part))
        )
        self.inner.write_at(path, offset, data)

    def write_bytes(self, path: str, data: Buffer) -> None:
        part = bytes(data)[: len(bytes(data)) // 2]
        self._change(Operation("write_bytes", path), lambda: self.inner.write_bytes(path, part))
        self.inner.write_bytes(path, data)

    def read_bytes(self, path: str) -> bytes:
        return self.inner.read_bytes(path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.inner.read_into(path, offset, buffer)

    def sync_file(self, path: str) -> None:
        self._change(Operation("sync_file", path))
        self.inner.sync_file(path)

    def sync_folder(self, path: str) -> None:
        self._change(Operation("sync_folder", path))
        self.inner.sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        self._change(Operation("rename", target, source=source))
        self.inner.rename(source, target)

    def remove_file(self, path: str) -> None:
        self._change(Operation("remove_file", path))
        self.inner.remove_file(path)

    def remove_tree(self, path: str) -> None:
        for name in self.inner.list_folder(path):
            entry = posixpath.join(path, name)
            info = self.inner.stat(entry)
            is_link = isinstance(self.inner, MemoryStorage) is False and os.path.islink(entry)
            if info is not None and info.is_folder and not is_link:
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self._change(Operation("remove_tree", path))
        self.inner.remove_tree(path)

    def list_folder(self, path: str) -> list[str]:
        return self.inner.list_folder(path)

    def stat(self, path: str) -> FileInfo | None:
        return self.inner.stat(path)

    def link(self, target: str, path: str) -> bool:
        self._change(Operation("link", path, source=target))
        return self.inner.link(target, path)

    def free_bytes(self, path: str) -> int | None:
        return self.inner.free_bytes(path)


class RecordingStorage(StorageWrapper):
    """Keeps every operation, in order, in ``operations``."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        with self._lock:
            self.operations.append(operation)

    def names(self) -> list[tuple[str, str]]:
        """The operations as (verb, last part of the path)."""
        return [(op.name, posixpath.basename(op.path)) for op in self.operations]


class FaultyStorage(StorageWrapper):
    """Raises ``error`` instead of operation ``fail_at``, and of the next ``num_failures - 1``.

    With ``halfway``, half of the failing write is done first. ``fail_at=None`` never fails;
    both may be changed at any time.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at: int | None,
        error: OSError | None = None,
        num_failures: float = 1,
        halfway: bool = False,
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_failures = num_failures
        self.halfway = halfway

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        if self.fail_at is not None and self.fail_at <= number < self.fail_at + self.num_failures:
            if self.halfway:
                half()
            raise copy.copy(self.error)

    @classmethod
    def from_then_on(cls, inner: Storage, *, fail_at: int, **options: Any) -> FaultyStorage:
        """A disk that is broken, or full, for good from operation ``fail_at`` on."""
        return cls(inner, fail_at=fail_at, num_failures=math.inf, **options)


class KillingStorage(StorageWrapper):
    """Kills its own process with SIGKILL before operation ``kill_at``.

    With ``halfway``, half of that write is done first.
    """

    def __init__(self, inner: Storage, *, kill_at: int, halfway: bool = False) -> None:
        super().__init__(inner)
        self.kill_at = kill_at
        self.halfway = halfway

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        if number == self.kill_at:
            if self.halfway:
                half()
            os.kill(os.getpid(), signal.SIGKILL)


class SlowStorage(StorageWrapper):
    """Sleeps before every operation; only before those named in ``only``, if given."""

    def __init__(
        self, inner: Storage, *, seconds_per_operation: float, only: tuple[str, ...] = ()
    ) -> None:
        super().__init__(inner)
        self.seconds_per_operation = seconds_per_operation
        self.only = only

    def before(self, operation: Operation, number: int, half: Callable[[], None]) -> None:
        if not self.only or operation.name in self.only:
            time.sleep(self.seconds_per_operation)


class LossyStorage(MemoryStorage):
    """A disk in memory that keeps, at `power_loss`, only what was synced.

    Bytes survive if `sync_file` came after them. Names (created, renamed, removed) survive if
    `sync_folder` of their folder came after them. Folders made before the test's subject starts
    are made durable by `settle`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._durable_bytes: dict[int, tuple[File, bytes]] = {}
        self._durable_names: dict[int, tuple[Folder, dict[str, Any]]] = {}

    def sync_file(self, path: str) -> None:
        with self._lock:
            file = self._file(path)
            self._durable_bytes[id(file)] = (file, bytes(file.data))

    def sync_folder(self, path: str) -> None:
        with self._lock:
            folder = self._folder(path)
            self._durable_names[id(folder)] = (folder, dict(folder.entries))

    def settle(self) -> None:
        """Make everything durable, as an idle hour would."""
        with self._lock:
            pending: list[Folder] = [self.root]
            while pending:
                folder = pending.pop()
                self._durable_names[id(folder)] = (folder, dict(folder.entries))
                for node in folder.entries.values():
                    if isinstance(node, Folder):
                        pending.append(node)
                    elif isinstance(node, File):
                        self._durable_bytes[id(node)] = (node, bytes(node.data))

    def power_loss(self, *, names_survive: bool = False) -> None:
        """Drop what wasn't synced.

        ``names_survive``: names are kept as they were last and only unsynced bytes are lost, as
        on a file system that writes its journal before the data.
        """
        with self._lock:
            self._drop(self.root, names_survive)

    def _drop(self, folder: Folder, names_survive: bool) -> None:
        if not names_survive:
            folder.entries = dict(self._durable_names.get(id(folder), (folder, {}))[1])
        for node in folder.entries.values():
            if isinstance(node, Folder):
                self._drop(node, names_survive)
            elif isinstance(node, File):
                node.data = bytearray(self._durable_bytes.get(id(node), (node, b""))[1])


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Let writing beyond so many bytes of any file fail, as on a full disk: "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
