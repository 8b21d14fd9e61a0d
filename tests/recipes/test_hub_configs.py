"""A config that we ship runs: each one for two steps, its family shrunk to two layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from legato.config.catalog import hub_names
from tests.helpers import tiny
from tests.helpers.runs import legato, steps_in

SMALL = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}

# What each hub folder's model is, in transformers' words; facts of the models' own config.json.
FAMILIES = {
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "llama2": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"tie_word_embeddings": False}),
    "llama3_2": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
}


def write_family(folder: Path, family: str) -> Path:
    model_type, changes = FAMILIES[family]
    # llama2's base model has no chat template: the packaged alpaca one must serve it.
    tokenizer = tiny.build_tokenizer(None if family == "llama2" else tiny.CHATML)
    config = AutoConfig.for_model(
        model_type,
        **SMALL,
        **changes,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_family_ships_full_lora_and_qlora() -> None:
    names = hub_names()
    assert len(names) >= 35
    for family in FAMILIES:
        ours = [name for name in names if name.startswith(f"{family}/")]
        for kind in (
            "full_single_device",
            "_lora_single_device",
            "_qlora_single_device",
            "full_distributed",
            "lora_distributed",
        ):
            assert any(name.endswith(kind) for name in ours), (family, kind)


@pytest.mark.parametrize("name", hub_names())
def test_a_shipped_config_runs_two_steps_on_its_shrunk_family(tmp_path: Path, name: str) -> None:
    model = write_family(tmp_path / "model", name.split("/")[0])
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            f'{{"instruction": "Say {i}", "input": "", "output": "number {i}"}}\n'
            for i in range(40)
        )
    )
    out = tmp_path / "out"
    arguments = [
        f"model={model}",
        f"dataset={data}",
        "dataset.type=alpaca",
        f"output_dir={out}",
        "device=cpu",
        "batch_size=2",
        "gradient_accumulation_steps=1",
        "max_steps=2",
        "val_set_size=8",
        "save_every_n_train_steps=1",
    ]
    assert legato("run", "--config", name, *arguments) == 0
    assert 2 in steps_in(out)
    step = out / "step_2"
    reloaded = AutoModelForCausalLM.from_pretrained(step)  # full: the model; LoRA: base + adapter
    assert reloaded(torch.arange(4)[None]).logits.shape == (1, 4, 272)
