"""What the rest of Legato may do to a disk or an object store: a few verbs on paths and bytes.

Every byte of a checkpoint passes through a `Storage`, so a test can fail, kill, slow down,
record or power off at any operation, and production code holds no hook for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes to write. (``collections.abc.Buffer`` needs Python 3.12.)"""


@dataclass(frozen=True)
class FileInfo:
    """What ``stat`` tells about a path; links are followed."""

    is_folder: bool
    size_bytes: int


class Storage(Protocol):
    """A few verbs on absolute paths (``str``) and bytes.

    Whatever goes wrong is an ``OSError``; what isn't there is a ``FileNotFoundError``. Nothing is
    durable before `sync_file` (bytes) and `sync_folder` (names in that folder, renames included).
    Methods may be called from several threads at once.

    Attributes:
        positioned_shared_writes: Several processes may `write_at` different places of one file.
            Where this is false, a file has one writer, which writes it in ascending order.
        atomic_rename: `rename` of a folder is one step that happens or doesn't.
    """

    positioned_shared_writes: bool
    atomic_rename: bool

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; one that is there already is left as it is."""

    def create_file(self, path: str, size_bytes: int) -> None:
        """Create or empty a file and claim ``size_bytes`` for it, so a full disk shows here."""

    def write_at(self, path: str, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``offset`` of a file made by `create_file`."""

    def write_bytes(self, path: str, data: Buffer) -> None:
        """Create or replace a whole file. Not synced."""

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a file."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset``; ``EOFError`` if the file ends before."""

    def sync_file(self, path: str) -> None:
        """Make the bytes of a file durable."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable: what was created, renamed and removed there."""

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder. A file replaces a file; a folder never replaces a filled one."""

    def remove_file(self, path: str) -> None:
        """Remove a file or a link."""

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it, links unfollowed; an absent one is fine."""

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; ``[]`` if there is no such folder."""

    def stat(self, path: str) -> FileInfo | None:
        """Return what lies at ``path`` (links followed); ``None``: nothing, or a dead link."""

    def link(self, target: str, path: str) -> bool:
        """Point ``path`` at the relative ``target``, atomically; false where links don't work.

        What is there already is replaced if it is a link, else left alone: ``FileExistsError``.
        """

    def free_bytes(self, path: str) -> int | None:
        """Return the bytes that this user may still write at ``path``; ``None`` if unknown."""
