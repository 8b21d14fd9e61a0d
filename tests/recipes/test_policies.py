"""The keys that say when a run saves and what it keeps: from the YAML to the folders on disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.checkpoint import (
    EpochEnd,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSchedule,
    LogSchedule,
    NewBest,
    OnSignal,
)
from legato.checkpoint import saver as saver_module
from legato.checkpoint.policy import KeepPolicy, SavePolicy
from legato.config.schema import RunConfig
from legato.recipes.policies import keep_policy, metric_of_best, save_policy, saves_new_best
from legato.report.metrics import read_events
from legato.storage import LocalStorage
from tests.helpers.runs import legato, steps_in, write_config

FULL = "full_finetune_single_device"
BASE: dict[str, Any] = {
    "recipe": FULL,
    "model": "m",
    "output_dir": "out",
    "datasets": [{"path": "rows.jsonl"}],
    "optimizer": {"lr": 0.1},
}
GROWING: dict[str, Any] = {"first": 1, "factor": 2, "max_interval": 4}
SCHEDULE = LogSchedule(1, factor=2, max_interval=4)
ALONE: dict[str, Any] = {"save_every_n_train_steps": None}
VALIDATED: dict[str, Any] = {"val_set_size": 0.1}


@pytest.mark.parametrize(
    ("keys", "save"),
    [
        ({}, EverySteps(500) | OnSignal()),
        (ALONE, OnSignal()),
        ({"save_every_n_train_steps": 7}, EverySteps(7) | OnSignal()),
        ({"save_every_n_train_steps": GROWING}, SCHEDULE | OnSignal()),
        (ALONE | {"save_every_n_seconds": 2.5}, OnSignal() | EverySeconds(2.5)),
        (ALONE | {"save_at_epoch_end": True}, OnSignal() | EpochEnd()),
        (ALONE | {"keep_best_n_checkpoints": 2}, OnSignal() | NewBest()),
        (
            {
                "save_every_n_train_steps": 7,
                "save_every_n_seconds": 60,
                "save_at_epoch_end": True,
                "keep_best_n_checkpoints": 1,
            },
            EverySteps(7) | OnSignal() | EverySeconds(60) | EpochEnd() | NewBest(),
        ),
    ],
)
def test_the_save_keys_become_the_policy_they_name(keys: dict[str, Any], save: SavePolicy) -> None:
    assert save_policy(RunConfig.model_validate(BASE | keys)) == save


@pytest.mark.parametrize(
    ("keys", "keep"),
    [
        ({}, KeepAll()),
        ({"keep_last_n_checkpoints": 2}, KeepLast(2)),
        ({"keep_every_n_steps": 4}, KeepEvery(4)),
        ({"keep_every_n_steps": GROWING}, KeepSchedule(SCHEDULE)),
        ({"keep_best_n_checkpoints": 2}, KeepBest(2, "train_loss")),
        ({"keep_best_n_checkpoints": 2} | VALIDATED, KeepBest(2, "eval_loss")),
        (
            {"keep_best_n_checkpoints": 2, "metric_for_best_model": "train_loss"} | VALIDATED,
            KeepBest(2, "train_loss"),
        ),
        (
            {
                "keep_last_n_checkpoints": 3,
                "keep_best_n_checkpoints": 1,
                "greater_is_better": True,
                "keep_every_n_steps": 4,
            },
            KeepLast(3) | KeepBest(1, "train_loss", greater_is_better=True) | KeepEvery(4),
        ),
    ],
)
def test_the_keep_keys_become_the_policy_they_name(keys: dict[str, Any], keep: KeepPolicy) -> None:
    assert keep_policy(RunConfig.model_validate(BASE | keys)) == keep


@pytest.mark.parametrize(
    ("keys", "metric", "saves"),
    [
        ({}, "train_loss", False),
        (VALIDATED, "eval_loss", False),
        ({"keep_best_n_checkpoints": 1}, "train_loss", False),
        ({"keep_best_n_checkpoints": 1} | VALIDATED, "eval_loss", True),
        (
            {"keep_best_n_checkpoints": 1, "metric_for_best_model": "train_loss"} | VALIDATED,
            "train_loss",
            False,
        ),
    ],
)
def test_only_an_evaluation_brings_a_save_of_its_own(
    keys: dict[str, Any], metric: str, saves: bool
) -> None:
    config = RunConfig.model_validate(BASE | keys)
    assert (metric_of_best(config), saves_new_best(config)) == (metric, saves)


@pytest.fixture
def configure(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Twelve steps in four epochs: the config of a run."""

    def write(**keys: Any) -> Path:
        return write_config(tmp_path, model=tiny_model_dir, recipe=FULL, epochs=4, **keys)

    return write


