"""A model that is made without memory and filled later is the model that transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from legato.errors import ModelError
from legato.models.load import load_meta_model, load_model
from legato.models.lora import attach_lora, fill_from_base
from legato.models.names import named_weights
from legato.models.saved_files import model_files
from tests.helpers import families

INPUT_IDS = torch.arange(3, 15).view(2, 6)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def filled(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    meta = load_meta_model(folder, dtype=dtype)
    assert all(parameter.is_meta for parameter in meta.model.parameters())
    meta.fill(meta.model, device=CPU)
    return meta.model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT_IDS).logits


def change_weights(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if name != drop}
    save_file(kept | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families.DENSE)
def test_a_filled_model_has_the_logits_that_transformers_gives(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = families.write_family(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert torch.equal(logits(filled(folder, dtype)), logits(reference))


def test_buffers_that_no_file_holds_are_computed(folder: Path) -> None:
    model, reference = filled(folder), AutoModelForCausalLM.from_pretrained(folder)
    buffers, expected = dict(model.named_buffers()), dict(reference.named_buffers())
    assert buffers.keys() == expected.keys() != set()
    assert all(torch.equal(buffers[name], expected[name]) for name in expected)


def test_a_step_folder_gets_the_same_files_either_way(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    whole = load_model(folder, dtype=torch.bfloat16)
    meta = load_meta_model(folder, dtype=torch.bfloat16)
    assert model_files(meta.model) == model_files(whole)
    (folder / "generation_config.json").unlink()
    assert model_files(load_meta_model(folder, dtype=torch.bfloat16).model) == model_files(
        load_model(folder, dtype=torch.bfloat16)
    )


def test_tied_weights_are_one_before_and_after(folder: Path) -> None:
    meta = load_meta_model(folder, dtype=torch.float32)
    assert meta.model.lm_head.weight is meta.model.model.embed_tokens.weight
    meta.fill(meta.model, device=CPU)
    assert meta.model.lm_head.weight is meta.model.model.embed_tokens.weight
    assert "lm_head.weight" not in named_weights(meta.model)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_weight_may_lie_under_either_name(folder: Path, kept: str) -> None:
    expected = logits(load_model(folder, dtype=torch.float32))
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, drop="model.embed_tokens.weight", **{kept: weight})
    assert torch.equal(logits(filled(folder)), expected)


def test_a_tied_weight_may_lie_under_both_names_if_they_hold_the_same(folder: Path) -> None:
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, **{"lm_head.weight": weight.clone()})
    assert torch.equal(logits(filled(folder)), logits(load_model(folder, dtype=torch.float32)))
    change_weights(folder, **{"lm_head.weight": weight + 1})
    with pytest.raises(ModelError, match="tie_word_embeddings: false"):
        filled(folder)


def test_files_of_the_bare_decoder_and_old_buffers_are_understood(tmp_path: Path) -> None:
    folder = families.write_family(tmp_path, "llama")
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)
    assert torch.equal(logits(filled(folder)), expected)


def test_missing_unexpected_and_misshapen_weights_are_named(folder: Path) -> None:
    change_weights(
        folder,
        drop="model.norm.weight",
        **{"model.layers.0.mlp.up_proj.weight": torch.ones(64, 31), "stranger": torch.ones(1)},
    )
    with pytest.raises(ModelError) as caught:
        load_meta_model(folder, dtype=torch.float32)
    assert caught.value.facts["missing"] == ["model.norm.weight"]
    assert caught.value.facts["unexpected"] == ["stranger"]
    assert caught.value.facts["mismatched"] == [
        ("model.layers.0.mlp.up_proj.weight", (64, 31), (64, 32))
    ]


def test_weights_are_rounded_as_on_one_device(folder: Path) -> None:
    change_weights(folder, **{"model.norm.weight": torch.full((32,), 1.0 + 2.0**-12)})
    meta = load_meta_model(folder, dtype=torch.bfloat16)
    for parameter in meta.model.parameters():
        parameter.data = parameter.data.float()  # to be masters
    meta.fill(meta.model, device=CPU)
    assert meta.model.model.norm.weight.dtype is torch.float32
    assert torch.equal(meta.model.model.norm.weight, torch.ones(32))


WHOLE = {"lora_modules_to_save": ["embed_tokens", "input_layernorm"]}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {}),
        ("mistral", {"use_dora": True}),
        ("mistral", {"lora_target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        ("mistral", WHOLE),
        ("llama", WHOLE),  # tied
    ],
)
def test_an_adapter_beside_no_weights_has_the_values_that_it_has_beside_real_ones(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    folder = families.write_family(tmp_path, family)
    settings = {"lora_rank": 4, "lora_alpha": 8, "seed": 7, "base_name": folder} | options
    expected = attach_lora(load_model(folder, dtype=torch.bfloat16), **settings)
    meta = load_meta_model(folder, dtype=torch.bfloat16)
    adapter = attach_lora(meta.model, **settings)
    frozen = [p for p in adapter.model.parameters() if not p.requires_grad]
    assert frozen
    assert all(parameter.is_meta for parameter in frozen)
    assert adapter.keys == expected.keys
    assert adapter.twins == expected.twins
    assert adapter.files == expected.files
    meta.fill(adapter.model, device=CPU)
    fill_from_base(adapter.model)
    found = named_weights(adapter.model)
    for name, tensor in named_weights(expected.model).items():
        assert torch.equal(found[name], tensor), name
