"""A Hugging Face folder as bytes: headers, layout, slices. No communication, no models."""

from __future__ import annotations

from legato.hf_folder.header import TensorSpec
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
from legato.hf_folder.slices import FolderReader, tensor_bytes

__all__ = [
    # layout
    "Box",
    "ByteRange",
    "PlannedFile",
    "TensorSpec",
    "index_json",
    "local_box",
    "own_box",
    "plan_files",
    "plan_ranges",
    # reading
    "FolderReader",
    "tensor_bytes",
]
