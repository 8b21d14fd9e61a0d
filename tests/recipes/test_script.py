"""`legato cp <recipe> my.py` gives a script that trains as the recipe does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    steps_in,
    write_config,
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copied_script_trains_as_its_recipe_does_and_they_go_on_from_each_other(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, dtype="bf16", epochs=2)
    script = tmp_path / "my.py"
    assert legato("cp", recipe, script) == 0
    out, mixed = tmp_path / "out", tmp_path / "mixed"
    assert legato("run", "--config", config) == 0
    begun = ["stop_after_step=2", f"output_dir={mixed}"]
    assert legato("run", "--config", config, *begun) == 0
    every = [f"output_dir={mixed}", "save_every_n_train_steps=4", "save_at_epoch_end=true"]
    assert legato("run", script, "--config", config, *every, "stop_after_step=5") == 0
    assert steps_in(mixed) == [2, 3, 4, 5]
    assert legato("run", script, "--config", config, *every) == 0
    assert steps_in(mixed) == [2, 3, 4, 5, 6]
    assert_same_tensors(mixed / "step_6", out / "step_6")


def test_a_copied_script_refuses_what_it_does_not_do_and_what_a_resumed_run_cannot_change(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        tmp_path, model=tiny_model_dir, recipe=RECIPES[1], max_steps=1, save_only_model=True
    )
    script = tmp_path / "my.py"
    assert legato("cp", RECIPES[1], script) == 0
    asked = ["val_set_size=2", "loggers=tensorboard"]
    assert legato("run", script, "--config", config, *asked) == 2
    said = capsys.readouterr().err
    assert "val_set_size: this script's loop doesn't follow it" in said
    assert "loggers: this script's loop doesn't follow it" in said

    assert legato("run", script, "--config", config) == 0
    assert legato("run", script, "--config", config) == 2
    assert "holds weights and no training state" in capsys.readouterr().err

    other = ["save_only_model=false", f"output_dir={tmp_path / 'whole'}"]
    assert legato("run", script, "--config", config, *other) == 0
    assert legato("run", script, "--config", config, *other, "seed=4") == 2
    assert "seed" in capsys.readouterr().err


def test_a_script_that_is_there_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "my.py"
    script.write_text("mine")
    assert legato("cp", RECIPES[0], script) == 2
    assert "is there already" in capsys.readouterr().err
    assert script.read_text() == "mine"


def test_a_script_that_is_not_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert legato("run", tmp_path / "absent.py", "--config", "x.yaml") == 2
    assert "absent.py: no such file" in capsys.readouterr().err
