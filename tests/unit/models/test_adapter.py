from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from legato.errors import FolderFormatError, LegatoError, ModelError, ModelNotFoundError
from legato.models.adapter import load_adapter
from legato.models.merge import merge_adapter
from tests.helpers import tiny
from tests.helpers.adapters import write_adapter

WEIGHTS = "adapter_model.safetensors"
A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("base") / "model")


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def with_config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], type[LegatoError], str]] = {
    "a tensor is gone": (
        with_tensors(lambda tensors: tensors.pop(A_KEY)),
        ModelError,
        f"1 of the 28 tensors that its .* ask for aren't in {WEIGHTS}, such as {A_KEY}",
    ),
    "a tensor nobody asked for": (
        with_tensors(lambda tensors: tensors.update(more=torch.zeros(2))),
        ModelError,
        "the base has no place for 1 of the adapter's 29 tensors, such as more",
    ),
    "a layer of another model": (
        with_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(3, 32)})),
        ModelError,
        "doesn't fit its base: .*lm_head.weight",
    ),
    "another rank in the config": (
        with_config(r=2),
        ModelError,
        rf"lora_A.weight is \(4, 32\) in {WEIGHTS}, and its .* ask for \(2, 32\) \(28 such",
    ),
    "NaN": (
        with_tensors(lambda tensors: tensors[A_KEY].view(-1)[5].fill_(torch.nan)),
        ModelError,
        f"1 of 28 tensors hold NaN or infinity, such as {A_KEY}",
    ),
    "a config that isn't JSON": (
        lambda folder: (folder / "adapter_config.json").write_text('{"r": 4'),
        FolderFormatError,
        r"adapter_config.json: can't be read as JSON \(Expecting",
    ),
    "a config without an end": (
        lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000),
        FolderFormatError,
        r"adapter_config.json: can't be read as JSON \(maximum recursion",
    ),
    "a rank that is a word": (
        with_config(r="four"),
        ModelError,
        "PEFT can't put it on the base by its adapter_config.json",
    ),
    "layers that aren't there": (
        with_config(target_modules=["c_attn"]),
        ModelError,
        "PEFT can't put it on the base by its adapter_config.json: .*c_attn",
    ),
    "a base that isn't a name": (
        with_config(base_model_name_or_path=5),
        ModelError,
        "doesn't say which base it is for",
    ),
    "half a file": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
        FolderFormatError,
        f"{WEIGHTS}",
    ),
    "a pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        ModelNotFoundError,
        "adapter_model.bin is a pickle, which Legato doesn't open",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_adapter_that_isnt_whole_is_refused_by_name(
    base: Path, tmp_path: Path, damage: str
) -> None:
    act, error, message = DAMAGES[damage]
    folder = write_adapter(base, tmp_path / "adapter")
    act(folder)
    with pytest.raises(error, match=message) as caught:
        load_adapter(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_of_other_kinds_are_refused_by_their_name(
    base: Path, tmp_path: Path, config: IA3Config | PromptTuningConfig
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ModelError, match=f"says peft_type {config.peft_type.value}; Legato reads"):
        merge_adapter(tmp_path / "adapter", output_dir=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
