from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from legato.cli.main import main
from legato.errors import FolderFormatError, ModelError, ModelNotFoundError
from legato.models.gguf import import_gguf, new_folder
from legato.models.load import load_model, load_tokenizer
from tests.helpers import gguf as gguf_helper
from tests.helpers.gguf import write_gguf


def test_a_gguf_file_becomes_a_model_folder_with_its_weights_in_bf16(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    folder = import_gguf(tmp_path / "tiny.gguf", output_dir=tmp_path / "out")
    assert folder == tmp_path / "out"
    written = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        expected = torch.from_numpy(source[theirs]).to(torch.bfloat16)
        assert torch.equal(written[ours], expected), ours
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert "quantization_config" not in config
    assert json.loads((folder / "legato_source.json").read_text()) == {"gguf": "tiny.gguf"}


def test_the_folder_loads_for_training_with_its_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = import_gguf(tmp_path / "tiny.gguf", output_dir=tmp_path / "out")
    model = load_model(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer("a mug", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template is not None


def nothing_left(folder: Path) -> bool:
    return not [p for p in folder.iterdir() if p.name not in ("tiny.gguf", "in")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't a GGUF file: it starts with b''"),
        (b"PK\x03\x04 a zip", "isn't a GGUF file"),
        (b"GGUF" + b"\x03\x00\x00\x00" + b"\x01" * 40, "can't be read as GGUF"),
    ],
)
def test_a_file_that_isnt_gguf_is_refused_and_leaves_nothing(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(FolderFormatError, match=message):
        import_gguf(tmp_path / "tiny.gguf", output_dir=tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_cut_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(FolderFormatError, match="can't be read as GGUF"):
        import_gguf(file, output_dir=tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        import_gguf(tmp_path / "none.gguf", output_dir=tmp_path / "out")


def test_a_folder_in_use_isnt_touched(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match="is already there and isn't empty"):
        import_gguf(tmp_path / "tiny.gguf", output_dir=tmp_path / "in")
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["thesis.txt"]
    assert nothing_left(tmp_path)


def test_the_verb_fills_an_empty_folder_and_says_how_to_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(file)
    out.mkdir()
    assert main(["import", "gguf", str(file), "--output-dir", str(out)]) == 0
    assert capsys.readouterr().out == f"{file} is in {out}. Use it with model={out}\n"
    assert (out / "model.safetensors").exists()


def test_a_model_that_answers_nonsense_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = gguf_helper._tensors

    def broken(vocab_size: int) -> dict[str, np.ndarray]:
        tensors = sound(vocab_size)
        tensors["output_norm.weight"][:] = np.nan
        return tensors

    monkeypatch.setattr(gguf_helper, "_tensors", broken)
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"doesn't generate \(finite logits: False\)"):
        import_gguf(tmp_path / "tiny.gguf", output_dir=tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_folder_gets_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def fill() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "config.json").write_text("{}")
            assert not (tmp_path / "out").exists()
            raise Interrupted

    with pytest.raises(Interrupted):
        fill()
    assert list(tmp_path.iterdir()) == []
