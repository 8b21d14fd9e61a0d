"""Read any part of any tensor of a Hugging Face folder, and nothing else of it."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from legato.errors import CheckpointMismatchError, FolderFormatError, ModelNotFoundError
from legato.hf_folder.header import TensorEntry, TensorSpec, read_header
from legato.hf_folder.layout import Box, box_ranges
from legato.storage import Storage

logger = logging.getLogger(__name__)

WEIGHT_STEMS = ("model", "adapter_model")
_MAX_INDEX_BYTES = 100_000_000


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, as a view: nothing is copied."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if not tensor.is_contiguous():
        raise ValueError("the tensor isn't contiguous, so its bytes aren't those of a file")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def find_weight_files(storage: Storage, folder: str) -> dict[str, frozenset[str] | None]:
    """Find the safetensors files of a model or an adapter.

    Args:
        storage: Where the folder is.
        folder: Its absolute path.

    Returns:
        File name -> the keys that the index wants from it, or ``None`` without an index.

    Raises:
        ModelNotFoundError: There is no folder, or it holds no safetensors weights; ``.path``.
        FolderFormatError: The index is broken, or names files outside the folder; ``.path``.
    """
    names = storage.list_folder(folder)
    for stem in WEIGHT_STEMS:
        if f"{stem}.safetensors.index.json" in names:
            path = posixpath.join(folder, f"{stem}.safetensors.index.json")
            return dict(_read_index(storage, path))
        if f"{stem}.safetensors" in names:
            return {f"{stem}.safetensors": None}
    if not names:
        raise ModelNotFoundError(f"{folder}: there is no such folder, or it is empty", path=folder)
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    what = f"only pickled ones ({pickled[0]}), which Legato doesn't open" if pickled else "none"
    raise ModelNotFoundError(
        f"{folder}: expected model.safetensors, its index or adapter_model.safetensors; "
        f"found weights: {what}.",
        path=folder,
    )


class FolderReader:
    """Tensors in the safetensors files of a folder, whole or in part.

    Opening it reads the headers only. Files are never mapped into memory, so a file that shrinks
    is an error and not a crash.

    Args:
        storage: Where the folder is.
        folder: Its absolute path.
        files: Names of the files to read, relative to the folder; by default those of the model
            or, where there is none, of the adapter.

    Attributes:
        specs: Key -> tensor, for every tensor of the files.
        bytes_read: Bytes of tensors read so far.

    Raises:
        ModelNotFoundError: The folder or its weights are absent; ``.path``.
        FolderFormatError: A file is broken, absent or hostile; ``.path``.
    """

    def __init__(
        self, storage: Storage, folder: str, *, files: Sequence[str] | None = None
    ) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.specs: dict[str, TensorSpec] = {}
        self._storage = storage
        self._entries: dict[str, tuple[str, TensorEntry]] = {}
        wanted: dict[str, frozenset[str] | None]
        if files is None:
            wanted = find_weight_files(storage, folder)
        else:
            wanted = dict.fromkeys(files)
        for name, keys in wanted.items():
            self._open(name, keys)

    def _open(self, name: str, keys: frozenset[str] | None) -> None:
        path = posixpath.join(self.folder, checked_name(name, path=self.folder))
        try:
            tensors = read_header(self._storage, path).tensors
        except FileNotFoundError:
            _refuse(path, "the file belongs to the folder, but it is absent")
        if keys is not None:
            if absent := sorted(keys - tensors.keys()):
                _refuse(path, f"the index says it holds {absent[0]!r}, but it doesn't")
            if unlisted := sorted(tensors.keys() - keys):
                logger.warning(
                    "%s: %d tensors aren't in the index and are left out, %s first",
                    path, len(unlisted), unlisted[0],
                )  # fmt: skip
            tensors = {key: entry for key, entry in tensors.items() if key in keys}
        for key, entry in tensors.items():
            if key in self._entries:
                _refuse(path, f"{key!r} is in {self._entries[key][0]} too")
            self._entries[key] = (path, entry)
            self.specs[key] = TensorSpec(key, entry.dtype, entry.shape)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or the part ``box`` of it, as a new CPU tensor; see `read_into`."""
        _, entry = self._entry(key)
        tensor = torch.empty(entry.shape if box is None else box.sizes, dtype=entry.dtype)
        self.read_into(key, box, tensor)
        return tensor

    def read_into(self, key: str, box: Box | None, tensor: Tensor, *, cast: bool = False) -> None:
        """Fill ``tensor`` (any device) with a tensor, or with the part ``box`` of it.

        Args:
            key: The tensor.
            box: The part; ``None`` for all of it. ``tensor`` has its sizes.
            tensor: A plain tensor (a DTensor's ``to_local()``), changed in place.
            cast: Whether ``tensor`` may be of another dtype; the values are rounded to it.

        Raises:
            CheckpointMismatchError: No file holds ``key``, or shape or dtype differ; ``.key``.
            FolderFormatError: The file has become shorter; ``.path``.
        """
        path, entry = self._entry(key)
        box = box or Box.whole(entry.shape)
        if tuple(tensor.shape) != box.sizes or (tensor.dtype != entry.dtype and not cast):
            raise CheckpointMismatchError(
                f"{path}: {key} is {entry.dtype} {box.sizes} on disk; "
                f"{tensor.dtype} {tuple(tensor.shape)} is expected.",
                path=path,
                key=key,
                expected=(tensor.dtype, tuple(tensor.shape)),
                found=(entry.dtype, box.sizes),
            )
        target = tensor.detach()
        direct = (
            target.device.type == "cpu" and target.is_contiguous() and target.dtype == entry.dtype
        )
        buffer = target if direct else torch.empty(box.sizes, dtype=entry.dtype)
        view = tensor_bytes(buffer)
        ranges = box_ranges(
            path, entry.offset_bytes, entry.dtype.itemsize, shape=entry.shape, box=box
        )
        for part in ranges:
            start = part.source_offset_bytes
            piece = view[start : start + part.length_bytes]
            try:
                self._storage.read_into(path, part.file_offset, piece)
            except EOFError as error:
                raise FolderFormatError(f"{path} was cut short: {error}", path=path) from error
            self.bytes_read += part.length_bytes
        if not direct:
            target.copy_(buffer)

    def _entry(self, key: str) -> tuple[str, TensorEntry]:
        if key not in self._entries:
            raise CheckpointMismatchError(
                f"{self.folder}: no file holds {key}", path=self.folder, key=key
            )
        return self._entries[key]


def checked_name(name: str, *, path: str) -> str:
    """Return ``name`` if it stays within its folder, else raise ``FolderFormatError``.

    ``path`` is what named it: an index, a manifest; the error's ``.path`` and ``.name``.
    """
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise FolderFormatError(
            f"{path} names the file {name!r}, which isn't a name within its folder",
            path=path,
            name=name,
        )
    return name


def _read_index(storage: Storage, path: str) -> dict[str, frozenset[str]]:
    found = storage.stat(path)
    if found is None or found.size_bytes > _MAX_INDEX_BYTES:
        _refuse(path, f"it is absent, or over {_MAX_INDEX_BYTES} bytes")
    try:
        document: Any = json.loads(storage.read_bytes(path))
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it isn't JSON ({error})")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(path, "it has no weight_map")
    keys: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            _refuse(path, f"{key!r} should lie in a .safetensors file, not in {name!r}")
        keys.setdefault(checked_name(name, path=path), set()).add(key)
    return {name: frozenset(found) for name, found in keys.items()}


def _refuse(path: str, why: str) -> NoReturn:
    raise FolderFormatError(f"{path} can't be trusted: {why}.", path=path)
