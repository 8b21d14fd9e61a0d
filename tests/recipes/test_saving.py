"""When steps are saved, which stay, and that a step folder is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.recipes.parts import RunParts
from tests.helpers.runs import RECIPES, legato, losses, steps_in, tensors, write_config


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("save_every", "keep_last", "expected"),
    [
        (1, None, [1, 2, 3, 4, 5]),
        (1, 1, [5]),
        (1, 2, [4, 5]),
        (2, None, [2, 4, 5]),
        (2, 1, [5]),
        (2, 2, [4, 5]),
        (3, None, [3, 5]),
    ],
)
def test_steps_are_saved_at_the_interval_and_at_the_end_and_the_last_ones_are_kept(
    tmp_path: Path,
    tiny_model_dir: Path,
    recipe: str,
    save_every: int,
    keep_last: int | None,
    expected: list[int],
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe, epochs=2)
    keep = [] if keep_last is None else [f"keep_last_n_checkpoints={keep_last}"]
    code = legato(
        "run", "--config", config, "max_steps=5", f"save_every_n_train_steps={save_every}", *keep
    )
    assert code == 0
    assert steps_in(tmp_path / "out") == expected
    assert (tmp_path / "out" / "latest").resolve().name == "step_5"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_end_of_the_data_is_saved_whatever_the_interval(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    assert legato("run", recipe, "--config", config, "save_every_n_train_steps=2") == 0
    assert steps_in(tmp_path / "out") == [2, 3]  # 10 rows, 4 a step: 3 steps


def test_no_steps_train_nothing_which_is_said_and_write_step_0(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, "max_steps_per_epoch=0") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "max_steps_per_epoch: 0, so that nothing is trained: the model is written as" in said
    assert steps_in(tmp_path / "out") == [0]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "step_0").state_dict()
    assert all(torch.equal(base[key], saved[key]) for key in base)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_full_step_folder_is_a_hugging_face_model_with_the_logits_of_the_live_one(
    tmp_path: Path, tiny_model_dir: Path, dtype: str, built: list[RunParts]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, f"dtype={dtype}", "max_steps=2") == 0
    step = tmp_path / "out" / "step_2"
    model, report = AutoModelForCausalLM.from_pretrained(step, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert model.config.use_cache is True
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    moved = [
        name
        for (name, before), after in zip(base.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(before, after.float())
    ]
    assert len(moved) == len(list(model.parameters()))
    (parts,) = built
    assert bool(parts.model.masters and parts.model.masters.copies) == (dtype == "bf16")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        live = parts.model.module.eval()(input_ids=ids).logits
        assert torch.equal(model.eval()(input_ids=ids).logits, live)
        assert (live.float() - base.eval()(input_ids=ids).logits).abs().max() > 1e-2
    tokenizer = AutoTokenizer.from_pretrained(step)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_model_dir).chat_template
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]


def test_a_lora_step_folder_is_a_peft_adapter_and_nothing_of_the_base(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[1])
    assert legato("run", "--config", config, "max_steps=3") == 0
    step = tmp_path / "out" / "step_3"
    assert not (step / "config.json").exists()  # with one, AutoModelForCausalLM refuses the folder
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    plain = base(torch.arange(8)[None]).logits
    tuned = PeftModel.from_pretrained(base, step)
    assert not torch.allclose(tuned(torch.arange(8)[None]).logits, plain)
    through_auto = AutoModelForCausalLM.from_pretrained(step)
    torch.testing.assert_close(
        through_auto(torch.arange(8)[None]).logits, tuned(torch.arange(8)[None]).logits
    )
    written = tensors(step)
    assert not [key for key in written if "embed_tokens" in key or "lm_head" in key]
    # B starts at zero: a dead adapter would still hold zeros.
    b_of = {k: t for k, t in written.items() if k.startswith("adapter_m") and "lora_B" in k}
    assert len(b_of) == 2 * 7
    assert all(t.abs().max() > 1e-4 for t in b_of.values())
    described = json.loads((step / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tiny_model_dir.resolve())
    assert described["task_type"] == "CAUSAL_LM"


def test_lora_learns_and_the_loss_falls(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[1],
        optimizer={"lr": 2e-2},
        lr_scheduler={"name": "constant"},
    )
    assert legato("run", "--config", config, "epochs=10") == 0
    history = losses(tmp_path / "out")
    assert len(history) == 30
    # The head is frozen noise, so little can be learned; a dead adapter would learn nothing.
    assert history[30] < history[1] - 0.2


def test_each_step_folder_holds_the_resolved_config_under_the_name_it_was_given_by(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("run", "--config", config, "max_steps=1", "seed=7") == 0
    for folder in (tmp_path / "out", tmp_path / "out" / "step_1"):
        assert "seed: 7" in (folder / "run.yaml").read_text()
    # What was resolved can be run again as it stands, and knows that it is done.
    resolved = tmp_path / "out" / "run.yaml"
    assert legato("validate", resolved) == 0
    assert legato("run", "--config", resolved, "max_steps=2") == 0
    assert resolved.read_text().startswith("# Resolved by Legato.")
    assert "max_steps: 2" in resolved.read_text()
