"""Where every byte lies: literals, and random tensors cut among random writers."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from torch import Tensor

from legato.errors import FolderFormatError
from legato.hf_folder import (
    Box,
    ByteRange,
    FolderReader,
    TensorSpec,
    index_json,
    own_box,
    plan_files,
    plan_ranges,
    tensor_bytes,
)
from legato.hf_folder.header import DTYPE_NAMES
from legato.storage import LocalStorage, MemoryStorage

QUICK = hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def spec(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(key, dtype, shape)


def test_a_small_model_is_one_file_without_a_number() -> None:
    (file,) = plan_files([spec("b", 2), spec("a", 3)], stem="model")
    assert file.name == "model.safetensors"
    assert len(file.header) % 8 == 0
    assert file.offsets == {"a": len(file.header), "b": len(file.header) + 12}
    assert file.size_bytes == len(file.header) + 20


def test_state_files_are_numbered_even_if_there_is_one() -> None:
    (file,) = plan_files([spec("a", 3)], stem="optimizer", always_numbered=True)
    assert file.name == "optimizer-00001-of-00001.safetensors"


def test_files_are_cut_where_the_next_tensor_would_exceed_the_limit() -> None:
    specs = [spec("a", 5), spec("b", 5), spec("c", 1), spec("d", 30), spec("e", 1)]
    files = plan_files(specs, stem="model", max_file_bytes=40)
    assert [(file.name, list(file.specs)) for file in files] == [
        ("model-00001-of-00004.safetensors", ["a", "b"]),
        ("model-00002-of-00004.safetensors", ["c"]),
        ("model-00003-of-00004.safetensors", ["d"]),
        ("model-00004-of-00004.safetensors", ["e"]),
    ]


@pytest.mark.parametrize(
    ("sizes", "min_files", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([1, 1], 4, [1, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([100, 0, 0], 3, [1, 1, 1]),
        ([0, 0], 1, [2]),
    ],
)
def test_there_are_as_many_files_as_asked_for_and_as_tensors_allow(
    sizes: list[int], min_files: int, expected: list[int]
) -> None:
    specs = [spec(f"t{i}", size) for i, size in enumerate(sizes)]
    files = plan_files(specs, stem="optimizer", min_files=min_files)
    assert [len(file.specs) for file in files] == expected


def test_no_tensors_are_no_files() -> None:
    assert plan_files([], stem="optimizer") == ()


def test_in_a_file_tensors_go_by_element_size_then_key() -> None:
    specs = [
        spec("z", 1, dtype=torch.bool),
        spec("y", 3, dtype=torch.bfloat16),
        spec("b", 1),
        spec("x", 1, dtype=torch.int64),
        spec("a", 1),
    ]
    (file,) = plan_files(specs, stem="model")
    assert list(file.specs) == ["x", "a", "b", "y", "z"]
    assert all(file.offsets[k] % s.dtype.itemsize == 0 for k, s in file.specs.items())


def test_the_same_key_twice_is_an_error_even_across_files() -> None:
    specs = [spec("a", 1), spec("b", 1), spec("a", 1)]
    with pytest.raises(FolderFormatError, match="a: two tensors"):
        plan_files(specs, stem="model", max_file_bytes=4)


def test_the_index_names_the_file_of_every_key() -> None:
    files = plan_files([spec("b", 1), spec("a", 2)], stem="model", max_file_bytes=8)
    assert json.loads(index_json(files)) == {
        "metadata": {"total_size": 12},
        "weight_map": {
            "a": "model-00002-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((4, 6), Box((1, 0), (2, 6)), [(6 * 4, 12 * 4, 0)]),
        ((4, 6), Box((0, 2), (4, 3)), [(8 + 24 * row, 12, 12 * row) for row in range(4)]),
        ((4, 6), Box((2, 1), (1, 2)), [(13 * 4, 8, 0)]),
        ((2, 3, 4), Box((0, 1, 0), (2, 2, 4)), [(16, 32, 0), (64, 32, 32)]),
        ((), Box((), ()), [(0, 4, 0)]),
        ((5,), Box((3,), (2,)), [(12, 8, 0)]),
        ((4, 6), Box((4, 0), (0, 6)), []),
        ((0, 6), Box((0, 0), (0, 6)), []),
        ((4, 1, 2), Box((1, 0, 0), (2, 1, 2)), [(8, 16, 0)]),
    ],
)
def test_a_box_is_these_byte_ranges(
    shape: tuple[int, ...], box: Box, expected: list[tuple[int, int, int]]
) -> None:
    (file,) = plan_files([spec("a", *shape)], stem="model")
    start = file.offsets["a"]
    assert plan_ranges(file, "a", box) == [
        ByteRange("model.safetensors", start + at, length, source)
        for at, length, source in expected
    ]


@pytest.mark.parametrize("box", [Box((3, 0), (2, 6)), Box((-1, 0), (1, 6)), Box((0,), (4,))])
def test_a_box_outside_its_tensor_is_an_error(box: Box) -> None:
    (file,) = plan_files([spec("a", 4, 6)], stem="model")
    with pytest.raises(ValueError, match="within a tensor of shape"):
        plan_ranges(file, "a", box)


def test_a_plain_tensor_is_written_whole() -> None:
    assert own_box(torch.zeros(3, 2)) == Box((0, 0), (3, 2))
    assert own_box(torch.tensor(1.0)) == Box((), ())


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
dtypes = st.sampled_from(list(DTYPE_NAMES))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random bits of a random dtype: also the odd ones, NaN payloads included."""
    shape, dtype = draw(shapes), draw(dtypes)
    seed = draw(st.integers(0, 1 << 30))
    high = 2 if dtype == torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype).reshape(shape)


