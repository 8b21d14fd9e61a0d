"""Runs through the real command line, in this process, and what they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from legato.cli.main import main
from legato.report.metrics import read_events
from tests.helpers import tiny

RECIPES = ("full_finetune_single_device", "lora_finetune_single_device")

# What makes a resume hard: dropout, accumulation, a rate that moves, a short last step.
HARD: dict[str, Any] = {
    "dtype": "fp32",
    "device": "cpu",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_seq_len": 256,
    "optimizer": {"name": "adamw", "lr": 5e-3, "weight_decay": 0.01},
    "lr_scheduler": {"name": "cosine", "num_warmup_steps": 1},
    "seed": 3,
}


def write_config(folder: Path, *, model: Path, recipe: str, **changes: Any) -> Path:
    """A config of ``recipe`` on 10 rows: 3 steps an epoch, the last one short."""
    data = tiny.write_orders(folder / "orders.jsonl", num_rows=10)
    values: dict[str, Any] = {
        "recipe": recipe,
        "model": str(model),
        "datasets": [{"path": str(data), "type": "prompt_completion"}],
        "output_dir": str(folder / "out"),
        **HARD,
    }
    if recipe.startswith("lora"):
        values |= {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    values |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def legato(*arguments: object) -> int:
    """The command line, in this process; returns its exit code."""
    return main([str(argument) for argument in arguments])


def steps_in(output_dir: Path) -> list[int]:
    """The step folders' numbers."""
    return sorted(int(path.name.removeprefix("step_")) for path in output_dir.glob("step_*"))


def losses(output_dir: Path) -> dict[int, float]:
    """Step -> loss, as metrics.jsonl has them; a later line of a step replaces an earlier one."""
    events = read_events(output_dir / "metrics.jsonl")
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def tensors(step_folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a step folder, the optimizer's too, read by the safetensors library."""
    files = sorted(step_folder.rglob("*.safetensors"))
    assert files, f"no tensors in {step_folder}"
    return {f"{path.stem[:9]}:{k}": t for path in files for k, t in load_file(path).items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Both step folders hold the same tensors, bit for bit."""
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different, f"{len(different)} of {len(first)} differ: {different[:5]}"
