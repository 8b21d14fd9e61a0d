"""Object stores and whatever else fsspec opens: a file is written front to back by one writer.

There is no rename in one step and no folder to sync: whoever stores checkpoints here writes files
under their final names and a manifest last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from legato.errors import MissingDependencyError
from legato.storage.base import Buffer, FileInfo, Storage
from legato.storage.local import LocalStorage

# Pieces that come before their turn wait in memory: enough for neighbours that swap places.
_MAX_WAITING_BYTES = 256 << 20


@dataclass
class _Upload:
    """A file under way: the bytes before ``position`` are sent, later ones wait for the gap."""

    file: Any
    size_bytes: int
    position: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class RemoteStorage:
    """Files of an fsspec file system, under absolute paths: ``/bucket/run`` for ``s3://bucket/run``.

    A file made by `create_file` is complete when `sync_file` ended it. Most stores don't show it
    before; some show what has been sent.

    Args:
        filesystem: An ``fsspec.AbstractFileSystem``.
    """

    positioned_shared_writes = False
    atomic_rename = False

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._uploads: dict[str, _Upload] = {}

    def make_folder(self, path: str) -> None:
        """Make a folder where the store has such a thing."""
        with _as_os_error(path):
            self._filesystem.makedirs(self._key(path), exist_ok=True)

    def create_file(self, path: str, size_bytes: int) -> None:
        """Begin a file of ``size_bytes``, which `write_at` fills and `sync_file` ends."""
        self._drop_upload(path)
        with _as_os_error(path):
            file = self._filesystem.open(self._key(path), "wb", autocommit=False)
        self._uploads[path] = _Upload(file, size_bytes)

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        """Send ``data``, now or when what comes before it has been sent.

        At most 256 MiB wait, so files are to be written in about ascending order; what exceeds
        that, or was sent already, is an ``OSError``.
        """
        upload = self._uploads.get(path)
        if upload is None:
            raise FileNotFoundError(errno.ENOENT, "no file was created to be written here", path)
        with upload.lock, _as_os_error(path):
            if offset < upload.position or offset + memoryview(data).nbytes > upload.size_bytes:
                raise OSError(errno.EINVAL, f"byte {offset} is sent already or past the end", path)
            if offset > upload.position:
                upload.waiting[offset] = bytes(data)
                if sum(map(len, upload.waiting.values())) > _MAX_WAITING_BYTES:
                    raise OSError(errno.ENOBUFS, f"too much waits for byte {upload.position}", path)
                return
            piece: Buffer | None = data
            while piece is not None:
                upload.file.write(piece)
                upload.position += memoryview(piece).nbytes
                piece = upload.waiting.pop(upload.position, None)

    def write_bytes(self, path: str, data: Buffer) -> None:
        """Create or replace a whole file."""
        self._drop_upload(path)
        with _as_os_error(path):
            self._filesystem.pipe_file(self._key(path), bytes(data))

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file."""
        with _as_os_error(path):
            return bytes(self._filesystem.cat_file(self._key(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset``; ``EOFError`` if the file ends before."""
        view = buffer.cast("B")
        if not view:
            return
        with _as_os_error(path):
            end = offset + len(view)
            found = self._filesystem.cat_file(self._key(path), start=offset, end=end)
        if len(found) < len(view):
            raise EOFError(f"{path} ends {len(view) - len(found)} bytes too early")
        view[:] = found

    def sync_file(self, path: str) -> None:
        """End a file that `create_file` began; it is durable from now on."""
        upload = self._uploads.get(path)
        if upload is None:
            if self.stat(path) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return
        if upload.position != upload.size_bytes:
            sent = f"{upload.position} of {upload.size_bytes} bytes were written without a gap"
            raise OSError(errno.EIO, sent, path)
        with _as_os_error(path):
            upload.file.close()
            upload.file.commit()
        del self._uploads[path]

    def sync_folder(self, path: str) -> None:
        """Do nothing: a store's names are durable as soon as they are there."""

    def rename(self, source: str, target: str) -> None:
        """Copy, then remove: not one step, and as slow as the bytes are many."""
        info = self.stat(source)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if info.is_folder and self.list_folder(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        with _as_os_error(source):
            # File by file: fsspec's own recursive move stumbles over folders that are no objects.
            start, end = self._key(source), self._key(target)
            for key in self._filesystem.find(start) if info.is_folder else [start]:
                below = key.strip("/").removeprefix(start.strip("/"))
                self._filesystem.cp_file(key, end + below)
            self._filesystem.rm(start, recursive=info.is_folder)

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        with _as_os_error(path):
            self._filesystem.rm_file(self._key(path))

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it; an absent one is fine."""
        for begun in [name for name in self._uploads if name.startswith(path.rstrip("/") + "/")]:
            self._drop_upload(begun)
        if self.stat(path) is not None:
            with _as_os_error(path):
                self._filesystem.rm(self._key(path), recursive=True)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; ``[]`` if there is no such folder."""
        key = self._key(path)
        with _as_os_error(path):
            try:
                found = self._filesystem.ls(key, detail=False)
            except FileNotFoundError:
                return []
        # Some stores keep an empty object under the folder's own name.
        own = key.strip("/")
        return sorted(
            posixpath.basename(name.rstrip("/")) for name in found if name.strip("/") != own
        )

    def stat(self, path: str) -> FileInfo | None:
        """Return what lies at ``path``, or ``None``."""
        key = self._key(path)
        with _as_os_error(path):
            try:
                info = self._filesystem.info(key)
            except FileNotFoundError:
                return None
        return FileInfo(is_folder=info["type"] == "directory", size_bytes=info["size"] or 0)

    def link(self, target: str, path: str) -> bool:
        """Return false: there are no links."""
        return False

    def free_bytes(self, path: str) -> int | None:
        """Return ``None``: a store doesn't tell."""
        return None

    def _key(self, path: str) -> str:
        # Others write here too, and what a client remembers of a listing is soon untrue.
        self._filesystem.invalidate_cache()
        # Bucket stores have no root: their names begin with the bucket's.
        return str(self._filesystem.root_marker) + path.lstrip("/")

    def _drop_upload(self, path: str) -> None:
        upload = self._uploads.pop(path, None)
        if upload is not None:
            with contextlib.suppress(Exception):  # unfinished, and never to be: no one misses it
                upload.file.discard()
                upload.file.closed = True  # else its end of life would send the rest


def open_storage(location: str) -> tuple[Storage, str]:
    """Return the storage of a path or URL (``s3://bucket/run``), and the path within it.

    Args:
        location: A local path, absolute or not, or any URL that fsspec knows.

    Returns:
        The storage, and the absolute path to give to its verbs.

    Raises:
        MissingDependencyError: The package that speaks this protocol isn't installed.
    """
    protocol, separator, _ = location.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalStorage(), os.path.abspath(location.removeprefix(f"{protocol}://"))
    import fsspec  # not needed for local paths

    try:
        filesystem, key = fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(
            f"{location} can't be opened: {error}", path=location
        ) from error
    return RemoteStorage(filesystem), "/" + str(key).lstrip("/")


@contextlib.contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """Whatever a store's client raises is an ``OSError`` to those who handle failed writes."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
