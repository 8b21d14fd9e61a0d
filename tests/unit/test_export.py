from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.cli.main import main
from legato.errors import ModelError, UnsupportedModelError, UsageError
from legato.export import export_gguf
from legato.models import gguf_llama
from tests.helpers import tiny
from tests.helpers.adapters import write_adapter
from tests.helpers.families import write_family
from tests.helpers.faults import no_file_larger_than


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_model(folder: Path, **changes: Any) -> Path:
    """One merge: a tokenizer without any isn't BPE."""
    merges = [("\u0120", "a")]
    return tiny.write_model(folder, dtype=torch.bfloat16, merges=merges, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def read_back(file: Path) -> tuple[Any, Any]:
    where = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, **where)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"head_dim": 12}, {"num_key_value_heads": 4}],
)
def test_transformers_reads_the_file_with_the_folders_logits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "model", **changes)
    told = export_gguf(folder, output=tmp_path / "out" / "model.gguf")
    assert told.written_by == "legato"
    assert told.difference is not None
    assert told.difference < 1e-6
    model, _ = read_back(tmp_path / "out" / "model.gguf")
    ids = torch.tensor([[1, 2, 3, 200, 17, 256, 259]])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.gguf"]


def fields_of(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_tokens_stops_and_template_are_inside(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>"), 261]
    edit(folder / "generation_config.json", eos_token_id=stops)
    export_gguf(folder, output=tmp_path / "model.gguf")
    assert caplog.messages == []
    fields = fields_of(tmp_path / "model.gguf")
    assert fields["general.architecture"] == "llama"
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.merges"] == ["\u0120 a"]
    assert fields["tokenizer.chat_template"] == tiny.CHATML
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.eot_token_id"] == stops[1]
    assert fields["tokenizer.ggml.eom_token_id"] == stops[2]
    assert fields["tokenizer.ggml.add_bos_token"] is False
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 272  # the embedding's rows
    assert tokens[256] == "\u0120a"
    assert tokens[260] == "[PAD260]"
    assert [types[i] for i in (0, stops[0], 256, 260)] == [1, 3, 1, 5]  # llama.cpp's numbers


def test_the_dtype_is_the_folders_or_the_one_asked_for_and_vectors_are_fp32(
    folder: Path, tmp_path: Path
) -> None:
    kinds = gguf.GGMLQuantizationType
    for dtype, kind in ((None, kinds.BF16), ("f16", kinds.F16), ("f32", kinds.F32)):
        file = tmp_path / f"{dtype}.gguf"
        export_gguf(folder, output=file, dtype=dtype)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        assert found["blk.1.ffn_up.weight"].tensor_type == kind
        assert found["blk.1.ffn_norm.weight"].tensor_type == kinds.F32
        up = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
        stored = gguf.dequantize(found["blk.1.ffn_up.weight"].data, kind).reshape(up.shape)
        np.testing.assert_allclose(stored, up.float().numpy(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                ],
            },
            "smollm",
        ),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                ],
            },
            None,
        ),
        ({"type": "Metaspace"}, None),
        (None, None),
    ],
)
def test_how_a_text_is_split_is_told_or_refused(pre_tokenizer: Any, name: str | None) -> None:
    model = {"type": "BPE", "byte_fallback": False, "merges": [["a", "b"]]}
    backend = {"model": model, "pre_tokenizer": pre_tokenizer, "normalizer": None}
    assert gguf_llama._splitter(backend) == name
    assert gguf_llama._splitter(backend | {"normalizer": {"type": "NFC"}}) is None
    assert gguf_llama._splitter(backend | {"model": model | {"byte_fallback": True}}) is None


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_other_families_are_refused_by_name(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / family, family)
    with pytest.raises(UnsupportedModelError, match=f"{family} models need llama.cpp's converter"):
        export_gguf(folder, output=tmp_path / "model.gguf")
    assert [p.name for p in tmp_path.iterdir()] == [family]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "Llama models with biases need"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            r"positions are scaled \(linear\) need",
        ),
    ],
)
def test_llamas_that_the_file_couldnt_describe_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        export_gguf(folder, output=tmp_path / "model.gguf")


def test_a_tokenizer_that_isnt_known_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")  # without merges
    with pytest.raises(UnsupportedModelError, match="with such a tokenizer"):
        export_gguf(folder, output=tmp_path / "model.gguf")


def test_an_adapter_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(folder, tmp_path / "adapter")
    with pytest.raises(ModelError, match=f"Merge it first: legato merge {adapter}"):
        export_gguf(adapter, output=tmp_path / "model.gguf")


