"""``generate_samples``: what the model says is reported, and training doesn't notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.report.metrics import read_events
from tests.helpers.runs import (
    RECIPES,
    assert_same_tensors,
    legato,
    losses,
    write_config,
)
from tests.helpers.tiny import write_model


@pytest.fixture(scope="module")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Much dropout, and a head of its own: in training mode it would say something else.
    folder = tmp_path_factory.mktemp("dropout") / "model"
    return write_model(folder, attention_dropout=0.5, tie_word_embeddings=False)


def samples_of(output_dir: Path) -> list[dict[str, Any]]:
    events = read_events(output_dir / "metrics.jsonl")
    return [event for event in events if event["event"] == "sample"]


def plain_greedy(folder: Path, prompt: str, *, most: int = 128) -> str:
    """transformers' model in the plainest loop: no cache, no batch, no padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    while len(ids) < start + most:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_answers_prompts_is_bit_for_bit_the_run_that_does_not(
    tmp_path: Path, dropout_model: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout's random state, the model's mode and its weights are as they would have been."""
    config = write_config(
        tmp_path,
        model=dropout_model,
        recipe=recipe,
        val_set_size=2,
        run_val_every_n_steps=1,
        enable_activation_checkpointing=True,
        packing=True,
        batch_size=1,
        epochs=2,
    )
    silent, talking = tmp_path / "silent", tmp_path / "talking"
    assert legato("run", "--config", config, f"output_dir={silent}", "max_steps=2") == 0
    capsys.readouterr()
    arguments = [f"output_dir={talking}", "max_steps=2", "generate_samples=5"]
    assert legato("run", "--config", config, *arguments) == 0
    assert_same_tensors(talking / "step_2", silent / "step_2")
    assert losses(talking) == losses(silent)
    assert len(losses(talking)) == 2
    assert samples_of(silent) == []
    found = samples_of(talking)
    assert [each["step"] for each in found] == [1, 1, 2, 2]  # two rows are held out
    shown = capsys.readouterr().err
    for each in found:
        assert f"sample {each['sample_id']}" in shown
        assert each["prompt"].startswith("<|im_start|>user\n")
        assert each["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert each["expected"].startswith('{"item": ')


def test_answers_are_those_of_the_checkpoint_of_their_step(
    tmp_path: Path, dropout_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No evaluation data: the prompts are training samples, and that is said."""
    config = write_config(
        tmp_path,
        model=dropout_model,
        recipe=RECIPES[0],
        run_val_every_n_steps=2,
        save_every_n_train_steps=2,
        generate_samples=3,
    )
    assert legato("run", "--config", config) == 0
    assert "prompts are training samples" in capsys.readouterr().err
    out = tmp_path / "out"
    found = samples_of(out)
    assert [(each["step"], each["sample_id"]) for each in found] == [
        (step, f"orders.jsonl:{row}") for step in (2, 3) for row in (1, 2, 3)
    ]
    assert found[0]["expected"] == '{"item": "mugs", "quantity": 1, "city": "Oslo"}'
    for each in found:
        assert each["answer"] == plain_greedy(out / f"step_{each['step']}", each["prompt"])
    assert len({each["answer"] for each in found}) > 1


def test_a_stream_without_evaluation_data_gives_prompts_of_its_own(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        streaming=True,
        shuffle_buffer_size=4,
        max_steps=1,
        generate_samples=2,
    )
    assert legato("run", "--config", config) == 0
    rows = [f"orders.jsonl:{row}" for row in range(1, 11)]
    found = samples_of(tmp_path / "out")
    assert len(found) == 2
    assert {each["sample_id"] for each in found} <= set(rows)
