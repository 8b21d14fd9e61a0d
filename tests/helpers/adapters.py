"""An adapter as training leaves it: no value is at its start, every layer matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from legato.models.load import load_model
from legato.models.lora import attach_lora
from legato.models.names import named_weights

FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "few": {"lora_target_modules": ["q_proj", "down_proj"]},
    "whole": {"lora_modules_to_save": ["embed_tokens", "norm"]},
    "head": {"lora_modules_to_save": ["lm_head"]},
}


def write_adapter(
    base: Path,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.1,
    **options: Any,
) -> Path:
    """Write an adapter folder for ``base``; returns ``folder``."""
    model = load_model(base, dtype=dtype)
    adapter = attach_lora(model, lora_rank=4, lora_alpha=8, base_name=base, **options)
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, tensor in named_weights(adapter.model, trainable_only=True).items():
        change = torch.randn(tensor.shape, generator=random) * noise
        tensors[adapter.keys[name]] = (tensor.detach() + change).to(dtype)
    tensors |= {key: tensors[adapter.keys[name]].clone() for key, name in adapter.twins.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for name, content in adapter.files.items():
        (folder / name).write_bytes(content)
    return folder
