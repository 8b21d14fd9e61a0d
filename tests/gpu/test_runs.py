"""Whole runs on CUDA: learning, resuming bit for bit, and reading the CPU's checkpoints."""

from __future__ import annotations

import gc
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.model import build_model
from tests.helpers.interchange import METHODS
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    write_config,
)
from tests.helpers.sharded import build_config, take_step
from tests.helpers.tiny import write_model

IN_BACKWARD = [
    "optimizer_in_backward=true",
    "clip_grad_norm=null",
    "batch_size=4",
    "gradient_accumulation_steps=1",
]

NF4 = "quantize_base=nf4"
OPTIONS = (
    [],
    ["packing=true"],
    ["compile=true"],
    ["compile=true", "packing=true", "enable_activation_checkpointing=true"],
    ["compile={scope: model}"],
    ["num_workers=1"],
    ["compile={mode: reduce-overhead}"],
)
RUNS = [
    *product(RECIPES, OPTIONS),
    *product(RECIPES[1:], ([NF4], [NF4, "compile=true", "enable_activation_checkpointing=true"])),
]


@pytest.mark.parametrize(("recipe", "options"), RUNS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, dtype: str, options: list[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, dtype=dtype, epochs=2)
    run = ["run", "--config", config, "device=cuda", *options]
    assert legato(*run) == 0
    here = tmp_path / "here"
    assert legato(*run, f"output_dir={here}", "stop_after_step=2") == 0
    # Answering prompts on the way changes nothing either.
    talking = ["generate_samples=2", "run_val_every_n_steps=1"]
    assert legato(*run, f"output_dir={here}", "save_every_n_train_steps=1", *talking) == 0
    last = steps_in(here)[-1]
    assert_same_tensors(here / f"step_{last}", tmp_path / "out" / f"step_{last}")
    assert losses(here) == losses(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(here / f"step_{last}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_cpu_and_gpu_read_each_others_checkpoints(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = (
        write_config(tmp_path, model=tiny_model_dir, recipe=recipe, lora_dropout=0.0)
        if (recipe.startswith("lora"))
        else write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    )
    assert legato("run", "--config", config, "device=cpu", "stop_after_step=1") == 0
    assert legato("run", "--config", config, "device=cuda", "stop_after_step=2") == 0
    assert legato("run", "--config", config, "device=cpu") == 0
    whole = tmp_path / "whole"
    assert legato("run", "--config", config, "device=cpu", f"output_dir={whole}") == 0
    found, expected = losses(tmp_path / "out"), losses(whole)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert abs(found[step] - loss) < 1e-3


def test_distributed_recipe_on_nccl_saves_what_the_single_device_recipe_reads(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    count = min(2, torch.cuda.device_count())
    config = write_config(tmp_path, model=tiny_model_dir, recipe="full_finetune_distributed")
    run = ["run", f"--nproc-per-node={count}", "--config", config, "device=cuda"]
    assert legato(*run, "stop_after_step=2") == 0
    [step] = steps_in(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"step_{step}")
    assert legato(*run, "generate_samples=2", "cpu_offload=true") == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_offloaded_activations_change_no_loss_and_take_less_device_memory(
    tmp_path: Path, recipe: str
) -> None:
    # Rows long enough that the blocks' inputs are more than what a step takes anyway.
    model = write_model(
        tmp_path / "model", num_hidden_layers=8, hidden_size=256, max_position_embeddings=4096
    )
    config = write_config(
        tmp_path, model=model, recipe=recipe, enable_activation_checkpointing=True
    )
    data = tmp_path / "orders.jsonl"
    with data.open("w") as file:
        for _ in range(10):
            file.write(json.dumps({"prompt": "x" * 3000, "completion": "y" * 500}) + "\n")
    peaks = []
    for name, options in (("kept", []), ("offloaded", ["enable_activation_offloading=true"])):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = ["run", "--config", config, "device=cuda", "max_seq_len=4096", *options]
        assert legato(*run, f"output_dir={tmp_path / name}") == 0
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert losses(tmp_path / "offloaded") == losses(tmp_path / "kept")
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("options", [["optimizer.name=adamw_8bit"], IN_BACKWARD], ids=str)
def test_a_resumed_low_memory_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, options: list[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], dtype="bf16")
    run = ["run", "--config", config, "device=cuda", *options]
    assert legato(*run) == 0
    here = tmp_path / "here"
    assert legato(*run, f"output_dir={here}", "stop_after_step=2") == 0
    assert legato(*run, f"output_dir={here}") == 0
    assert_same_tensors(here / "step_3", tmp_path / "out" / "step_3")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("words", ["compile=true", "compile={scope: model}"])
def test_a_compiled_run_has_the_losses_of_an_eager_one(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, words: str
) -> None:
    changes = {"lora_dropout": 0.0} if recipe.startswith("lora") else {}
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, **changes)
    run = ["run", "--config", config, "device=cuda", "train_on_inputs=true"]
    assert legato(*run, words) == 0
    plain = tmp_path / "plain"
    assert legato(*run, f"output_dir={plain}") == 0
    assert losses(tmp_path / "out") == pytest.approx(losses(plain), abs=1e-4)


def test_a_merge_on_the_device_is_that_on_the_cpu(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[1], max_steps=2)
    assert legato("run", "--config", config, "device=cuda") == 0
    merged = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        words = ["--output-dir", folder, "--device", device]
        assert legato("merge", tmp_path / "out" / "step_2", *words) == 0
        merged.append(load_file(folder / "model.safetensors"))
    torch.testing.assert_close(merged[1], merged[0], rtol=1e-6, atol=1e-6)


def test_qlora_takes_less_device_memory_than_lora_and_that_less_than_full(tmp_path: Path) -> None:
    # Many layers of small weights: each is there 32 times in bf16 while it is quantized.
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 32}
    model = write_model(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    weights = (model / "model.safetensors").stat().st_size
    world = World.single("cuda")
    loading, training = {}, {}
    for name, (method, changes) in METHODS.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = {"dtype": "bf16", "device": "cuda"} | changes
        loaded = build_model(build_config(model, method, num_ranks=1, **values), world=world)
        loading[name] = torch.cuda.max_memory_allocated() - before
        take_step(loaded, build_optimizer(loaded.parameters, lr=1e-3), world)
        training[name] = torch.cuda.max_memory_allocated() - before
        del loaded
        gc.collect()
    # Half a byte a weight instead of two; fp32 masters, gradients and moments on top of two.
    assert loading["lora"] - loading["qlora"] > 0.4 * weights
    assert training["lora"] - training["qlora"] > 0.4 * weights
    assert training["full"] - training["lora"] > 5 * weights
