"""QLoRA through the command line: said, resumed bit for bit, and used with the base as it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from legato.models.names import named_weights
from legato.parallel.world import World
from legato.recipes.model import build_model
from legato.report.metrics import read_events
from tests.helpers import tiny
from tests.helpers.runs import assert_same_tensors, legato, losses, steps_in, write_config
from tests.helpers.sharded import build_config

LORA = "lora_finetune_single_device"
QLORA = {"recipe": LORA, "quantize_base": "nf4", "dtype": "bf16"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("base") / "model", dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"enable_activation_checkpointing": True}], ids=str)
def test_a_run_is_stopped_resumed_merged_and_asked(
    options: dict[str, Any], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=base, **QLORA, **options)
    whole, here = tmp_path / "out", tmp_path / "here"
    assert legato("run", "--config", config) == 0
    said = " ".join(capsys.readouterr().err.split())
    # 14 weights of 18,432 elements in bf16: 36,864 bytes; half a byte, a scale per 64 and theirs.
    assert "base nf4: 14 weights in" in said
    start = next(e for e in read_events(whole / "metrics.jsonl") if e["event"] == "start")
    assert start["quantize_base"] == "nf4"
    assert start["unquantized_bytes"] == 36_864
    assert 9_216 < start["quantized_bytes"] < 9_216 * 1.25

    assert legato("run", "--config", config, f"output_dir={here}", "stop_after_step=1") == 0
    # Saved at every step, and the weights go on as if nothing was.
    saving = "save_every_n_train_steps=1"
    assert legato("run", "--config", config, f"output_dir={here}", saving) == 0
    assert steps_in(here) == [1, 2, 3]
    step = here / f"step_{steps_in(here)[-1]}"
    assert_same_tensors(step, whole / step.name)
    assert losses(here) == losses(whole)

    assert legato("merge", step, "--output-dir", tmp_path / "merged", "--dtype", "fp32") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on the base in nf4, and is merged into the base in its files' own precision" in said
    original = load_file(base / "model.safetensors")
    adapter = load_file(step / "adapter_model.safetensors")
    for name, merged in load_file(tmp_path / "merged" / "model.safetensors").items():
        expected = original[name].float()
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (adapter[f"{layer}.lora_{which}.weight"].float() for which in "AB")
            assert b.abs().sum() > 0
            expected = expected + 2.0 * (b @ a)  # alpha / rank
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-7)

    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reference = PeftModel.from_pretrained(reference, step).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[1, 2, 3, 200]])
    torch.testing.assert_close(
        model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
    words = ["--ask", "2 mugs to Oslo", "--max-new-tokens", "4", "--device", "cpu"]
    assert legato("chat", step, *words) == 0
    assert capsys.readouterr().out  # of three steps: line breaks


def test_another_precision_of_the_base_is_another_run(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=base, **QLORA)
    assert legato("run", "--config", config, "stop_after_step=1") == 0
    capsys.readouterr()
    assert legato("run", "--config", config, "quantize_base=none") == 2
    assert "quantize_base: was nf4, now none" in capsys.readouterr().err


def test_modules_that_train_as_a_whole_begin_as_the_base_has_them(base: Path) -> None:
    options = {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["norm", "up_proj"]}
    config = build_config(base, "lora", num_ranks=1, **QLORA, **options)
    loaded = build_model(config, world=World.single("cpu"))
    weights = named_weights(loaded.trained.module, trainable_only=True)
    original = load_file(base / "model.safetensors")
    assert loaded.trained.keys is not None
    as_a_whole = {n: key for n, key in loaded.trained.keys.items() if ".lora_" not in key}
    assert len(as_a_whole) == 1 + 2
    for name, key in as_a_whole.items():
        assert torch.equal(weights[name], original[key.removeprefix("base_model.model.")]), name
    assert loaded.quantized is not None
    assert loaded.quantized.num_weights == 14 - 2


WITHOUT_TORCHAO = """
import sys
sys.modules["torchao"] = None
from legato.cli.main import main
code = main(sys.argv[1:])
assert not [name for name, module in sys.modules.items() if name[:7] == "torchao" and module]
sys.exit(code)
"""


def test_a_run_that_quantizes_nothing_needs_no_torchao(base: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model=base, recipe=LORA, max_steps=1)
    words = ["run", "--config", str(config)]
    told = run(
        [sys.executable, "-c", WITHOUT_TORCHAO, *words], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert steps_in(tmp_path / "out") == [1]


# One process imports torch once. Each model gets a process of its own, and its step another one,
# whose high-water mark begins where the loaded model stands.
PEAKS = """
import json, os, resource, sys
import torch, transformers, peft, torchao.quantization
from legato.config.schema import RunConfig
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.model import build_model
from tests.helpers.sharded import take_step

def in_a_child(do):
    child = os.fork()
    if child == 0:
        do()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def say_peak():
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)

def measure():
    loaded = build_model(RunConfig.model_validate(config), world=world)
    say_peak()
    def step():
        take_step(loaded, build_optimizer(loaded.parameters, lr=1e-3), world)
        say_peak()
    in_a_child(step)

world = World.single("cpu")
small, *configs = json.loads(sys.argv[1])
build_model(RunConfig.model_validate(small), world=world)  # imports what is imported late
for config in configs:
    in_a_child(measure)
"""


def test_qlora_loads_and_trains_in_less_memory_than_lora_and_that_in_less_than_full(
    base: Path, tmp_path: Path
) -> None:
    # Many layers of small weights: while one of them is quantized or computes, it stands there in
    # full precision, and 16 times while its nearest values are looked for.
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 32}
    model = tiny.write_model(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    weights = (model / "model.safetensors").stat().st_size
    assert weights > 50_000_000
    common = {
        "model": str(model),
        "datasets": [{"path": "unused.jsonl", "type": "alpaca"}],
        "output_dir": "unused",
        "device": "cpu",
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    lora = common | {"recipe": LORA, "lora_rank": 4}
    full = common | {"recipe": "full_finetune_single_device"}
    # With a fixed threshold glibc gives every freed megabyte back at once.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    qlora = lora | {"quantize_base": "nf4"}
    configs = json.dumps([qlora | {"model": str(base)}, qlora, lora, full])
    command = [sys.executable, "-c", PEAKS, configs]
    told = run(command, capture_output=True, text=True, env=environment, check=False)
    assert told.returncode == 0, told.stderr
    loading_qlora, of_qlora, loading_lora, of_lora, _, of_full = map(int, told.stdout.split())
    # Were the whole base there in full while it is read, loading would take as much as for LoRA.
    assert loading_lora - loading_qlora > 0.4 * weights
    # Half a byte a weight instead of two; fp32 masters, gradients and moments on top of two.
    assert of_lora - of_qlora > 0.4 * weights
    assert of_full - of_lora > 5 * weights
