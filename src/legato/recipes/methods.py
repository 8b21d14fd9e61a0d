"""The methods: which weights train, and what a step folder is made of.

This screen is all that differs between recipes; data, optimizer, loop and checkpoints are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from legato.config.schema import RunConfig
from legato.models.lora import attach_lora
from legato.models.saved_files import model_files

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
    """Full fine-tuning: every weight trains, a step folder is a whole model.

    Args:
        model: As it was loaded, with or without its weights.
        config: The run; nothing of it matters here.

    Returns:
        The model itself.
    """
    return Trained(module=model, kind="model", keys=None, files=model_files(model))


def lora(model: PreTrainedModel, config: RunConfig) -> Trained:
    """LoRA: the base is frozen, a step folder is a PEFT adapter.

    Args:
        model: The base, with or without its weights; it is taken over and wrapped in place.
        config: The run; its ``lora_``, ``use_`` and ``quantize_base`` keys say which adapter.

    Returns:
        The base with its adapter, which alone trains.

    Raises:
        ConfigError: An adapter that this base can't have.

    Source:
        Hu et al. 2021, arXiv:2106.09685; see :func:`~legato.models.lora.attach_lora`.
    """
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
