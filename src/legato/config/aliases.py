"""Other spellings of our keys, and advice for keys that other trainers have.

Aliases are resolved within one layer (the file; the command line) before layers are merged: a
command line may use either spelling of what a file says. Both in one layer are an error.
"""

from __future__ import annotations

from typing import Any

from legato.config.problems import KeyPath, Problem, dotted
from legato.config.source import Layer, Override

ALIASES: dict[str, tuple[str, ...]] = {
    "model_name_or_path": ("model",),
    "dataset": ("datasets",),
    "max_length": ("max_seq_len",),
    "sample_packing": ("packing",),
    "per_device_train_batch_size": ("batch_size",),
    "num_train_epochs": ("epochs",),
    "learning_rate": ("optimizer", "lr"),
    "max_grad_norm": ("clip_grad_norm",),
    "lora_r": ("lora_rank",),
    "load_in_4bit": ("quantize_base",),
    "save_every_n_steps": ("save_every_n_train_steps",),
    "save_steps": ("save_every_n_train_steps",),
    "save_total_limit": ("keep_last_n_checkpoints",),
    "eval_steps": ("run_val_every_n_steps",),
    "report_to": ("loggers",),
    "torch_compile": ("compile",),
    "gradient_checkpointing": ("enable_activation_checkpointing",),
}
"""Spelling -> our key."""

TORCHTUNE_ADVICE: dict[str, str] = {
    "tokenizer": "the tokenizer comes with `model`; its max_seq_len is the key max_seq_len",
    "checkpointer": "the folder to read is `model`, the one to write is `output_dir`",
    "checkpoint_dir": "Legato's key is `model`",
    "checkpoint_files": "`model` is a folder, whose index names its files",
    "recipe_checkpoint": "Legato's key is `resume_from_checkpoint`; torchtune's state isn't read",
    "adapter_checkpoint": "Legato's key is `resume_from_checkpoint`; torchtune's state isn't read",
    "model_type": "config.json of `model` says it",
    "dataset_val": "Legato's key is `eval_datasets`",
    "loss": "Legato always uses the token-mean cross-entropy",
    "shuffle": "rows are always shuffled, in an order made from `seed`",
    "optimizer_in_bwd": "Legato's key is `optimizer_in_backward`",
    "metric_logger": "Legato's keys are `loggers` and `output_dir`",
    "log_level": "give --debug on the command line",
    "log_peak_memory_stats": "memory is always logged",
    "profiler": "Legato has no profiler key",
    "cudnn_deterministic_mode": "Legato's key is `deterministic`",
    "log_dir": "Legato's key is `output_dir`",
    "fused": "AdamW is fused wherever the device can",
    "packed": "Legato's key is `packing`",
    "train_on_input": "Legato's key is `train_on_inputs`",
    "column_map": "Legato's key is `datasets`, where an entry has `columns`",
    "data_files": "Legato's key is `datasets`, where an entry has `path`",
    "lora_attn_modules": "Legato's key is `lora_target_modules`",
    "apply_lora_to_mlp": "Legato's key is `lora_target_modules`",
    "apply_lora_to_output": "Legato's key is `lora_target_modules`",
    "save_adapter_weights_only": "LoRA recipes always save the adapter alone",
    "fsdp_cpu_offload": "Legato's key is `cpu_offload`",
    "fsdp_reshard_after_forward": "Legato's key is `reshard_after_forward`",
    "custom_sharded_layers": "every block is sharded, and all the rest together",
    "data_parallel_shard_dim": "Legato's key is `dp_shard`",
    "data_parallel_replicate_dim": "Legato's key is `dp_replicate`",
    "tensor_parallel_dim": "Legato has FSDP2 and no tensor parallelism",
    "tensor_parallel_plan": "Legato has FSDP2 and no tensor parallelism",
    "context_parallel_dim": "Legato has FSDP2 and no context parallelism",
    "enable_fp8_training": "Legato trains in bf16 or fp32: `dtype`",
    "enable_dcp": "every save is written by all ranks",
    "ac_mode": "Legato's key is `enable_activation_checkpointing`: true, or every n-th block",
    "ac_option": "Legato's key is `enable_activation_checkpointing`: true, or every n-th block",
    "mixed_precision": "Legato trains in bf16 or fp32: `dtype`",
    "quantizer": "Legato's key is `quantize_base`; it has no quantization-aware training",
    "resize_token_embeddings": "new tokens are added to the folder of `model` first",
}
"""Keys of torchtune that aren't ours under any spelling, and what to do instead."""

