"""What docs/checkpoints.md says of format 1 is so: its reader reads what a run wrote."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from xxhash import xxh3_128_hexdigest

from legato.cli.ckpt import app
from legato.config.schema import RunConfig
from tests.helpers import documents, runs, tiny

ROOT = documents.ROOT
DOCUMENT = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return documents.section(DOCUMENT, title)


@pytest.fixture(scope="module")
def reader() -> SimpleNamespace:
    return documents.format_reader()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last step folder of a full fine-tuning in bf16 with fp32 masters."""
    return trained(tmp_path_factory.mktemp("full"), recipe="full_finetune_single_device")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("adapter"), recipe="lora_finetune_single_device")


def trained(folder: Path, *, recipe: str) -> Path:
    model = tiny.write_model(folder / "model")
    config = runs.write_config(folder, model=model, recipe=recipe, dtype="bf16", max_steps=2)
    assert runs.legato("run", "--config", config) == 0
    return folder / "out" / "step_2"


def as_torch(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(dtype).reshape(array.shape)


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_the_reader_of_the_docs_reads_every_tensor_of_a_run(
    kind: str, reader: SimpleNamespace, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    manifest, tensors = reader.read_step(folder)
    assert (manifest["step"], manifest["branch"], manifest["world_size"]) == (2, 0, 1)
    assert manifest["kind"] == {"full": "model", "adapter": "adapter"}[kind]

    weights = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}[kind]
    state = "state/optimizer-00001-of-00001.safetensors"
    assert tensors.keys() == {weights, state}
    for name, found in tensors.items():
        expected = load_file(folder / name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(as_torch(found[key], value.dtype), value), key


def test_the_reader_of_the_docs_reads_every_dtype(reader: SimpleNamespace) -> None:
    from safetensors.torch import save

    values = {
        "bf16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "fp8": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int": torch.tensor(-7),
        "empty": torch.zeros(0, 3),
        "complex": torch.tensor([1 + 2j]),
        "half": torch.tensor([0.1], dtype=torch.float16),
    }
    found = reader.read_tensors(save(values))
    for key, value in values.items():
        bits = as_torch(found[key], value.dtype)
        assert bits.shape == value.shape, key
        # As bytes: not every dtype can be compared.
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (bits, value))), key


def flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"tf"'))


def cut_a_file(folder: Path) -> None:
    path = folder / "state" / "trainer.json"
    path.write_bytes(path.read_bytes()[:-1])


def edit_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


@pytest.mark.parametrize("damage", [flip_a_byte, edit_the_header, cut_a_file, edit_the_manifest])
def test_the_reader_of_the_docs_finds_damage(
    damage: Callable[[Path], None], full: Path, reader: SimpleNamespace, tmp_path: Path
) -> None:
    copy = shutil.copytree(full, tmp_path / "step_2")
    reader.read_step(copy)
    damage(copy)
    with pytest.raises(ValueError, match=r"damaged|wrong|not a valid manifest"):
        reader.read_step(copy)


def test_a_slice_of_several_runs_is_read_as_the_docs_say(reader: SimpleNamespace) -> None:
    # Two ranks wrote the left and the right half of a matrix of 2 rows of 4 bytes.
    left, right = xxh3_128_hexdigest(b"abef"), xxh3_128_hexdigest(b"cdgh")
    slices = [[2, 2, left, 2, 4], [4, 2, right, 2, 4]]
    entry = {"size_bytes": 10, "header_digest": xxh3_128_hexdigest(b"H!"), "slices": slices}
    reader.check("matrix", b"H!abcdefgh", entry)
    with pytest.raises(ValueError, match="damaged at byte 4"):
        reader.check("matrix", b"H!abcdefgX", entry)


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_every_file_of_a_run_is_in_the_docs_tree(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    tree = DOCUMENT.partition("## Format 1\n")[2].split("```")[1]
    files = {path.name for path in folder.rglob("*") if path.is_file()} - {"run.yaml"}
    numbers = {"optimizer-00001-of-00001.safetensors": "optimizer-00001-of-00002.safetensors"}
    assert {name for name in files if numbers.get(name, name) not in tree} == set()
    assert {Path(name).suffix for name in files} <= {".safetensors", ".json", ".jinja"}
    # With a config.json, transformers takes an adapter for a model.
    assert ("config.json" in files) == (kind == "full")


def test_the_manifest_of_a_run_has_the_fields_of_the_docs(full: Path) -> None:
    shown = section("manifest.json").split("```")[1]
    manifest = json.loads((full / "manifest.json").read_bytes())
    assert set(manifest) | {"size_bytes", "header_digest", "slices"} == {
        name for name in re.findall(r'"([a-z_]+)":', shown) if name != "eval_loss"
    }
    assert manifest["files"].keys() == {
        path.relative_to(full).as_posix()
        for path in full.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def test_the_trainer_state_of_a_run_has_the_fields_of_the_docs(full: Path) -> None:
    content = json.loads((full / "state" / "trainer.json").read_bytes())
    assert set(content) == {"format", "parts", "optimizer"}
    assert set(content["optimizer"]) == {"groups", "values", "packs_moments"}
    assert set(content["parts"]) == {"trainer"}
    told = section("state/trainer.json")
    assert [name for name in content["parts"]["trainer"] if f"`{name}`" not in told] == []


def test_a_trained_parameter_takes_as_many_bytes_as_the_docs_say(
    full: Path, reader: SimpleNamespace
) -> None:
    _, tensors = reader.read_step(full)
    (model,) = [found for name, found in tensors.items() if name.startswith("model")]
    (state,) = [found for name, found in tensors.items() if name.startswith("state")]
    num_parameters = sum(array.size for array in model.values())
    model_bytes = sum(array.nbytes for array in model.values())
    state_bytes = sum(a.nbytes for key, a in state.items() if not key.startswith("step/"))
    assert (model_bytes / num_parameters, state_bytes / num_parameters) == (2, 12)
    assert "the default), full or LoRA | 2 | 12 | 14 |" in DOCUMENT


def test_every_key_and_verb_of_the_docs_exists() -> None:
    rows = [line for line in section("Keys").splitlines() if line.startswith("| ")]
    keys = {key for row in rows for key in re.findall(r"`(\w+)[`:]", row.split("|")[2])}
    assert len(keys) > 12
    assert keys - set(RunConfig.model_fields) == set()
    verbs = set(re.findall(r"^legato ckpt (\w+)", section("Verbs"), re.M)) | {"unpin"}
    assert verbs == {command.name for command in app.registered_commands}


def test_every_link_leads_to_something_and_every_heading_is_found() -> None:
    links = re.findall(r"\]\(([^)]+)\)", DOCUMENT)
    assert len(links) > 10
    anchors = {h.lower().replace(" ", "-") for h in re.findall(r"^##+ (.+)$", DOCUMENT, re.M)}
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / "docs" / path).exists(), link
        assert not anchor or anchor in anchors, link
