"""Signals and the trigger file, on a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legato.report.metrics import read_events
from tests.helpers import tiny
from tests.helpers.runs import RECIPES, legato, losses, steps_in, write_config

pytestmark = pytest.mark.slow


def start(config: Path, *arguments: str, to: int | None = None) -> subprocess.Popen[bytes]:
    """A run in a process of its own; what it says goes to said.txt beside its config, or ``to``."""
    command = [sys.executable, "-m", "legato", "run", "--config", str(config), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (config.parent / "said.txt").open("wb") as said:
        return subprocess.Popen(
            command, env=environment, stdout=said if to is None else to, stderr=subprocess.STDOUT
        )


def wait_for_step(output_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (output_dir / "metrics.jsonl").exists():
            done = [
                e["step"] for e in read_events(output_dir / "metrics.jsonl") if e["event"] == "step"
            ]
            if done and max(done) >= step:
                return
        assert process.poll() is None, (output_dir.parent / "said.txt").read_text()
        time.sleep(0.05)
    raise AssertionError(f"step {step} wasn't reached")


def evaluations(output_dir: Path) -> dict[int, float]:
    """Step -> evaluation loss; one that was told twice is the same."""
    found: dict[int, float] = {}
    for event in read_events(output_dir / "metrics.jsonl"):
        if event["event"] == "eval":
            assert found.setdefault(event["step"], event["eval_loss"]) == event["eval_loss"]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=["SIGTERM", "SIGINT", "SIGHUP"],
)
def test_a_stop_signal_saves_the_step_it_came_in_and_the_same_command_goes_on(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, number: signal.Signals, code: int
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, epochs=None, max_steps=400)
    out = tmp_path / "out"
    process = start(config)
    wait_for_step(out, 3, process)
    process.send_signal(number)
    process.wait(timeout=120)
    output = (tmp_path / "said.txt").read_text()
    assert process.returncode == code, output
    assert "Traceback" not in output
    [step] = steps_in(out)
    assert max(losses(out)) == step
    assert step < 400
    assert legato("run", "--config", config, f"stop_after_step={step + 1}") == 0
    assert steps_in(out) == [step, step + 1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    held_out = tiny.write_orders(tmp_path / "held_out.jsonl", num_rows=20)
    often = tmp_path / "often.jsonl"
    often.write_text(held_out.read_text() * 40)  # a second of evaluation
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=recipe,
        eval_datasets=[{"path": str(often)}],
        run_val_every_n_steps=2,
        epochs=None,
        max_steps=4,
    )
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert legato("run", "--config", config, f"output_dir={whole}") == 0
    expected = evaluations(whole)
    assert list(expected) == [2, 4]
    for step in (2, 4):
        process = start(config)
        wait_for_step(out, step, process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
        assert process.returncode == 143, (tmp_path / "said.txt").read_text()
        assert steps_in(out)[-1] == step
        assert step not in evaluations(out)
    assert legato("run", "--config", config) == 0
    assert evaluations(out) == expected
    assert losses(out) == losses(whole)


def test_a_run_whose_reader_has_gone_trains_on_and_saves_when_it_is_stopped(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path, model=tiny_model_dir, recipe=RECIPES[0], epochs=None, max_steps=4000
    )
    out = tmp_path / "out"
    reader, writer = os.pipe()
    process = start(config, to=writer)  # as `legato run ... 2>&1 | tee log`
    os.close(writer)
    wait_for_step(out, 3, process)
    os.close(reader)  # Ctrl-C and a closed terminal end tee too
    wait_for_step(out, max(losses(out)) + 3, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 129
    assert steps_in(out) == [max(losses(out))]


def test_sigusr1_and_the_trigger_file_save_and_go_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_config(
        tmp_path, model=tiny_model_dir, recipe=RECIPES[1], epochs=None, max_steps=4000
    )
    out = tmp_path / "out"
    process = start(config)
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)  # while it loads the model
    while not steps_in(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert steps_in(out) == [1]
    wait_for_step(out, 3, process)
    assert steps_in(out) == [1]
    process.send_signal(signal.SIGUSR1)
    while len(steps_in(out)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first, _ = steps_in(out)
    (out / "SAVE").touch()
    while len(steps_in(out)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(steps_in(out)) == 3
    assert not (out / "SAVE").exists()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    assert process.returncode == 143
    assert steps_in(out)[0] == first
    assert len(steps_in(out)) == 4


@pytest.mark.crash
@pytest.mark.parametrize("recipe", RECIPES)
def test_kill_9_loses_at_most_what_came_after_the_newest_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=recipe,
        epochs=None,
        max_steps=60,
        lr_scheduler={"name": "linear"},
    )
    whole = tmp_path / "whole"
    assert (
        legato("run", "--config", config, f"output_dir={whole}", "save_every_n_train_steps=null")
        == 0
    )
    out = tmp_path / "out"
    for wanted in (5, 25):
        process = start(config, "save_every_n_train_steps=1", "keep_last_n_checkpoints=2")
        wait_for_step(out, wanted, process)
        process.kill()
        process.wait()
    assert legato("run", "--config", config, "save_every_n_train_steps=20") == 0
    assert losses(out) == losses(whole)
