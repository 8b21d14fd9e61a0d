"""Training on a stream: resumed bit for bit, whoever works ahead; a bad row loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legato.report.metrics import read_events
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    write_config,
)

# 10 rows less one held out, in blocks of 4, 4 and 1; 4 rows a step: 3 steps a pass.
STREAM = {"streaming": True, "shuffle_buffer_size": 4, "val_set_size": 1, "max_steps": 7}


def trainer_state(step: Path) -> dict[str, object]:
    stored = json.loads((step / "state/trainer.json").read_text())["parts"]["trainer"]
    return {k: stored[k] for k in ("step", "rows_seen", "tokens_seen", "data_place")}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("packing", [False, True])
def test_a_stopped_and_resumed_stream_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, packing: bool
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, packing=packing, **STREAM)
    run = ["run", "--config", config, "save_every_n_train_steps=3"]
    assert legato(*run) == 0
    whole, here = tmp_path / "out", tmp_path / "here"
    # In the middle of a block, with processes that have read on; then at the end of a pass.
    stopped = [*run, f"output_dir={here}", "num_workers=2"]
    assert legato(*stopped, "stop_after_step=2") == 0
    assert legato(*run, f"output_dir={here}", "stop_after_step=3") == 0
    assert legato(*stopped) == 0
    assert_same_tensors(here / "step_7", whole / "step_7")
    assert losses(here) == losses(whole)
    assert trainer_state(here / "step_7") == trainer_state(whole / "step_7")
    if not packing:
        assert trainer_state(whole / "step_7")["rows_seen"] == 9 + 9 + 4
        place = trainer_state(whole / "step_3")["data_place"]
        assert isinstance(place, dict)
        assert place.pop("digest").startswith("xxh3_128:")
        assert place == {"epoch": 1, "first_row": 1, "taken": 0}
    [start] = [e for e in read_events(whole / "metrics.jsonl") if e["event"] == "start"]
    assert (start["num_samples"], start["steps_per_epoch"], start["total_steps"]) == (None, None, 7)
    assert [e["step"] for e in read_events(whole / "metrics.jsonl") if e["event"] == "eval"] == [7]


def test_a_bad_row_ends_the_run_with_a_checkpoint_and_the_mended_file_goes_on_from_it(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], **STREAM)
    whole = tmp_path / "whole"
    assert legato("run", "--config", config, f"output_dir={whole}") == 0
    data = tmp_path / "orders.jsonl"
    good = data.read_text()
    lines = good.splitlines()
    data.write_text("\n".join([*lines[:9], '{"prompt": 3']))
    capsys.readouterr()
    assert legato("run", "--config", config) == 1
    assert "orders.jsonl:10: isn't valid JSON" in capsys.readouterr().err
    assert steps_in(tmp_path / "out") == [1]
    data.write_text(good)
    assert legato("run", "--config", config) == 0
    assert_same_tensors(tmp_path / "out" / "step_7", whole / "step_7")
    assert losses(tmp_path / "out") == losses(whole)


def test_a_run_says_what_a_stream_left_out_and_data_show_shows_its_beginning(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], **STREAM)
    data = tmp_path / "orders.jsonl"
    data.write_text(data.read_text() + '{"prompt": "x", "completion": ' + json.dumps("y" * 300))
    with data.open("a") as file:
        file.write("}\n{\n")
    run = ["run", "--config", config, "max_steps=4", "on_bad_row=skip"]
    assert legato(*run) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "pass 1 has ended: " in said
    assert "longer than max_seq_len, dropped: 1 (orders.jsonl:11)" in said
    assert "bad rows, skipped: 1 (orders.jsonl:12)" in said
    assert "this pass so far: " in said
    assert legato("data", "show", config, "on_bad_row=skip") == 0
    shown = capsys.readouterr().out
    assert "a stream: this is of its first shuffle_buffer_size rows" in shown
    assert "evaluation: 1 sample\n" in shown


def test_workers_change_nothing_in_a_run_whose_data_is_read_before(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[1], epochs=2)
    there = tmp_path / "there"
    assert legato("run", "--config", config) == 0
    assert legato("run", "--config", config, f"output_dir={there}", "num_workers=1") == 0
    assert_same_tensors(there / "step_6", tmp_path / "out" / "step_6")
    assert losses(there) == losses(tmp_path / "out")
