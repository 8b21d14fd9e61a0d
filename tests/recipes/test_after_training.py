"""From a run to what is done with it, through the command line."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.cli.main import VERBS
from tests.helpers import tiny
from tests.helpers.runs import RECIPES, legato, write_config

FULL, LORA = RECIPES
PAGE = Path(__file__).parents[2] / "docs" / "after-training.md"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("base") / "model", merges=[("\u0120", "a")])


def train(folder: Path, base: Path, recipe: str, *changes: str) -> Path:
    config = write_config(folder, model=base, recipe=recipe)
    assert legato("run", "--config", config, *changes) == 0
    return folder / "out" / "latest"


def ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    words = ["--ask", "2 mugs to Oslo", "--max-new-tokens", "12", "--device", "cpu"]
    assert legato("chat", folder, *words) == 0
    return capsys.readouterr().out


def refuse_a_flipped_bit(step: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = step / "adapter_model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    for words in (
        ["merge", step, "--output-dir", folder / "never"],
        ["chat", step, "--ask", "2 mugs to Oslo"],
        ["eval", step, "--tasks", "truthfulqa_mc2_local", "--truthfulqa-csv", "never.csv"],
    ):
        assert legato(*words) == 1
        said = capsys.readouterr().err
        assert "adapter_model.safetensors: the bytes from" in said
        assert "are damaged: not what was saved. Use another step." in said
    assert not (folder / "never").exists()
    weights.write_bytes(sound)


@pytest.mark.parametrize("form", ["use_dora", "use_rslora"])
def test_a_lora_run_is_merged_asked_exported_and_packed_for_the_hub(
    form: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = train(tmp_path, base, LORA, f"{form}=true", "epochs=2")
    merged, exported = tmp_path / "merged", tmp_path / "model.gguf"
    assert legato("merge", latest, "--output-dir", merged) == 0
    ids = torch.tensor([[1, 2, 3, 200]])
    plain = AutoModelForCausalLM.from_pretrained(base)
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), latest)
    found = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    torch.testing.assert_close(found, reference.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain(input_ids=ids).logits, atol=1e-3)
    assert AutoTokenizer.from_pretrained(merged).chat_template == tiny.CHATML

    assert ask(merged, capsys) == ask(latest, capsys)
    refuse_a_flipped_bit(latest, tmp_path, capsys)
    assert legato("export", "gguf", latest, "--output", exported) == 1  # an adapter
    capsys.readouterr()
    assert legato("export", "gguf", merged, "--output", exported) == 0
    assert "GGUF tensors" not in capsys.readouterr().err  # a bar of transformers
    assert exported.stat().st_size > 0
    assert legato("push", merged, "me/mine", "--dry-run") == 0


def test_a_full_run_is_a_whole_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "mood.jinja"
    template.write_text("{{ mood }} " + tiny.CHATML)
    latest = train(tmp_path, base, FULL, f"chat_template={template}", "chat_template_kwargs.mood=!")
    # Whoever reads the step asks as training did.
    rendered = AutoTokenizer.from_pretrained(latest).apply_chat_template(
        [{"role": "user", "content": "two"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "! <|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert ask(latest, capsys).strip()
    assert legato("merge", latest, "--output-dir", tmp_path / "merged") == 1
    assert "is a whole model already, no adapter" in capsys.readouterr().err
    exported = tmp_path / "model.gguf"
    assert legato("export", "gguf", latest, "--output", exported) == 0
    exported.unlink()
    damaged = shutil.copytree(latest.resolve(), tmp_path / "damaged")
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    for words in (["push", damaged, "me/mine", "--dry-run"], ["export", "gguf", damaged]):
        where = ["--output", exported] if words[0] == "export" else []
        assert legato(*words, *where) == 1
        assert "are damaged: not what was saved. Use another step" in capsys.readouterr().err
    assert not exported.exists()
    # The run's own data are prompts as they stand.
    answers = tmp_path / "answers.jsonl"
    words = ["--prompts", tmp_path / "orders.jsonl", "--output", answers, "--limit", "3"]
    assert legato("generate", latest, *words, "--max-new-tokens", "4") == 0
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == [f"orders.jsonl:{i}" for i in (1, 2, 3)]


def test_every_command_of_the_page_exists(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line.split("  #")[0] for line in PAGE.read_text("utf-8").splitlines() if "legato " in line
    ]
    commands = [
        line.partition("legato ")[2] for line in lines if line.startswith(("legato", "cat"))
    ]
    assert len(commands) == 12
    for command in commands:
        words = shlex.split(command)
        assert words[0] in VERBS
        verb = words[:2] if words[0] == "export" else words[:1]
        assert legato(*verb, "--help") == 0
        shown = capsys.readouterr().out
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if option not in shown] == []
