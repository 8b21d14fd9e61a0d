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
NORM_KEY = "base_model.model.model.norm.weight"


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
    "a rank that no memory holds": (
        with_config(r=10**9),
        ModelError,
        "has r 1000000000, and no tensor in .* has a rank above 4",
    ),
    "a rank of one layer that no memory holds": (
        with_config(rank_pattern={"q_proj": 10**9}),
        ModelError,
        "has rank_pattern q_proj 1000000000, and no tensor",
    ),
    **{
        f"lora_alpha {alpha}": (
            with_config(lora_alpha=alpha),
            ModelError,
            "has lora_alpha .*; expected a number of at most 1,000,000",
        )
        for alpha in (float("nan"), float("inf"), 1e308)
    },
    "an alpha of one layer": (
        with_config(alpha_pattern={"q_proj": -1e300}),
        ModelError,
        "has alpha_pattern q_proj -1e.300",
    ),
    "a pattern that isn't one": (
        with_config(target_modules="(("),
        ModelError,
        r"names layers by '\(\(.*', which isn't a regular expression: missing \)",
    ),
    "a base weight that nobody declared": (
        with_tensors(lambda t: t.update({NORM_KEY: torch.full((32,), 3.0)})),
        ModelError,
        f"holds {NORM_KEY} with other values than its base's",
    ),
    "NaN": (
        with_tensors(lambda tensors: tensors[A_KEY].view(-1)[5].fill_(torch.nan)),
        ModelError,
        f"1 of 28 tensors hold NaN or infinity, such as {A_KEY}",
    ),
    "integers": (
        with_tensors(lambda tensors: tensors.update({A_KEY: tensors[A_KEY].to(torch.int32)})),
        ModelError,
        rf"{A_KEY} is int32; expected floating-point weights \(1 such tensors\)",
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


def test_base_weights_that_peft_kept_beside_the_adapter_are_no_obstacle(
    base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(base, tmp_path / "adapter")
    norm = load_file(base / "model.safetensors")["model.norm.weight"]
    with_tensors(lambda tensors: tensors.update({NORM_KEY: norm}))(folder)
    loaded = load_adapter(folder).model
    assert torch.equal(loaded.state_dict()[NORM_KEY], norm)


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
