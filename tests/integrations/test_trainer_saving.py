"""What a Trainer with Legato's callback writes, and when."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback

from legato.checkpoint import (
    EpochEnd,
    EverySteps,
    KeepBest,
    KeepLast,
    NewBest,
)
from legato.errors import CheckpointWriteError
from legato.integrations.transformers import LegatoCheckpoints
from tests.integrations.trainers import (
    NUM_STEPS,
    assert_equal_weights,
    build_rows,
    build_trainer,
    weights,
)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def manifest(step: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((step / "manifest.json").read_text())
    return content


def train(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    trainer = build_trainer(folder, *callbacks, **changes)
    trainer.train()
    assert not list(folder.glob("checkpoint-*"))
    return trainer


# ---- what ----------------------------------------------------------------------------------------


def test_a_step_is_a_hugging_face_folder_without_a_pickle(tmp_path: Path) -> None:
    trainer = train(tmp_path, LegatoCheckpoints(save=EverySteps(3)), max_steps=9)
    step = tmp_path / "step_9"
    loaded = AutoModelForCausalLM.from_pretrained(step)
    assert_equal_weights(weights(loaded), weights(trainer.model))
    assert loaded.config.use_cache is True
    text = AutoTokenizer.from_pretrained(step).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jinja"}
    for file in files:
        # A zip, as torch.save writes, or the first opcode of a pickle.
        assert file.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"), file


def test_every_file_of_a_step_is_in_its_manifest(tmp_path: Path) -> None:
    train(tmp_path, LegatoCheckpoints(save=EverySteps(3)), max_steps=3)
    step = tmp_path / "step_3"
    there = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert "trainer_state.json" in there
    assert set(manifest(step)["files"]) == there - {"manifest.json"}


def test_moments_are_those_of_the_optimizer_by_the_models_names(tmp_path: Path) -> None:
    trainer = train(tmp_path, LegatoCheckpoints(save=EverySteps(4)), max_steps=4)
    state = load_file(tmp_path / "step_4/state/optimizer-00001-of-00001.safetensors")
    assert trainer.optimizer is not None
    for name, parameter in trainer.model.named_parameters():
        for moment, value in trainer.optimizer.state[parameter].items():
            assert torch.equal(state[f"{moment}/{name}"], value), name


def test_the_arguments_lie_in_a_step_as_json(tmp_path: Path) -> None:
    train(tmp_path, LegatoCheckpoints(save=EverySteps(2)), max_steps=2, hub_token="secret")
    content = (tmp_path / "step_2/training_args.json").read_text()
    assert json.loads(content)["learning_rate"] == 0.01
    assert "secret" not in content


def test_what_was_logged_at_a_step_is_in_its_manifest(tmp_path: Path) -> None:
    checkpoints = LegatoCheckpoints(save=EverySteps(6))
    trainer = train(tmp_path, checkpoints, max_steps=8)
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}
    losses = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    metrics = manifest(tmp_path / "step_6")["metrics"]
    assert metrics["eval_loss"] == logged[6]["eval_loss"]
    assert metrics["loss"] == losses[6]["loss"]
    stored = json.loads((tmp_path / "step_6/trainer_state.json").read_text())
    assert {entry["step"] for entry in stored["log_history"]} == {2, 3, 4, 6}


# ---- when ----------------------------------------------------------------------------------------


def test_the_trainers_own_schedule_is_followed(tmp_path: Path) -> None:
    train(tmp_path, LegatoCheckpoints(), save_strategy="steps", save_steps=4)
    assert steps(tmp_path) == [4, 8, 12, 15]
    assert manifest(tmp_path / "step_4")["reason"] == "interval"
    assert manifest(tmp_path / "step_15")["reason"] == "final"


def test_the_trainers_save_total_limit_is_followed(tmp_path: Path) -> None:
    train(tmp_path, LegatoCheckpoints(), save_strategy="steps", save_steps=0.2, save_total_limit=2)
    assert steps(tmp_path) == [12, 15]
    assert (tmp_path / "latest").resolve().name == "step_15"


@pytest.mark.parametrize(
    ("checkpoints", "strategy"),
    [(LegatoCheckpoints(), "epoch"), (LegatoCheckpoints(save=EpochEnd()), "no")],
    ids=["the Trainer's", "Legato's"],
)
def test_the_last_step_of_each_epoch_is_saved(
    checkpoints: LegatoCheckpoints, strategy: str, tmp_path: Path
) -> None:
    train(tmp_path, checkpoints, save_strategy=strategy)
    assert steps(tmp_path) == [5, 10, 15]
    assert manifest(tmp_path / "step_5")["reason"] == "epoch"


def test_a_new_best_is_saved_when_it_is_found(tmp_path: Path) -> None:
    trainer = train(
        tmp_path,
        LegatoCheckpoints(save=NewBest()),
        metric_for_best_model="loss",
        greater_is_better=False,
        eval_steps=1,
        learning_rate=0.2,
    )
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    before = {step: [losses[s] for s in losses if s < step] for step in losses}
    found = [step for step, loss in losses.items() if loss < min(before[step], default=9e9)]
    assert 1 < len(found) < NUM_STEPS
    assert steps(tmp_path) == sorted({*found, NUM_STEPS})
    assert (tmp_path / "best").resolve().name == f"step_{found[-1]}"
    stored = json.loads((tmp_path / f"step_{found[-1]}/trainer_state.json").read_text())
    assert stored["best_metric"] == losses[found[-1]]


def test_the_best_and_the_last_step_are_kept(tmp_path: Path) -> None:
    # The highest loss, since the lowest is the last one.
    keep = KeepLast(1) | KeepBest(1, greater_is_better=True)
    checkpoints = LegatoCheckpoints(save=EverySteps(3), keep=keep)
    trainer = train(tmp_path, checkpoints, learning_rate=0.2)
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = max(losses, key=lambda step: losses[step])
    assert best < NUM_STEPS
    assert steps(tmp_path) == [best, NUM_STEPS]


class Asking(TrainerCallback):
    """Wants one step saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = True