def events(output_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(output_dir / "metrics.jsonl") if e["event"] == name]


def reasons(output_dir: Path) -> dict[int, str]:
    """Step -> why it was saved, as metrics.jsonl has it."""
    return {event["step"]: event["reason"] for event in events(output_dir, "save")}


FALLING = {"run_val_every_n_steps": {"first": 2, "factor": 2, "max_interval": 4}}  # 2, 4, 8, 12
EVERY_STEP = dict.fromkeys(range(1, 13), "time")


@pytest.mark.parametrize(
    ("keys", "saved", "on_disk", "best"),
    [
        (
            {"save_every_n_train_steps": GROWING},
            dict.fromkeys([1, 2, 4, 8, 12], "schedule"),
            [1, 2, 4, 8, 12],
            None,
        ),
        (
            ALONE | {"save_at_epoch_end": True},
            dict.fromkeys([3, 6, 9, 12], "epoch"),
            [3, 6, 9, 12],
            None,
        ),
        (ALONE | {"save_every_n_seconds": 1e-6}, EVERY_STEP, list(range(1, 13)), None),
        (ALONE | {"save_every_n_seconds": 3600}, {12: "final"}, [12], None),
        (
            ALONE | FALLING | {"keep_best_n_checkpoints": 2},
            dict.fromkeys([2, 4, 8, 12], "best"),
            [8, 12],
            12,
        ),
        (
            ALONE | FALLING | {"keep_best_n_checkpoints": 1, "greater_is_better": True},
            {2: "best", 12: "final"},
            [2, 12],
            2,
        ),
        (
            {"save_every_n_train_steps": 3, "keep_best_n_checkpoints": 1},
            dict.fromkeys([3, 6, 9, 12], "interval"),
            [12],
            12,
        ),
        (
            {
                "save_every_n_train_steps": 3,
                "keep_best_n_checkpoints": 1,
                "greater_is_better": True,
            },
            dict.fromkeys([3, 6, 9, 12], "interval"),
            [3, 12],
            3,
        ),
        (
            {"save_every_n_train_steps": 2, "keep_every_n_steps": 4},
            dict.fromkeys([2, 4, 6, 8, 10, 12], "interval"),
            [4, 8, 12],
            None,
        ),
        (
            {"save_every_n_train_steps": 2, "keep_every_n_steps": GROWING},
            dict.fromkeys([2, 4, 6, 8, 10, 12], "interval"),
            [2, 4, 8, 12],
            None,
        ),
        (
            {"save_every_n_train_steps": 5, "keep_last_n_checkpoints": 1, "staging": "blocking"},
            {5: "interval", 10: "interval", 12: "final"},
            [12],
            None,
        ),
    ],
)
def test_the_steps_that_the_keys_ask_for_are_saved_and_kept(
    tmp_path: Path,
    configure: Callable[..., Path],
    keys: dict[str, Any],
    saved: dict[int, str],
    on_disk: list[int],
    best: int | None,
) -> None:
    evaluated = {"eval_datasets": [{"path": str(tmp_path / "orders.jsonl")}]}
    config = configure(**keys, **(evaluated if "run_val_every_n_steps" in keys else {}))
    assert legato("run", "--config", config) == 0
    out = tmp_path / "out"
    assert reasons(out) == saved
    assert steps_in(out) == on_disk
    assert (out / "latest").resolve().name == "step_12"
    link = out / "best"
    assert (link.resolve().name if link.is_symlink() else None) == (best and f"step_{best}")
    # The literals above hold for losses that fall.
    measured = [event["eval_loss"] for event in events(out, "eval")]
    assert measured == sorted(measured, reverse=True)


