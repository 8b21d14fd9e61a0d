"""Tensors of a step, each read into a live one, and who is shown how far that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from legato.checkpoint.digests import OnRead
from legato.checkpoint.records import Committed
from legato.checkpoint.tensors import is_plain, local
from legato.hf_folder import FolderReader, local_box
from legato.storage import Storage


class ReadProgress(Protocol):
    """Shows how far a restore is; a context manager around the reading."""

    def __call__(self, *, total_bytes: int) -> AbstractContextManager[OnRead]:
        """Begin to show it.

        Args:
            total_bytes: Bytes of all tensors that are going to be restored, on all ranks together.

        Returns:
            What gives a function to be told of each further so many bytes.
        """
        ...


@contextmanager
def unseen(*, total_bytes: int) -> Iterator[OnRead]:
    """The `ReadProgress` that shows nothing."""
    yield lambda num_bytes: None


class StepTensors:
    """The tensors in some files of a step.

    Args:
        reader: The open files.

    Attributes:
        specs: Key -> tensor.
        on_read: Told of the bytes of each tensor that was filled.
    """

    def __init__(self, reader: FolderReader) -> None:
        self.specs = reader.specs
        self.on_read: OnRead = lambda num_bytes: None
        self._reader = reader

    @classmethod
    def open(cls, storage: Storage, committed: Committed, stem: str) -> StepTensors | None:
        """Those in the step's files that begin with ``stem``; None: it has no such file."""
        names = [
            name
            for name in committed.manifest.files
            if name.startswith(stem) and name.endswith(".safetensors")
        ]
        return cls(FolderReader(storage, committed.path, files=sorted(names))) if names else None

    def read(self, key: str) -> Tensor:
        """A new tensor on the CPU."""
        return self._reader.read(key)

    def fill(self, key: str, target: Tensor) -> None:
        """Read this rank's part of ``key`` into ``target``, rounding to its dtype."""
        box = None if is_plain(target) else local_box(target)
        shard = local(target)
        if shard.numel() > 0:
            self._reader.read_into(key, box, shard, cast=True)
        # All of it counts: the other ranks read their parts meanwhile.
        self.on_read(self.specs[key].size_bytes)
