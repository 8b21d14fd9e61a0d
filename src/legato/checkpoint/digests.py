"""A file on disk against its entry in the manifest."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from legato.checkpoint.manifest import FileEntry, Slice, check_coverage
from legato.errors import FolderFormatError
from legato.storage import Storage

OnRead = Callable[[int], object]
"""Told of each further so many bytes that were read."""

_READ_BYTES = 64 * 1024**2


def wrong_size(storage: Storage, path: str, entry: FileEntry) -> str | None:
    """What is wrong with the size of a file; None: nothing is."""
    found = storage.stat(path)
    if found is None:
        return f"{path} is absent"
    if found.size_bytes != entry.size_bytes:
        return f"{path} has {found.size_bytes} bytes, not {entry.size_bytes}"
    return None


def wrong_header(storage: Storage, path: str, entry: FileEntry) -> str | None:
    """What is wrong with the bytes before the first slice of a file; None: nothing is."""
    if entry.header_digest is None:
        return None
    header = Slice(0, entry.header_bytes, entry.header_digest)
    if _digest_on_disk(storage, path, header) == header.digest:
        return None
    return f"{path}: the header is damaged"


def wrong_digest(
    storage: Storage, path: str, entry: FileEntry, *, on_read: OnRead | None = None
) -> str | None:
    """What is wrong with the bytes of a file, all of them read; None: nothing is."""
    try:
        check_coverage(path, entry)
    except FolderFormatError as error:  # whoever wrote it: some bytes have no digest, or two
        return str(error)
    if problem := wrong_header(storage, path, entry):
        return problem
    for part in entry.slices:
        if _digest_on_disk(storage, path, part, on_read=on_read) != part.digest:
            return f"{path}: the bytes from {part.offset} on are damaged"
    return None


def _digest_on_disk(
    storage: Storage, path: str, part: Slice, *, on_read: OnRead | None = None
) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(part.run_bytes, _READ_BYTES)))
    for i in range(part.num_runs):
        start = part.offset + i * part.distance_bytes
        end = start + part.run_bytes
        while start < end:
            piece = buffer[: end - start]
            storage.read_into(path, start, piece)
            hasher.update(piece)
            if on_read is not None:
                on_read(len(piece))
            start += len(piece)
    return hasher.hexdigest()
