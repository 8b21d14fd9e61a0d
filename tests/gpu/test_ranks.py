"""Several ranks on CUDA, over nccl: offloaded parts, copies, other numbers, ranks that die."""

from __future__ import annotations

import signal
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from legato.report.metrics import read_events
from tests.helpers.launches import Launched, killed_in_a_save
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


TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
    *("--nproc-per-node=2", "-m", "legato", "run"),
)


@pytest.mark.parametrize("launcher", ["legato", "torchrun"])
def test_a_killed_rank_is_restarted_and_the_result_is_that_of_an_undisturbed_run(
    tmp_path: Path, tiny_model_dir: Path, launcher: str
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
    if launcher == "torchrun":
        run = Launched(config, command=TORCHRUN)
    else:
        run = Launched(config, "--max-restarts=1")
    run.wait_until(lambda: 10 in steps_in(run.output_dir), "step 10")
    run.send(signal.SIGKILL, rank=1)
    run.succeed()
    events = read_events(run.output_dir / "metrics.jsonl")
    assert [event["event"] for event in events].count("resume") == 1
    assert losses(run.output_dir) == losses(whole.output_dir)


@pytest.mark.parametrize(("rank", "verb"), [(1, "write_at"), (1, "sync_file"), (0, "rename")])
def test_a_rank_killed_in_a_save_goes_on_from_the_step_before_it(
    tmp_path: Path, tiny_model_dir: Path, rank: int, verb: str
) -> None:
    config = config_in(
        tmp_path, tiny_model_dir, "full", epochs=None, max_steps=6, save_every_n_train_steps=2
    )
    whole = Launched(config, output_dir=tmp_path / "whole")
    whole.succeed()
    killed = killed_in_a_save(tmp_path / "site", {0: (rank, verb, "step_4[.]tmp")})
    run = Launched(config, "--max-restarts=1", environment=killed)
    run.succeed()
    events = read_events(run.output_dir / "metrics.jsonl")
    assert [event["step"] for event in events if event["event"] == "resume"] == [2]
    assert steps_in(run.output_dir) == [2, 4, 6]
    assert losses(run.output_dir) == losses(whole.output_dir)
    assert_same_tensors(run.output_dir / "step_6", whole.output_dir / "step_6")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_another_number_of_gpus_goes_on_with_the_same_rows_and_losses(
    tmp_path: Path, tiny_model_dir: Path, method: str
) -> None:
    config = config_in(
        tmp_path, tiny_model_dir, method, epochs=4, batch_size=1, gradient_accumulation_steps=2
    )
    whole = Launched(config, output_dir=tmp_path / "whole")
    whole.succeed()
    out = tmp_path / "out"
    most = min(4, torch.cuda.device_count())
    # Two processes at first: four rows a step, whoever goes on.
    for last, num_ranks in ((2, 2), (3, 1), (5, most), (6, 1), (9, 2)):
        options = [f"stop_after_step={last}", f"output_dir={out}"]
        if num_ranks == 1:
            assert legato("run", "--config", config, *options) == 0
        else:
            Launched(config, *options, num_processes=num_ranks).succeed()
    expected = {step: loss for step, loss in losses(whole.output_dir).items() if step <= 9}
    assert losses(out) == pytest.approx(expected, abs=1e-4)


def test_a_signal_to_one_rank_saves_at_one_step_and_goes_on_or_stops(
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
    run.send(signal.SIGUSR1, rank=1)
    run.wait_until(lambda: len(steps_in(run.output_dir)) == 1, "the first save")
    run.send(signal.SIGUSR1)
    run.wait_until(lambda: len(steps_in(run.output_dir)) == 2, "the second save")
    run.wait_for_step(steps_in(run.output_dir)[-1] + 3)
    run.send(signal.SIGTERM, rank=1)
    assert run.end()[0] == 143
    assert len(steps_in(run.output_dir)) == 3
