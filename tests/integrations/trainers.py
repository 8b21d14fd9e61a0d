"""Real Trainers on a tiny model: dropout, accumulation, a cosine, an evaluation."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from legato.checkpoint import EverySteps
from legato.integrations.transformers import LegatoCheckpoints
from tests.helpers import tiny

# 20 rows, 2 a micro-batch, 2 micro-batches a step: 5 steps an epoch, 15 in all.
NUM_ROWS, STEPS_PER_EPOCH, NUM_STEPS = 20, 5, 15


def build_rows(num_rows: int = NUM_ROWS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (num_rows, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def build_args(output_dir: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "logging_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(**(values | changes))


def build_trainer(
    output_dir: Path,
    *callbacks: TrainerCallback,
    model: Any = None,
    eval_dataset: Any = None,
    **changes: Any,
) -> Trainer:
    if model is None:
        set_seed(3)
        model = AutoModelForCausalLM.from_config(tiny.build_config(attention_dropout=0.1))
    return Trainer(
        model=model,
        args=build_args(output_dir, **changes),
        train_dataset=build_rows(),
        eval_dataset=build_rows(4) if eval_dataset is None else eval_dataset,
        processing_class=tiny.build_tokenizer(),
        callbacks=list(callbacks),
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def tensors_of(step: Path) -> dict[str, bytes]:
    """All tensors of a step folder, weights and state, as bytes."""
    found = {}
    for file in sorted(step.rglob("*.safetensors")):
        for key, value in load_file(file).items():
            raw = value.contiguous().view(-1).view(torch.uint8)
            found[f"{file.name}/{key}"] = raw.numpy().tobytes()
    return found


def only_step(source: Path, step: int, target: Path) -> Path:
    """A copy of a run as it was when ``step`` was its newest; returns the step's folder."""
    target.mkdir()
    shutil.copytree(source / f"step_{step}", target / f"step_{step}")
    return target / f"step_{step}"


@dataclass
class Whole:
    """A training that nobody interrupted, saved at every step."""

    folder: Path
    weights: dict[str, torch.Tensor]


def every_step() -> LegatoCheckpoints:
    return LegatoCheckpoints(save=EverySteps(1))


def run_whole(folder: Path, *, model: Any = None, **changes: Any) -> Whole:
    trainer = build_trainer(folder, every_step(), model=model, **changes)
    trainer.train()
    return Whole(folder, weights(trainer.model))


def resume(step: Path, *, model: Any = None, **changes: Any) -> dict[str, torch.Tensor]:
    trainer = build_trainer(step.parent, every_step(), model=model, **changes)
    trainer.train(resume_from_checkpoint=str(step))
    return weights(trainer.model)


class Stopper(TrainerCallback):
    """Ends a training after a step: as asked, by an error, or by a kill."""

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < self.step:
            return
        if self.how == "stop":
            control.should_training_stop = True
        elif self.how == "error":
            raise RuntimeError("out of memory")
        else:
            os.kill(os.getpid(), signal.SIGKILL)
