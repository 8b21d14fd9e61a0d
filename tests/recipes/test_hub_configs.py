"""A config that we ship runs: each one for two steps, its family shrunk to two layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from legato.config.catalog import hub_names
from tests.helpers import tiny
from tests.helpers.runs import legato, losses, steps_in

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


@pytest.mark.parametrize(
    ("method", "rate"),  # of step 5, by hand: 4 of 50 steps of warm-up towards 2e-5 and 3e-4
    [("full", "1.6e-06"), ("lora", "2.4e-05")],
)
def test_a_first_command_again_and_with_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, rate: str
) -> None:
    model = tiny.write_model(tmp_path / "model", max_position_embeddings=1024)
    rows = [{"instruction": f"Say {i}", "input": "", "output": f"number {i}"} for i in range(600)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    out = tmp_path / "out"
    command = ["run", f"{method}_finetune_single_device", "--config"]
    command += [f"smollm2/135M_{method}_single_device", f"model={model}"]
    command += [f"datasets.0.path={tmp_path / 'rows.json'}", "datasets.0.type=alpaca"]
    command += ["save_every_n_train_steps=2", f"output_dir={out}", "max_steps=4"]
    assert legato(*command) == 0
    assert steps_in(out) == [2, 4]

    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    if method == "full":
        loaded = AutoModelForCausalLM.from_pretrained(out / "step_4")
    else:
        loaded = PeftModel.from_pretrained(base, out / "step_4")
    prompt = AutoTokenizer.from_pretrained(out / "step_4")("Say 7", return_tensors="pt")
    answer = loaded.generate(**prompt, max_new_tokens=2, min_new_tokens=2)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 2

    capsys.readouterr()
    assert legato(*command) == 0
    said = capsys.readouterr().err
    assert f"nothing left to do: {out} has done step 4 of 4" in said
    assert "lr at step" not in said
    assert legato(*command[:-1], "max_steps=6") == 0
    assert (
        "the schedule was planned anew (4 steps before, 6 now): "
        f"lr at step 5: {rate}, as before; the same up to step 6, the last"
    ) in capsys.readouterr().err
    assert steps_in(out) == [4, 6]
    assert sorted(losses(out)) == [1, 2, 3, 4, 5, 6]
