"""What a resumed run says of its learning rate."""

from __future__ import annotations

from typing import Any

import pytest

from legato.config.schema import RunConfig
from legato.recipes.beginning import compare_rates, say_new_rate
from legato.train.state import TrainState


def build(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "recipe": "full_finetune_single_device",
        "model": "m",
        "output_dir": "out",
        "datasets": [{"path": "a"}],
        "optimizer": {"lr": 2e-5},
        "lr_scheduler": {"num_warmup_steps": 50},
    }
    return RunConfig(**(values | changes))


@pytest.mark.parametrize(
    ("new_limit", "last_step", "told"),
    [
        (3, 4, "lr at step 5: was 5, now 3"),
        (7, 9, "lr at step 5: 5, as before; from step 8 on another"),
        (7, 7, "lr at step 5: 5, as before; the same up to step 7, the last"),
    ],
)
def test_two_curves_are_compared_from_the_next_step_to_the_last(
    new_limit: int, last_step: int, told: str
) -> None:
    def old(step: int) -> float:
        return float(step)

    def new(step: int) -> float:
        return float(min(step, new_limit))

    assert compare_rates(old, new, step=5, last_step=last_step) == told


@pytest.mark.parametrize(
    ("changes", "total_steps", "told"),
    [
        ({}, 100, None),
        ({"optimizer": {"lr": 2e-5, "weight_decay": 0.1}}, 100, None),
        ({}, 120, "(100 steps before, 120 now): lr at step 5: 1.6e-06, as before; from step 52 on"),
        ({"optimizer": {"lr": 4e-5}}, 100, "lr at step 5: was 1.6e-06, now 3.2e-06"),
        (
            {"lr_scheduler": {"num_warmup_steps": 50, "name": "linear"}},
            *(60, "(100 steps before, 60 now): lr at step 5: 1.6e-06, as before; from step 52 on"),
        ),
        (
            {"lr_scheduler": {"num_warmup_steps": 50, "num_training_steps": 100}},
            *(40, "(100 steps before, 40 now): lr at step 5: 1.6e-06, as before; the same up to"),
        ),
    ],
)
def test_whatever_changes_length_or_schedule_is_said_and_nothing_else(
    changes: dict[str, Any],
    total_steps: int,
    told: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = {"config": build().model_dump(mode="json"), "total_steps": 100}
    state = TrainState(step=4, facts=facts)
    say_new_rate(state, build(**changes), total_steps=total_steps)
    if told is None:
        assert caplog.text == ""
    else:
        assert told in caplog.text
