"""The demo through its command, with a tiny model: it runs, goes on, and knows when it is done."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from legato.cli.main import main
from legato.report.start import human_bytes


def demo(folder: Path, model: Path, *options: str) -> int:
    return main(["demo", "--dir", str(folder), "--model", str(model), *options])


def steps_in(folder: Path) -> set[str]:
    return {entry.name for entry in (folder / "run").glob("step_*")}


@pytest.mark.slow
def test_the_demo_runs_goes_on_and_is_done(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "demo"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert demo(folder, tiny_model_dir, "--steps", "2") == 0
    told = capsys.readouterr().out
    data, _, sample = told.partition("one of them, what is trained between [[ and ]]:\n")
    assert "384 orders to learn from, 80 held out (24 more with unseen names)" in data
    sample, _, rest = sample.partition(f"\nmore of them: legato data show {folder / 'demo.yaml'}\n")
    text = (folder / "orders.jsonl").read_text()
    learned = [json.loads(line)["messages"] for line in text.splitlines()]
    assert sample in [
        f"<|im_start|>system\n{system['content']}<|im_end|>\n"
        f"<|im_start|>user\n{user['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n[[{answer['content']}<|im_end|>]]"
        for system, user, answer in learned
    ]
    assert rest.startswith("3/5  before ")
    assert "3/5  before      the untouched model answers 104 orders" in told
    assert "exact, new phrasings and combinations 0 of 80    0 of 80" in told
    assert steps_in(folder) == {"step_1", "step_2"}
    for step in (1, 2):
        files = [each for each in (folder / "run" / f"step_{step}").rglob("*") if each.is_file()]
        size = human_bytes(sum(f.stat().st_size for f in files if f.name != "manifest.json"))
        assert f"\nstep_{step}      {size}" in told
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "step_2")
    assert model.config.num_hidden_layers == 2
    assert len((folder / "orders.jsonl").read_text().splitlines()) == 384

    # Done: said at once, nothing is trained. The command isn't on the PATH any more.
    monkeypatch.setattr(shutil, "which", lambda name: None)
    own = Path(sys.executable).with_name("legato")
    command = own if own.is_file() else f"{sys.executable} -m legato"
    before = (folder / "answers_before.json").read_bytes()
    assert demo(folder, tiny_model_dir, "--steps", "2") == 0
    told = capsys.readouterr().out
    assert told.startswith("Done before;")
    assert "step_2" in told
    assert told.endswith(
        "\nWARNING: only 0 of 80 held-out orders are exact after 2 steps, and 76 (95%) were "
        f"expected. Train on:\n    {command} demo --dir {folder} --steps 10\n"
    )

    # More steps: goes on from step 2, and doesn't measure the untouched model again.
    assert demo(folder, tiny_model_dir, "--steps", "3") == 0
    told = capsys.readouterr().out
    assert "3/5  before      measured already" in told
    assert steps_in(folder) == {"step_1", "step_2", "step_3"}
    assert (folder / "answers_before.json").read_bytes() == before
    assert json.loads((folder / "answers_after.json").read_text())["step"] == 3

    # Fewer: the run is past them.
    (folder / "answers_after.json").unlink()
    assert demo(folder, tiny_model_dir, "--steps", "2") == 0
    capsys.readouterr()

    assert demo(folder, tiny_model_dir, "--ask", "Six red mugs to Oslo, please.") == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.skipif("LEGATO_TEST_DEMO" not in os.environ, reason="takes minutes: make test-demo")
def test_the_real_model_learns_nineteen_of_twenty_orders_from_none(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path / "demo", smollm2_dir) == 0
    told = capsys.readouterr().out
    found = re.search(r"new phrasings and combinations (\d+) of 80 +(\d+) of 80", told)
    assert found is not None
    before, after = map(int, found.groups())
    assert before <= 4
    assert after >= 76
    assert "WARNING" not in told


def test_asking_before_the_demo_ran_says_what_to_do(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path / "none", tiny_model_dir, "--ask", "Six red mugs") == 1
    assert "there is no checkpoint yet. Run the demo first: " in capsys.readouterr().err
