"""HF Trainer's side of bench/resume.py: a plain script, resuming when it finds a checkpoint.

Run by bench/resume.py only. The rows are tokenized already.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class StepFile(TrainerCallback):
    """Appends to ``steps.jsonl`` what Legato has in metrics.jsonl: the step's start, end, loss."""

    def __init__(self, path: Path, *, stop_after: int | None) -> None:
        self._path = path
        self._stop_after = stop_after
        self._began = self._time = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.time()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        self._time = time.time()
        if state.global_step == self._stop_after:
            control.should_save = control.should_training_stop = True

    def on_log(self, _: Any, state: Any, __: Any, logs: Any, **___: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            event = {"event": "step", "step": state.global_step, "loss": float(logs["loss"])}
            event |= {"time": self._time, "step_seconds": self._time - self._began}
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")


def main() -> None:
    values = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(values["folder"])
    folder.mkdir(exist_ok=True)
    checkpoint = get_last_checkpoint(folder)
    # fp32 weights are the masters; autocast computes in bf16.
    model = AutoModelForCausalLM.from_pretrained(values["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(values["model"])
    trainer = Trainer(
        model=model,
        train_dataset=Dataset.load_from_disk(values["rows"]),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        callbacks=[StepFile(folder / "steps.jsonl", stop_after=values["stop_after"])],
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=values["batch_size"],
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            learning_rate=values["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=values["seed"],
        ),
    )
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
