"""Several ranks on CUDA, over nccl: offloaded parts, copies of the model, a rank that dies."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path

import pytest
import torch

from legato.report.metrics import read_events
from tests.helpers.launches import Launched
from tests.helpers.runs import assert_same_tensors, legato, losses, steps_in, write_config

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def config_in(folder: Path, model: Path, method: str, **changes: object) -> Path:
    if method == "lora":
        changes = {"lora_dropout": 0.0} | changes
    recipe = f"{method}_finetune_distributed"
    return write_config(folder, model=model, recipe=recipe, **{"device": "cuda"} | changes)


NF4 = "quantize_base=nf4"
OPTIONS = (
    [],
    ["cpu_offload=true"],
    ["dp_replicate=2"],
    ["reshard_after_forward=false"],
    ["compile=true"],
    ["compile={scope: model}"],
)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *product(("full", "lora"), OPTIONS),
        ("lora", [NF4]),
        ("lora", [NF4, "compile=true", "enable_activation_checkpointing=true"]),
    ],
    ids=str,
)
def test_two_gpus_take_the_steps_of_one_and_resume_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, method: str, options: list[str]
) -> None:
    config = config_in(tmp_path, tiny_model_dir, method)
    whole, parts, one = (tmp_path / name for name in ("whole", "parts", "one"))
    Launched(config, *options, output_dir=whole).succeed()
    Launched(config, *options, "stop_after_step=2", output_dir=parts).succeed()
    Launched(config, *options, output_dir=parts).succeed()
    last = steps_in(whole)[-1]
    assert losses(parts) == losses(whole)
    assert_same_tensors(parts / f"step_{last}", whole / f"step_{last}")
    alone = [f"recipe={method}_finetune_single_device", f"output_dir={one}"]
    alone += [NF4] if NF4 in options else []
    assert legato("run", "--config", config, *alone, "batch_size=4") == 0
    assert losses(whole) == pytest.approx(losses(one), abs=1e-4)


def test_a_killed_rank_is_restarted_and_the_result_is_that_of_an_undisturbed_run(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(
        tmp_path,
        tiny_model_dir,
        "full",
        epochs=None,
        max_steps=60,
        save_every_n_train_steps=5,
        keep_last_n_checkpoints=2,
    )
    whole = Launched(config, output_dir=tmp_path / "whole")
    whole.succeed()
    run = Launched(config, "--max-restarts=1")
    run.wait_until(lambda: 10 in steps_in(run.output_dir), "step 10")
    run.send(signal.SIGKILL, rank=1)
    run.succeed()
    events = read_events(run.output_dir / "metrics.jsonl")
    assert [event["event"] for event in events].count("resume") == 1
    assert losses(run.output_dir) == losses(whole.output_dir)


def test_a_stop_signal_to_one_rank_saves_once_at_one_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(
        tmp_path,
        tiny_model_dir,
        "lora",
        epochs=None,
        max_steps=100_000,
        save_every_n_train_steps=None,
    )
    run = Launched(config)
    run.wait_for_step(3)
    run.send(signal.SIGTERM, rank=1)
    assert run.end()[0] == 143
    assert len(steps_in(run.output_dir)) == 1
