from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from legato.errors import (
    ConfigError,
    FolderFormatError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from legato.models import facts, load
from legato.models.load import load_model, load_tokenizer
from tests.helpers import families, tiny


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if name != drop}
    save_file(kept | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_has_the_weights_that_transformers_loads(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(folder, dtype=dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert model.training
    assert model.config.use_cache is False
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert name == other
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("read", [load.load_model, load.load_meta_model])
def test_what_takes_a_while_to_read_is_said(
    folder: Path,
    read: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", logger="legato")
    read(folder, dtype=torch.float32)
    assert "reading" not in caplog.text
    size = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(load, "_LARGE_BYTES", size)
    read(folder, dtype=torch.float32)
    assert f"reading {size / 1e9:.1f} GB of weights from {folder}" in caplog.text


def test_a_tied_head_that_isnt_in_the_files_isnt_missing(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_model(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_several_files_and_an_index_are_one_model(tmp_path: Path) -> None:
    model = families.build_family("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load_model(tmp_path, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", families.DENSE)
def test_dense_families_load(family: str, tmp_path: Path) -> None:
    folder = families.write_family(tmp_path, family)
    model = load_model(folder, dtype=torch.float32)
    ids = torch.arange(3, 9).view(1, 6)
    with torch.no_grad():
        expected = families.build_family(family)(input_ids=ids).logits
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize("family", families.MIXTURES)
def test_mixtures_of_experts_are_refused_by_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = families.write_family(tmp_path, family)
    with pytest.raises(UnsupportedModelError, match=f"{family} is a mixture of experts"):
        load_model(folder, dtype=torch.float32)
    # The list only makes the word come early: transformers' own answer is the same.
    monkeypatch.setattr(facts, "_SPLIT_EXPERTS", frozenset())
    with pytest.raises(UnsupportedModelError, match=rf"\({family}\) keeps its weights under other"):
        load_model(folder, dtype=torch.float32)


def test_a_dense_family_that_is_renamed_in_files_is_refused_with_an_example(
    tmp_path: Path,
) -> None:
    folder = families.write_family(tmp_path, "gpt_neox")
    with pytest.raises(UnsupportedModelError, match=r"such as lm_head\.weight") as caught:
        load_model(folder, dtype=torch.float32)
    assert caught.value.facts["family"] == "gpt_neox"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_weights(folder, drop="model.norm.weight")
    with pytest.raises(ModelError, match=r"model\.norm\.weight of the model isn't in") as caught:
        load_model(folder, dtype=torch.float32)
    assert caught.value.facts["missing"] == ["model.norm.weight"]


def test_tensors_too_many_are_named_the_first_three_and_counted(folder: Path) -> None:
    change_weights(folder, **{f"extra.{i}": torch.zeros(1) for i in range(5)})
    with pytest.raises(ModelError, match=r"extra\.0, extra\.1, extra\.2 and 2 more of the files"):
        load_model(folder, dtype=torch.float32)


def test_another_shape_is_an_error_with_both(folder: Path) -> None:
    change_weights(folder, **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(ModelError, match=r"norm\.weight \(31,\) in the files, \(32,\) by config"):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("read", [load.load_model, load.load_meta_model])
def test_integers_are_not_taken_for_weights(folder: Path, read: Any) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    change_weights(folder, **{key: torch.ones(32, 32, dtype=torch.int8)})
    with pytest.raises(ModelError, match=rf"{key} is int8 in the files; expected floating-point"):
        read(folder, dtype=torch.float32)


def test_a_config_that_no_model_can_be_built_by_is_named(folder: Path) -> None:
    change_config(folder, vocab_size=100)  # the padding's id is above
    with pytest.raises(ModelError, match=r"config\.json: no model can be built by it \(Assertion"):
        load.load_model(folder, dtype=torch.float32)


def test_stop_tokens_that_cant_be_read_are_not_left_out(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(FolderFormatError, match=r"generation_config\.json: can't be read as JSON"):
        load.load_model(folder, dtype=torch.float32)


def test_a_checkpoint_of_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**tiny.build_config().to_dict())
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match=r"score\.weight of the files isn't in the model"):
        load_model(tmp_path / "classifier", dtype=torch.float32)


def test_config_and_weights_of_different_depth_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match="and 6 more of the model isn't in the files"):
        load_model(folder, dtype=torch.float32)


def test_broken_weights_are_found_before_anything_is_built(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(FolderFormatError, match="can't be read as safetensors"):
        load_model(folder, dtype=torch.float32)


def test_missing_weights_are_found_before_anything_is_built(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        load_model(folder, dtype=torch.float32)


def test_an_unknown_family_is_refused_by_name(folder: Path) -> None:
    change_config(folder, model_type="from_next_year")
    with pytest.raises(ModelError, match="from_next_year"):
        load_model(folder, dtype=torch.float32)


def test_a_model_that_isnt_a_language_model_is_refused_by_name(folder: Path) -> None:
    change_config(folder, model_type="vit")
    with pytest.raises(UnsupportedModelError, match="vit: transformers has no causal language"):
        load_model(folder, dtype=torch.float32)


def test_code_in_a_model_folder_isnt_run(folder: Path) -> None:
    change_config(
        folder,
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(folder, dtype=torch.float32)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("attention", "implementation"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")]
)
def test_attention_is_what_was_asked_for(folder: Path, attention: str, implementation: str) -> None:
    model = load_model(folder, dtype=torch.float32, attention=attention)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("flash", "flash needs a CUDA device, this run is on cpu"),
        ("flex", "flex needs a CUDA device, this run is on cpu"),
        ("sdpaa", "'sdpaa' is unknown. Expected auto, sdpa"),
    ],
)
def test_attention_that_cant_be_had_is_refused_with_the_reason(
    folder: Path, attention: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(folder, dtype=torch.float32, attention=attention)


def test_a_tokenizer_pads_on_the_right(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.padding_side == "right"
    assert tokenizer.decode(tokenizer("two mugs")["input_ids"]) == "two mugs"


def test_a_folder_without_a_tokenizer_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"its tokenizer can't be loaded.*Expected tokenizer\.json"
    ):
        load_tokenizer(folder)


def test_loading_a_model_and_peft_writes_nothing_to_the_terminal(folder: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level=logging.WARNING);"
        "import torch; from legato.models.load import load_model, split_head;"
        "from legato.models.lora import attach_lora;"
        f"model = load_model({str(folder)!r}, dtype=torch.float32);"
        f"adapter = attach_lora(model, lora_rank=2, lora_alpha=4, base_name={str(folder)!r});"
        "split_head(adapter.model)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == ""


def test_third_party_errors_stay_visible(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    from legato.models.quiet import silence_known_noise

    silence_known_noise()
    logger = logging.getLogger("torchao")
    logger.warning("Failed to load /some/kernel.so: no such GPU")
    logger.error("Failed to load weights")
    logger.warning("something new")
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to load weights",
        "something new",
    ]
