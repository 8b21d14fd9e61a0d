"""DDP: two processes train one model, and write one folder together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open

from legato.checkpoint import EverySteps, KeepLast
from legato.errors import RankDisagreementError
from legato.integrations.transformers import LegatoCheckpoints
from tests.helpers import spawn
from tests.integrations.trainers import (
    assert_equal_weights,
    build_trainer,
    only_step,
    resume,
    run_whole,
    weights,
)

pytestmark = pytest.mark.distributed

SHORT: dict[str, Any] = {"ddp_backend": "gloo", "num_train_epochs": 2}

# Importing transformers in each process is most of it.
LIMIT_SECONDS = 240.0


def as_torchrun_does(rank: int) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update({**ranks, **sizes, "MASTER_ADDR": "127.0.0.1"})


def train_and_resume(rank: int, folder: str) -> None:
    """20 rows on 2 ranks, 2 a micro-batch, 2 micro-batches a step: 3 steps an epoch, 6 in all."""
    as_torchrun_does(rank)
    plain = build_trainer(Path(folder) / "plain", **SHORT)
    plain.train()
    uninterrupted = run_whole(Path(folder) / "whole", **SHORT)
    assert_equal_weights(uninterrupted.weights, weights(plain.model))
    for step in (2, 3):
        if rank == 0:
            only_step(uninterrupted.folder, step, Path(folder) / f"from_{step}")
        dist.barrier()
        found = resume(Path(folder) / f"from_{step}/step_{step}", **SHORT)
        assert_equal_weights(found, uninterrupted.weights)


def test_two_ranks_resume_bit_for_bit_mid_epoch_and_at_an_epoch_boundary(tmp_path: Path) -> None:
    spawn.run(train_and_resume, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    steps = {path.name for path in (tmp_path / "from_2").glob("step_*")}
    assert steps == {f"step_{step}" for step in range(2, 7)}
    with safe_open(tmp_path / "from_2/step_6/state/rng.safetensors", "pt") as file:
        assert {key.split("/")[0] for key in file.keys()} == {"rank_0", "rank_1"}  # noqa: SIM118


def resume_from_different_steps(rank: int, folder: str, step: str) -> None:
    as_torchrun_does(rank)
    checkpoints = LegatoCheckpoints(save=EverySteps(1), keep=KeepLast(2))
    trainer = build_trainer(Path(folder), checkpoints, ddp_backend="gloo")
    with pytest.raises(RankDisagreementError, match="0 to 2"):
        trainer.train(resume_from_checkpoint=step if rank == 1 else None)


def test_ranks_that_resume_from_different_steps_all_hear_of_it(tmp_path: Path) -> None:
    run_whole(tmp_path / "whole", max_steps=2)
    step = tmp_path / "whole/step_2"
    spawn.run(
        resume_from_different_steps,
        2,
        str(tmp_path / "out"),
        str(step),
        timeout_seconds=LIMIT_SECONDS,
    )
