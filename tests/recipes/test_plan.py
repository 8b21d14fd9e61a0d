"""How many checkpoints a config plans, as numbers."""

from __future__ import annotations

from typing import Any

import pytest

from legato.config.schema import RunConfig
from legato.recipes.facts import save_when
from legato.recipes.plan import num_saves
from legato.recipes.policies import keep_policy

BASE = {
    "recipe": "full_finetune_single_device",
    "model": "m",
    "output_dir": "out",
    "datasets": [{"path": "rows.jsonl"}],
    "optimizer": {"lr": 0.1},
    "epochs": 4,
}
VALIDATED = {"val_set_size": 0.1, "run_val_every_n_steps": 30}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"save_every_n_train_steps": 50}, 8),
        ({"save_every_n_train_steps": None}, 1),
        ({"save_every_n_train_steps": None, "save_at_epoch_end": True}, 4),
        ({"save_every_n_train_steps": 50, "save_at_epoch_end": True}, 8),  # 100, 200, 300: twice
        ({"save_every_n_train_steps": 60, "save_at_epoch_end": True}, 9),  # 300 is due twice
        ({"save_every_n_train_steps": 150, "keep_best_n_checkpoints": 1, **VALIDATED}, 14),
        ({"save_every_n_train_steps": 150, **VALIDATED}, 3),
        # Without evaluation data the best one is found among those that are saved anyway.
        ({"save_every_n_train_steps": 150, "keep_best_n_checkpoints": 1}, 3),
        ({"save_every_n_train_steps": {"first": 10, "factor": 2, "max_interval": 100}}, 8),
    ],
)
def test_saves_of_every_kind_are_planned_once_each(keys: dict[str, Any], expected: int) -> None:
    config = RunConfig.model_validate(BASE | keys)
    assert num_saves(config, step=0, last_step=400, steps_per_epoch=100) == expected


def test_only_what_is_still_to_come_is_planned() -> None:
    config = RunConfig.model_validate(
        BASE | {"save_every_n_train_steps": 60, "save_at_epoch_end": True}
    )
    assert num_saves(config, step=240, last_step=400, steps_per_epoch=100) == 3
    # A stream has no known epochs; a long run isn't walked through.
    assert num_saves(config, step=0, last_step=400, steps_per_epoch=None) == 7
    assert num_saves(config, step=0, last_step=10**15, steps_per_epoch=100) > 10**13


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"save_every_n_train_steps": 50}, "every 50 steps"),
        (
            {"save_every_n_train_steps": 50, "keep_best_n_checkpoints": 1},
            "every 50 steps (best by train_loss)",
        ),
        ({"save_every_n_train_steps": None}, ""),
        (
            {
                "save_every_n_train_steps": {"first": 10, "factor": 2, "max_interval": 100},
                "save_every_n_seconds": 600,
                "save_at_epoch_end": True,
                "keep_best_n_checkpoints": 1,
                **VALIDATED,
            },
            "from step 10 on, ever more rarely, every 600 s, at each end of an epoch, "
            "at each new best eval_loss",
        ),
    ],
)
def test_the_start_block_says_every_time_of_a_save_and_what_the_best_is_judged_by(
    keys: dict[str, Any], words: str
) -> None:
    assert save_when(RunConfig.model_validate(BASE | keys)) == words


@pytest.mark.parametrize(
    ("value", "kept"),
    [(100, [200, 300]), ({"first": 50, "factor": 2, "max_interval": 150}, [50, 200])],
)
def test_steps_are_kept_for_good_by_an_interval_or_a_schedule(value: Any, kept: list[int]) -> None:
    config = RunConfig.model_validate(BASE | {"keep_every_n_steps": value})
    assert keep_policy(config).keep([50, 150, 200, 300]) == kept
