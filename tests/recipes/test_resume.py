"""N steps == k steps, stop, resume, N - k steps: bit for bit, for every recipe."""

from __future__ import annotations

import datetime as dt
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from legato.checkpoint import Checkpointer, ModelPart
from legato.data import Batch
from legato.recipes import beginning, training
from legato.recipes.parts import RunParts
from legato.report import byte_bar
from legato.train.step import train_step
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    tensors,
    write_config,
)
from tests.helpers.tiny import CHATML, write_model

TOTAL_STEPS = 8  # epochs of 3 steps: 1-3, 4-6, 7-9


@pytest.fixture(scope="module")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dropout") / "model", attention_dropout=0.1)


@pytest.fixture(scope="module", params=[(r, d) for r in RECIPES for d in ("fp32", "bf16")], ids=str)
def whole_run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    dropout_model: Path,
) -> tuple[Path, list[str]]:
    """A run that nobody disturbed: its output_dir, and the arguments that make it."""
    recipe, dtype = request.param
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(
        folder, model=dropout_model, recipe=recipe, dtype=dtype, epochs=3, max_steps=TOTAL_STEPS
    )
    arguments = ["run", "--config", str(config)]
    assert legato(*arguments) == 0
    return folder / "out", arguments


def files_in(folder: Path) -> dict[Path, int]:
    """Every file and folder below, and when it was last written to."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "stops",
    [[1], [2], [3], [4], [5], [6], [7], [2, 3, 5]],
    ids=lambda stops: "stop_after_" + "_".join(map(str, stops)),
)
def test_a_stopped_and_resumed_run_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, whole_run: tuple[Path, list[str]], stops: list[int]
) -> None:
    whole, arguments = whole_run
    here = tmp_path / "out"
    for stop in stops:
        code = legato(
            *arguments,
            f"output_dir={here}",
            f"stop_after_step={stop}",
            "save_every_n_train_steps=2",
        )
        assert code == 0
        assert steps_in(here)[-1] == stop
    assert legato(*arguments, f"output_dir={here}") == 0
    assert_same_tensors(here / f"step_{TOTAL_STEPS}", whole / f"step_{TOTAL_STEPS}")
    assert losses(here) == losses(whole)
    counters = []
    for folder in (here, whole):
        text = (folder / f"step_{TOTAL_STEPS}/state/trainer.json").read_text()
        stored = json.loads(text)["parts"]["trainer"]
        counters.append({key: stored[key] for key in ("step", "rows_seen", "tokens_seen")})
    assert counters[0] == counters[1]
    assert counters[0]["rows_seen"] == 10 + 10 + 8


class FirstDay(dt.date):
    """A calendar that stands still."""

    @classmethod
    def today(cls) -> dt.date:
        return dt.date(2026, 1, 31)


class NextDay(dt.date):
    """The same, a day on."""

    @classmethod
    def today(cls) -> dt.date:
        return dt.date(2026, 2, 1)


def test_a_run_that_goes_on_the_next_day_trains_on_the_date_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%d %B %Y') }}\n" + CHATML
    model = write_model(tmp_path / "model", chat_template=dated)
    config = write_config(tmp_path, model=model, recipe=RECIPES[1], epochs=1)

    def run(folder: str, *changes: str) -> Path:
        out = tmp_path / folder
        assert legato("run", "--config", config, f"output_dir={out}", *changes) == 0
        return out

    monkeypatch.setattr(beginning, "date", FirstDay)
    whole = run("whole")
    run("resumed", "stop_after_step=1")
    monkeypatch.setattr(beginning, "date", NextDay)
    resumed, later = run("resumed"), run("later")
    assert_same_tensors(resumed / "step_3", whole / "step_3")
    assert losses(resumed) == losses(whole)
    for out, day in ((whole, "2026-01-31"), (resumed, "2026-01-31"), (later, "2026-02-01")):
        stored = json.loads((out / "step_3/state/trainer.json").read_text())
        assert stored["parts"]["trainer"]["facts"]["start_date"] == day
    assert losses(later) != losses(whole)  # the date is in what is trained on


@pytest.mark.parametrize("background", [True, False])
def test_weights_before_a_save_are_the_weights_after_it(
    tmp_path: Path, whole_run: tuple[Path, list[str]], background: bool
) -> None:
    """A run that saves at every step takes the same path as one that saves at the end only."""
    whole, arguments = whole_run
    here = tmp_path / "out"
    options = [f"enable_async_checkpointing={background}", "save_every_n_train_steps=1"]
    assert legato(*arguments, f"output_dir={here}", *options) == 0
    assert steps_in(here) == list(range(1, TOTAL_STEPS + 1))
    assert losses(here) == losses(whole)
    assert_same_tensors(here / f"step_{TOTAL_STEPS}", whole / f"step_{TOTAL_STEPS}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_finished_run_says_that_nothing_is_left_and_changes_nothing(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    assert legato("run", "--config", config, "max_steps=2") == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "step_2").rglob("*")}
    capsys.readouterr()
    for verb in (["run"], ["validate", "--full"]):
        assert legato(*verb, "--config", config, "max_steps=2") == 0
        assert "nothing left to do" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "step_2").rglob("*")} == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_more_steps_go_on_and_say_what_the_learning_rate_does(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        tmp_path, model=tiny_model_dir, recipe=recipe, epochs=None, lr_scheduler={"name": "linear"}
    )
    assert legato("run", "--config", config, "max_steps=4") == 0
    assert "num_threads" not in capsys.readouterr().err
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    before = files_in(tmp_path)
    try:
        for verb in (["validate", "--full"], ["run"]):
            assert files_in(tmp_path) == before
            assert legato(*verb, "--config", config, "max_steps=6") == 0
            said = " ".join(capsys.readouterr().err.split())
            assert f"num_threads was {threads}, is {threads + 1}: the run goes on" in said
            assert "changed since the checkpoint: max_steps: was 4, now 6" in said
            # peak 5e-3, linear: step 5 of 4 is past the end; of 6 it has 2 of 6 left.
            assert "lr at step 5: was 0, now 0.00167" in said
            assert f"starts from step_4 in {tmp_path / 'out'}, goes on at step 5" in said
    finally:
        torch.set_num_threads(threads)
    assert steps_in(tmp_path / "out") == [4, 6]
    assert sorted(losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]


def test_a_changed_field_that_a_run_cannot_change_is_refused_with_both_values(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, "max_steps=1") == 0
    capsys.readouterr()
    for verb in (["run"], ["validate", "--full"]):
        assert legato(*verb, "--config", config, "max_steps=2", "seed=4") == 2
        message = capsys.readouterr().err
        assert "seed: was 3, now 4" in message
        assert "--accept-changes" in message
    assert steps_in(tmp_path / "out") == [1]
    assert legato("run", "--config", config, "max_steps=2", "seed=4", "--accept-changes") == 0
    assert steps_in(tmp_path / "out") == [1, 2]


def test_a_field_that_decides_the_tensors_of_a_checkpoint_is_not_offered_to_be_accepted(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[1])
    assert legato("run", "--config", config, "max_steps=1") == 0
    changed = ["run", "--config", config, "max_steps=2", "lora_rank=8", "lora_alpha=16"]
    end = (
        "\nPut these back, or train anew with another output_dir (or resume_from_checkpoint=false "
        "and --start-over). --accept-changes can't help: a checkpoint's tensors are as they were "
        "with the old lora_rank.\n"
    )
    for flags, listed in (
        ([], "  lora_rank: was 4, now 8\n  lora_alpha: was 8.0, now 16.0"),
        (["--accept-changes"], "  lora_rank: was 4, now 8"),
    ):
        capsys.readouterr()
        assert legato(*changed, *flags) == 2
        message = capsys.readouterr().err
        assert f"holds a run with another config:\n{listed}{end}" in message
    assert steps_in(tmp_path / "out") == [1]


def test_the_same_global_batch_cut_otherwise_is_no_change(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, "max_steps=1") == 0
    cut = ["batch_size=4", "gradient_accumulation_steps=1"]
    assert legato("run", "--config", config, "max_steps=2", *cut) == 0
    assert steps_in(tmp_path / "out") == [1, 2]


@pytest.mark.parametrize("streaming", [False, True])
def test_another_global_batch_goes_on_with_the_next_row_and_says_which(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    streaming: bool,
) -> None:
    trained: list[list[str]] = []

    def note_and_step(batches: list[Batch], **options: Any) -> Any:
        trained.append([sample_id for batch in batches for sample_id in batch.sample_ids])
        return train_step(batches, **options)

    monkeypatch.setattr("legato.train.trainer.train_step", note_and_step)
    length = {"streaming": True, "max_steps": 7} if streaming else {"epochs": 2}
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], **length)
    run = ["run", "--config", config, "--accept-changes"]
    assert legato(*run, "stop_after_step=1") == 0
    capsys.readouterr()
    smaller = [*run, "batch_size=3", "gradient_accumulation_steps=1"]
    assert legato(*smaller, "stop_after_step=2") == 0
    said = " ".join(capsys.readouterr().err.split())
    where = "block of the stream that begins with row 1 (pass 1)" if streaming else "epoch 1"
    assert "a step takes 3 rows now, 4 before: training goes on with row 5 of the 10 of " in said
    assert where in said
    assert legato(*smaller, "stop_after_step=4") == 0
    assert "rows now" not in capsys.readouterr().err
    assert legato(*run, "batch_size=8", "gradient_accumulation_steps=1") == 0
    assert [len(ids) for ids in trained] == [4, 3, 3, 3, 7, *([8, 2] if streaming else [])]
    seen = list(chain.from_iterable(trained))
    for first in range(0, len(seen), 10):
        assert len(set(seen[first : first + 10])) == 10
    text = (tmp_path / "out" / f"step_{len(trained)}/state/trainer.json").read_text()
    stored = json.loads(text)["parts"]["trainer"]
    assert stored["rows_seen"] == 20 + 10 * streaming
    assert stored["facts"]["total_steps"] == len(trained)
    assert stored["facts"]["global_batch_size"] == 8
    if not streaming:
        assert stored["data_place"] == {"epoch": 2, "taken": 0, "steps": 0}


def test_moments_that_another_optimizer_left_are_not_kept_for_later(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    run = ["run", "--config", config]
    assert legato(*run, "stop_after_step=1") == 0
    capsys.readouterr()
    for verb in (["validate", "--full"], ["run"]):
        rest = ["--config", config, "stop_after_step=2", "optimizer.name=sgd"]
        assert legato(*verb, *rest) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert "sgd keeps no moments: those of the checkpoint are left out" in said
    assert not any(":exp_avg" in key for key in tensors(tmp_path / "out/step_2"))
    for verb in (["validate", "--full"], ["run"]):
        assert legato(*verb, "--config", config) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert "the checkpoint holds no moments: those of adamw begin at 0" in said
    last = tensors(tmp_path / "out/step_3")
    assert {t.item() for key, t in last.items() if ":step/" in key} == {1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_without_state_cannot_be_resumed_and_the_remedy_named_works(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    step = tmp_path / "out" / "step_1"
    assert legato("run", "--config", config, "max_steps=1", "save_only_model=true") == 0
    assert not (step / "state").exists()
    for more in ([], ["allow_missing=[optimizer]"], ["save_only_model=true"]):
        capsys.readouterr()
        assert legato("run", "--config", config, "max_steps=2", *more) != 0
        message = " ".join(capsys.readouterr().err.split())
        assert f"{step} holds weights and no training state" in message
        assert "save_only_model" in message
    model = step
    if recipe.startswith("lora"):
        model = tmp_path / "merged"
        assert (
            f"(legato merge {step} --output-dir DIR) and begin a new run with model=DIR" in message
        )
        assert legato("merge", step, "--output-dir", model) == 0
    else:
        assert f"or begin a new run with model={step} and another output_dir" in message
    new = [f"model={model}", f"output_dir={tmp_path / 'other'}"]
    assert legato("run", "--config", config, "max_steps=1", *new) == 0
    assert steps_in(tmp_path / "other") == [1]


def test_a_checkpoint_without_optimizer_state_is_gone_on_from_where_that_is_allowed(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], max_steps=3)
    assert legato("run", "--config", config, "stop_after_step=2") == 0
    # A loop of one's own goes on from a run's step and keeps no optimizer.
    with Checkpointer(tmp_path / "out") as whole, Checkpointer(tmp_path / "bare") as bare:
        assert whole.source is not None
        trainer = whole.read_trainer_state(whole.source)
        weights = ModelPart(tensors=load_file(tmp_path / "out/step_2/model.safetensors"))
        bare.save({"model": weights, "trainer": trainer}, step=2).result()
    step = tmp_path / "bare" / "step_2"
    assert (step / "state" / "trainer.json").exists()
    other = tmp_path / "other"
    again = ["run", "--config", config, f"output_dir={other}", f"resume_from_checkpoint={step}"]
    capsys.readouterr()
    assert legato(*again) != 0
    message = " ".join(capsys.readouterr().err.split())
    assert f"{step} can't be restored: it holds no optimizer state" in message
    assert "allow_missing: [optimizer]" in message
    assert legato(*again, "allow_missing=[optimizer]") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{step} holds no optimizer state: it begins anew, as allowed" in said
    assert "goes on at step 3" in said
    counts = [t.item() for key, t in tensors(other / "step_3").items() if ":step/" in key]
    assert set(counts) == {1}
    before, after = (load_file(s / "model.safetensors") for s in (step, other / "step_3"))
    assert any(not torch.equal(after[key], before[key]) for key in before)


def test_start_over_moves_the_steps_in_the_way_and_deletes_nothing(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, "max_steps=2", "save_every_n_train_steps=1") == 0
    capsys.readouterr()
    again = ["run", "--config", config, "max_steps=2", "resume_from_checkpoint=false"]
    for words in (again, ["validate", "--full", *again[1:]]):
        assert legato(*words) == 1
        message = capsys.readouterr().err
        assert "step_1" in message
        assert "--start-over" in message
    assert legato(*again, "--start-over") == 0
    assert steps_in(tmp_path / "out") == [2]
    [moved] = (tmp_path / "out").glob(".old-*")
    assert steps_in(moved) == [1, 2]


def test_an_explicit_path_resumes_from_that_step_and_much_of_it_under_a_bar(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], epochs=2)
    assert legato("run", "--config", config, "save_every_n_train_steps=2") == 0
    other = tmp_path / "other"
    source = tmp_path / "out" / "step_4"
    arguments = [f"resume_from_checkpoint={source}", f"output_dir={other}"]
    capsys.readouterr()
    monkeypatch.setattr(byte_bar, "LARGE_BYTES", 1)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    assert legato("run", "--config", config, *arguments) == 0
    assert re.search(r"restoring.*kB", capsys.readouterr().err)
    assert_same_tensors(other / "step_6", tmp_path / "out" / "step_6")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deterministic_run_asks_torch_for_it_in_its_steps_and_takes_the_same_ones(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    build = training.build_parts

    def watched(*words: Any, **options: Any) -> RunParts:
        parts = build(*words, **options)
        parts.model.head.register_forward_hook(
            lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
        )
        return parts

    monkeypatch.setattr(training, "build_parts", watched)
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    assert legato("run", "--config", config) == 0
    assert set(seen) == {False}
    seen.clear()
    other = tmp_path / "other"
    assert legato("run", "--config", config, "deterministic=true", f"output_dir={other}") == 0
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert losses(other) == losses(tmp_path / "out")
