"""Keys that would be ignored, that contradict each other, or whose feature isn't there yet."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from legato.config.load import validate
from legato.config.rules import CONFLICTS, ONLY_WITH
from legato.config.schema import RunConfig

BASE: dict[str, Any] = {
    "recipe": "full_finetune_single_device",
    "model": "m",
    "output_dir": "out",
    "datasets": [{"path": "a"}],
    "optimizer": {"lr": 1.0},
}
TEXT = {"datasets": [{"path": "a", "type": "text"}]}
STREAM = {"streaming": True, "max_steps": 5}
LORA = {"recipe": "lora_finetune_single_device"}
IN_BACKWARD = {"optimizer_in_backward": True, "clip_grad_norm": None}
EVALUATED = {"val_set_size": 10}

IGNORED = [
    ({"lora_rank": 16}, "lora_rank: this recipe trains all weights"),
    ({"lora_alpha": 16}, "lora_alpha: this recipe trains all weights"),
    ({"lora_dropout": 0.1}, "lora_dropout: this recipe trains all weights"),
    ({"lora_target_modules": ["q"]}, "lora_target_modules: this recipe trains all weights"),
    ({"lora_modules_to_save": ["h"]}, "lora_modules_to_save: this recipe trains all weights"),
    ({"use_dora": True}, "use_dora: this recipe trains all weights"),
    ({"use_rslora": True}, "use_rslora: this recipe trains all weights"),
    ({"dp_shard": 2}, "dp_shard: this recipe trains on one device"),
    ({"dp_replicate": 2}, "dp_replicate: this recipe trains on one device"),
    ({"reshard_after_forward": False}, "reshard_after_forward: this recipe trains on one device"),
    ({"cpu_offload": True}, "cpu_offload: this recipe trains on one device"),
    ({"shared_storage": False}, "shared_storage: this recipe trains on one device"),
    ({"quantize_base": "none"}, "quantize_base: only frozen weights can be quantized"),
    ({"quantize_base": "nf4"}, "quantize_base: only frozen weights can be quantized"),
    (
        {"train_on_inputs": True, "turns_to_train": "last"},
        "turns_to_train: train_on_inputs: true trains every turn",
    ),
    ({"run_val_every_n_steps": 5}, "run_val_every_n_steps: there is nothing to evaluate on"),
    (
        {"metric_for_best_model": "train_loss"},
        "metric_for_best_model: nothing is chosen by a metric",
    ),
    ({"greater_is_better": True}, "greater_is_better: nothing is chosen by a metric"),
    ({"prune": "move"}, "prune: all checkpoints are kept"),
    ({"save_only_model": True, "keep_last_n_states": 1}, "keep_last_n_states: save_only_model"),
    ({"save_only_model": True, "allow_missing": ["optimizer"]}, "allow_missing: save_only_model"),
    ({"enable_async_checkpointing": False, "staging": "overlap"}, "staging: nothing is staged"),
    (
        {"chat_template": "chatml", "chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs: the pack",
    ),
    ({"train_on_inputs": True, "roles_to_train": ["user"]}, "roles_to_train: train_on_inputs"),
    (TEXT | {"roles_to_train": ["user"]}, "roles_to_train: segments and plain text have no turns"),
    (TEXT | {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: segments and plain text"),
    (TEXT | {"train_on_inputs": False}, "train_on_inputs: plain text is trained from end to end"),
    (
        {"datasets": [{"path": "a", "type": "segments"}], "special_tokens_in_text": "allow"},
        "special_tokens_in_text: the control tokens that stand in segments are meant",
    ),
    ({"shuffle_buffer_size": 5}, "shuffle_buffer_size: data that is read before training"),
    (STREAM | {"epochs": 2}, "epochs: a stream is as long as max_steps says"),
    (STREAM | {"max_steps_per_epoch": 2}, "max_steps_per_epoch: a stream is as long as max_steps"),
    ({"optimizer": {"name": "sgd", "lr": 1, "betas": [0.9, 0.9]}}, "optimizer.betas: sgd has no"),
    (
        {"lr_scheduler": {"name": "constant", "num_training_steps": 5}},
        "lr_scheduler.num_training_steps: a constant schedule has no end",
    ),
]
CONTRADICTIONS = [
    ({"streaming": True}, "max_steps: nobody knows the length of a stream"),
    (STREAM | {"datasets": [{"path": "a"}, {"path": "b"}]}, "datasets: a weight counts how often"),
    (STREAM | {"val_set_size": 0.1}, "val_set_size: a share of an unknown number of rows"),
    ({"epochs": None}, "epochs: null repeats the data until max_steps, which isn't set"),
    (EVALUATED | {"eval_datasets": [{"path": "e"}]}, "val_set_size: eval_datasets is set as well"),
    ({"master_weights": "none", "dtype": "fp32"}, "master_weights: dtype: fp32 needs no copy"),
    (LORA | {"master_weights": "none"}, "master_weights: an adapter's fp32 copy is small"),
    (
        {"master_weights": "none", "optimizer": {"name": "sgd", "lr": 1}},
        "master_weights: only adamw and adamw_8bit round",
    ),
    (
        {"recipe": "full_finetune_distributed", "optimizer": {"name": "adamw_8bit", "lr": 1}},
        "optimizer: adamw_8bit works on a single device only",
    ),
    ({"optimizer_in_backward": True}, "optimizer_in_backward: a gradient is used and gone before"),
    (
        IN_BACKWARD | {"gradient_accumulation_steps": 2},
        "optimizer_in_backward: each micro-batch would be an update",
    ),
    (
        IN_BACKWARD | {"on_nonfinite": "skip"},
        "optimizer_in_backward: weights have changed before it is known",
    ),
    (
        IN_BACKWARD | {"recipe": "full_finetune_distributed", "cpu_offload": True},
        "optimizer_in_backward: the update would begin while its gradient",
    ),
    (
        IN_BACKWARD
        | {"recipe": "full_finetune_distributed", "dp_replicate": 2, "master_weights": "none"},
        "optimizer_in_backward: copies of the model that round at random",
    ),
    (
        {"enable_activation_offloading": True, "enable_activation_checkpointing": 2},
        "enable_activation_offloading: what every block saves for backward",
    ),
    (
        {"enable_activation_offloading": True, "enable_activation_checkpointing": True}
        | {"device": "cpu"},
        "enable_activation_offloading: activations are in host memory already",
    ),
    (
        LORA | {"use_dora": True, "quantize_base": "nf4"},
        "use_dora: DoRA reads the base's weights as numbers",
    ),
    (
        {"recipe": "lora_finetune_distributed", "cpu_offload": True, "quantize_base": "nf4"},
        "cpu_offload: a base in nf4 stays on the device",
    ),
    (
        {"keep_best_n_checkpoints": 1, "metric_for_best_model": "eval_loss"},
        "metric_for_best_model: there is nothing to evaluate on",
    ),
    (
        {"recipe": "full_finetune_distributed", "compile": {"mode": "reduce-overhead"}},
        "compile: these modes record CUDA graphs",
    ),
    ({"attention": "flash", "device": "cpu"}, "attention: needs a CUDA device"),
    ({"attention": "varlen"}, "attention: varlen is for packed rows; set packing: true"),
    (
        {"packing": True, "attention": "sdpa", "max_seq_len": 8193},
        "attention: needs a mask for packed rows",
    ),
]


def test_the_base_has_no_problem() -> None:
    assert validate(BASE)[1] == []


@pytest.mark.parametrize(("values", "problem"), IGNORED + CONTRADICTIONS)
def test_what_would_be_ignored_or_contradicts_is_refused(
    values: dict[str, Any], problem: str
) -> None:
    _, (found,) = validate(BASE | values)
    assert str(found).startswith(problem)


def test_every_rule_has_a_case() -> None:
    assert len(CONTRADICTIONS) == len(CONFLICTS)
    ruled = {key for rule in ONLY_WITH for key in rule.keys}
    assert {problem.split(":")[0] for _, problem in IGNORED} == ruled


@pytest.mark.parametrize(
    "values",
    [
        LORA | {"lora_rank": 4, "lora_target_modules": "all-linear", "quantize_base": "nf4"},
        {"recipe": "lora_finetune_distributed", "quantize_base": "nf4", "use_rslora": True},
        EVALUATED | {"run_val_every_n_steps": 5},
        {"run_val_every_n_steps": None},
        {"generate_samples": 2, "run_val_every_n_steps": 5},
        {"keep_best_n_checkpoints": 2, "prune": "move", "greater_is_better": True},
        {"keep_best_n_checkpoints": 2, "metric_for_best_model": "train_loss"},
        {"epochs": None, "max_steps": 5},
        {"max_steps_per_epoch": 0},
        {"chat_template": "t.jinja", "chat_template_kwargs": {"a": 1}},
        {"compile": {"scope": "block", "mode": "default"}},
        STREAM | {"shuffle_buffer_size": 100, "num_workers": 2, "packing": True, "val_set_size": 9},
        STREAM | {"eval_datasets": [{"path": "e"}, {"path": "f", "weight": 2}]},
        {"recipe": "full_finetune_distributed", "dp_shard": 2, "dp_replicate": 4}
        | {"reshard_after_forward": False, "cpu_offload": True, "shared_storage": False},
        {"recipe": "lora_finetune_distributed", "lora_rank": 4, "dp_shard": "all"},
        {"master_weights": "none"},
        {"master_weights": "none", "optimizer": {"name": "adamw_8bit", "lr": 1}},
        IN_BACKWARD,
        IN_BACKWARD | LORA | {"enable_activation_checkpointing": True},
        {"enable_activation_offloading": True, "enable_activation_checkpointing": True},
        {"enable_activation_offloading": False},
        {"attention": "flash", "device": "cuda:1"},
        {"packing": True, "attention": "varlen", "max_seq_len": 32768},
        {"packing": True, "attention": "sdpa", "max_seq_len": 8192},
    ],
)
def test_what_fits_together_is_taken(values: dict[str, Any]) -> None:
    assert validate(BASE | values)[1] == []


def test_combinations_are_told_beside_other_mistakes() -> None:
    _, found = validate(BASE | {"lora_rank": 8, "epochs": "two", "modell": "x", "streaming": True})
    assert {problem.path[0] for problem in found} == {"lora_rank", "epochs", "modell", "max_steps"}


def test_a_stream_of_another_weight_is_refused() -> None:
    _, (found,) = validate(BASE | STREAM | {"datasets": [{"path": "a", "weight": 2}]})
    assert str(found).startswith("datasets: a weight counts how often")


def test_nothing_is_said_of_what_depends_on_a_mistake() -> None:
    _, found = validate(
        BASE
        | {"recipe": "lora", "lora_rank": 8, "val_set_size": "x"}
        | {"run_val_every_n_steps": 5}
    )
    assert {problem.path[0] for problem in found} == {"recipe", "val_set_size"}


def test_a_config_made_in_python_is_held_to_the_same_rules() -> None:
    with pytest.raises(ValidationError, match="lora_rank: this recipe trains all weights"):
        RunConfig(**BASE, lora_rank=8)
