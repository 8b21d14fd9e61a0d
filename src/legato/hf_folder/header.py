"""safetensors headers: written byte by byte, and read as if an enemy had written them.

A file is 8 bytes of little-endian header length, the header (JSON, padded with spaces so that the
data starts at a multiple of 8), then the tensors, one after the other without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from legato.errors import FolderFormatError
from legato.storage import Storage

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Each dtype that a file may hold, under the name that safetensors gives it."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# transformers once refused files without it, and other readers still look for it.
FORMAT_METADATA: Mapping[str, str] = {"format": "pt"}

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses more

_MAX_DIMS = 64
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a file names it: its key, dtype and whole shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``offset_bytes`` counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds; ``size_bytes`` is that of the header with its length."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    size_bytes: int


def encode_header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] = FORMAT_METADATA
) -> bytes:
    """Return the first bytes of a file whose tensors follow in the order of ``specs``.

    Args:
        specs: The tensors, in the order of their bytes.
        metadata: Text that readers get beside the tensors.

    Returns:
        The header's length in 8 bytes, and the header, padded to a multiple of 8.

    Raises:
        FolderFormatError: A dtype that safetensors can't name, a key twice, a reserved key, or a
            header over 100 MB; ``.key``.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.key in document or spec.key == "__metadata__":
            raise FolderFormatError(f"{spec.key}: the key is used twice in one file", key=spec.key)
        if spec.dtype not in DTYPE_NAMES:
            raise FolderFormatError(
                f"{spec.key} is {spec.dtype}, which Legato can't store in a safetensors file. "
                f"It stores: {', '.join(sorted(DTYPES))}.",
                key=spec.key,
            )
        end = offset + spec.size_bytes
        document[spec.key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FolderFormatError(
            f"a header of {len(text)} bytes: no reader takes more than {MAX_HEADER_BYTES}", key=None
        )
    return _LENGTH.pack(len(text)) + text


def read_header(storage: Storage, path: str) -> Header:
    """Read and check a header; nothing in it is trusted.

    Args:
        storage: Where the file is.
        path: Its absolute path.

    Returns:
        The tensors with absolute offsets: disjoint, without gaps, together the whole file.

    Raises:
        FolderFormatError: The file is cut short or too long, or its header is broken or hostile;
            ``.path``.
        FileNotFoundError: There is no such file.
    """
    found = storage.stat(path)
    if found is None or found.is_folder:
        raise FileNotFoundError(f"{path}: no such file")
    if found.size_bytes < _LENGTH.size:
        _refuse(path, f"it is {found.size_bytes} bytes long, too short for any header")
    prefix = bytearray(_LENGTH.size)
    storage.read_into(path, 0, memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    size_bytes = _LENGTH.size + length
    if length > MAX_HEADER_BYTES:
        _refuse(path, f"it announces a header of {length} bytes, over {MAX_HEADER_BYTES}")
    if size_bytes > found.size_bytes:
        _refuse(path, f"its header should end at byte {size_bytes}, the file is cut short before")
    text = bytearray(length)
    storage.read_into(path, _LENGTH.size, memoryview(text))
    try:
        document = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header isn't plain JSON ({error})")
    if not isinstance(document, dict):
        _refuse(path, "its header isn't a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(path, "its __metadata__ isn't a map of texts")
    tensors = {key: _entry(path, key, value, size_bytes) for key, value in document.items()}
    _check_coverage(path, tensors, start=size_bytes, end=found.size_bytes)
    return Header(tensors=tensors, metadata=metadata, size_bytes=size_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r:.200} appears twice")
    for key in found:
        key.encode("utf-8")  # a lone surrogate isn't text: UnicodeEncodeError is a ValueError
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} isn't JSON")


def _entry(path: str, key: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"{key!r:.200} should have dtype, shape and data_offsets, and nothing else")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        _refuse(
            path, f"{key!r:.200} is of dtype {value['dtype']!r:.200}, which Legato doesn't know"
        )
    shape, offsets = value["shape"], value["data_offsets"]
    # torch can't hold more elements or dims; unchecked, a product of them could take for ever.
    if not _is_counts(shape) or len(shape) > _MAX_DIMS or _extent(shape) >= 2**63:
        _refuse(path, f"{key!r:.200} has the shape {shape!r:.200}")
    if not _is_counts(offsets) or len(offsets) != 2:
        _refuse(path, f"{key!r:.200} has the data_offsets {offsets!r:.200}")
    start, end = offsets
    expected = math.prod(shape) * dtype.itemsize
    if end - start != expected:
        _refuse(
            path, f"{key!r:.200} takes {expected} bytes by its shape, {end - start} by its offsets"
        )
    return TensorEntry(dtype, tuple(shape), data_start + start, expected)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _extent(shape: list[int]) -> int:
    """Elements, as if no dim were empty: strides are made of this."""
    return math.prod(max(min(size, 2**63), 1) for size in shape)


def _check_coverage(path: str, tensors: dict[str, TensorEntry], *, start: int, end: int) -> None:
    position = start
    order = sorted(tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].size_bytes))
    for key, entry in order:
        if entry.offset_bytes != position:
            what = "overlaps what comes before it" if entry.offset_bytes < position else "has a gap"
            _refuse(
                path, f"{key!r:.200} {what}: byte {position} expected, {entry.offset_bytes} found"
            )
        position += entry.size_bytes
    if position != end:
        _refuse(path, f"its tensors end at byte {position}, the file at {end}")


def _refuse(path: str, why: str) -> NoReturn:
    raise FolderFormatError(f"{path} isn't a sound safetensors file: {why}.", path=path)
