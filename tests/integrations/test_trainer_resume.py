"""Resumed at any step, a Trainer ends with the bits of the run that was never interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import AutoModelForCausalLM, TrainerState, set_seed

from legato.checkpoint import EverySteps
from legato.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointTornError,
)
from legato.integrations.transformers import LegatoCheckpoints
from tests.helpers import spawn, tiny
from tests.integrations.trainers import (
    NUM_STEPS,
    Stopper,
    Whole,
    assert_equal_weights,
    build_rows,
    build_trainer,
    every_step,
    only_step,
    resume,
    run_whole,
    tensors_of,
    weights,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Killed trainings run in processes with one thread each: same sums here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run_whole(tmp_path_factory.mktemp("whole") / "out")


# ---- bit for bit -------------------------------------------------------------------------------


def test_the_callback_changes_nothing_about_training(whole: Whole, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.train()
    assert_equal_weights(weights(trainer.model), whole.weights)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(3, id="mid-epoch after an evaluation"),
        pytest.param(4, id="mid-epoch"),
        pytest.param(5, id="epoch boundary"),
        pytest.param(12, id="mid-epoch after an evaluation, last epoch"),
        pytest.param(10, id="second epoch boundary"),
    ],
)
def test_a_resumed_training_ends_with_the_same_bits(
    whole: Whole, step: int, tmp_path: Path
) -> None:
    found = resume(only_step(whole.folder, step, tmp_path / "out"))
    assert_equal_weights(found, whole.weights)
    # Moments, scheduler, random states and the Trainer's own account of it, not only the weights.
    last, expected = tmp_path / f"out/step_{NUM_STEPS}", whole.folder / f"step_{NUM_STEPS}"
    assert tensors_of(last) == tensors_of(expected)
    now, then = [
        TrainerState.load_from_json(str(folder / "trainer_state.json"))
        for folder in (last, expected)
    ]
    assert (now.global_step, now.epoch) == (then.global_step, then.epoch) == (NUM_STEPS, 3.0)
    losses = [
        [(e["step"], e.get("loss"), e.get("eval_loss")) for e in s.log_history[:-1]]
        for s in (now, then)
    ]
    # The loss since the last log before the break counts the steps since the resume only.
    assert losses[0][-6:] == losses[1][-6:]


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        pytest.param(
            5,
            {
                "eval_strategy": "epoch",
                "eval_dataset": {"a": build_rows(4), "b": build_rows(6)},
            },
            id="two evaluations at an epoch boundary",
        ),
        pytest.param(
            6, {"eval_dataset": {"a": build_rows(4), "b": build_rows(6)}}, id="two evaluations"
        ),
        pytest.param(
            6,
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 10.0},
                "metric_for_best_model": "loss",
                "warmup_steps": 0,
            },
            id="scheduler that follows a metric",
        ),
        pytest.param(4, {"optim": "adafactor"}, id="adafactor"),
        pytest.param(4, {"optim": "sgd", "optim_args": "momentum=0.9"}, id="sgd with momentum"),
        pytest.param(4, {"bf16": True}, id="bf16 autocast"),
        pytest.param(4, {"lr_scheduler_type": "cosine_with_restarts"}, id="restarts"),
    ],
)
def test_other_trainings_resume_bit_for_bit_too(
    step: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    uninterrupted = run_whole(tmp_path / "whole", **changes)
    found = resume(only_step(uninterrupted.folder, step, tmp_path / "out"), **changes)
    assert_equal_weights(found, uninterrupted.weights)


def test_the_plateau_of_the_test_above_does_lower_the_rate(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"factor": 0.5, "patience": 0, "threshold": 10.0},
        metric_for_best_model="loss",
        warmup_steps=0,
        max_steps=10,
    )
    trainer.train()
    assert isinstance(trainer.lr_scheduler, ReduceLROnPlateau)
    assert trainer.optimizer.param_groups[0]["lr"] < 0.01


def build_peft_model() -> Any:
    set_seed(3)
    base = AutoModelForCausalLM.from_config(tiny.build_config())
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("step", [4, 5])
def test_an_adapter_resumes_bit_for_bit(step: int, tmp_path: Path) -> None:
    uninterrupted = run_whole(tmp_path / "whole", model=build_peft_model())
    saved = only_step(uninterrupted.folder, step, tmp_path / "out")
    assert_equal_weights(resume(saved, model=build_peft_model()), uninterrupted.weights)


def test_an_adapters_step_is_a_peft_folder(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, every_step(), model=build_peft_model(), max_steps=2)
    trainer.train()
    step = tmp_path / "step_2"
    assert not (step / "config.json").exists()
    loaded = PeftModel.from_pretrained(build_peft_model().unload(), step)
    assert_equal_weights(weights(loaded), weights(trainer.model))


# ---- interrupted -------------------------------------------------------------------------------


def test_a_training_that_another_callback_stops_goes_on_where_it_was(
    whole: Whole, tmp_path: Path
) -> None:
    build_trainer(tmp_path, LegatoCheckpoints(save=EverySteps(100)), Stopper(7, "stop")).train()
    checkpoints = every_step()
    latest = checkpoints.latest(tmp_path)
    assert latest == str(tmp_path.resolve() / "step_7")
    trainer = build_trainer(tmp_path, checkpoints)
    trainer.train(resume_from_checkpoint=latest)
    assert_equal_weights(weights(trainer.model), whole.weights)


def test_after_an_error_the_same_process_goes_on_from_the_newest_save(
    whole: Whole, tmp_path: Path
) -> None:
    checkpoints = every_step()
    trainer = build_trainer(tmp_path, checkpoints, Stopper(8, "error"))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    latest = checkpoints.latest(tmp_path)
    assert latest == str(tmp_path.resolve() / "step_7")
    again = build_trainer(tmp_path, checkpoints)
    again.train(resume_from_checkpoint=latest)
    assert_equal_weights(weights(again.model), whole.weights)


def train_until_killed(rank: int, folder: str) -> None:
    build_trainer(Path(folder), every_step(), Stopper(8, "kill")).train()


@pytest.mark.crash
def test_a_killed_training_goes_on_from_its_newest_save(whole: Whole, tmp_path: Path) -> None:
    spawn.run(train_until_killed, 1, str(tmp_path), may_die={0})
    checkpoints = every_step()
    latest = checkpoints.latest(tmp_path)
    assert latest is not None
    assert Path(latest).name in {"step_6", "step_7"}
    trainer = build_trainer(tmp_path, checkpoints)
    trainer.train(resume_from_checkpoint=latest)
    assert_equal_weights(weights(trainer.model), whole.weights)
    assert not list(tmp_path.glob(".step_*"))


# ---- which step --------------------------------------------------------------------------------


def test_a_fresh_folder_has_no_latest_step(tmp_path: Path) -> None:
    assert LegatoCheckpoints().latest(tmp_path / "absent") is None
    assert LegatoCheckpoints().latest(tmp_path) is None


def test_a_torn_step_is_passed_over(
    whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only_step(whole.folder, 4, tmp_path / "out")
    (tmp_path / "out/step_9").mkdir()
    latest = LegatoCheckpoints().latest(tmp_path / "out")
    assert latest is not None
    assert Path(latest).name == "step_4"
    assert "step 9 is skipped" in caplog.text


def test_a_training_from_the_beginning_doesnt_touch_the_steps_of_another(
    whole: Whole, tmp_path: Path
) -> None:
    only_step(whole.folder, 4, tmp_path / "out")
    with pytest.raises(CheckpointExistsError, match=r"step_4.*checkpoints\.latest") as caught:
        build_trainer(tmp_path / "out", every_step()).train()
    assert caught.value.steps == [4]  # type: ignore[attr-defined]
    build_trainer(
        tmp_path / "out", LegatoCheckpoints(save=EverySteps(2), start_over=True), max_steps=2
    ).train()
    assert len(list((tmp_path / "out").glob(".old-*/step_4/model.safetensors"))) == 1


def test_a_step_of_another_folder_is_found_by_its_path(whole: Whole, tmp_path: Path) -> None:
    step = str(only_step(whole.folder, 4, tmp_path / "old"))
    with pytest.raises(CheckpointNotFoundError, match="resume_from_checkpoint"):
        build_trainer(tmp_path / "new", every_step()).train(resume_from_checkpoint=step)
    trainer = build_trainer(tmp_path / "new", every_step(), resume_from_checkpoint=step)
    trainer.train(resume_from_checkpoint=step)
    assert_equal_weights(weights(trainer.model), whole.weights)


def test_a_step_with_the_same_number_of_another_run_isnt_taken_for_it(
    whole: Whole, tmp_path: Path
) -> None:
    other = run_whole(tmp_path / "other", max_steps=4, seed=8)
    step = str(only_step(whole.folder, 4, tmp_path / "old"))
    with pytest.raises(CheckpointNotFoundError):
        build_trainer(other.folder, every_step()).train(resume_from_checkpoint=step)


def test_a_trainers_own_checkpoint_goes_on_as_steps_of_legato(whole: Whole, tmp_path: Path) -> None:
    own = build_trainer(tmp_path / "own", max_steps=4, save_strategy="steps", save_steps=4)
    own.train()
    trainer = build_trainer(tmp_path / "out", LegatoCheckpoints(save=EverySteps(3)))
    trainer.train(resume_from_checkpoint=str(tmp_path / "own/checkpoint-4"))
    steps = {path.name for path in (tmp_path / "out").glob("step_*")}
    assert steps == {"step_6", "step_9", "step_12", "step_15"}


def test_a_checkpoint_that_a_trainer_without_legato_wrote_after_one_of_legatos(
    whole: Whole, tmp_path: Path
) -> None:
    """It hands on which step of Legato's it came from, and mustn't be taken for that one."""
    step = only_step(whole.folder, 4, tmp_path / "old")
    without = build_trainer(tmp_path / "own", max_steps=6, save_strategy="steps", save_steps=6)
    without.train(resume_from_checkpoint=str(step))
    trainer = build_trainer(tmp_path / "out", LegatoCheckpoints(save=EverySteps(9)))
    trainer.train(resume_from_checkpoint=str(tmp_path / "own/checkpoint-6"))
    assert {path.name for path in (tmp_path / "out").glob("step_*")} == {"step_9", "step_15"}


def test_a_finished_training_has_nothing_left_to_do(whole: Whole, tmp_path: Path) -> None:
    step = only_step(whole.folder, NUM_STEPS, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in step.rglob("*")}
    assert_equal_weights(resume(step), whole.weights)
    assert {path: path.stat().st_mtime_ns for path in step.rglob("*")} == before


def test_another_model_is_refused_by_name(whole: Whole, tmp_path: Path) -> None:
    step = only_step(whole.folder, 4, tmp_path / "out")
    config = tiny.build_config(num_hidden_layers=3)
    trainer = build_trainer(
        tmp_path / "out", every_step(), model=AutoModelForCausalLM.from_config(config)
    )
    with pytest.raises(CheckpointMismatchError, match=r"model\.layers\.2\."):
        trainer.train(resume_from_checkpoint=str(step))


def open_locks() -> list[str]:
    """Lock files that this process holds open."""
    links = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    return [path for path in map(str, map(os.path.realpath, links)) if path.endswith(".lock")]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are read from /proc")
def test_a_training_that_is_refused_or_over_gives_the_folder_back(
    whole: Whole, tmp_path: Path
) -> None:
    step = only_step(whole.folder, 4, tmp_path / "out")
    config = tiny.build_config(num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config)
    trainer = build_trainer(tmp_path / "out", every_step(), model=model)
    with pytest.raises(CheckpointMismatchError):
        trainer.train(resume_from_checkpoint=str(step))
    assert open_locks() == []
    resume(step)
    assert open_locks() == []


def test_a_damaged_step_is_refused_when_bytes_are_verified(whole: Whole, tmp_path: Path) -> None:
    step = only_step(whole.folder, 4, tmp_path / "out")
    file = step / "state/optimizer-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checkpoints = LegatoCheckpoints(save=EverySteps(1), verify_on_load=True)
    with pytest.raises(CheckpointTornError, match="optimizer-00001"):
        build_trainer(tmp_path / "out", checkpoints).train(resume_from_checkpoint=str(step))


def test_a_step_without_state_is_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    build_trainer(tmp_path, every_step(), save_only_model=True, max_steps=4).train()
    step = tmp_path / "step_4"
    assert not (step / "state").exists()
    with pytest.raises(CheckpointMismatchError, match="allow_missing"):
        resume(step, save_only_model=True)
    checkpoints = LegatoCheckpoints(
        save=EverySteps(1), allow_missing=("optimizer", "rng", "scheduler")
    )
    trainer = build_trainer(tmp_path, checkpoints, max_steps=6)
    trainer.train(resume_from_checkpoint=str(step))
    assert (tmp_path / "step_6/state").exists()
