"""The methods: which weights train, and what a step folder is made of.

This screen is all that differs between recipes; data, optimizer, loop and checkpoints are the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from legato.config.schema import RunConfig
from legato.models.lora import attach_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Trained:
    """What a method makes of a loaded model.

    Attributes:
        module: The module to train; exactly its trainable parameters train.
        kind: ``model`` (a step folder is the whole model) or ``adapter``.
        keys: Canonical name of each trained tensor -> its key in the file; None: the names.
        files: Further files of a step folder, by name.
        twins: Further key in the file -> the trained tensor that it repeats.
    """

    module: Any
    kind: Literal["model", "adapter"]
    keys: Mapping[str, str] | None
    files: Mapping[str, bytes]
    twins: Mapping[str, str] = field(default_factory=dict)


def full(model: PreTrainedModel, config: RunConfig) -> Trained:
    """Full fine-tuning: every weight trains, a step folder is a whole model."""
    return Trained(module=model, kind="model", keys=None, files=model_files(model))


def lora(model: PreTrainedModel, config: RunConfig) -> Trained:
    """LoRA: the base is frozen, a step folder is a PEFT adapter."""
    adapter = attach_lora(
        model,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=config.lora_target_modules,
        lora_modules_to_save=config.lora_modules_to_save,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        base_name=config.model,
        quantize_base=config.quantize_base,
        seed=config.seed,
    )
    return Trained(
        module=adapter.model,
        kind="adapter",
        keys=adapter.keys,
        files=adapter.files,
        twins=adapter.twins,
    )


METHODS: Mapping[str, Callable[[PreTrainedModel, RunConfig], Trained]] = {
    "full_finetune_single_device": full,
    "lora_finetune_single_device": lora,
    "full_finetune_distributed": full,
    "lora_finetune_distributed": lora,
}


def model_files(model: PreTrainedModel) -> dict[str, bytes]:
    """config.json and generation_config.json, as transformers writes them for this model."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        files = read_folder(folder)
    # Training switches the cache off in the live model; whoever loads the folder wants it on.
    config = json.loads(files["config.json"]) | {"architectures": [type(model).__name__]}
    config.pop("use_cache", None)
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return files


def read_folder(folder: str | Path) -> dict[str, bytes]:
    """The files of a flat folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