ADVICE = TORCHTUNE_ADVICE | {
    # transformers, TRL, Axolotl, LLaMA-Factory
    "base_model": "Legato's key is `model`",
    "bf16": "Legato's key is `dtype`, bf16 or fp32",
    "fp16": "Legato's key is `dtype`, bf16 or fp32",
    "precision": "Legato's key is `dtype`, bf16 or fp32",
    "adapter": "choose a LoRA recipe: `recipe: lora_finetune_single_device`",
    "sequence_len": "Legato's key is `max_seq_len`",
    "cutoff_len": "Legato's key is `max_seq_len`",
    "micro_batch_size": "Legato's key is `batch_size`",
    "num_epochs": "Legato's key is `epochs`",
    "lora_target": "Legato's key is `lora_target_modules`",
    "modules_to_save": "Legato's key is `lora_modules_to_save`",
    "additional_target": "Legato's key is `lora_modules_to_save`",
    "lora_target_linear": "Legato's key is `lora_target_modules: all-linear`",
    "test_datasets": "Legato's key is `eval_datasets`",
    "eval_dataset": "Legato's key is `eval_datasets`",
    "eval_strategy": "Legato's key is `run_val_every_n_steps`",
    "save_strategy": "Legato's keys are `save_every_n_train_steps` and `save_at_epoch_end`",
    "load_best_model_at_end": "Legato's key is `keep_best_n_checkpoints`; `best` links to it",
    "lr_scheduler_type": "Legato's key is `lr_scheduler.name`",
    "warmup_steps": "Legato's key is `lr_scheduler.num_warmup_steps`",
    "warmup_ratio": "Legato's key is `lr_scheduler.num_warmup_steps`, a number of steps",
    "weight_decay": "Legato's key is `optimizer.weight_decay`",
    "optim": "Legato's key is `optimizer.name`",
    "logging_steps": "Legato's key is `log_every_n_steps`",
    "overwrite_output_dir": "give --start-over on the command line",
}
"""Keys of other trainers that aren't ours under any spelling, and what to do instead."""

VALUE_ADVICE: dict[str, dict[str, str]] = {
    "optimizer.name": {
        "adafactor": "Adafactor keeps sums over whole rows and columns of a weight, and fails "
        "where ranks hold a part each; adamw_8bit takes little memory too",
        "adamw_torch": "Legato's name is adamw",
        "adamw_torch_fused": "Legato's adamw is fused wherever the device can",
        "adamw_torch_8bit": "Legato's name is adamw_8bit",
        "adamw_bnb_8bit": "Legato's name is adamw_8bit, by torchao",
    },
    "metric_for_best_model": {"loss": "Legato's name is eval_loss, or train_loss without data"},
}
"""Key -> values of other trainers, or well-known ones that aren't offered, and what to do."""

_NO_PREFERENCES = (
    "Legato has no preference or reinforcement training. TRL has, with Legato's checkpoints: "
    "docs/trainer.md"
)
_NO_DISTILLATION = "Legato has no distillation"
_NO_QAT = "Legato has no quantization-aware training"
RECIPE_ADVICE: dict[str, str] = {
    "lora_dpo_single_device": _NO_PREFERENCES,
    "lora_dpo_distributed": _NO_PREFERENCES,
    "full_dpo_distributed": _NO_PREFERENCES,
    "ppo_full_finetune_single_device": _NO_PREFERENCES,
    "knowledge_distillation_single_device": _NO_DISTILLATION,
    "knowledge_distillation_distributed": _NO_DISTILLATION,
    "qat_single_device": _NO_QAT,
    "qat_distributed": _NO_QAT,
    "qat_lora_finetune_distributed": _NO_QAT,
    "eleuther_eval": "that is `legato eval FOLDER --tasks NAMES`",
    "generate": "that is `legato generate FOLDER --prompts FILE --output FILE`, or `legato chat`",
    "quantize": "Legato quantizes no checkpoint; `legato export gguf` writes what llama.cpp can",
}
"""Recipes of torchtune that Legato hasn't, and what to do instead."""

COMPONENT = "_component_"
COMPONENT_ADVICE: dict[str, str] = {
    "model": "`model: <hub id or folder>`",
    "dataset": "`datasets: [{path: ..., type: alpaca}]`",
    "dataset_val": "`eval_datasets: [{path: ...}]`",
    "optimizer": "`optimizer: {name: adamw, lr: ...}`",
    "lr_scheduler": "`lr_scheduler: {name: cosine, num_warmup_steps: ...}`",
}
OWN_KEYS_INSIDE = ("model", "dataset", "dataset_val")
"""Components whose keys are settings of the run, which the advice on the component can't hold."""