def test_a_step_that_another_callback_asks_for_is_saved(tmp_path: Path) -> None:
    train(tmp_path, Asking(5), LegatoCheckpoints(save=EverySteps(3)), max_steps=8)
    assert steps(tmp_path) == [3, 5, 6, 8]
    assert manifest(tmp_path / "step_5")["reason"] == "asked"


def test_a_callback_behind_legatos_is_told_to_come_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_trainer(tmp_path, LegatoCheckpoints(save=EverySteps(3)), Asking(1), max_steps=4)
    trainer.train()
    assert "Make LegatoCheckpoints the last callback" in caplog.text
    assert steps(tmp_path) == [3, 4]


def test_figures_of_every_save_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = LegatoCheckpoints(save=EverySteps(2))
    with caplog.at_level(logging.INFO, logger="legato"):
        train(tmp_path, checkpoints, max_steps=7)
    assert [(each.step, each.reason) for each in checkpoints.saves] == [
        (2, "interval"),
        (4, "interval"),
        (6, "interval"),
        (7, "final"),
    ]
    assert all(each.error is None and each.written_bytes > 0 for each in checkpoints.saves)
    assert "step_7 is complete" in caplog.text


def test_a_step_holds_the_weights_of_its_time_however_fast_training_goes_on(
    tmp_path: Path,
) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Remember(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = weights(kwargs["model"])

    train(tmp_path, Remember(), LegatoCheckpoints(save=EverySteps(1)))
    assert steps(tmp_path) == list(range(1, 16))
    for step, expected in seen.items():
        stored = load_file(tmp_path / f"step_{step}/model.safetensors")
        assert {"lm_head.weight"} == expected.keys() - stored.keys()
        for name, value in stored.items():
            assert torch.equal(value, expected[name]), (step, name)


# ---- going wrong ---------------------------------------------------------------------------------


def test_a_failed_save_ends_training_only_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device")

    def refuse(*args: Any) -> None:
        raise full

    monkeypatch.setattr("legato.storage.LocalStorage.create_file", refuse)
    checkpoints = LegatoCheckpoints(
        save=EverySteps(2), on_save_error="raise", final_save_patience_seconds=0.0
    )
    with pytest.raises(CheckpointWriteError, match="No space left"):
        build_trainer(tmp_path / "raise", checkpoints, max_steps=6).train()
    checkpoints = LegatoCheckpoints(save=EverySteps(2), final_save_patience_seconds=0.0)
    trainer = build_trainer(tmp_path / "continue", checkpoints, max_steps=6)
    with pytest.raises(CheckpointWriteError, match="No space left"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert steps(tmp_path / "continue") == []


def test_a_model_of_plain_torch_is_saved_too(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(256, 8)
            self.head = torch.nn.Linear(8, 256)

        def forward(
            self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor
        ) -> dict[str, Any]:
            logits = self.head(self.embed(input_ids))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    trainer = train(
        tmp_path,
        LegatoCheckpoints(save=EverySteps(2)),
        model=Plain(),
        max_steps=4,
        eval_dataset=build_rows(4),
    )
    stored = load_file(tmp_path / "step_4/model.safetensors")
    assert_equal_weights(stored, weights(trainer.model))
    assert not (tmp_path / "step_4/config.json").exists()
