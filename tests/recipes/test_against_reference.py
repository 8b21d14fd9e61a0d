"""The whole way from YAML to weights, against a loop written with transformers and torch alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from tests.helpers.runs import RECIPES, legato, losses, write_config

PEAK, WARMUP, STEPS = 5e-3, 2, 6


def reference_rows(model_dir: Path, data: Path) -> list[dict[str, torch.Tensor]]:
    """Rows by the template's text: what stands after the prompt is trained, through the stop."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = []
    for line in data.read_text().splitlines():
        row = json.loads(line)
        prompt = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt + row["completion"] + "<|im_end|>\n")["input_ids"]
        start = len(tokenizer(prompt)["input_ids"])
        end = start + len(tokenizer(row["completion"] + "<|im_end|>")["input_ids"])
        labels = [-100] * start + ids[start:end] + [-100] * (len(ids) - end)
        rows.append({"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])})
    return rows


def reference_losses(
    model: torch.nn.Module, rows: list[dict[str, torch.Tensor]], *, decay: float
) -> list[float]:
    """Full-batch steps, row by row: the sum of token losses over the number of trained tokens."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=PEAK,
    )
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS
    )
    num_tokens = sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)
    history = []
    for _ in range(STEPS):
        total = 0.0
        for row in rows:
            logits = model(input_ids=row["input_ids"]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, row["labels"][0, 1:], reduction="sum")
            (loss / num_tokens).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append(total / num_tokens)
    return history


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(10, 1), (5, 2), (2, 5), (3, 4), (1, 10)])
def test_losses_are_those_of_transformers_and_torch_however_the_batch_is_cut(
    tmp_path: Path, tiny_model_dir: Path, recipe: str, batch_size: int, accumulation: int
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=recipe,
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        epochs=STEPS,
        optimizer={"lr": PEAK, "weight_decay": 0.1},
        lr_scheduler={"name": "cosine", "num_warmup_steps": WARMUP},
        **({"lora_dropout": 0.0} if recipe.startswith("lora") else {}),
    )
    assert legato("run", "--config", config) == 0

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    if recipe.startswith("lora"):
        # The adapter's random start is Legato's: take it from a run that trained nothing.
        start = tmp_path / "start"
        assert legato("run", "--config", config, "max_steps=0", f"output_dir={start}") == 0
        model = PeftModel.from_pretrained(model, start / "step_0", is_trainable=True)
        assert isinstance(model.peft_config["default"], LoraConfig)
    expected = reference_losses(
        model, reference_rows(tiny_model_dir, tmp_path / "orders.jsonl"), decay=0.1
    )
    found = losses(tmp_path / "out")
    assert sorted(found) == list(range(1, STEPS + 1))
    torch.testing.assert_close(
        torch.tensor(list(found.values())), torch.tensor(expected), atol=2e-5, rtol=0
    )
    assert expected[-1] < expected[0] - 0.05  # the comparison has something to compare


def test_evaluation_loss_is_that_of_transformers_and_leaves_training_alone(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0], epochs=2)
    assert legato("run", "--config", config) == 0
    undisturbed = losses(tmp_path / "out")
    data = tmp_path / "orders.jsonl"
    with_eval = ["run_val_every_n_steps=2", f"eval_datasets=[{{path: {data}}}]"]
    out = tmp_path / "with_eval"
    assert (
        legato(
            "run", "--config", config, *with_eval, f"output_dir={out}", "save_every_n_train_steps=2"
        )
        == 0
    )
    assert losses(out) == undisturbed

    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = {e["step"]: e["eval_loss"] for e in events if e["event"] == "eval"}
    assert sorted(evaluations) == [2, 4, 6]
    model = AutoModelForCausalLM.from_pretrained(out / "step_4").eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in reference_rows(tiny_model_dir, data):
            logits = model(input_ids=row["input_ids"]).logits[0, :-1]
            targets = row["labels"][0, 1:]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets != -100).sum())
    assert math.isclose(evaluations[4], total / count, abs_tol=2e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_loss(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    assert legato("run", "--config", config) == 0
    plain = losses(tmp_path / "out")
    out = tmp_path / "checkpointed"
    options = ["enable_activation_checkpointing=true", f"output_dir={out}"]
    assert legato("run", "--config", config, *options) == 0
    assert losses(out) == plain


def test_small_updates_reach_bf16_weights_through_their_masters(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """At this rate plain bf16 loses most updates: the master must have moved where bf16 may not."""
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        dtype="bf16",
        optimizer={"lr": 2e-5},
        lr_scheduler={"name": "constant"},
    )
    assert legato("run", "--config", config) == 0
    from tests.helpers.runs import tensors

    written = tensors(tmp_path / "out" / "step_3")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16).state_dict()
    moved, total = 0, 0
    for key, master in written.items():
        if ":master/" not in key:
            continue
        name = key.split(":master/")[1]
        assert master.dtype == torch.float32
        moved += int((master != base[name].float()).sum())
        total += master.numel()
        model_key = next(k for k in written if k.startswith("model") and k.endswith(f":{name}"))
        assert torch.equal(written[model_key], master.to(torch.bfloat16))
    assert total > 10_000
    # Rows of tokens that never appear have no gradient; everything else moves.
    assert moved / total > 0.5
