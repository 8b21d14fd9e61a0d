"""The only door to disks and object stores: a few verbs on absolute paths and bytes."""

from __future__ import annotations

from legato.storage.base import FileInfo, Storage
from legato.storage.local import LocalStorage
from legato.storage.memory import MemoryStorage
from legato.storage.probe import probe_positioned_writes
from legato.storage.remote import RemoteStorage, open_storage

__all__ = [
    "FileInfo",
    "LocalStorage",
    "MemoryStorage",
    "RemoteStorage",
    "Storage",
    "open_storage",
    "probe_positioned_writes",
]
