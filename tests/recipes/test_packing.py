"""Packed rows through the command line: the same training, fewer slots, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from legato.report.metrics import read_events
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    tensors,
    write_config,
)
from tests.helpers.tiny import write_model

ONE_ROW_A_STEP = {"batch_size": 1, "gradient_accumulation_steps": 1, "packing": True}


@pytest.fixture(scope="module")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dropout") / "model", attention_dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_packed_run_that_is_stopped_inside_of_an_epoch_goes_on_bit_for_bit(
    tmp_path: Path, dropout_model: Path, recipe: str
) -> None:
    changes = {"epochs": 2, "max_seq_len": 256, "val_set_size": 1, **ONE_ROW_A_STEP}
    config = write_config(tmp_path, model=dropout_model, recipe=recipe, **changes)
    assert legato("run", "--config", config) == 0
    whole, here = tmp_path / "out", tmp_path / "here"
    last_step = steps_in(whole)[-1]
    start = next(read_events(whole / "metrics.jsonl"))
    rows = start["num_packed_rows"]
    assert (start["num_samples"], start["steps_per_epoch"], last_step) == (9, rows, 2 * rows)
    assert 2 < rows < 9
    assert start["packing_efficiency"] == pytest.approx(start["num_tokens"] / (rows * 256))
    for stop in (1, rows + 1):
        assert (
            legato("run", "--config", config, f"output_dir={here}", f"stop_after_step={stop}") == 0
        )
    assert legato("run", "--config", config, f"output_dir={here}") == 0
    assert_same_tensors(here / f"step_{last_step}", whole / f"step_{last_step}")
    assert losses(here) == losses(whole)


def test_packed_training_is_unpacked_training(tmp_path: Path, tiny_model_dir: Path) -> None:
    """One step over all rows: the same loss, the same gradient, the same evaluation."""
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        batch_size=10,
        gradient_accumulation_steps=1,
        val_set_size=3,
        clip_grad_norm=None,
        optimizer={"name": "sgd", "lr": 1.0},
        lr_scheduler={"name": "constant"},
    )
    found = {}
    for name, packing in (("padded", False), ("packed", True)):
        out = tmp_path / name
        assert legato("run", "--config", config, f"output_dir={out}", f"packing={packing}") == 0
        assert steps_in(out) == [1]
        events = list(read_events(out / "metrics.jsonl"))
        (evaluation,) = [event for event in events if event["event"] == "eval"]
        found[name] = (losses(out)[1], evaluation["eval_loss"], tensors(out / "step_1"))
    assert found["packed"][:2] == pytest.approx(found["padded"][:2], rel=1e-6)
    for key, tensor in found["padded"][2].items():
        assert torch.allclose(found["packed"][2][key], tensor, atol=1e-5), key


def test_a_checkpoint_does_not_tell_that_its_rows_were_packed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], **ONE_ROW_A_STEP)
    assert legato("run", "--config", config, "max_steps=1") == 0
    step = tmp_path / "out" / "step_1"
    assert "legato" not in (step / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(step)
    assert model.config._attn_implementation == "sdpa"


def test_packing_cannot_change_on_resume(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], max_steps=2)
    assert legato("run", "--config", config, "stop_after_step=1") == 0
    assert legato("run", "--config", config, "packing=true") == 2
    assert "packing" in capsys.readouterr().err