def test_a_file_that_is_there_and_an_unknown_dtype_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(UsageError, match="is already there"):
        export_gguf(folder, output=tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"
    with pytest.raises(UsageError, match="--dtype q4_k_m: expected bf16, f16, f32"):
        export_gguf(folder, output=tmp_path / "other.gguf", dtype="q4_k_m")
    with pytest.raises(UsageError, match=r"there is no convert_hf_to_gguf\.py"):
        export_gguf(folder, output=tmp_path / "other.gguf", converter=tmp_path)


def test_a_file_with_other_logits_never_gets_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_llama, "_permuted", lambda weight, num_heads: weight)
    with pytest.raises(ModelError, match="gives other logits"):
        export_gguf(folder, output=tmp_path / "model.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop(UP), f"don't fit config.json. {UP} of the model isn't in"),
        (lambda tensors: tensors.update({Q: tensors[Q][:5].clone()}), rf"{Q} \(5, 32\) in the"),
        (lambda tensors: tensors[UP].fill_(torch.nan), "its own logits aren't numbers"),
    ],
    ids=["missing", "another shape", "NaN"],
)
def test_damaged_weights_are_told_and_not_exported(
    folder: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        export_gguf(folder, output=tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*model.gguf*"))


def test_what_a_killed_export_left_is_cleared_up_by_the_next(folder: Path, tmp_path: Path) -> None:
    # In a container the next process may have the same number.
    left = tmp_path / f".model.gguf.partial-{os.getpid()}"
    left.mkdir()
    (left / "model.gguf").write_bytes(b"half")
    (tmp_path / f".model.gguf.partial-{2**22 + 1}").mkdir()  # above every number of a process
    export_gguf(folder, output=tmp_path / "model.gguf")
    assert not list(tmp_path.glob(".model.gguf*"))


CONVERTER = """
import argparse, shutil, sys
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile")
parser.add_argument("--outtype")
options = parser.parse_args()
if options.outtype == "f16":
    sys.exit("Model FooForCausalLM is not supported")
shutil.copyfile({source!r}, options.outfile)
"""


def test_llama_cpps_converter_is_asked_where_it_is_given_or_on_the_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_gguf(folder, output=tmp_path / "source.gguf")
    tool = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    tool.parent.mkdir()
    script = CONVERTER.format(source=str(tmp_path / "source.gguf"))
    tool.write_text(f"#!{sys.executable}\n{script}")
    tool.chmod(0o755)
    told = export_gguf(folder, output=tmp_path / "given.gguf", converter=tool.parent)
    assert told.written_by == str(tool)
    with pytest.raises(ModelError, match=r"ended with 1 .* It said: Model FooForCausalLM is not"):
        export_gguf(folder, output=tmp_path / "no.gguf", converter=tool, dtype="f16")
    monkeypatch.setenv("PATH", str(tool.parent))
    assert export_gguf(folder, output=tmp_path / "found.gguf").written_by == str(tool)
    # What it writes is checked as well.
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="gives other logits"):
        export_gguf(other, output=tmp_path / "other.gguf")
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.is_file()) == [".gguf"] * 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"", b"", None),
        (b"'content'", b"'comment'", "another chat template"),
        (b"\x03\x00\x00\x00\x00\x00\x00\x00\xc4\xa0a", b"\x03\x00\x00\x00\x00\x00\x00\x00\xc4\xa0b",
         r"another tokens: expected \[\], found \['\u0120a'\]"),
        (b"eos_token_id\x04\x00\x00\x00", b"eoz_token_id\x04\x00\x00\x00", "another stop token"),
        (b"GGUF", b"GGGG", "the written file can't be read"),
    ],
)  # fmt: skip
def test_a_family_that_transformers_cannot_read_back_is_compared_all_the_same(
    old: bytes,
    new: bytes,
    message: str | None,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    export_gguf(folder, output=tmp_path / "source.gguf")
    content = (tmp_path / "source.gguf").read_bytes()
    assert old in content
    content = content.replace(b"\x00llama", b"\x00llamb", 1).replace(old, new)
    (tmp_path / "source.gguf").write_bytes(content)
    tool = tmp_path / "convert_hf_to_gguf.py"
    tool.write_text(CONVERTER.format(source=str(tmp_path / "source.gguf")))
    edit(folder / "generation_config.json", eos_token_id=[259, 260, 261, 262])
    if message is None:
        told = export_gguf(folder, output=tmp_path / "out.gguf", converter=tool)
        assert told.difference is None
        assert "its logits aren't compared: transformers can't read it" in caplog.text
        assert "end an answer" in caplog.text
    else:
        with pytest.raises(ModelError, match=message):
            export_gguf(folder, output=tmp_path / "out.gguf", converter=tool)
        assert not (tmp_path / "out.gguf").exists()


def test_the_command_says_what_it_wrote(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model.gguf"
    assert main(["export", "gguf", str(folder), "--output", str(output)]) == 0
    assert f"{output} is written by legato; its logits differ by" in capsys.readouterr().out
    output.unlink()
    with no_file_larger_than(20_000):
        assert main(["export", "gguf", str(folder), "--output", str(output)]) == 1
    assert f"{output}: No space left on device. Make room there" in capsys.readouterr().err
    assert not list(tmp_path.glob("*model.gguf*"))
