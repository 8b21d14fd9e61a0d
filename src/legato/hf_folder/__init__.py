"""A Hugging Face folder as bytes: headers, layout, slices. No communication, no models."""

from __future__ import annotations

from legato.hf_folder.header import (
    DTYPE_NAMES,
    Header,
    TensorEntry,
    TensorSpec,
    encode_header,
    read_header,
)
from legato.hf_folder.layout import (
    Box,
    ByteRange,
    PlannedFile,
    index_json,
    local_box,
    own_box,
    plan_files,
    plan_ranges,
)
from legato.hf_folder.slices import FolderReader, find_weight_files, tensor_bytes

__all__ = [
    # headers
    "DTYPE_NAMES",
    "Header",
    "TensorEntry",
    "TensorSpec",
    "encode_header",
    "read_header",
    # layout
    "Box",
    "ByteRange",
    "PlannedFile",
    "index_json",
    "local_box",
    "own_box",
    "plan_files",
    "plan_ranges",
    # reading
    "FolderReader",
    "find_weight_files",
    "tensor_bytes",
]
