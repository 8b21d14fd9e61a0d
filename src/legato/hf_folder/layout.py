"""Which tensor lies in which file at which byte: pure, the same on every rank.

A row slice of a tensor is one byte range of its file, so ranks that know the layout write one
Hugging Face folder together without gathering anything. These functions speak of tensors as the
*file* names them; whose model tensors have other names (adapters) translates keys before.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from legato.errors import FolderFormatError
from legato.hf_folder.header import TensorSpec, encode_header


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written: its header, and where each tensor starts.

    Attributes:
        name: Name in the folder.
        header: First bytes of the file.
        size_bytes: Of the whole file.
        offsets: Key -> first byte of the tensor, counted from the start of the file.
        specs: Key -> tensor, in the order of their bytes.
    """

    name: str
    header: bytes
    size_bytes: int
    offsets: Mapping[str, int]
    specs: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: ``sizes`` elements from ``offsets`` on, one number per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Elements in the box; 1 for a 0-dim tensor."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file, and where they lie in the box's own contiguous, row-major bytes."""

    file: str
    file_offset: int
    length_bytes: int
    source_offset_bytes: int


def plan_files(
    specs: Sequence[TensorSpec],
    *,
    stem: str,
    max_file_bytes: int = 5_000_000_000,
    min_files: int = 1,
    always_numbered: bool = False,
) -> tuple[PlannedFile, ...]:
    """Cut tensors, in the order given, into files.

    Args:
        specs: All tensors, in the model's order.
        stem: Start of the names: ``model`` gives ``model.safetensors``, or
            ``model-00001-of-00003.safetensors`` and so on.
        max_file_bytes: Bytes of tensors per file; only a single larger tensor exceeds it.
        min_files: At least so many files (as long as there are tensors for them), so that ranks
            that write at the same time don't wait for each other on one file.
        always_numbered: Number the name of a single file too.

    Returns:
        The files; none if there are no tensors. In each, tensors are ordered by element size
        (largest first, so every tensor is aligned), then by key, as safetensors does.

    Raises:
        FolderFormatError: A key twice, or as `encode_header`; ``.key``.
    """
    for key, count in Counter(spec.key for spec in specs).most_common(1):
        if count > 1:
            raise FolderFormatError(f"{key}: two tensors are planned under this key", key=key)
    limit = min(max_file_bytes, -(-sum(spec.size_bytes for spec in specs) // min_files))
    groups: list[list[TensorSpec]] = []
    filled = 0
    for i, spec in enumerate(specs):
        num_left = len(specs) - i
        must_spread = num_left <= min_files - len(groups)
        if not groups or must_spread or filled + spec.size_bytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.size_bytes
    numbered = always_numbered or len(groups) > 1
    return tuple(
        _plan_file(
            f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors"
            if numbered
            else f"{stem}.safetensors",
            group,
        )
        for i, group in enumerate(groups, start=1)
    )


def _plan_file(name: str, specs: Sequence[TensorSpec]) -> PlannedFile:
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.key))
    header = encode_header(ordered)
    ends = itertools.accumulate((spec.size_bytes for spec in ordered), initial=len(header))
    *starts, end = ends
    return PlannedFile(
        name=name,
        header=header,
        size_bytes=end,
        offsets={spec.key: start for spec, start in zip(ordered, starts, strict=True)},
        specs={spec.key: spec for spec in ordered},
    )


def index_json(files: Sequence[PlannedFile]) -> bytes:
    """Return ``<stem>.safetensors.index.json``: which file holds which key, keys sorted."""
    weight_map = {key: file.name for file in files for key in file.offsets}
    total_size = sum(spec.size_bytes for file in files for spec in file.specs.values())
    document = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def plan_ranges(file: PlannedFile, key: str, box: Box) -> list[ByteRange]:
    """Return the bytes of ``file`` that hold the part ``box`` of the tensor ``key``.

    In ascending order: one range for rows, one per row for columns, none if the box is empty.
    """
    spec = file.specs[key]
    return list(
        box_ranges(file.name, file.offsets[key], spec.dtype.itemsize, shape=spec.shape, box=box)
    )


def box_ranges(
    file: str, tensor_offset: int, itemsize: int, *, shape: Sequence[int], box: Box
) -> Iterator[ByteRange]:
    """Yield the byte ranges of a part of a tensor that starts at ``tensor_offset`` in ``file``.

    A box that doesn't lie within the tensor is a ``ValueError``.
    """
    if len(box.offsets) != len(shape) or any(
        offset < 0 or size < 0 or offset + size > whole
        for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    ):
        raise ValueError(f"{box} doesn't lie within a tensor of shape {tuple(shape)}")
    if box.num_elements == 0:
        return
    # Trailing dims that are taken whole, and the last one that isn't, make one run of bytes.
    num_outer = len(shape)
    while num_outer > 0 and box.sizes[num_outer - 1] == shape[num_outer - 1]:
        num_outer -= 1
    num_outer = max(num_outer - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run_bytes = math.prod(box.sizes[num_outer:]) * itemsize
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    outer = itertools.product(*(range(size) for size in box.sizes[:num_outer]))
    for i, index in enumerate(outer):
        element = start + sum(n * stride for n, stride in zip(index, strides, strict=False))
        yield ByteRange(file, tensor_offset + element * itemsize, run_bytes, i * run_bytes)


def own_box(tensor: Tensor) -> Box | None:
    """Return the part of a tensor that this rank writes.

    Args:
        tensor: A plain tensor or a DTensor.

    Returns:
        All of a plain tensor (the caller decides which rank writes it); this rank's shard of a
        DTensor; ``None`` if the shard is empty, or if it is a replica that another rank writes
        (the one with coordinate 0 on every replicated mesh axis does).

    Raises:
        RuntimeError: The DTensor holds a pending reduction (``Partial``).
    """
    # Imported here: it costs half a second, and a single process never meets a DTensor.
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for placement, position in zip(tensor.placements, coordinate, strict=True):
        if placement.is_replicate() and position != 0:
            return None
    return local_box(tensor)


def local_box(tensor: Tensor) -> Box | None:
    """Return the part of a tensor that this rank holds; ``None`` if it holds nothing of it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch's own
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if box.num_elements == 0:
        return None
    return box
