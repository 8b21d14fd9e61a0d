"""Runs that keep less in memory: the same steps, and checkpoints that either kind goes on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from legato.checkpoint.manifest import FileEntry, parse_manifest
from legato.recipes import training
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    tensors,
    write_config,
)

FULL, LORA = RECIPES
EIGHT_BIT = {"name": "adamw_8bit", "lr": 5e-3, "weight_decay": 0.01}
# Of what updates in backward: no clipping, and all four rows of a step at once.
UNCLIPPED: dict[str, Any] = {
    "clip_grad_norm": None,
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
}
IN_BACKWARD = "optimizer_in_backward=true"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bf16"}, {"dtype": "fp32", "enable_activation_checkpointing": True}],
    ids=str,
)
def test_a_run_that_updates_in_backward_and_one_that_doesnt_go_on_from_each_other(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, options: dict[str, Any]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, **UNCLIPPED | options)
    assert legato("run", "--config", config) == 0
    here = tmp_path / "here"
    run = ["run", "--config", config, f"output_dir={here}", "--accept-changes"]
    assert legato(*run, IN_BACKWARD, "stop_after_step=1") == 0
    assert legato(*run, "stop_after_step=2") == 0
    assert legato(*run, IN_BACKWARD) == 0
    assert_same_tensors(here / "step_3", tmp_path / "out" / "step_3")
    assert losses(here) == losses(tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (FULL, {"optimizer": EIGHT_BIT, "dtype": "bf16"}),
        (FULL, {"optimizer": EIGHT_BIT, "dtype": "bf16", "master_weights": "none"}),
        (LORA, {"optimizer": EIGHT_BIT, "lora_modules_to_save": ["embed_tokens"]}),
        # All of it at once: what the least memory takes.
        (
            FULL,
            {"optimizer": EIGHT_BIT, "dtype": "bf16", "master_weights": "none"}
            | {"optimizer_in_backward": True, "enable_activation_checkpointing": True}
            | UNCLIPPED,
        ),
        (
            FULL,
            {"dtype": "bf16", "master_weights": "none", "optimizer_in_backward": True} | UNCLIPPED,
        ),
    ],
    ids=["masters", "rounded", "lora", "least memory", "adamw in backward, rounded"],
)
def test_a_stopped_and_resumed_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, options: dict[str, Any]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, epochs=2, **options)
    assert legato("run", "--config", config) == 0
    here = tmp_path / "here"
    run = ["run", "--config", config, f"output_dir={here}"]
    assert legato(*run, "stop_after_step=2", "save_every_n_train_steps=1") == 0
    assert legato(*run) == 0
    assert_same_tensors(here / "step_6", tmp_path / "out" / "step_6")
    found = losses(here)
    assert found == losses(tmp_path / "out")
    assert found[6] < found[1] - 0.02
    if "optimizer" in options:
        packed = [key for key in tensors(here / "step_6") if ":exp_avg.codes/" in key]
        assert any("embed_tokens" in key for key in packed)
    if recipe == FULL:
        AutoModelForCausalLM.from_pretrained(here / "step_6")


def test_weights_that_an_update_in_backward_has_spoiled_are_not_saved(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=FULL, **UNCLIPPED)
    build = training.build_parts
    gradients: list[torch.Tensor] = []

    def spoil_the_second(gradient: torch.Tensor) -> torch.Tensor:
        gradients.append(gradient)
        return gradient * float("nan" if len(gradients) == 2 else 1)

    def build_spoilt(*words: Any, **facts: Any) -> Any:
        parts = build(*words, **facts)
        weight = parts.model.parameters["model.layers.0.mlp.down_proj.weight"]
        weight.register_hook(spoil_the_second)
        return parts

    monkeypatch.setattr(training, "build_parts", build_spoilt)
    # After backward, the check comes before the update: step 1 is what there is to save.
    assert legato("run", "--config", config, f"output_dir={tmp_path / 'after'}") == 1
    assert steps_in(tmp_path / "after") == [1]
    gradients.clear()
    capsys.readouterr()
    assert legato("run", "--config", config, IN_BACKWARD) == 1
    assert "so this step isn't saved" in capsys.readouterr().err
    assert steps_in(tmp_path / "out") == []


def test_a_step_of_two_processes_that_one_would_cut_is_refused_at_resume(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = UNCLIPPED | {"batch_size": 2}
    config = write_config(tmp_path, model=tiny_model_dir, recipe=FULL, **options)
    run = ["run", "--config", config, IN_BACKWARD]
    assert legato(*run, "stop_after_step=1") == 0
    # As two processes would have written it: four rows a step, two on each.
    step = tmp_path / "out" / "step_1"
    text = (step / "state/trainer.json").read_bytes()
    assert text.count(b'"global_batch_size": 2') == 1
    text = text.replace(b'"global_batch_size": 2', b'"global_batch_size": 4')
    (step / "state/trainer.json").write_bytes(text)
    manifest = parse_manifest((step / "manifest.json").read_bytes(), path="manifest.json")
    files = manifest.files | {"state/trainer.json": FileEntry.of_bytes(text)}
    (step / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files).encode())
    capsys.readouterr()
    assert legato(*run) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optimizer_in_backward: the run's 4 rows a step are 2 micro-batches" in said
    assert legato(*run, "batch_size=4", "--accept-changes") == 0


def test_activation_offloading_is_refused_where_there_is_no_other_memory(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=FULL, device="auto")
    options = ["enable_activation_offloading=true", "enable_activation_checkpointing=true"]
    if torch.cuda.is_available():
        pytest.skip("there is other memory")
    assert legato("run", "--config", config, *options) == 2
    assert "this run computes on cpu, where activations are in host" in capsys.readouterr().err
