"""What a callback can't follow is refused before training, with a remedy, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    TrainerControl,
    TrainerState,
)

from legato.checkpoint import EpochEnd, EverySteps, KeepLast, NewBest, OnSignal
from legato.checkpoint.policy import SavePolicy
from legato.errors import CheckpointError, ConfigError, ModelError
from legato.integrations.trainer_parts import SchedulerPart
from legato.integrations.trainer_rules import model_problems, planned_saves
from legato.integrations.transformers import LegatoCheckpoints
from tests.helpers import tiny
from tests.integrations.trainers import build_args, build_trainer

FOLLOWING = {"save_strategy": "steps"}


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({}, {"save_strategy": "best", "metric_for_best_model": "loss"}, "save=NewBest()"),
        (
            {},
            {**FOLLOWING, "load_best_model_at_end": True, "save_steps": 3},
            "load output_dir/best after training",
        ),
        ({}, {**FOLLOWING, "auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({}, {**FOLLOWING, "restore_callback_states_from_checkpoint": True}, "Set it to False"),
        ({}, {**FOLLOWING, "save_on_each_node": True}, "one folder that all nodes see"),
        ({}, {"save_strategy": "no"}, "save=EverySteps(500)"),
        ({"save": EverySteps(5)}, FOLLOWING, 'save_strategy="no"'),
        ({"keep": KeepLast(2)}, {**FOLLOWING, "save_total_limit": 2}, "Leave one of them out"),
        ({"save": EverySteps(5) | OnSignal()}, {}, "control.should_save"),
        ({"save": NewBest()}, {}, 'metric_for_best_model="loss"'),
        (
            {"save": NewBest()},
            {"metric_for_best_model": "loss", "eval_strategy": "no"},
            'eval_strategy="steps"',
        ),
    ],
)
def test_arguments_that_cant_work_are_refused_when_the_trainer_is_built(
    options: dict[str, Any], changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_trainer(tmp_path / "out", LegatoCheckpoints(**options), **changes)
    assert len(caught.value.problems) == 1
    assert expected in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        # Set afterwards: building such arguments needs a GPU, another package or the hub.
        ("fsdp", "full_shard", "DDP (torchrun"),
        ("deepspeed", {"zero_optimization": {"stage": 3}}, "DDP (torchrun"),
        ("fp16", True, "bf16=True"),
        ("push_to_hub", True, 'hub_strategy="end"'),
        ("enable_jit_checkpoint", True, "control.should_training_stop"),
    ],
)
def test_arguments_of_other_machines_are_refused(
    name: str, value: Any, expected: str, tmp_path: Path
) -> None:
    args = build_args(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError) as caught:
        LegatoCheckpoints(save=EverySteps(1)).on_init_end(args, TrainerState(), TrainerControl())
    assert expected in "\n".join(caught.value.problems)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    args = build_args(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ConfigError, match="torchrun"):
        LegatoCheckpoints(save=EverySteps(1)).on_init_end(args, TrainerState(), TrainerControl())


@pytest.mark.parametrize(
    ("save", "changes", "expected"),
    [
        (None, {"save_strategy": "steps"}, 14),  # 25, 30, ... 85, and the last one
        (None, {"save_strategy": "epoch"}, 3),  # 54, 72, 90
        (EverySteps(15), {}, 4),
        (EverySteps(15) | EpochEnd(), {}, 6),
        (NewBest(), {"eval_strategy": "steps"}, 10),
        (NewBest(), {"eval_strategy": "epoch"}, 3),
        (EverySteps(45) | NewBest(), {"eval_strategy": "no"}, 2),
    ],
)
def test_saves_still_to_come_are_counted_for_every_kind_of_plan(
    save: SavePolicy | None, changes: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    state = TrainerState(
        global_step=40 if save or changes["save_strategy"] == "epoch" else 20,
        max_steps=90,
        num_train_epochs=5,
        save_steps=5,
        eval_steps=5,
    )
    assert planned_saves(build_args(tmp_path, **changes), state, save=save) == expected


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_trainer(
            tmp_path, LegatoCheckpoints(), auto_find_batch_size=True, save_on_each_node=True
        )
    assert len(caught.value.problems) == 3


def test_a_callback_that_is_added_later_is_checked_before_the_first_step(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, auto_find_batch_size=True)
    trainer.add_callback(LegatoCheckpoints(save=EverySteps(1)))
    with pytest.raises(ConfigError, match="auto_find_batch_size"):
        trainer.train()


def test_a_hyperparameter_search_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny.build_config())
    problems = model_problems(model, None, is_search=True)
    assert len(problems) == 1
    assert "one output_dir" in problems[0]


class Wrapped:
    """An optimizer as accelerate wraps it for another way of training."""

    class accelerator_state:
        class distributed_type:
            value = "FSDP"


def test_what_accelerate_launch_shards_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny.build_config())
    assert "FSDP: the Trainer loads" in model_problems(model, Wrapped, is_search=False)[0]


def test_a_family_that_is_written_under_other_names_is_refused() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    problems = model_problems(AutoModelForCausalLM.from_config(config), None, is_search=False)
    assert "MixtralForCausalLM keeps its weights under other names" in problems[0]


def test_several_adapters_are_refused(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(tiny.build_config())
    model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    model.add_adapter("second", LoraConfig(target_modules="all-linear"))
    trainer = build_trainer(tmp_path, LegatoCheckpoints(save=EverySteps(1)), model=model)
    with pytest.raises(ConfigError, match=r"2 adapters \(default, second\)"):
        trainer.train()


def test_prompt_tuning_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(tiny.build_config())
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    trainer = build_trainer(tmp_path, LegatoCheckpoints(save=EverySteps(1)), model=model)
    with pytest.raises(ModelError, match="prompt_encoder"):
        trainer.train()


def test_a_scheduler_whose_state_isnt_json_is_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # Its milestones are a Counter with numbers as keys, which JSON would turn into texts.
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    with pytest.raises(CheckpointError, match="MultiStepLR"):
        SchedulerPart(scheduler)


def test_a_refused_training_leaves_the_folder_free(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

    stranger = Odd()
    trainer = build_trainer(tmp_path / "out", LegatoCheckpoints(save=EverySteps(1)))
    optimizer = torch.optim.AdamW([*trainer.model.parameters(), stranger.weight], lr=0.01)
    trainer.optimizer = optimizer
    with pytest.raises(CheckpointError, match="without a name"):
        trainer.train()
    assert not (tmp_path / "out/.lock").exists()