def test_evaluation_and_log_lines_follow_a_schedule(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    config = configure(
        eval_datasets=[{"path": str(tmp_path / "orders.jsonl")}],
        run_val_every_n_steps={"first": 2, "factor": 2, "max_interval": 3},
        log_every_n_steps=GROWING,
        enable_async_checkpointing=False,
        save_every_n_train_steps=4,
    )
    assert legato("run", "--config", config, "max_steps=11") == 0
    out = tmp_path / "out"
    assert [event["step"] for event in events(out, "eval")] == [2, 4, 7, 10, 11]
    assert [event["step"] for event in events(out, "step")] == [1, 2, 4, 8, 11]
    # Not in the background: training waited until each was on disk.
    saves = events(out, "save")
    assert [save["step"] for save in saves] == [4, 8, 11]
    assert all(save["blocked_seconds"] >= save["committed_seconds"] > 0 for save in saves)


def test_what_is_pruned_is_moved_and_older_steps_lose_their_state(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    config = configure(
        save_every_n_train_steps=3,
        keep_last_n_checkpoints=3,
        keep_last_n_states=1,
        prune="move",
    )
    assert legato("run", "--config", config) == 0
    out = tmp_path / "out"
    assert steps_in(out) == [6, 9, 12]
    assert [path.name for path in (out / ".pruned").iterdir()] == ["step_3"]
    assert (out / ".pruned" / "step_3" / "model.safetensors").is_file()
    assert [step for step in (6, 9, 12) if (out / f"step_{step}" / "state").exists()] == [12]


@pytest.mark.parametrize(
    ("on_save_error", "exit_code", "on_disk", "ended"),
    [("continue", 0, [4, 8, 12], ["end"]), ("raise", 3, [4], [])],
)
def test_a_failed_save_is_tried_again_or_ends_the_run(
    tmp_path: Path,
    configure: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    on_save_error: str,
    exit_code: int,
    on_disk: list[int],
    ended: list[str],
) -> None:
    """The disk is full once, when step 8 gets its name."""
    monkeypatch.setattr(saver_module, "RETRY_SECONDS", 0.0)
    rename, failures = LocalStorage.rename, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def rename_or_fail(self: LocalStorage, source: str, target: str) -> None:
        if target.endswith("step_8") and failures:
            raise failures.pop()
        rename(self, source, target)

    monkeypatch.setattr(LocalStorage, "rename", rename_or_fail)
    config = configure(save_every_n_train_steps=4, on_save_error=on_save_error)
    assert legato("run", "--config", config) == exit_code
    out = tmp_path / "out"
    assert steps_in(out) == on_disk
    assert list(reasons(out)) == on_disk
    (failed,) = events(out, "save_failed")
    assert (failed["step"], failed["will_retry"]) == (8, on_save_error == "continue")
    assert "No space left on device" in failed["error"]
    assert [e["event"] for e in read_events(out / "metrics.jsonl") if e["event"] == "end"] == ended


def test_the_best_value_of_another_metric_keeps_no_new_best_from_being_saved(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=FULL, keep_best_n_checkpoints=1)
    run = ["run", "--config", config, "epochs=2"]
    assert legato(*run, "stop_after_step=4", "save_every_n_train_steps=1") == 0
    trainer = json.loads((tmp_path / "out/step_4/state/trainer.json").read_text())
    (tmp_path / "hard.jsonl").write_text('{"prompt": "~", "completion": "{}|^`@#%&*=<>[]"}\n')
    watched = [f"eval_datasets=[{{path: {tmp_path / 'hard.jsonl'}}}]", "run_val_every_n_steps=1"]
    assert legato(*run, *watched, "save_every_n_train_steps=null") == 0
    events = read_events(tmp_path / "out" / "metrics.jsonl")
    evaluated = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval"}
    # Worse than the best of before, which is of another metric.
    assert evaluated[5] > trainer["parts"]["trainer"]["best"]["value"]
    assert "step_5 saved" in capsys.readouterr().err