def spelled(path: KeyPath, spellings: dict[KeyPath, str]) -> str:
    """A key as the person wrote it.

    Args:
        path: Our key.
        spellings: Our key -> the word that stood for it.

    Returns:
        The dotted key, with ours behind it in parentheses where the two differ.
    """
    ours = dotted(path)
    for length in range(len(path), 0, -1):
        written = spellings.get(path[:length])
        if written is not None and written != dotted(path[:length]):
            rest = dotted(path[length:])
            full = f"{written}.{rest}" if rest else written
            return f"{full} ({ours})"
    return ours


def resolve_file(layer: Layer, spellings: dict[KeyPath, str]) -> None:
    """Rename aliases in a file's layer, in place.

    Args:
        layer: The file. Of two spellings of one key the second goes, and is one of its problems.
        spellings: Gets what was renamed: our key -> the word in the file.
    """
    for alias, path in ALIASES.items():
        if alias not in layer.data:
            continue
        previous = spellings.get(path) or (dotted(path) if _holds(layer.data, path) else None)
        if previous is not None:
            layer.problems.append(Problem((alias,), f"{previous} is set as well; keep one"))
            del layer.data[alias]
            continue
        wrapped = alias == "dataset" and isinstance(layer.data[alias], dict)
        _move_lines(layer, alias, path, into_list=wrapped)
        spellings[(*path, 0) if wrapped else path] = alias
        _put(layer.data, path, _convert(alias, layer.data.pop(alias)))


def resolve_overrides(
    overrides: list[Override], layer: Layer, spellings: dict[KeyPath, str]
) -> list[Override]:
    """Rename aliases in a command line.

    Args:
        overrides: What was typed, in order.
        layer: The command line: gets a problem for each clash of two spellings of one key.
        spellings: Gets what was typed: our key -> the word.

    Returns:
        Overrides of our keys. ``dataset=``, ``dataset.path=`` and so on became one ``datasets`` of
        one entry, at the end.
    """
    result: list[Override] = []
    dataset: dict[Any, Any] = {}
    first_spelling: dict[KeyPath, str] = {}
    for override in overrides:
        target, spelling = _target(override)
        if first_spelling.setdefault(target, spelling) != spelling:
            layer.problems.append(
                Problem(
                    (), f"{override.argument}: {first_spelling[target]} is set as well; keep one"
                )
            )
            continue
        spellings[target] = spelling
        is_list = isinstance(override.value, list) and override.path == ("dataset",)
        if spelling == "dataset" and not override.remove and not is_list:
            _collect(dataset, override)
            continue
        rest = override.path[1:] if spelling in ALIASES else override.path[len(target) :]
        value = _convert(spelling, override.value)
        result.append(Override(override.argument, (*target, *rest), value, override.remove))
    if dataset:
        spellings[("datasets", 0)] = "dataset"
        result.append(Override("dataset", ("datasets",), [dataset]))
    return result


_TARGETS = frozenset(ALIASES.values())


def _target(override: Override) -> tuple[KeyPath, str]:
    """Our key that an override sets (as far as aliases know it), and how it is spelled there."""
    word = str(override.path[0])
    if word in ALIASES:
        return ALIASES[word], word
    for length in range(1, len(override.path) + 1):
        if override.path[:length] in _TARGETS:
            return override.path[:length], dotted(override.path[:length])
    return override.path, dotted(override.path)


def _collect(entry: dict[str, Any], override: Override) -> None:
    if len(override.path) > 1:
        _put(entry, override.path[1:], override.value)
    elif isinstance(override.value, dict):
        entry.update(override.value)
    else:
        entry["path"] = override.value


def _convert(alias: str, value: Any) -> Any:
    if alias == "load_in_4bit" and isinstance(value, str):
        return {"true": "nf4", "false": "none"}.get(value.lower(), value)
    if alias == "dataset":
        entries = value if isinstance(value, list) else [value]
        return [{"path": each} if isinstance(each, str) else each for each in entries]
    return value


def _holds(data: dict[str, Any], path: KeyPath) -> bool:
    node: Any = data
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _put(data: dict[Any, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[path[-1]] = value


def _move_lines(layer: Layer, alias: str, path: KeyPath, *, into_list: bool) -> None:
    for old in [p for p in layer.lines if p[0] == alias]:
        inner = (0, *old[1:]) if into_list and len(old) > 1 else old[1:]
        layer.lines[(*path, *inner)] = layer.lines.pop(old)
