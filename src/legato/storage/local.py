"""A POSIX folder: positioned writes, and fsync of files and of the folders that name them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from legato.storage.base import Buffer, FileInfo

# What a file system answers when it has no such call, rather than no room or no right.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})

# Large writes go to the disk in pieces, each on its way while the next is copied; 4 and 16 MiB were
# as fast. What is small isn't worth a call: the fsync at the end takes it along.
_PIECE_BYTES = 8 * 1024**2
_SMALL_BYTES = 256 * 1024
# linux/fs.h: start writing back and wait for nothing; wait before, start, wait after.
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT = 1 | 2 | 4
# How far a file's bytes on their way to the disk lie behind those that are being copied.
_ON_THEIR_WAY_BYTES = 64 * 1024**2


class LocalStorage:
    """Files on a mounted disk.

    Args:
        positioned_shared_writes: Whether several processes may write one file. True on local
            disks and NFS; some FUSE mounts lose such writes silently: see
            `legato.storage.probe_positioned_writes`.
    """

    atomic_rename = True

    def __init__(self, *, positioned_shared_writes: bool = True) -> None:
        self.positioned_shared_writes = positioned_shared_writes

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; one that is there already is left as it is."""
        os.makedirs(path, exist_ok=True)

    def create_file(self, path: str, size_bytes: int) -> None:
        """Create or empty a file and claim ``size_bytes`` for it, so a full disk shows here."""
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            if size_bytes == 0:
                return
            # Asked first: to claim in vain would fill the disk for a moment, for everyone on it.
            disk = os.fstatvfs(fd)
            if disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    # ext4 keeps what it had reserved until the disk was full.
                    os.ftruncate(fd, 0)
                    error.filename = path
                    raise
                os.ftruncate(fd, size_bytes)

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``offset`` of a file made by `create_file`."""
        with _opened(path, os.O_WRONLY) as fd:
            _write_all(fd, offset, data, path)

    def write_bytes(self, path: str, data: Buffer) -> None:
        """Create or replace a whole file. Not synced."""
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _write_all(fd, 0, data, path)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file; ``FileNotFoundError`` if it is a pipe, which never ends."""
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise FileNotFoundError(errno.ENOENT, "a pipe is there, no file", path)
        return Path(path).read_bytes()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset``; ``EOFError`` if the file ends before."""
        view = buffer.cast("B")
        with _opened(path, os.O_RDONLY) as fd:
            while view:
                num_read = os.preadv(fd, [view], offset)
                if num_read == 0:
                    raise EOFError(f"{path} ends at byte {offset}, {len(view)} bytes too early")
                view, offset = view[num_read:], offset + num_read

    def sync_file(self, path: str) -> None:
        """Make the bytes of a file durable; a large one's leave the page cache."""
        with _opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)
            size_bytes = os.fstat(fd).st_size
            if size_bytes >= _SMALL_BYTES:
                _drop_cached(fd, 0, size_bytes)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable: what was created, renamed and removed there."""
        with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            try:
                os.fsync(fd)
            except OSError as error:
                # Some network file systems can't sync a folder; their renames are synchronous.
                if error.errno not in _UNSUPPORTED:
                    raise

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder. A file replaces a file; a folder never replaces a filled one."""
        os.rename(source, target)

    def remove_file(self, path: str) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it, links unfollowed; an absent one is fine."""
        # Two cleaners may meet in one folder, so whatever has vanished already is as it should be.
        try:
            entries = list(os.scandir(path))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(entry.path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; ``[]`` if there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def stat(self, path: str) -> FileInfo | None:
        """Return what lies at ``path`` (links followed), or ``None``."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link in a circle leads to nothing, like a dead one
                return None
            raise
        return FileInfo(is_folder=stat.S_ISDIR(found.st_mode), size_bytes=found.st_size)

    def link(self, target: str, path: str) -> bool:
        """Point ``path`` at the relative ``target``, atomically; false where links don't work.

        What is there already is replaced if it is a link, else left alone: ``FileExistsError``.
        """
        if os.path.lexists(path) and not os.path.islink(path):
            raise FileExistsError(errno.EEXIST, "it isn't a link, so it is left alone", path)
        beside = f"{path}.tmp-{os.getpid()}-{threading.get_ident()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            os.symlink(target, beside)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        try:
            os.replace(beside, path)
        except OSError:
            os.unlink(beside)
            raise
        return True

    def free_bytes(self, path: str) -> int | None:
        """Return the bytes that this user may still write at ``path``; ``None`` if unknown."""
        there = Path(path)
        while not there.exists() and there != there.parent:
            there = there.parent
        found = os.statvfs(there)
        return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, offset: int, data: Buffer, path: str) -> None:
    view = memoryview(data).cast("B")
    while view:
        try:
            # A call writes less than asked when the disk fills up: the next one says why.
            num_written = os.pwrite(fd, view[:_PIECE_BYTES], offset)
        except OSError as error:
            error.filename = path
            raise
        if num_written >= _SMALL_BYTES:
            _start_writeback(fd, offset, num_written)
        view, offset = view[num_written:], offset + num_written


def _start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin on these bytes, and let go of as many that were copied a while before.

    A checkpoint is read by nobody here for now. Left in the page cache it would push out what
    training reads, and each new page costs the kernel more than the copy: with SmolLM2-135M's
    1.9 GB, 2.4 s of CPU a save instead of 0.9. Only hints: what counts is the fsync.
    """
    if _sync_file_range is None:
        return
    _sync_file_range(fd, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)
    behind = offset - _ON_THEIR_WAY_BYTES
    if behind > 0:
        start = max(0, behind - num_bytes)
        _sync_file_range(fd, start, behind - start, _SYNC_FILE_RANGE_WAIT)
        _drop_cached(fd, start, behind - start)


def _drop_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Give the memory of bytes that are on disk back; what isn't on disk yet stays."""
    if hasattr(os, "posix_fadvise"):  # Linux
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call of that name, which Python lacks; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found


_sync_file_range = _find_sync_file_range()
