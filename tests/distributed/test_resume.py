"""N steps on several ranks == k steps, stop, resume on as many, N - k steps: bit for bit."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legato.config.load import load_config
from legato.recipes.training import run
from legato.report.metrics import read_events
from tests.helpers import spawn, tiny
from tests.helpers.runs import assert_same_tensors, legato, losses, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

LAST = 5
# On 3 and 4 ranks the last step of an epoch leaves ranks without a row.
CASES = {
    "copies": (4, ["dp_replicate=2"]),
    "lora with dropout": (3, ["recipe=lora_finetune_distributed", "lora_dropout=0.1"]),
    "bf16 masters, packing": (2, ["dtype=bf16", "packing=true", "max_seq_len=128"]),
}

World = tuple[int, list[list[str]]]  # how many ranks, and what each start of theirs adds


def starts_on_rank(rank: int, folder: str, worlds: list[World]) -> None:
    """One world after another, each of fewer ranks, in the processes that are there."""
    for number, (num_ranks, starts) in enumerate(worlds):
        dist.destroy_process_group()
        if rank >= num_ranks:
            return
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store-{number}", num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=dt.timedelta(seconds=200),
        )
        for start, overrides in enumerate(starts):
            torch.manual_seed(start)  # a process of its own wouldn't stand where this one does
            loaded = load_config(f"{folder}/run.yaml", overrides)
            run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case undisturbed in ``whole``, stopped in ``parts``; copies, resumed on two ranks."""
    folder = tmp_path_factory.mktemp("resume")
    write_config(
        folder,
        model=tiny.write_model(folder / "model"),
        recipe="full_finetune_distributed",
        batch_size=1,
        gradient_accumulation_steps=1,
        epochs=3,
        max_steps=LAST,
    )
    worlds: list[World] = []
    for name, (num_ranks, options) in CASES.items():
        outs = [f"output_dir={folder / name / each}" for each in ("whole", "parts")]
        stops = [[outs[1], f"stop_after_step={step}"] for step in (2, 3, LAST)]
        worlds.append((num_ranks, [[*options, *words] for words in ([outs[0]], *stops)]))
    source = f"resume_from_checkpoint={folder / 'copies' / 'parts' / 'step_3'}"
    worlds[-1][1].append([source, f"output_dir={folder / 'copies' / 'two ranks'}"])
    spawn.run(starts_on_rank, 4, str(folder), worlds, timeout_seconds=500.0)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_is_the_undisturbed_one_bit_for_bit(
    finished: Path, case: str
) -> None:
    whole, parts = (finished / case / name for name in ("whole", "parts"))
    assert sorted(losses(whole)) == list(range(1, LAST + 1))
    assert losses(parts) == losses(whole)
    assert_same_tensors(parts / f"step_{LAST}", whole / f"step_{LAST}")


def test_what_four_ranks_with_copies_left_goes_on_on_two_and_on_one(finished: Path) -> None:
    copies = finished / "copies"
    options = [
        "recipe=full_finetune_single_device",
        f"resume_from_checkpoint={copies / 'parts' / 'step_3'}",
        f"output_dir={copies / 'one'}",
    ]
    assert legato("run", "--config", finished / "run.yaml", *options) == 0
    expected, tokens = losses(copies / "whole"), num_tokens(copies / "whole")
    for folder in (copies / "one", copies / "two ranks"):
        assert sorted(losses(folder)) == [4, 5]
        for step, loss in losses(folder).items():
            assert loss == pytest.approx(expected[step], abs=1e-5)
        assert num_tokens(folder) == {step: tokens[step] for step in (4, 5)}


def num_tokens(output_dir: Path) -> dict[int, int]:
    events = read_events(output_dir / "metrics.jsonl")
    return {event["step"]: event["num_tokens"] for event in events if event["event"] == "step"}