@st.composite
def partitions(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Cut a box along random dims at random places: rows, columns, middles, empty parts."""
    if not box.sizes or depth == 0 or draw(st.booleans()):
        return [box]
    dim = draw(st.integers(0, len(box.sizes) - 1))
    cut = draw(st.integers(0, box.sizes[dim]))
    left, right = list(box.sizes), list(box.sizes)
    left[dim], right[dim] = cut, box.sizes[dim] - cut
    offsets = list(box.offsets)
    offsets[dim] += cut
    return draw(partitions(Box(box.offsets, tuple(left)), depth - 1)) + draw(
        partitions(Box(tuple(offsets), tuple(right)), depth - 1)
    )


def part(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor.contiguous()


def load_with_safetensors(content: bytes) -> dict[str, Tensor]:
    # From a file: the library's own loader of bytes doesn't know every dtype that it writes.
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        return dict(safetensors.torch.load_file(file.name))


@QUICK
@hypothesis.given(data=st.data())
def test_any_tree_written_in_any_parts_is_read_bit_equal_by_safetensors_and_by_any_parts(
    data: st.DataObject,
) -> None:
    tree = data.draw(st.dictionaries(st.text(min_size=1, max_size=8), tensors(), max_size=5))
    tree.pop("__metadata__", None)
    specs = [TensorSpec(key, value.dtype, tuple(value.shape)) for key, value in tree.items()]
    files = plan_files(
        specs,
        stem="model",
        max_file_bytes=data.draw(st.integers(1, 2000)),
        min_files=data.draw(st.integers(1, 4)),
    )
    storage = MemoryStorage()
    storage.make_folder("/f")
    written: dict[str, int] = {}
    for file in files:
        storage.create_file(f"/f/{file.name}", file.size_bytes)
        storage.write_at(f"/f/{file.name}", 0, file.header)
        written[file.name] = len(file.header)
        for key in file.specs:
            boxes = data.draw(partitions(Box.whole(tree[key].shape)))
            for box in data.draw(st.permutations(boxes)):
                source = tensor_bytes(part(tree[key], box))
                for piece in plan_ranges(file, key, box):
                    start = piece.source_offset_bytes
                    content = source[start : start + piece.length_bytes]
                    assert len(content) == piece.length_bytes > 0
                    storage.write_at(f"/f/{piece.file}", piece.file_offset, content)
                    written[piece.file] += piece.length_bytes

    found: dict[str, Tensor] = {}
    for file in files:
        content = storage.read_bytes(f"/f/{file.name}")
        assert len(content) == file.size_bytes == written[file.name]
        found |= load_with_safetensors(content)
    assert found.keys() == tree.keys()
    for key, tensor in tree.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert bytes(tensor_bytes(found[key])) == bytes(tensor_bytes(tensor))

    reader = FolderReader(storage, "/f", files=[file.name for file in files])
    for key, tensor in tree.items():
        for box in data.draw(partitions(Box.whole(tensor.shape))):
            read = reader.read(key, box)
            assert bytes(tensor_bytes(read)) == bytes(tensor_bytes(part(tensor, box)))
    assert reader.bytes_read == sum(spec.size_bytes for spec in specs)


@QUICK
@hypothesis.given(data=st.data())
def test_a_files_parts_cover_it_exactly_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    (file,) = plan_files([spec("a", *shape)], stem="model")
    covered = [0] * math.prod(shape)
    for box in data.draw(partitions(Box.whole(shape))):
        position = 0
        for piece in plan_ranges(file, "a", box):
            assert piece.source_offset_bytes == position
            position += piece.length_bytes
            first = (piece.file_offset - file.offsets["a"]) // 4
            for i in range(first, first + piece.length_bytes // 4):
                covered[i] += 1
        assert position == box.num_elements * 4
    assert covered == [1] * math.prod(shape)


def test_the_bytes_of_a_tensor_are_a_view() -> None:
    tensor = torch.zeros(2, dtype=torch.int16)
    tensor_bytes(tensor)[2] = 7
    assert tensor.tolist() == [0, 7]
    with pytest.raises(ValueError, match="contiguous"):
        tensor_bytes(torch.zeros(2, 3).t())


def test_a_folder_of_several_files_is_read_by_transformers(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    weights = dict(model.named_parameters())
    specs = [TensorSpec(key, value.dtype, tuple(value.shape)) for key, value in weights.items()]
    files = plan_files(specs, stem="model", max_file_bytes=20_000)
    assert len(files) > 2
    storage = LocalStorage()
    model.config.save_pretrained(tmp_path)
    storage.write_bytes(f"{tmp_path}/model.safetensors.index.json", index_json(files))
    for file in files:
        storage.create_file(f"{tmp_path}/{file.name}", file.size_bytes)
        storage.write_at(f"{tmp_path}/{file.name}", 0, file.header)
        for key, offset in file.offsets.items():
            storage.write_at(f"{tmp_path}/{file.name}", offset, tensor_bytes(weights[key]))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for key, value in loaded.named_parameters():
        assert torch.equal(value, weights[key])
