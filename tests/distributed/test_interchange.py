"""A step folder doesn't tell whether the run that wrote it was compiled, how, or on what.

Every form of a run reads what every other form wrote: {eager, each block compiled, the whole model
compiled, wrap_compile} x {activation checkpointing or not} x {one device, FSDP2} x {methods}.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from legato.parallel.world import World
from tests.helpers import spawn, tiny
from tests.helpers.interchange import (
    ALL_METHODS,
    COMPILE,
    METHODS,
    ROUNDED,
    Form,
    Run,
    all_forms,
    assert_same,
    contents,
    known,
    read_and_write,
    stored,
    write_canonical,
)
from tests.helpers.sharded import take_step

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# -- names and values


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and a folder with one checkpoint of known values for each method."""
    folder = tmp_path_factory.mktemp("canonical")
    model = tiny.write_model(folder / "model")
    write_canonical(folder, model)
    return model, folder


def test_the_canonical_folders_hold_the_known_values_as_other_libraries_read_them(
    canonical: tuple[Path, Path],
) -> None:
    _model, folder = canonical
    for method in ALL_METHODS:
        for name, values in stored(folder / method / "step_1").items():
            if name.startswith("step/"):
                continue
            if method in ROUNDED and name.startswith("model/"):
                master = re.sub(
                    r"(lora_[AB])\.", r"\1.default.", name.replace("model", "master", 1)
                )
                expected = known(master, torch.from_numpy(values)).bfloat16().float()
            else:
                expected = known(name, torch.from_numpy(values))
            assert np.array_equal(values, expected.numpy()), name
    full = AutoModelForCausalLM.from_pretrained(folder / "full" / "step_1")
    weight = full.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight, known("model/model.layers.1.mlp.up_proj.weight", weight))
    adapter = PeftModel.from_pretrained(full, folder / "lora" / "step_1")
    weight = adapter.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight
    key = "model/base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    assert torch.equal(weight, known(key, weight))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_form_reads_the_canonical_folder_and_writes_it_again_byte_for_byte(
    canonical: tuple[Path, Path], num_ranks: int
) -> None:
    model, folder = canonical
    forms = all_forms(num_ranks)
    assert len(forms) == len(COMPILE) * 2 * len(METHODS) + 2 * len(ROUNDED)
    if num_ranks == 1:
        read_and_write(0, forms, model, folder)
    else:
        spawn.run(read_and_write, num_ranks, forms, model, folder, timeout_seconds=600.0)
    for form in forms:
        expected = contents(folder / form.method / "step_1")
        found = contents(folder / str(form) / "step_1")
        moments = [name for name in expected if "optimizer" in name]
        assert moments, form
        if num_ranks > 1:  # each rank has a file of its own for its part
            assert_same(
                stored(folder / str(form) / "step_1"),
                stored(folder / form.method / "step_1"),
                form,
            )
            for files in (expected, found):
                for name in [name for name in files if "optimizer" in name]:
                    del files[name]
        assert found == expected, form


# -- training


# Each is trained in the first form, goes on in the second and is read by the first again. Every
# value of every axis stands on both sides.
CROSSED = [
    (Form("eager", False, 1, "full"), Form("block", False, 1, "full")),
    (Form("block", True, 1, "full"), Form("eager", True, 2, "full")),
    (Form("model", False, 2, "full"), Form("wrap_compile", False, 1, "full")),
    (Form("wrap_compile", True, 2, "full"), Form("model", True, 1, "full")),
    (Form("block", False, 2, "lora"), Form("eager", False, 1, "lora")),
    (Form("eager", True, 1, "lora"), Form("model", False, 2, "lora")),
    (Form("wrap_compile", False, 1, "qlora"), Form("block", True, 2, "qlora")),
    (Form("model", True, 1, "qlora"), Form("wrap_compile", False, 2, "qlora")),
]
# Only the process changes: later steps are those of a run that nobody stopped, bit for bit.
RESUMED = [
    Form("block", True, 1, "lora"),
    Form("block", False, 2, "full"),
    Form("model", False, 1, "qlora"),
    Form("wrap_compile", False, 1, "lora"),
]
PAIRS = [*CROSSED, *((form, form) for form in RESUMED)]


def train(
    rank: int, jobs: Sequence[tuple[int, Form]], model: Path, folder: Path, step: int
) -> list[dict[str, Any]]:
    """For each pair by its number: restore in a form, take ``step`` and save; step 3: restore."""
    results = []
    num_ranks = jobs[0][1].num_ranks
    with World.join("cpu", distributed=num_ranks > 1) as world:
        for number, form in jobs:
            output_dir = folder / str(number)
            run = Run(form, model, world)
            if step > 1:
                run.restore(output_dir)
            result: dict[str, Any] = {"restored": run.arrays()}
            if step < 3:
                result["loss"] = take(run, step)
                run.save(output_dir, step=step)
            if step == 1 and number >= len(CROSSED):  # and the run that nobody stops
                result["next_loss"] = take(run, step + 1)
                result["undisturbed"] = run.arrays()
            results.append(result)
    return results


def take(run: Run, step: int) -> float:
    return take_step(run.model, run.optimizer, run.world, step=step, one_form=True).loss


def by_world(
    model: Path, folder: Path, *, step: int, forms: Sequence[Form]
) -> dict[int, dict[str, Any]]:
    """Each pair's step in new processes, one for each number of ranks; what rank 0 saw."""
    results: dict[int, dict[str, Any]] = {}
    for num_ranks in (1, 2):
        jobs = [(i, form) for i, form in enumerate(forms) if form.num_ranks == num_ranks]
        found = spawn.run(train, num_ranks, jobs, model, folder, step, timeout_seconds=900.0)[0]
        results |= {i: result for (i, _), result in zip(jobs, found, strict=True)}
    return results


@pytest.mark.timeout(1800)
def test_twelve_runs_go_on_in_another_form_and_come_back_without_losing_a_bit(
    tmp_path: Path,
) -> None:
    for side in (0, 1):
        covered = [pair[side] for pair in CROSSED]
        assert {form.how for form in covered} == set(COMPILE)
        assert {form.method for form in covered} == set(METHODS)
        assert {form.checkpointed for form in covered} == {True, False}
        assert {form.num_ranks for form in covered} == {1, 2}
    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    first = by_world(model, tmp_path, step=1, forms=[before for before, _ in PAIRS])
    second = by_world(model, tmp_path, step=2, forms=[after for _, after in PAIRS])
    third = by_world(model, tmp_path, step=3, forms=[before for before, _ in PAIRS])
    for i, pair in enumerate(PAIRS):
        what = " -> ".join(map(str, pair))
        assert_same(second[i]["restored"], stored(tmp_path / str(i) / "step_1"), what)
        assert_same(third[i]["restored"], stored(tmp_path / str(i) / "step_2"), what)
        assert second[i]["loss"] < first[i]["loss"], what
        if i >= len(CROSSED):
            assert second[i]["loss"] == first[i]["next_loss"], what
            assert_same(third[i]["restored"], first[i]["undisturbed"], what)
    shutil.rmtree(tmp_path)
