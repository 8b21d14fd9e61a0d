"""Compiled runs through the command line: the same training, in few forms, resumed bit for bit."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from legato.config.schema import RunConfig
from legato.parallel.world import World
from legato.recipes.data import build_run_data, compiled_lengths
from legato.report.metrics import read_events
from tests.helpers import rows
from tests.helpers.launches import Launched
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    write_config,
)
from tests.helpers.tiny import write_model

# torch reads .grad of activations while it compiles, and hides this warning in its own way.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def own_compiler_state() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words"),
    [(RECIPES[0], "compile={scope: model}"), (RECIPES[1], "compile=true")],
)
def test_a_compiled_run_is_the_eager_one_and_resumes_bit_for_bit(
    tmp_path: Path,
    recipe: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    config = write_config(
        tmp_path,
        model=model,
        recipe=recipe,
        val_set_size=2,
        run_val_every_n_steps=1,
        train_on_inputs=True,
        epochs=2,
        **{"lora_dropout": 0.0} if recipe == RECIPES[1] else {},
    )
    run, here, plain = ["run", "--config", config, words], tmp_path / "here", tmp_path / "plain"
    assert legato(*run) == 0
    said = capsys.readouterr().err
    what = "as a whole" if "model" in words else "block by block"
    assert f", compiled {what}" in said
    assert "step 1 took " in said
    events = list(read_events(tmp_path / "out" / "metrics.jsonl"))
    assert events[0]["compile"] == ("model" if "model" in words else "block")
    steps = [event for event in events if event["event"] == "step"]
    assert 0.05 < steps[0]["compile_seconds"] < steps[0]["step_seconds"]
    assert steps[-1]["compile_seconds"] == 0.0

    assert legato(*run, f"output_dir={here}", "stop_after_step=1") == 0
    torch._dynamo.reset()  # as in another process
    assert legato(*run, f"output_dir={here}") == 0
    assert losses(here) == losses(tmp_path / "out")
    [*_, last] = steps_in(here)
    assert_same_tensors(here / f"step_{last}", tmp_path / "out" / f"step_{last}")

    assert legato("run", "--config", config, f"output_dir={plain}") == 0
    compiled, eager = losses(tmp_path / "out"), losses(plain)
    assert compiled == pytest.approx(eager, abs=2e-5)
    assert compiled != eager  # it was another computation
    by_step = [
        {
            e["step"]: e["eval_loss"]
            for e in read_events(folder / "metrics.jsonl")
            if "eval_loss" in e
        }
        for folder in (tmp_path / "out", plain)
    ]
    assert by_step[0] == pytest.approx(by_step[1], abs=2e-5)


@pytest.mark.slow
def test_updates_in_backward_are_the_same_bits_as_after_it_compiled_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    whole_steps = {"clip_grad_norm": None, "batch_size": 4, "gradient_accumulation_steps": 1}
    options = {"dtype": "bf16", "max_steps": 2} | whole_steps
    config = write_config(tmp_path, model=model, recipe=RECIPES[0], compile=True, **options)
    during = tmp_path / "during"
    words = ["optimizer_in_backward=true", f"output_dir={during}"]
    assert legato("run", "--config", config) == 0
    torch._dynamo.reset()
    assert legato("run", "--config", config, *words) == 0
    assert losses(during) == losses(tmp_path / "out")
    assert_same_tensors(during / "step_2", tmp_path / "out" / "step_2")


def test_training_and_evaluation_meet_the_same_few_forms_of_batches(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        compile=True,
        val_set_size=3,
        batch_size=2,
        device="cpu",
    )
    values = RunConfig.model_validate(yaml.safe_load(config.read_text()))
    data = build_run_data(
        values,
        start_date=dt.date(2026, 1, 1),
        world=World.single("cpu"),
        global_batch_size=3,  # a micro-batch of two rows and one of one
    )
    forms = set()
    for loader in (data.loader, data.eval_loader):
        assert loader is not None
        for step in range(1, loader.steps_per_epoch + 1):
            for batch in loader.micro_batches(step):
                forms.add(tuple(batch.input_ids.shape))
                assert batch.position_ids is None
    assert {num_rows for num_rows, _ in forms} == {2}
    assert len(forms) <= 6
    assert {length % 64 for _, length in forms} == {0}


def test_compiled_lengths_are_at_most_six_and_no_longer_than_the_model_takes() -> None:
    many = rows.as_data(rows.random_rows(list(range(2, 500))))
    lengths = compiled_lengths(many, None, max_seq_len=499)
    assert lengths == [128, 192, 256, 384, 448, 499]
    few = rows.as_data(rows.random_rows([3, 60, 64, 65]))
    assert compiled_lengths(few, max_seq_len=512) == [64, 128]


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_compiler_ends_the_run_before_step_1_with_the_remedy(
    tmp_path: Path,
    tiny_model_dir: Path,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, compile=True)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert legato("run", "--config", config) == 1
    said = capsys.readouterr().err
    assert "needs a C++ compiler, and there is none (looked for CXX=/nowhere/g++)" in said
    assert "or set compile: false" in said
    assert not steps_in(tmp_path / "out")
    assert not list((tmp_path / "out").glob("metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_compile_the_whole_model_through_the_command(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    config = write_config(tmp_path, model=model, recipe="full_finetune_distributed", max_steps=2)
    said = Launched(config, "compile={scope: model}").succeed()
    assert "2 x cpu (1 threads), compiled as a whole" in said
    plain = [f"output_dir={tmp_path / 'plain'}", "recipe=full_finetune_single_device"]
    assert legato("run", "--config", config, *plain, "gradient_accumulation_steps=4") == 0
    found, expected = losses(tmp_path / "out"), losses(tmp_path / "plain")
    assert found == pytest.approx(expected, abs=2e-5)
