"""What a run says before its first step, as a person reads it on standard error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.runs import RECIPES, legato, write_config


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        # By hand: 272 x 32 of the tied embedding, 2 layers of 9,280, and the last norm's 32.
        (RECIPES[0], "27.3k, all trained"),
        # Beside them rank 4 on the 7 projections of each layer: 2 x 4 x 512.
        (RECIPES[1], "31.4k, 4.10k of them trained (13 %)"),
    ],
)
def test_a_run_says_what_it_will_do_and_marks_what_is_trained_in_one_row(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    parameters: str,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # a mask by pad id would show below
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (tmp_path / "orders.jsonl").read_text().splitlines()]
    for stop, source in (
        (1, "the model as it is, step 1"),
        (2, f"step_1 in {out}, goes on at step 2"),
    ):
        assert legato("run", "--config", config, f"stop_after_step={stop}") == 0
        said = capsys.readouterr().err
        block = {line[:14].rstrip(): line[14:] for line in said.splitlines()}
        assert block["run"] == f"run ({recipe})"
        assert block["model"] == str(tiny_model_dir)
        assert block["parameters"] == parameters
        assert block["precision"] == "fp32"
        assert block["data"].startswith("10 samples, ")
        assert block["batch"] == "4 sequences a step (2 a micro-batch x 2 micro-batches)"
        assert block["length"] == "3 steps (3 an epoch, 1 epoch asked for)"
        assert "each, every 500 steps, and at the end" in block["checkpoints"]
        assert re.fullmatch(rf"{re.escape(str(out))} \([\d.]+ \wB free\)", block["output"])
        assert block["starts from"] == source
        assert f"config: {out / 'run.yaml'} (resolved)" in said.splitlines()

        shown = re.search(
            r"\none sample \(orders\.jsonl:(\d+)\), what is trained in \[\[ \]\]:\n", said
        )
        assert shown is not None
        row = rows[int(shown[1]) - 1]
        assert said[shown.end() :].startswith(
            f"<|im_start|>user\n{row['prompt']}<|im_end|>\n"
            f"<|im_start|>assistant\n[[{row['completion']}<|im_end|>]]\n"
        )
        done = f"done: step {stop} is in {out}/latest. Try it: legato chat {out}/latest"
        assert said.splitlines()[-1] == done
