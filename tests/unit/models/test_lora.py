from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from legato.errors import ConfigError, ModelError
from legato.models.folder import weight_files, weights_digest
from legato.models.lora import Adapter, attach_lora
from legato.models.names import named_weights
from tests.helpers import families

INPUT_IDS = torch.arange(3, 15).view(2, 6)

FORMS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "list": {"lora_target_modules": ["q_proj", "mlp.up_proj"]},
    "one name": {"lora_target_modules": "v_proj"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "embedding": {"lora_target_modules": ["embed_tokens", "q_proj"]},
    "head": {"lora_target_modules": ["lm_head"]},
    "whole": {"lora_modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "whole projection": {"lora_modules_to_save": ["layers.1.mlp.down_proj"]},
}
TIED_FORMS: dict[str, tuple[str, list[str]]] = {
    "embedding": ("llama", ["embed_tokens"]),
    "head": ("llama", ["lm_head"]),
    "both and norms": ("llama", ["embed_tokens", "lm_head", "input_layernorm"]),
    "gpt2": ("gpt2", ["wte"]),  # a name that PEFT doesn't know for an embedding's
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return families.write_family(tmp_path / "base", "mistral")


def load(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def attach(base: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Adapter:
    settings: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "seed": 7} | options
    return attach_lora(load(base, dtype), base_name=base, **settings)


def train(adapter: Adapter) -> None:
    parameters = [p for p in adapter.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    for _ in range(2):
        adapter.model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write(adapter: Adapter, folder: Path) -> Path:
    """What a checkpoint of the adapter holds."""
    folder.mkdir()
    weights = named_weights(adapter.model, trainable_only=True)
    assert weights.keys() == adapter.keys.keys()
    tensors = {adapter.keys[name]: tensor.detach() for name, tensor in weights.items()}
    tensors |= {key: weights[name].detach().clone() for key, name in adapter.twins.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for name, content in adapter.files.items():
        (folder / name).write_bytes(content)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT_IDS).logits


@pytest.mark.parametrize("form", FORMS)
def test_peft_loads_a_trained_adapter_with_equal_logits(
    form: str, base: Path, tmp_path: Path
) -> None:
    adapter = attach(base, **FORMS[form])
    train(adapter)
    expected = logits(adapter.model)
    assert not torch.allclose(expected, logits(load(base)), atol=1e-2)  # it isn't dead
    folder = write(adapter, tmp_path / "adapter")
    assert torch.equal(logits(PeftModel.from_pretrained(load(base), folder)), expected)


def test_transformers_finds_the_base_of_an_adapter_folder(base: Path, tmp_path: Path) -> None:
    adapter = attach(base)
    train(adapter)
    folder = write(adapter, tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(adapter.model))


@pytest.mark.parametrize("form", FORMS)
def test_file_and_config_are_those_that_peft_writes(form: str, base: Path, tmp_path: Path) -> None:
    adapter = attach(base, **FORMS[form])
    ours = write(adapter, tmp_path / "ours")
    adapter.model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    found = json.loads((ours / "adapter_config.json").read_text())
    expected = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for config in (found, expected):
        config["target_modules"] = sorted(config["target_modules"])
    assert found == expected
    with (
        safe_open(ours / "adapter_model.safetensors", "pt") as mine,
        safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as theirs,
    ):
        assert set(mine.keys()) == set(theirs.keys())
        for key in theirs.keys():  # noqa: SIM118
            assert torch.equal(mine.get_tensor(key), theirs.get_tensor(key)), key


@pytest.mark.parametrize(("family", "names"), TIED_FORMS.values(), ids=TIED_FORMS)
def test_a_tied_embedding_that_trains_stays_tied_and_is_stored_as_peft_stores_it(
    family: str, names: list[str], tmp_path: Path
) -> None:
    base = families.write_family(tmp_path / "base", family)
    adapter = attach(base, lora_modules_to_save=names)
    causal = adapter.model.get_base_model()
    assert causal.lm_head.weight is causal.get_input_embeddings().weight
    assert list(adapter.twins) == ["base_model.model.lm_head.weight"]
    train(adapter)
    expected = logits(adapter.model)
    folder = write(adapter, tmp_path / "adapter")
    assert torch.equal(logits(PeftModel.from_pretrained(load(base), folder)), expected)
    adapter.model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as theirs:
        assert set(theirs.keys()) == {*adapter.keys.values(), *adapter.twins}
    with adapter.model.disable_adapter():
        assert torch.equal(logits(adapter.model), logits(load(base)))


def test_a_name_means_a_whole_part_of_a_path(base: Path) -> None:
    """PEFT itself would take ``norm`` for input_layernorm and post_attention_layernorm too."""
    adapter = attach(base, lora_modules_to_save=["norm"])
    copies = [name for name in adapter.keys if "modules_to_save" in name]
    assert copies == ["base_model.model.model.norm.modules_to_save.default.weight"]


def test_a_fresh_adapter_changes_nothing_and_only_it_trains(base: Path) -> None:
    adapter = attach(base)
    assert torch.equal(logits(adapter.model), logits(load(base)))
    names = [name for name, p in adapter.model.named_parameters() if p.requires_grad]
    assert names == list(adapter.keys)
    assert len(names) == 2 * 7 * 2  # A and B, seven linear layers, two blocks


def test_the_first_values_come_from_the_seed_alone(base: Path) -> None:
    def values(seed: int) -> list[torch.Tensor]:
        adapter = attach(base, seed=seed)
        return [t.clone() for t in named_weights(adapter.model, trainable_only=True).values()]

    first = values(1)
    torch.rand(10)
    before = torch.random.get_rng_state()
    second = values(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], values(2)[0])


def test_the_first_values_are_pefts(base: Path) -> None:
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    reference = get_peft_model(load(base), config)
    adapter = attach(base)
    for name, tensor in named_weights(adapter.model, trainable_only=True).items():
        assert torch.equal(tensor, reference.get_parameter(name)), name


def test_an_adapter_has_the_dtype_of_its_base(base: Path) -> None:
    adapter = attach(base, torch.bfloat16, use_dora=True)
    assert {p.dtype for p in adapter.model.parameters()} == {torch.bfloat16}


def test_keys_hold_when_blocks_are_wrapped_later(base: Path) -> None:
    adapter = attach(base)
    layers = adapter.model.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert named_weights(adapter.model, trainable_only=True).keys() == adapter.keys.keys()


def test_the_base_is_named_by_path_and_digest(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    adapter = attach(Path("base"))
    config = json.loads(adapter.files["adapter_config.json"])
    assert config["base_model_name_or_path"] == str(base)
    assert config["revision"] is None
    assert json.loads(adapter.files["legato_base.json"]) == {
        "base": str(base),
        "hub_id": None,
        "revision": None,
        "digest": weights_digest(weight_files(base)),
        "quantize_base": "none",
    }


def test_a_downloaded_base_keeps_its_hub_id_and_commit(base: Path) -> None:
    note = {"hub_id": "org/name", "revision": "abc"}
    (base / "legato_source.json").write_text(json.dumps(note))
    described = json.loads(attach(base).files["legato_base.json"])
    assert (described["hub_id"], described["revision"]) == ("org/name", "abc")


def test_a_base_from_the_hub_is_named_by_id_and_revision(base: Path) -> None:
    adapter = attach_lora(
        load(base), lora_rank=2, lora_alpha=4, base_name="org/unknown", base_revision="v1"
    )
    config = json.loads(adapter.files["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/unknown", "v1")


def test_transposed_linear_layers_of_gpt2_round_trip(tmp_path: Path) -> None:
    base = families.write_family(tmp_path / "base", "gpt2")
    adapter = attach(base, lora_target_modules=["c_attn"])
    train(adapter)
    folder = write(adapter, tmp_path / "adapter")
    expected = logits(adapter.model)
    assert torch.equal(logits(PeftModel.from_pretrained(load(base), folder)), expected)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "query"], r"no layer is called query in Mistral.*k_proj, lm_head, o_proj"),
        (["proj"], "no layer is called proj"),
        ("all_linear", "no layer is called all_linear.*or all-linear for every linear layer"),
        ([], "the list is empty"),
    ],
)
def test_targets_that_match_nothing_are_refused_with_what_there_is(
    base: Path, targets: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(base, lora_target_modules=targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_modules_to_save": ["embed"]},
            "lora_modules_to_save: no layer is called embed in MistralForCausalLM. There are: "
            "down_proj, embed_tokens, .*, norm, ",
        ),
        (
            {"lora_target_modules": ["q_proj", "lm_head"], "lora_modules_to_save": ["lm_head"]},
            "lora_modules_to_save: lm_head is also one of lora_target_modules",
        ),
    ],
)
def test_modules_to_save_that_are_not_there_or_are_targets_are_refused(
    base: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(base, **options)


def test_dropout_that_no_layer_applies_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_dropout: model\.embed_tokens has token ids"):
        attach(base, lora_target_modules=["embed_tokens"], lora_dropout=0.1)
    attach(base, lora_target_modules=["embed_tokens", "q_proj"], lora_dropout=0.1)
    attach(base, lora_target_modules=["embed_tokens"])


def test_a_trainable_tensor_without_a_place_in_the_file_is_an_error(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(model: Any, *, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {key: tensor for key, tensor in state_dict.items() if "lora_A" not in key}

    monkeypatch.setattr("peft.get_peft_model_state_dict", forgetful)
    with pytest.raises(ModelError, match="14 trainable tensors have no place") as caught:
        attach(base)
    assert len(caught.value.facts["names"]) == 14
