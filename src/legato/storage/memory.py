"""A file tree in memory: for tests, and the base of the fakes that lose power."""

from __future__ import annotations

import errno
import os
import posixpath
import threading
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from legato.storage.base import Buffer, FileInfo

_MAX_LINKS = 16


@dataclass
class File:
    """A file's bytes."""

    data: bytearray = field(default_factory=bytearray)


@dataclass
class Link:
    """A symbolic link."""

    target: str


@dataclass
class Folder:
    """The names in a folder."""

    entries: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = File | Link | Folder


class MemoryStorage:
    """Files and folders in memory, with the errors of a POSIX disk; safe to use from threads."""

    positioned_shared_writes = True
    atomic_rename = True

    def __init__(self) -> None:
        self.root = Folder()
        self._lock = threading.RLock()

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; one that is there already is left as it is."""
        with self._lock:
            walked = "/"
            for name in _names(path):
                folder, walked = self._folder(walked), posixpath.join(walked, name)
                folder.entries.setdefault(name, Folder())
            if not isinstance(self._node(path), Folder):
                _fail(errno.EEXIST, path)

    def create_file(self, path: str, size_bytes: int) -> None:
        """Create or empty a file of ``size_bytes`` zeros."""
        with self._lock:
            self._file_to_write(path).data[:] = bytes(size_bytes)

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``offset`` of a file made by `create_file`."""
        content = bytes(data)
        with self._lock:
            file = self._file(path)
            if len(file.data) < offset:
                file.data.extend(bytes(offset - len(file.data)))
            file.data[offset : offset + len(content)] = content

    def write_bytes(self, path: str, data: Buffer) -> None:
        """Create or replace a whole file. Not synced."""
        with self._lock:
            self._file_to_write(path).data[:] = bytes(data)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file."""
        with self._lock:
            return bytes(self._file(path).data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset``; ``EOFError`` if the file ends before."""
        view = buffer.cast("B")
        with self._lock:
            found = self._file(path).data[offset : offset + len(view)]
        if len(found) < len(view):
            raise EOFError(f"{path} ends {len(view) - len(found)} bytes too early")
        view[:] = found

    def sync_file(self, path: str) -> None:
        """Do nothing but check that the file is there: memory is as durable as it gets."""
        with self._lock:
            self._file(path)

    def sync_folder(self, path: str) -> None:
        """Do nothing but check that the folder is there."""
        with self._lock:
            self._folder(path)

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder. A file replaces a file; a folder never replaces a filled one."""
        with self._lock:
            source_folder, source_name = self._parent(source)
            target_folder, target_name = self._parent(target)
            node = source_folder.entries.get(source_name) or _fail(errno.ENOENT, source)
            there = target_folder.entries.get(target_name)
            if there is node:
                return
            if isinstance(node, Folder):
                if target.startswith(source.rstrip("/") + "/"):
                    _fail(errno.EINVAL, target)
                if there is not None and not isinstance(there, Folder):
                    _fail(errno.ENOTDIR, target)
                if isinstance(there, Folder) and there.entries:
                    _fail(errno.ENOTEMPTY, target)
            elif isinstance(there, Folder):
                _fail(errno.EISDIR, target)
            del source_folder.entries[source_name]
            target_folder.entries[target_name] = node

    def remove_file(self, path: str) -> None:
        """Remove a file or a link."""
        with self._lock:
            folder, name = self._parent(path)
            node = folder.entries.get(name) or _fail(errno.ENOENT, path)
            if isinstance(node, Folder):
                _fail(errno.EISDIR, path)
            del folder.entries[name]

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it, links unfollowed; an absent one is fine."""
        with self._lock:
            try:
                folder, name = self._parent(path)
            except FileNotFoundError:
                return
            node = folder.entries.get(name)
            if node is not None and not isinstance(node, Folder):
                _fail(errno.ENOTDIR, path)
            folder.entries.pop(name, None)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; ``[]`` if there is no such folder."""
        with self._lock:
            try:
                return sorted(self._folder(path).entries)
            except FileNotFoundError:
                return []

    def stat(self, path: str) -> FileInfo | None:
        """Return what lies at ``path`` (links followed), or ``None``."""
        with self._lock:
            try:
                node = self._node(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:  # as on a disk: like a dead one
                    return None
                raise
            size_bytes = len(node.data) if isinstance(node, File) else 0
            return FileInfo(is_folder=isinstance(node, Folder), size_bytes=size_bytes)

    def link(self, target: str, path: str) -> bool:
        """Point ``path`` at the relative ``target``; only a link is replaced."""
        with self._lock:
            folder, name = self._parent(path)
            if not isinstance(folder.entries.get(name), Link | None):
                _fail(errno.EEXIST, path)
            folder.entries[name] = Link(target)
            return True

    def free_bytes(self, path: str) -> int | None:
        """Return ``None``: memory has no quota that is worth telling."""
        return None

    def _node(self, path: str, num_links: int = 0) -> File | Folder:
        node: File | Folder = self.root
        walked = "/"
        for name in _names(path):
            if not isinstance(node, Folder):
                _fail(errno.ENOTDIR, path)
            child = node.entries.get(name) or _fail(errno.ENOENT, path)
            if isinstance(child, Link):
                if num_links == _MAX_LINKS:
                    _fail(errno.ELOOP, path)
                target = posixpath.join(walked, child.target)
                child = self._node(target, num_links + 1)
            node, walked = child, posixpath.join(walked, name)
        return node

    def _folder(self, path: str) -> Folder:
        node = self._node(path)
        return node if isinstance(node, Folder) else _fail(errno.ENOTDIR, path)

    def _file(self, path: str) -> File:
        node = self._node(path)
        return node if isinstance(node, File) else _fail(errno.EISDIR, path)

    def _file_to_write(self, path: str) -> File:
        folder, name = self._parent(path)
        if isinstance(folder.entries.get(name), Link):
            return self._file(path)
        node = folder.entries.setdefault(name, File())
        return node if isinstance(node, File) else _fail(errno.EISDIR, path)

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, name = posixpath.split(path.rstrip("/"))
        return self._folder(folder), name


def _names(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ValueError(f"a storage path is absolute; found {path!r}")
    return [name for name in posixpath.normpath(path).split("/") if name]


def _fail(number: int, path: str) -> NoReturn:
    raise OSError(number, os.strerror(number), path)
