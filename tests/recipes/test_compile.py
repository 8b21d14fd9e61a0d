"""Compiled runs through the command line: the same training, in few forms, resumed bit for bit."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._inductor import cudagraph_trees

from legato.config.schema import RunConfig
from legato.evaluation.harness import evaluate_folder
from legato.evaluation.truthfulqa import TASK_NAME
from legato.parallel.world import World
from legato.recipes.data import build_run_data, compiled_lengths, stream_lengths
from legato.recipes.model import build_model
from legato.report.metrics import read_events
from tests.helpers import rows
from tests.helpers.launches import Launched
from tests.helpers.questions import prepare_lm_eval, write_questions
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    write_config,
)
from tests.helpers.sharded import build_config
from tests.helpers.tiny import write_model

# torch reads .grad of activations while it compiles, and hides this warning in its own way.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("own_compiler_state"),
]


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # TruthfulQA's solved examples are a long prompt, in bytes.
    shape = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    model = write_model(tmp_path / "model", **shape)
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

    prepare_lm_eval(monkeypatch)
    options: dict[str, Any] = {"tasks": [TASK_NAME], "limit": 2}
    options["truthfulqa_csv"] = write_questions(tmp_path / "TruthfulQA.csv")
    [of_compiled] = evaluate_folder(tmp_path / "out" / f"step_{last}", **options)
    [of_eager] = evaluate_folder(plain / f"step_{last}", **options)
    assert of_compiled.num_samples == of_eager.num_samples == 2
    assert of_eager.standard_error is not None
    assert abs(of_compiled.value - of_eager.value) <= of_eager.standard_error


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


@pytest.mark.parametrize("scope", ["block", "model"])
def test_mode_and_dynamic_reach_torch_compile(
    tiny_model_dir: Path, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def record(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
    options = {"scope": scope, "mode": "max-autotune-no-cudagraphs", "dynamic": True}
    for choice, mode, dynamic in (
        (options, "max-autotune-no-cudagraphs", True),
        ({"scope": scope}, None, False),
        ({"scope": scope, "mode": "reduce-overhead"}, "reduce-overhead", False),
    ):
        asked.clear()
        config = build_config(tiny_model_dir, "full", num_ranks=1, compile=choice)
        loaded = build_model(config, world=World.single("cpu"))
        # CUDA graphs are told of each pass, and gradients that add up leave their memory.
        passes = cudagraph_trees.MarkStepBox.mark_step_counter
        loaded.decode(torch.arange(3, 9)[None])
        passes -= cudagraph_trees.MarkStepBox.mark_step_counter
        kept = {bool(p._post_accumulate_grad_hooks) for p in loaded.parameters.values()}
        assert (passes, kept) == ((1, {True}) if mode == "reduce-overhead" else (0, {False}))
        of_blocks = [each for each in asked if "mode" in each]  # the loss has a form of its own
        assert len(of_blocks) == (2 if scope == "block" else 1)
        for each in of_blocks:
            assert (each["mode"], each["dynamic"]) == (mode, dynamic)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, {64, 128, 256}),
        ({"packing": True}, {256}),
        ({"streaming": True, "max_steps": 4}, {64, 128, 256}),
        ({"streaming": True, "max_steps": 4, "packing": True}, {256}),
    ],
    ids=str,
)
def test_training_and_evaluation_meet_the_same_few_forms_of_batches(
    tmp_path: Path, tiny_model_dir: Path, options: dict[str, Any], lengths: set[int]
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        compile=True,
        val_set_size=3,
        batch_size=2,
        device="cpu",
        **options,
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
        for step in range(1, (loader.steps_per_epoch or 4) + 1):
            for batch in loader.fetch(step).batches:
                forms.add(tuple(batch.input_ids.shape))
                assert (batch.position_ids is not None) == values.packing
    data.loader.close()
    assert {num_rows for num_rows, _ in forms} == {2}
    assert {length for _, length in forms} <= lengths


def test_compiled_lengths_are_at_most_six_and_no_longer_than_the_model_takes() -> None:
    many = rows.as_data(rows.random_rows(list(range(2, 500))))
    lengths = compiled_lengths(many, None, max_seq_len=499)
    assert lengths == [128, 192, 256, 384, 448, 499]
    few = rows.as_data(rows.random_rows([3, 60, 64, 65]))
    assert compiled_lengths(few, max_seq_len=512) == [64, 128]


@pytest.mark.parametrize(
    ("max_seq_len", "lengths"),
    [
        (4096, [128, 256, 512, 1024, 2048, 4096]),
        (2000, [64, 128, 256, 512, 1024, 2000]),
        (100, [64, 100]),
        (40, [40]),
    ],
)
def test_rows_of_a_stream_have_at_most_six_lengths_down_from_the_longest(
    max_seq_len: int, lengths: list[int]
) -> None:
    assert stream_lengths(max_seq_len) == lengths


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
