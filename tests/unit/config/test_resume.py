"""What changed between a run and its resumption."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from legato.config.load import dump_yaml
from legato.config.resume import diff_on_resume, differences
from legato.config.schema import RunConfig


def build(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "recipe": "full_finetune_single_device",
        "model": "m",
        "output_dir": "out",
        "datasets": [{"path": "a", "columns": {"prompt": "q"}}],
        "optimizer": {"lr": 1e-3},
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "val_set_size": 5,
    }
    return RunConfig(**(values | changes))


def told(**changes: Any) -> tuple[list[str], list[str]]:
    refused, warned = diff_on_resume(build().model_dump(mode="json"), build(**changes))
    return [str(change) for change in refused], [str(change) for change in warned]


def test_nothing_changed() -> None:
    assert told() == ([], [])


def test_the_written_yaml_is_the_same_config() -> None:
    config = build(recipe="lora_finetune_single_device", lora_rank=4)
    assert diff_on_resume(yaml.safe_load(dump_yaml(config)), config) == ((), ())


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"seed": 1}, "seed: was 0, now 1"),
        ({"dtype": "fp32"}, "dtype: was bf16, now fp32"),
        ({"train_on_inputs": True}, "train_on_inputs: was false, now true"),
        (
            {"datasets": [{"path": "b", "columns": {"prompt": "q"}}]},
            "datasets.0.path: was a, now b",
        ),
        (
            {"datasets": [{"path": "a", "columns": {"prompt": "x", "completion": "y"}}]},
            "datasets.0.columns.prompt: was q, now x",
        ),
        ({"val_set_size": 0}, "val_set_size: was 5.0, now 0.0"),
        ({"batch_size": 8}, "batch_size: was 4, now 8"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_follow_is_refused(changes: dict[str, Any], refused: str) -> None:
    found, warned = told(**changes)
    assert found[0] == refused
    assert warned == []


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"epochs": 3}, "epochs: was 1, now 3"),
        ({"max_steps": 6}, "max_steps: was null, now 6"),
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr: was 0.001, now 1.0"),
        ({"lr_scheduler": {"name": "linear"}}, "lr_scheduler.name: was cosine, now linear"),
    ],
)
def test_what_a_run_follows_is_said(changes: dict[str, Any], warned: str) -> None:
    assert told(**changes) == ([], [warned])


@pytest.mark.parametrize(
    "changes",
    [
        {"output_dir": "elsewhere"},
        {"device": "cpu"},
        {"save_every_n_train_steps": {"first": 1, "max_interval": 4}},
        {"compile": {"mode": "default"}},
        {"keep_last_n_checkpoints": 1, "prune": "move"},
        {"batch_size": 2, "gradient_accumulation_steps": 4},
        {"batch_size": 8, "gradient_accumulation_steps": 1},
    ],
)
def test_what_may_change_freely_is_not_said(changes: dict[str, Any]) -> None:
    assert told(**changes) == ([], [])


def test_a_path_is_left_to_its_contents_only_where_the_run_recorded_them() -> None:
    old = build().model_dump(mode="json")
    elsewhere = [{"path": "b", "columns": {"prompt": "x"}}]
    new = build(model="./m", datasets=elsewhere, chat_template="chatml", seed=1)
    recorded = ["model", "datasets.0.path"]
    found = [str(change) for change in diff_on_resume(old, new, by_contents=recorded)[0]]
    assert found == [
        "seed: was 0, now 1",
        "datasets.0.columns.prompt: was q, now x",
        "chat_template: was auto, now chatml",
    ]
    without = [change.key for change in diff_on_resume(old, new)[0]]
    assert without[:3] == ["model", "seed", "datasets.0.path"]


def test_everything_about_evaluation_data_may_change_and_is_said() -> None:
    path = {"path": "a"}
    old = build(val_set_size=0, eval_datasets=[path | {"columns": {"prompt": "q"}}])
    other = {"path": "b", "type": "alpaca", "split": "test", "weight": 2.0}
    new = build(val_set_size=0, eval_datasets=[other])
    refused, warned = diff_on_resume(old.model_dump(mode="json"), new)
    assert (refused, [str(change) for change in warned]) == (
        (),
        [
            "eval_datasets.0.path: was a, now b",
            "eval_datasets.0.type: was null, now alpaca",
            "eval_datasets.0.columns.prompt: was q, now absent",
            "eval_datasets.0.split: was null, now test",
            "eval_datasets.0.weight: was 1.0, now 2.0",
        ],
    )
    recorded = ["eval_datasets.0.path"]
    warned = diff_on_resume(old.model_dump(mode="json"), new, by_contents=recorded)[1]
    assert warned[0].key == "eval_datasets.0.type"


def test_a_data_set_that_was_added_is_no_other_path() -> None:
    old = build().model_dump(mode="json")
    new = build(datasets=[*old["datasets"], {"path": "b"}])
    [change] = diff_on_resume(old, new, by_contents=["datasets.0.path", "datasets.1.path"])[0]
    assert change.key == "datasets"


def test_a_key_that_the_old_config_lacks_had_its_default() -> None:
    old = build().model_dump(mode="json")
    del old["seed"], old["epochs"], old["optimizer"]["weight_decay"]
    old["a_key_of_an_older_version"] = 1
    refused, warned = diff_on_resume(old, build(seed=2))
    assert ([str(c) for c in refused], warned) == (["seed: was 0, now 2"], ())


@pytest.mark.parametrize(
    ("global_batch_size", "world_size", "changes", "refused"),
    [
        # The run takes 16 rows a step: 4 x 2 on each of two ranks.
        (16, 2, {}, []),
        (16, 4, {}, []),
        (16, 4, {"gradient_accumulation_steps": 1}, []),
        (16, 1, {"batch_size": 16, "gradient_accumulation_steps": 1}, []),
        (
            *(16, 4, {"gradient_accumulation_steps": 4}),
            ["gradient_accumulation_steps: was 2, now 4"],
        ),
    ],
)
def test_the_global_batch_belongs_to_the_run_on_any_number_of_ranks(
    global_batch_size: int, world_size: int, changes: dict[str, Any], refused: list[str]
) -> None:
    found, warned = diff_on_resume(
        build().model_dump(mode="json"),
        build(**changes),
        global_batch_size=global_batch_size,
        world_size=world_size,
    )
    assert ([str(change) for change in found], warned) == (refused, ())


def test_the_same_method_on_another_number_of_devices_is_the_same_run() -> None:
    assert told(recipe="full_finetune_distributed") == ([], [])
    assert told(recipe="lora_finetune_distributed")[0] == [
        "recipe: was full_finetune_single_device, now lora_finetune_distributed"
    ]


def test_differences_name_every_key_that_has_another_value() -> None:
    one = build().model_dump(mode="json")
    other = build(seed=1, optimizer={"lr": 2.0}).model_dump(mode="json") | {"--flag": True}
    assert sorted(str(change) for change in differences(one, other)) == [
        "--flag: was absent, now true",
        "optimizer.lr: was 0.001, now 2.0",
        "seed: was 0, now 1",
    ]
