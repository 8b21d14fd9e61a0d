"""Which keys only work together.

A key that would be ignored is refused: a run that silently leaves out what its config asks for is
worse than one that doesn't start. The tables are data, so that a resolved config can be written
without the keys that don't apply to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from legato.config.formats import UNREAD
from legato.config.names import CUDA_GRAPH_MODES, PACKAGED_TEMPLATES
from legato.config.problems import Problem
from legato.errors import ConfigError

if TYPE_CHECKING:
    from legato.config.schema import RunConfig


@dataclass(frozen=True)
class OnlyWith:
    """``keys`` mean something only where ``needed`` holds."""

    keys: tuple[str, ...]
    needs: tuple[str, ...]
    """Keys that ``needed`` reads."""
    needed: Callable[[RunConfig], bool]
    otherwise: str


@dataclass(frozen=True)
class Conflict:
    """``exists`` finds values that contradict each other; reported at the first of ``keys``."""

    keys: tuple[str, ...]
    exists: Callable[[RunConfig], bool]
    message: str


def is_lora(config: RunConfig) -> bool:
    """Whether the recipe trains an adapter."""
    return config.recipe.startswith("lora_")


def is_distributed(config: RunConfig) -> bool:
    """Whether the recipe trains on several processes."""
    return config.recipe.endswith("_distributed")


def check_processes(config: RunConfig, num_processes: int) -> None:
    """Refuse several processes that would each train the same model for themselves.

    Args:
        config: The run.
        num_processes: How many were started, or are to be.

    Raises:
        ConfigError: A recipe for one device, and more than one process.
    """
    if num_processes > 1 and not is_distributed(config):
        other = config.recipe.replace("_single_device", "_distributed")
        raise ConfigError(
            f"recipe: {config.recipe} trains on one device, and there are {num_processes} "
            f"processes. Use recipe: {other}, or start one process."
        )


def has_evaluation_data(config: RunConfig) -> bool:
    """Whether anything is there to evaluate on."""
    return bool(config.eval_datasets) or config.val_set_size > 0


_EVALUATION = ("eval_datasets", "val_set_size")
_KEEPS = ("keep_last_n_checkpoints", "keep_best_n_checkpoints", "keep_every_n_steps")

ONLY_WITH = (
    OnlyWith(
        (
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "lora_modules_to_save",
            "use_dora",
            "use_rslora",
        ),
        ("recipe",),
        is_lora,
        "this recipe trains all weights; recipe: lora_finetune_single_device uses it",
    ),
    OnlyWith(
        ("quantize_base",),
        ("recipe",),
        is_lora,
        "only frozen weights can be quantized; recipe: lora_finetune_single_device has them",
    ),
    OnlyWith(
        ("dp_shard", "dp_replicate", "reshard_after_forward", "cpu_offload", "shared_storage"),
        ("recipe",),
        is_distributed,
        "this recipe trains on one device; the _distributed ones use it",
    ),
    OnlyWith(
        ("run_val_every_n_steps",),
        (*_EVALUATION, "generate_samples"),
        lambda c: has_evaluation_data(c) or c.generate_samples > 0,
        "there is nothing to evaluate on; set val_set_size, eval_datasets or generate_samples",
    ),
    OnlyWith(
        ("metric_for_best_model", "greater_is_better"),
        ("keep_best_n_checkpoints",),
        lambda c: c.keep_best_n_checkpoints is not None,
        "nothing is chosen by a metric; set keep_best_n_checkpoints",
    ),
    OnlyWith(
        ("prune",),
        _KEEPS,
        lambda c: any(getattr(c, key) is not None for key in _KEEPS),
        f"all checkpoints are kept; set one of {', '.join(_KEEPS)}",
    ),
    OnlyWith(
        ("keep_last_n_states", "allow_missing"),
        ("save_only_model",),
        lambda c: not c.save_only_model,
        "save_only_model leaves no state to keep or to resume from",
    ),
    OnlyWith(
        ("staging",),
        ("enable_async_checkpointing",),
        lambda c: c.enable_async_checkpointing,
        "nothing is staged with enable_async_checkpointing: false",
    ),
    OnlyWith(
        ("chat_template_kwargs",),
        ("chat_template",),
        lambda c: c.chat_template not in PACKAGED_TEMPLATES,
        "the packaged templates read no variables",
    ),
    OnlyWith(
        ("roles_to_train", "turns_to_train"),
        ("train_on_inputs",),
        lambda c: not c.train_on_inputs,
        "train_on_inputs: true trains every turn",
    ),
    *(
        OnlyWith(each.keys, ("datasets", "eval_datasets"), each.may_be_read, each.reason)
        for each in UNREAD
    ),
    OnlyWith(
        ("shuffle_buffer_size",),
        ("streaming",),
        lambda c: c.streaming,
        "data that is read before training is shuffled as a whole",
    ),
    OnlyWith(
        ("epochs", "max_steps_per_epoch"),
        ("streaming",),
        lambda c: not c.streaming,
        "a stream is as long as max_steps says, and begins again where it ends before",
    ),
    OnlyWith(
        ("optimizer.betas",),
        ("optimizer",),
        lambda c: c.optimizer.name != "sgd",
        "sgd has no betas",
    ),
    OnlyWith(
        ("lr_scheduler.num_training_steps",),
        ("lr_scheduler",),
        lambda c: c.lr_scheduler.name != "constant",
        "a constant schedule has no end",
    ),
)

# Above this a row's dense mask costs more than everything else: 268 MB at 16k, 4x per doubling.
MOST_MASKED_TOKENS = 8192

CONFLICTS = (
    Conflict(
        ("max_steps", "streaming"),
        lambda c: c.streaming and c.max_steps is None,
        "nobody knows the length of a stream before its end; set how many steps to take",
    ),
    Conflict(
        ("datasets", "streaming"),
        lambda c: c.streaming and (len(c.datasets) > 1 or c.datasets[0].weight != 1),
        "a weight counts how often a row comes in an epoch, and a stream is taken as it comes: it "
        "is one data set (a folder or a glob of files is one, too) of weight 1",
    ),
    Conflict(
        ("val_set_size", "streaming"),
        lambda c: c.streaming and 0 < c.val_set_size < 1,
        "a share of an unknown number of rows; set how many, from 1 on: the first ones are held "
        "out",
    ),
    Conflict(
        ("epochs", "max_steps", "streaming"),
        lambda c: c.epochs is None and c.max_steps is None and not c.streaming,
        "null repeats the data until max_steps, which isn't set; set one of the two",
    ),
    Conflict(
        ("val_set_size", "eval_datasets"),
        lambda c: c.val_set_size > 0 and bool(c.eval_datasets),
        "eval_datasets is set as well; choose one of the two",
    ),
    Conflict(
        ("master_weights", "dtype"),
        lambda c: c.master_weights == "none" and c.dtype == "fp32",
        "dtype: fp32 needs no copy and no rounding; leave it out",
    ),
    Conflict(
        ("master_weights", "recipe"),
        lambda c: c.master_weights == "none" and is_lora(c),
        "an adapter's fp32 copy is small and always kept; leave it out",
    ),
    Conflict(
        ("master_weights", "optimizer"),
        lambda c: c.master_weights == "none" and c.optimizer.name not in ("adamw", "adamw_8bit"),
        "only adamw and adamw_8bit round stochastically; use one, or keep fp32 master weights",
    ),
    Conflict(
        ("optimizer", "recipe"),
        lambda c: c.optimizer.name == "adamw_8bit" and is_distributed(c),
        "adamw_8bit works on a single device only: its blocks of 256 values cross the rows that "
        "ranks share out, so that another number of processes couldn't go on from its state. Use "
        "adamw",
    ),
    Conflict(
        ("optimizer_in_backward", "clip_grad_norm"),
        lambda c: c.optimizer_in_backward and c.clip_grad_norm is not None,
        "a gradient is used and gone before the norm of all of them is known; set clip_grad_norm: "
        "null",
    ),
    Conflict(
        ("optimizer_in_backward", "gradient_accumulation_steps"),
        lambda c: c.optimizer_in_backward and c.gradient_accumulation_steps > 1,
        "each micro-batch would be an update of its own; set gradient_accumulation_steps: 1",
    ),
    Conflict(
        ("optimizer_in_backward", "on_nonfinite"),
        lambda c: c.optimizer_in_backward and c.on_nonfinite == "skip",
        "weights have changed before it is known that a gradient isn't finite; use on_nonfinite: "
        "stop",
    ),
    Conflict(
        ("optimizer_in_backward", "cpu_offload"),
        lambda c: c.optimizer_in_backward and c.cpu_offload,
        "the update would begin while its gradient is still on the way to host memory; use one of "
        "the two",
    ),
    Conflict(
        ("optimizer_in_backward", "master_weights", "dp_replicate"),
        lambda c: c.optimizer_in_backward and c.master_weights == "none" and c.dp_replicate > 1,
        "copies of the model that round at random during backward would drift apart; keep fp32 "
        "master weights, or set dp_replicate: 1",
    ),
    Conflict(
        ("enable_activation_offloading", "enable_activation_checkpointing"),
        lambda c: c.enable_activation_offloading and int(c.enable_activation_checkpointing) != 1,
        "what every block saves for backward, weights too, would travel; set "
        "enable_activation_checkpointing: true, and only the blocks' inputs do",
    ),
    Conflict(
        ("enable_activation_offloading", "device"),
        lambda c: c.enable_activation_offloading and c.device in ("cpu", "mps"),
        "activations are in host memory already; leave it out",
    ),
    Conflict(
        ("use_dora", "quantize_base"),
        lambda c: c.use_dora and c.quantize_base != "none",
        "DoRA reads the base's weights as numbers, which PEFT can't do in nf4; "
        "leave out one of the two",
    ),
    Conflict(
        ("cpu_offload", "quantize_base"),
        lambda c: c.cpu_offload and c.quantize_base != "none",
        "a base in nf4 stays on the device, in a quarter of bf16's memory; "
        "leave out one of the two",
    ),
    Conflict(
        ("metric_for_best_model", *_EVALUATION),
        lambda c: (
            (c.metric_for_best_model or "").startswith("eval_") and not has_evaluation_data(c)
        ),
        "there is nothing to evaluate on; set val_set_size or eval_datasets, or use train_loss",
    ),
    Conflict(
        ("compile", "recipe"),
        lambda c: is_distributed(c) and getattr(c.compile, "mode", None) in CUDA_GRAPH_MODES,
        "these modes record CUDA graphs, which need weights that stay where they are, and a "
        "sharded model gathers them anew each time; use mode: max-autotune-no-cudagraphs",
    ),
    Conflict(
        ("attention", "device"),
        lambda c: c.attention in ("flash", "flex") and c.device in ("cpu", "mps"),
        "needs a CUDA device; use auto or sdpa",
    ),
    Conflict(
        ("attention", "packing"),
        lambda c: c.attention == "varlen" and not c.packing,
        "varlen is for packed rows; set packing: true, or use auto",
    ),
    Conflict(
        ("attention", "packing", "max_seq_len"),
        lambda c: (
            c.packing and c.attention in ("sdpa", "eager") and c.max_seq_len > MOST_MASKED_TOKENS
        ),
        f"needs a mask for packed rows, and with more than {MOST_MASKED_TOKENS} tokens a row that "
        "costs more than all the rest; use auto, varlen, flex or flash",
    ),
)


def _is_set(config: RunConfig, key: str) -> bool:
    section: Any = config
    for name in key.split("."):
        if name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return section is not None  # null asks for nothing that could be ignored


def inapplicable(config: RunConfig) -> set[str]:
    """Dotted keys that mean nothing in this config, whether they are set or not."""
    return {key for rule in ONLY_WITH if not rule.needed(config) for key in rule.keys}


def check(config: RunConfig, *, unreadable: frozenset[str] = frozenset()) -> list[Problem]:
    """Everything in ``config`` that contradicts, or would be ignored.

    Args:
        config: Values that are right one by one.
        unreadable: Top-level keys whose value in ``config`` is a stand-in; nothing is said of what
            depends on them.

    Returns:
        What is wrong, in the order of the tables.
    """
    problems: list[Problem] = []
    for rule in ONLY_WITH:
        if unreadable.isdisjoint(rule.needs) and not rule.needed(config):
            problems += [
                Problem(tuple(key.split(".")), rule.otherwise)
                for key in rule.keys
                if _is_set(config, key) and key.split(".")[0] not in unreadable
            ]
    for conflict in CONFLICTS:
        if unreadable.isdisjoint(conflict.keys) and conflict.exists(config):
            problems.append(Problem((conflict.keys[0],), conflict.message))
    return problems
