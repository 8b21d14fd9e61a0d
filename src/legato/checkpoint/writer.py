"""Let ``dcp.save`` and ``dcp.async_save`` write one Hugging Face folder, each rank its own bytes.

For loops that call `torch.distributed.checkpoint` themselves; Legato's own saves keep one plan and
don't plan anew each time. ``dcp.async_save`` needs a group of its own, or its background thread
meets the training's collectives::

    group = dist.new_group(backend="gloo")
    writer = FolderStorageWriter("out/model", files={"config.json": config_json})
    dcp.async_save(model.state_dict(), storage_writer=writer, process_group=group)

What fails is raised on every rank as torch's ``CheckpointException``, a ``BaseException`` whose
``failures`` maps rank to the error; ``except Exception`` doesn't catch it.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from legato.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from legato.hf_folder import (
    Box,
    PlannedFile,
    TensorSpec,
    index_json,
    plan_files,
    plan_ranges,
    tensor_bytes,
)
from legato.storage import LocalStorage, Storage

_MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class _Order:
    """The tensors of a rank's state dict in its own order, before DCP deals them out."""

    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class _Layout:
    """What every rank needs to write: where the folder grows, and its files."""

    folder: str
    files: tuple[PlannedFile, ...]


class FolderStorageWriter(StorageWriter):
    """A DCP storage writer whose result is a Hugging Face folder, on any number of ranks.

    Every rank writes its shards at their final place in the files; nothing is gathered. The folder
    grows beside its final name and gets it by one rename when all of it is synced (on object
    stores, it grows in its place). A leftover of a failed save is replaced by the next one.

    Args:
        path: The folder to make; ``dcp.save(..., checkpoint_id=path)`` sets it too. All ranks see
            the same disk.
        storage: Where; by default a local disk.
        stem: Start of the files' names: ``model``, ``adapter_model``.
        keys: Name in the state dict -> key in the file, where they differ.
        files: Further files of the folder (``config.json``), by name; rank 0's count.
        max_file_bytes: Bytes of tensors per file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage: Storage | None = None,
        stem: str = "model",
        keys: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        max_file_bytes: int = _MAX_FILE_BYTES,
    ) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self._storage = storage or LocalStorage()
        self._stem = stem
        self._keys = dict(keys or {})
        self._files = dict(files or {})
        self._max_file_bytes = max_file_bytes
        self._rank = 0
        self._layout: _Layout | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether DCP may pass this as ``checkpoint_id``: a local path."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to ``checkpoint_id`` if one is given."""
        if checkpoint_id is not None:
            self.path = os.path.abspath(checkpoint_id)
        self._layout = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note which rank this is."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what isn't a tensor; note the order of the tensors."""
        if not plan.usable:
            raise CheckpointError(
                "DCP's plan cache hands out empty plans: use a planner without enable_plan_caching"
            )
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn} isn't a tensor. A Hugging Face folder holds tensors only: "
                    "wrap a number in torch.tensor(), keep everything else in a file of its own.",
                    key=item.index.fqn,
                )
        return replace(plan, storage_data=_Order(tuple(map(self._spec, plan.items))))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: lay out the folder and create its files."""
        if len(plans) > 1 and not self._storage.positioned_shared_writes:
            raise CheckpointError("this storage doesn't let several ranks write one file")
        path = self._final_path()
        if self._storage.stat(path) is not None:
            raise CheckpointExistsError(f"{path} exists; nothing is overwritten", path=path)
        # The order of the first rank that has a tensor: DCP deals replicas out, away from rank 0.
        specs = {spec.key: spec for plan in plans for spec in plan.storage_data.specs}
        folder = path
        if self._storage.atomic_rename:
            folder = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.tmp-dcp")
            self._storage.remove_tree(folder)
        self._storage.make_folder(folder)
        layout = _Layout(
            folder,
            plan_files(list(specs.values()), stem=self._stem, max_file_bytes=self._max_file_bytes),
        )
        for file in layout.files:
            file_path = posixpath.join(folder, file.name)
            self._storage.create_file(file_path, file.size_bytes)
            self._storage.write_at(file_path, 0, file.header)
        self._layout = layout
        return [replace(plan, storage_data=layout) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards at their final place, and sync the files touched."""
        layout = plan.storage_data
        items: dict[str, list[WriteItem]] = {file.name: [] for file in layout.files}
        holder = {key: file for file in layout.files for key in file.offsets}
        for item in plan.items:
            items[holder[self._spec(item).key].name].append(item)
        results = []
        for file in _rotated(layout.files, self._rank):
            mine = sorted(items[file.name], key=lambda item: self._place(file, item))
            for item in mine:
                results.append(self._write_item(layout.folder, file, item, planner))
            if mine:
                self._storage.sync_file(posixpath.join(layout.folder, file.name))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check that every byte was written, then give the folder its name."""
        assert self._layout is not None
        layout, path = self._layout, self._final_path()
        written: Counter[str] = Counter()
        for result in (result for of_rank in results for result in of_rank):
            written[self._key(result.index.fqn)] += result.size_in_bytes
        for spec in (spec for file in layout.files for spec in file.specs.values()):
            if written[spec.key] != spec.size_bytes:
                raise CheckpointWriteError(
                    f"{path}: {written[spec.key]} of {spec.size_bytes} bytes of {spec.key} were "
                    "written; its shards overlap or don't cover it",
                    path=path,
                    key=spec.key,
                )
        files = dict(self._files)
        if len(layout.files) > 1:
            files[f"{self._stem}.safetensors.index.json"] = index_json(layout.files)
        for name, content in files.items():
            self._storage.write_bytes(posixpath.join(layout.folder, name), content)
        for name in [*files, *(file.name for file in layout.files)]:
            self._storage.sync_file(posixpath.join(layout.folder, name))
        self._storage.sync_folder(layout.folder)
        if layout.folder != path:
            self._storage.rename(layout.folder, path)
            self._storage.sync_folder(posixpath.dirname(path))

    def _write_item(
        self, folder: str, file: PlannedFile, item: WriteItem, planner: SavePlanner
    ) -> WriteResult:
        spec = self._spec(item)
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor) or tensor.dtype != spec.dtype:
            raise CheckpointError(
                f"{spec.key} was planned as {spec.dtype}, and isn't", key=spec.key
            )
        content = tensor_bytes(tensor.detach().cpu().contiguous())
        for part in plan_ranges(file, spec.key, _box(item)):
            start = part.source_offset_bytes
            piece = content[start : start + part.length_bytes]
            self._storage.write_at(posixpath.join(folder, file.name), part.file_offset, piece)
        return WriteResult(item.index, content.nbytes, file.name)

    def _place(self, file: PlannedFile, item: WriteItem) -> tuple[int, tuple[int, ...]]:
        return file.offsets[self._spec(item).key], _box(item).offsets

    def _spec(self, item: WriteItem) -> TensorSpec:
        assert item.tensor_data is not None
        key, data = self._key(item.index.fqn), item.tensor_data
        return TensorSpec(key, data.properties.dtype, tuple(data.size))

    def _key(self, name: str) -> str:
        return self._keys.get(name, name)

    def _final_path(self) -> str:
        if self.path is None:
            raise CheckpointError("no folder to write: give the writer a path, or dcp.save an id")
        return self.path


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _rotated(files: tuple[PlannedFile, ...], rank: int) -> Iterator[PlannedFile]:
    # Ranks that write one file at the same time wait for each other, so each starts elsewhere.
    start = rank % max(len(files), 1)
    yield from files[start:]
    yield from files[:start]
