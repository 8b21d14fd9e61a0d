"""Reading parts of folders that others wrote, and refusing the ones that can't be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from legato.errors import CheckpointMismatchError, FolderFormatError, ModelNotFoundError
from legato.hf_folder import Box, FolderReader
from legato.storage import LocalStorage

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def reader(folder: Path, files: list[str] | None = None) -> FolderReader:
    return FolderReader(LocalStorage(), str(folder), files=files)


def split(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    """The tensors in two files with an index."""
    safetensors.torch.save_file({"a": TENSORS["a"]}, folder / "m1.safetensors")
    safetensors.torch.save_file({"b": TENSORS["b"]}, folder / "m2.safetensors")
    document = {"weight_map": weight_map or {"a": "m1.safetensors", "b": "m2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def test_a_part_is_read_and_only_its_bytes(folder: Path) -> None:
    found = reader(folder)
    assert torch.equal(found.read("a", Box((1, 0), (2, 6))), TENSORS["a"][1:3])
    assert found.bytes_read == 48
    assert torch.equal(found.read("a", Box((0, 2), (4, 1))), TENSORS["a"][:, 2:3])
    assert found.bytes_read == 64
    assert torch.equal(found.read("scalar"), TENSORS["scalar"])
    assert found.specs["b"].shape == (5,)
    assert found.specs["b"].dtype == torch.bfloat16


def test_reading_into_a_tensor_changes_it_in_place(folder: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    address = parameter.data_ptr()
    reader(folder).read_into("a", None, parameter)
    assert torch.equal(parameter, TENSORS["a"])
    assert parameter.data_ptr() == address


def test_reading_into_a_view_that_is_not_contiguous_fills_it(folder: Path) -> None:
    target = torch.zeros(6, 4)
    reader(folder).read_into("a", None, target.t())
    assert torch.equal(target, TENSORS["a"].t())


def test_another_dtype_is_an_error_unless_casting_is_asked_for(folder: Path) -> None:
    target = torch.zeros(4, 6, dtype=torch.bfloat16)
    with pytest.raises(CheckpointMismatchError, match=r"a is torch.float32 .* torch.bfloat16"):
        reader(folder).read_into("a", None, target)
    reader(folder).read_into("a", None, target, cast=True)
    assert torch.equal(target, TENSORS["a"].bfloat16())


def test_another_shape_is_an_error(folder: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"\(4, 6\) on disk") as caught:
        reader(folder).read_into("a", None, torch.zeros(6, 4))
    assert caught.value.key == "a"  # type: ignore[attr-defined]


def test_an_absent_key_is_an_error_with_its_name(folder: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="no file holds c"):
        reader(folder).read("c")


def test_an_index_leads_to_every_file(tmp_path: Path) -> None:
    found = reader(split(tmp_path))
    assert sorted(found.specs) == ["a", "b"]
    assert torch.equal(found.read("b"), TENSORS["b"])


def test_an_adapter_is_found_where_there_is_no_model(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    assert sorted(reader(tmp_path).specs) == ["a", "b", "scalar"]


def test_given_files_are_read_instead_of_the_models(folder: Path) -> None:
    (folder / "state").mkdir()
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "state" / "optimizer.safetensors")
    assert list(reader(folder, ["state/optimizer.safetensors"]).specs) == ["x"]


@pytest.mark.parametrize(
    "name",
    ["../m1.safetensors", "/etc/m1.safetensors", "a/../../m1.safetensors", "a\\m.safetensors"],
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    safetensors.torch.save_file({"a": TENSORS["a"]}, tmp_path / "m1.safetensors")
    split(inside, {"a": name})
    with pytest.raises(FolderFormatError, match="within its folder"):
        reader(inside)


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        ({"a": "m2.safetensors"}, "says it holds 'a'"),
        ({"a": "m1.safetensors", "c": "m1.safetensors"}, "says it holds 'c'"),
        ({"a": "m3.safetensors"}, "absent"),
        ({"a": "m1.bin"}, "should lie in a .safetensors file"),
        ({"a": 3}, "should lie in a .safetensors file"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, weight_map: dict[str, str], why: str
) -> None:
    with pytest.raises(FolderFormatError, match=why):
        reader(split(tmp_path, weight_map))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, text: str) -> None:
    (split(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FolderFormatError, match=r"index\.json"):
        reader(tmp_path)


def test_tensors_that_the_index_leaves_out_are_said_aloud(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split(folder, {"a": "model.safetensors"})
    assert list(reader(folder).specs) == ["a"]
    assert "2 tensors aren't in the index" in caplog.text


def test_a_key_in_two_files_is_refused(folder: Path) -> None:
    safetensors.torch.save_file({"b": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(FolderFormatError, match="'b' is in"):
        reader(folder, ["model.safetensors", "other.safetensors"])


def test_a_file_cut_short_after_it_was_opened_is_an_error(folder: Path) -> None:
    found = reader(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(FolderFormatError, match="cut short"):
        found.read("a")


def test_a_folder_without_weights_says_what_it_found_instead(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        reader(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="found weights: none"):
        reader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"pickled ones \(pytorch_model.bin\)"):
        reader(tmp_path)
