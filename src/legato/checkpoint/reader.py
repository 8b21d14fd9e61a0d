"""Let ``dcp.load`` read any Hugging Face folder, each rank its own slices and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from legato.errors import CheckpointError, CheckpointMismatchError
from legato.hf_folder import Box, FolderReader
from legato.storage import LocalStorage, Storage


class FolderStorageReader(StorageReader):
    """A DCP storage reader of safetensors folders, whoever wrote them, on any number of ranks.

    Strict both ways: a key, shape or dtype that differs is an error. (DCP alone ignores keys that
    the state dict lacks, and casts.)

    Args:
        path: The folder; ``dcp.load(..., checkpoint_id=path)`` sets it too.
        storage: Where it is; by default a local disk.
        files: Names of the files to read; by default those of the model or adapter.
        keys: Name in the state dict -> key in the file, where they differ.
        strict: Whether keys that the state dict lacks are an error.
        cast: Whether values may be rounded to another dtype.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage: Storage | None = None,
        files: Sequence[str] | None = None,
        keys: Mapping[str, str] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self._storage = storage or LocalStorage()
        self._files = files
        self._keys = dict(keys or {})
        self._strict = strict
        self._cast = cast
        self._reader: FolderReader | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this rank has read in this load."""
        return 0 if self._reader is None else self._reader.bytes_read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether DCP may pass this as ``checkpoint_id``: a local path."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of ``checkpoint_id`` if one is given."""
        if checkpoint_id is not None:
            self.path = os.path.abspath(checkpoint_id)
        self._reader = None

    def read_metadata(self, *args: Any) -> Metadata:
        """Return every tensor of the folder, under the state dict's names."""
        if self.path is None:
            raise CheckpointError("no folder to read: give the reader a path, or dcp.load an id")
        self._reader = FolderReader(self._storage, self.path, files=self._files)
        names = {key: name for name, key in self._keys.items()}
        return Metadata(
            {
                names.get(key, key): TensorStorageMetadata(
                    properties=TensorProperties(dtype=spec.dtype),
                    size=torch.Size(spec.shape),
                    chunks=[
                        ChunkStorageMetadata(
                            torch.Size([0] * len(spec.shape)), torch.Size(spec.shape)
                        )
                    ],
                )
                for key, spec in self._reader.specs.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: `read_metadata` opened the folder."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: refuse tensors that no rank asked for."""
        assert self._reader is not None
        asked = {self._key(item) for plan in plans for item in plan.items}
        # Of a tensor without elements there is nothing to ask for.
        held = [key for key, spec in self._reader.specs.items() if spec.size_bytes > 0]
        extra = sorted(set(held) - asked)
        if extra and self._strict:
            raise CheckpointMismatchError(
                f"{self.path} holds {len(extra)} tensors that the state dict lacks: "
                f"{', '.join(extra[:3])}. With strict=False they are left out.",
                path=self.path,
                key=extra[0],
                extra=extra,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the slices of this rank straight into their tensors."""
        assert self._reader is not None
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            self._reader.read_into(self._key(item), box, target, cast=self._cast)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _key(self, item: ReadItem) -> str:
        name = item.storage_index.fqn
        return self._keys.get(name, name)
