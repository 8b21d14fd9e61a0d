"""Headers that others read, and headers that nobody should."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch

from legato.errors import FolderFormatError
from legato.hf_folder import TensorSpec
from legato.hf_folder.header import DTYPE_NAMES, encode_header, read_header
from legato.storage import LocalStorage, MemoryStorage

BASE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def write(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def test_a_header_is_these_bytes() -> None:
    specs = [
        TensorSpec("weight", torch.bfloat16, (2, 3)),
        TensorSpec("scalar", torch.float32, ()),
        TensorSpec("empty", torch.bool, (0, 4)),
    ]
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"scalar":{"dtype":"F32","shape":[],"data_offsets":[12,16]},'
        b'"empty":{"dtype":"BOOL","shape":[0,4],"data_offsets":[16,16]}} '
    )
    assert encode_header(specs) == struct.pack("<Q", len(text)) + text
    assert len(text) % 8 == 0


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_named_as_the_safetensors_library_names_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"t": torch.zeros(3, 2, dtype=dtype)}, path, {"note": "text"})
    header = read_header(LocalStorage(), str(path))
    assert header.tensors["t"].dtype == dtype
    assert header.tensors["t"].shape == (3, 2)
    assert header.metadata == {"note": "text"}
    written = encode_header([TensorSpec("t", dtype, (3, 2))], metadata={"note": "text"})
    assert path.read_bytes()[: header.size_bytes] == written


def test_offsets_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.int64), "a": torch.tensor(True)}
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path)
    entry = read_header(LocalStorage(), str(path)).tensors["b"]
    assert path.read_bytes()[entry.offset_bytes :][:24] == struct.pack("<3q", 0, 1, 2)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"a": BASE}, b"", "end at byte"),
        ({"a": BASE}, b"12345", "tensors end at byte"),
        ({"a": BASE, "b": BASE}, b"1234", "overlaps"),
        ({"a": BASE, "b": {**BASE, "data_offsets": [2, 6]}}, b"123456", "overlaps"),
        ({"a": BASE, "b": {**BASE, "data_offsets": [5, 9]}}, b"123456789", "gap"),
        ({"a": {**BASE, "data_offsets": [1, 5]}}, b"12345", "gap"),
        ({"a": {**BASE, "data_offsets": [0, 8]}}, b"12345678", "takes 4 bytes by its shape"),
        ({"a": {**BASE, "data_offsets": [4, 0]}}, b"1234", "takes 4 bytes"),
        ({"a": {**BASE, "data_offsets": [-4, 0]}}, b"1234", "data_offsets"),
        ({"a": {**BASE, "data_offsets": [0, 2, 4]}}, b"1234", "data_offsets"),
        ({"a": {**BASE, "data_offsets": [0, 1 << 70]}}, b"1234", "takes 4 bytes"),
        ({"a": {**BASE, "data_offsets": [0.0, 4.0]}}, b"1234", "data_offsets"),
        ({"a": {**BASE, "shape": [-4]}}, b"1234", "shape"),
        ({"a": {**BASE, "shape": [True, 4]}}, b"1234", "shape"),
        ({"a": {**BASE, "shape": "4"}}, b"1234", "shape"),
        ({"a": {**BASE, "shape": [2**62, 4, 0], "data_offsets": [0, 0]}}, b"", "shape"),
        ({"a": {**BASE, "shape": [1] * 65 + [4]}}, b"1234", "shape"),
        ({"a": {**BASE, "dtype": "F4"}}, b"1234", "dtype 'F4'"),
        ({"a": {**BASE, "dtype": ["U8"]}}, b"1234", "dtype"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", "data_offsets"),
        ({"a": {**BASE, "run": "this"}}, b"1234", "nothing else"),
        ({"a": [BASE]}, b"1234", "nothing else"),
        ({"__metadata__": {"format": 1}, "a": BASE}, b"1234", "__metadata__"),
        ({"__metadata__": [], "a": BASE}, b"1234", "__metadata__"),
        ([BASE], b"1234", "object"),
        (b'{"a":' + json.dumps(BASE).encode() + b',"a":1}', b"1234", "'a' appears twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b"1234", "twice"),
        (b"[" * 200_000, b"", "JSON"),
        (b'{"a":NaN}', b"", "NaN"),
        (b'{"\\ud800":1}', b"", "JSON"),
        (b'{"\xff":1}', b"", "JSON"),
        (b"", b"", "JSON"),
    ],
)
def test_a_hostile_header_is_refused_by_name(
    tmp_path: Path, header: Any, data: bytes, why: str
) -> None:
    path = write(tmp_path, header, data)
    with pytest.raises(FolderFormatError, match=re.escape(why)) as caught:
        read_header(LocalStorage(), path)
    assert caught.value.path == path  # type: ignore[attr-defined]
    assert path in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("length", "why"),
    [(100_000_001, "over 100000000"), (1 << 63, "over 100000000"), (5000, "cut short")],
)
def test_a_header_length_that_lies_is_refused_before_it_is_read(
    tmp_path: Path, length: int, why: str
) -> None:
    path = write(tmp_path, {"a": BASE}, b"1234", length=length)
    with pytest.raises(FolderFormatError, match=why):
        read_header(LocalStorage(), path)


def test_a_file_shorter_than_a_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"1234567")
    with pytest.raises(FolderFormatError, match="7 bytes long"):
        read_header(LocalStorage(), str(path))
    with pytest.raises(FileNotFoundError):
        read_header(LocalStorage(), str(tmp_path / "absent.safetensors"))


def test_empty_tensors_may_lie_between_others(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(0, 3),
        "b": torch.ones(2),
        "c": torch.zeros(0),
        "d": torch.ones(1, dtype=torch.uint8),
    }
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path)
    found = read_header(LocalStorage(), str(path)).tensors
    assert {key: entry.shape for key, entry in found.items()} == {
        "a": (0, 3),
        "b": (2,),
        "c": (0,),
        "d": (1,),
    }


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([TensorSpec("a", torch.complex128, (1,))], "complex128"),
        ([TensorSpec("a", torch.int8, ()), TensorSpec("a", torch.int8, ())], "twice"),
        ([TensorSpec("__metadata__", torch.int8, ())], "__metadata__"),
    ],
)
def test_what_a_file_cant_hold_is_refused_when_it_is_planned(
    specs: list[TensorSpec], why: str
) -> None:
    with pytest.raises(FolderFormatError, match=why):
        encode_header(specs)


def test_keys_may_be_any_text(tmp_path: Path) -> None:
    specs = [TensorSpec('quote " and \\ and ä', torch.uint8, (4,))]
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(specs) + b"1234")
    assert list(safetensors.torch.load_file(path)) == ['quote " and \\ and ä']
    assert list(read_header(LocalStorage(), str(path)).tensors) == ['quote " and \\ and ä']


SOUND = safetensors.torch.save(
    {"a": torch.arange(4), "b": torch.zeros(2, 3).bool(), "c": torch.zeros(0, 2)}, {"x": "y"}
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    changes=st.dictionaries(st.integers(0, len(SOUND) - 1), st.integers(0, 255), max_size=4),
    cut=st.one_of(st.just(0), st.integers(0, len(SOUND))),
)
def test_a_damaged_file_is_refused_or_sound_to_the_safetensors_library_too(
    changes: dict[int, int], cut: int
) -> None:
    content = bytearray(SOUND)
    for position, value in changes.items():
        content[position] = value
    del content[len(content) - cut :]
    storage = MemoryStorage()
    storage.write_bytes("/x", bytes(content))
    try:
        found = read_header(storage, "/x")
    except FolderFormatError:
        return
    assert {name for name, _ in safetensors.deserialize(bytes(content))} == found.tensors.keys()
