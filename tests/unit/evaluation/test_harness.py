from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.cli.main import main
from legato.errors import MissingDependencyError, ModelError, UsageError
from legato.evaluation.harness import evaluate_folder
from legato.evaluation.truthfulqa import TASK_NAME, mc2_task
from tests.helpers import tiny
from tests.helpers.adapters import write_adapter
from tests.helpers.questions import prepare_lm_eval, write_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("m") / "model", max_position_embeddings=2048)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare_lm_eval(monkeypatch)
    return write_questions(tmp_path / "t.csv")


def by_hand(folder: Path, questions: Path, count: int) -> float:
    """Probabilities of the answers' tokens by one forward each, in double precision."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = mc2_task(questions)
    rows = list(task["custom_dataset"]()["validation"])[:count]
    shares = []
    for row in rows:
        prompt = tokenizer(task["doc_to_text"](row), add_special_tokens=False)["input_ids"]
        probabilities = []
        for choice in row["choices"]:
            answer = tokenizer(f" {choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
            logs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            probabilities.append(float(logs[range(len(answer)), answer].sum().exp()))
        true = sum(p for p, label in zip(probabilities, row["labels"], strict=True) if label)
        shares.append(true / sum(probabilities))
    return sum(shares) / len(shares)


def test_the_figure_is_that_of_plain_forward_passes(folder: Path, questions: Path) -> None:
    [score] = evaluate_folder(folder, tasks=[TASK_NAME], truthfulqa_csv=questions)
    assert (score.task, score.metric, score.num_samples) == (TASK_NAME, "acc", 3)
    assert score.value == pytest.approx(by_hand(folder, questions, 3), rel=1e-3)
    assert score.standard_error is not None
    assert 0 < score.standard_error < 1


def test_an_adapter_is_measured_with_its_base(
    folder: Path, questions: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(folder, tmp_path / "adapter", noise=0.5)
    options: dict[str, Any] = {"tasks": [TASK_NAME], "truthfulqa_csv": questions, "limit": 1}
    [with_adapter] = evaluate_folder(adapter, **options)
    [plain] = evaluate_folder(folder, **options)
    assert with_adapter.num_samples == plain.num_samples == 1
    assert with_adapter.value != pytest.approx(plain.value, rel=1e-3)


def test_logits_that_are_no_numbers_make_no_figure(tmp_path: Path, questions: Path) -> None:
    folder = tiny.write_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"logits aren't numbers \(NaN\)"):
        evaluate_folder(folder, tasks=[TASK_NAME], truthfulqa_csv=questions)


def test_the_command_shows_a_table_and_writes_json(
    folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(folder), "--tasks", TASK_NAME, "--truthfulqa-csv", str(questions)]
    output = tmp_path / "new" / "scores.json"
    words += ["--limit", "2", "--device", "cpu", "--output", str(output)]
    assert main(words) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["task", "metric", "value"]
    assert line.split()[:2] == [TASK_NAME, "acc"]
    written = json.loads(output.read_text())
    assert written["limit"] == 2
    [score] = written["scores"]
    assert score["value"] == pytest.approx(by_hand(folder, questions, 2), rel=1e-3)
    assert main(words) == 2
    assert "scores.json: is already there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tasks", "with_csv", "message"),
    [
        ([TASK_NAME], False, "needs --truthfulqa-csv TruthfulQA.csv"),
        ([], False, "no task is given"),
        (["arc_easyy"], False, "lm-eval knows no task arc_easyy"),
        (["arc_easy"], True, "is read by the task truthfulqa_mc2_local, which isn't asked for"),
    ],
)
def test_tasks_are_checked_before_the_model_is_loaded(
    questions: Path, tmp_path: Path, tasks: list[str], with_csv: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_folder(
            tmp_path / "none", tasks=tasks, truthfulqa_csv=questions if with_csv else None
        )


def test_solved_examples_that_a_task_would_ignore_are_refused(
    folder: Path, questions: Path
) -> None:
    options: dict[str, Any] = {"tasks": [TASK_NAME], "truthfulqa_csv": questions, "limit": 1}
    with pytest.raises(UsageError, match="--num-fewshot 3: truthfulqa_mc2_local has six examples"):
        evaluate_folder(folder, num_fewshot=3, **options)
    assert evaluate_folder(folder, num_fewshot=0, **options)[0].num_samples == 1


def test_a_task_of_the_hub_that_ignored_how_many_examples_were_asked_for_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"results": {"arc_easy": {"acc,none": 0.5}}, "n-shot": {"arc_easy": 0}}
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda *_, **options: found)
    assert evaluate_folder(folder, tasks=["arc_easy"], num_fewshot=0)[0].value == 0.5
    assert evaluate_folder(folder, tasks=["arc_easy"], num_fewshot=5)[0].value == 0.5
    assert [message for message in caplog.messages if "arc_easy" in message] == [
        "arc_easy: asked with 0 solved examples, as its own config has it, not with 5"
    ]


def test_without_lm_eval_the_error_says_how_to_get_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lm-eval>=0\.4\.9'"):
        evaluate_folder(folder, tasks=["arc_easy"])
