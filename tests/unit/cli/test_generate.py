from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from legato.cli.main import main
from legato.cli.prompts import read_prompts
from legato.generate import generate_batch, load_for_generation
from tests.helpers import tiny
from tests.helpers.faults import no_file_larger_than


def run(folder: Path, prompts: Path, output: Path, *options: str) -> int:
    words = ["generate", str(folder), "--prompts", str(prompts), "--output", str(output)]
    return main([*words, "--max-new-tokens", "7", "--device", "cpu", *options])


def answers_to(folder: Path, prompts: list[Any]) -> list[str]:
    made = generate_batch(*load_for_generation(folder), prompts, max_new_tokens=7)
    return [answer.text for answer in made]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_each_line_of_a_text_is_asked_and_the_answers_keep_its_order(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("seven ropes to Kyoto\n\ntwo\nlamps\n")
    assert run(tiny_model_dir, tmp_path / "p.txt", tmp_path / "a.jsonl", "--batch-size", "2") == 0
    prompts = [user("seven ropes to Kyoto"), user("two"), user("lamps")]
    expected = answers_to(tiny_model_dir, prompts)
    assert rows_of(tmp_path / "a.jsonl") == [
        {
            "sample_id": f"p.txt:{line}",
            "prompt": prompt,
            "answer": answer,
            "finish_reason": "length",
        }
        for line, prompt, answer in zip([1, 3, 4], prompts, expected, strict=True)
    ]
    said = capsys.readouterr().out
    assert said == f"3 answers in {tmp_path / 'a.jsonl'}; 3 of them were cut at 7 tokens\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "p.txt"]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "two"}, user("two")),
        ({"prompt": "two", "completion": "no"}, user("two")),
        ({"prompt": user("two")}, user("two")),
        (
            {"prompt": "two", "system": "Be brief.", "completion": "no"},
            [{"role": "system", "content": "Be brief."}, *user("two")],
        ),
        ({"prompt": {"item": "mugs"}, "completion": 2}, user('{"item": "mugs"}')),
        ({"messages": user("two")}, user("two")),
        (
            {"messages": [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]},
            [*user("a"), {"role": "assistant", "content": "b"}, *user("c")],
        ),
        ({"messages": [*user("two"), {"role": "assistant", "content": "no"}]}, user("two")),
        ({"instruction": "Count", "input": "mugs", "output": "no"}, user("Count\n\nmugs")),
    ],
)
def test_a_row_of_any_format_is_asked_without_its_answer(
    tiny_model_dir: Path, tmp_path: Path, row: dict[str, Any], prompt: list[dict[str, str]]
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    assert run(tiny_model_dir, tmp_path / "p.jsonl", tmp_path / "a.jsonl") == 0
    [written] = rows_of(tmp_path / "a.jsonl")
    assert written["prompt"] == prompt
    assert [written["answer"]] == answers_to(tiny_model_dir, [prompt])


@pytest.mark.parametrize(
    ("row", "options", "prompt"),
    [
        (
            {"question": "two", "answer": "no", "system": "Be brief."},
            ["--columns", "prompt=question", "--columns", "completion=answer"],
            [{"role": "system", "content": "Be brief."}, *user("two")],
        ),
        ({"question": "two"}, ["--columns", "prompt=question"], user("two")),
        ({"prompt": "a", "messages": user("two")}, ["--type", "messages"], user("two")),
        ({"prompt": "two"}, ["--type", "prompt_completion"], user("two")),
    ],
)
def test_a_row_is_read_as_a_data_set_with_these_keys(
    tiny_model_dir: Path,
    tmp_path: Path,
    row: dict[str, Any],
    options: list[str],
    prompt: list[dict[str, str]],
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    assert run(tiny_model_dir, tmp_path / "p.jsonl", tmp_path / "a.jsonl", *options) == 0
    [written] = rows_of(tmp_path / "a.jsonl")
    assert written["prompt"] == prompt
    assert [written["answer"]] == answers_to(tiny_model_dir, [prompt])


TOOLS = (  # a random model's answer says little of what is far before it
    "{% if not tools or mood != 'calm' %}{{ raise_exception('something is missing') }}{% endif %}"
    "{{ tools | tojson }} {{ mood }} {% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }}{% endfor %}"
    " {{ m.tool_call_id }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_tools_calls_and_variables_reach_the_template_as_in_training(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.write_model(tmp_path / "base", chat_template=TOOLS)
    call = {"name": "price", "arguments": {"of": "mugs"}}
    turns = [
        *user("two"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "9"},
    ]
    last = [] if kind == "prompt" else [{"role": "assistant", "content": "9 it is"}]
    row = {kind: [*turns, *last], "tools": [{"name": "price", "parameters": {}}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--chat-template-kwargs", "mood=1", "--chat-template-kwargs", '{"mood": "calm"}']
    assert run(folder, tmp_path / "p.jsonl", tmp_path / "a.jsonl", *options) == 0
    assert "chat template: with mood='calm'" in capsys.readouterr().err
    [written] = rows_of(tmp_path / "a.jsonl")
    assert written["tools"] == [{"type": "function", "function": row["tools"][0]}]
    assert written["prompt"][2] == {"role": "tool", "content": "9", "tool_call_id": "call00001"}

    model, tokenizer = load_for_generation(folder)
    text = (
        '[{"type": "function", "function": {"name": "price", "parameters": {}}}] calm '
        "user: two <|im_end|>assistant:  call00001 price <|im_end|>tool: 9 call00001<|im_end|>"
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=7, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert written["answer"] == tokenizer.decode(made, skip_special_tokens=True)


def test_raw_continues_texts_as_they_stand(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "base", chat_template=None)
    (tmp_path / "p.jsonl").write_text('{"prompt": "two mugs"}\n{"prompt": "a"}\n')
    assert run(folder, tmp_path / "p.jsonl", tmp_path / "a.jsonl", "--raw", "--limit", "1") == 0
    assert rows_of(tmp_path / "a.jsonl") == [
        {
            "sample_id": "p.jsonl:1",
            "prompt": "two mugs",
            "answer": answers_to(folder, ["two mugs"])[0],
            "finish_reason": "length",
        }
    ]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("p.txt", None, [], "p.txt: there is no such file"),
        ("p.txt", "\n \n", [], "p.txt: holds no prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{broken\n', [], "p.jsonl:2"),
        ("p.jsonl", '{"text": "a"}\n', [], "p.jsonl:1: holds no question, only text"),
        ("p.jsonl", '{"what": "a"}\n', [], "can't tell the format from the columns"),
        ("p.jsonl", '{"messages": []}\n', ["--raw"], "p.jsonl:1: --raw continues texts"),
    ],
)
def test_a_file_without_usable_prompts_is_an_error_and_writes_nothing(
    tiny_model_dir: Path,
    tmp_path: Path,
    name: str,
    content: str | None,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert run(tiny_model_dir, tmp_path / name, tmp_path / "a.jsonl", *options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "question"], "--columns question: expected OURS=THEIRS"),
        (["--chat-template-kwargs", "think"], "--chat-template-kwargs think: expected KEY=VALUE"),
        (["--chat-template-kwargs", "a.b=1"], "--chat-template-kwargs a.b=1: expected KEY=VALUE"),
        (["--raw", "--chat-template-kwargs", "a=1"], "--raw uses no chat template"),
        (["--raw", "--chat-template", "chatml"], "--raw uses no chat template"),
        (["--raw", "--type", "messages"], "--type: --raw continues the text of one column"),
    ],
)
def test_options_that_make_no_sense_end_with_2(
    tiny_model_dir: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "two"}\n')
    assert run(tiny_model_dir, tmp_path / "p.jsonl", tmp_path / "a.jsonl", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--type=text", "--columns=prompt=question", "--split=train"])
def test_a_text_file_has_no_use_for_what_says_how_rows_are_read(
    tiny_model_dir: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("two\n")
    assert run(tiny_model_dir, tmp_path / "p.txt", tmp_path / "a.jsonl", option) == 2
    name = option.partition("=")[0]
    assert f"{name}: p.txt has a prompt a line" in capsys.readouterr().err


def test_only_a_line_break_ends_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("two\u2028mugs\x0c\r\none\u0085cup\rsix", "utf-8", newline="")
    rows = read_prompts(str(file), raw=True)
    assert [row.text for row in rows] == ["two\u2028mugs\x0c", "one\u0085cup", "six"]


def test_an_output_that_is_there_is_never_overwritten(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("two\n")
    (tmp_path / "a.jsonl").write_text("mine")
    assert run(tiny_model_dir, tmp_path / "p.txt", tmp_path / "a.jsonl") == 2
    assert "a.jsonl: is already there" in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_text() == "mine"


@pytest.mark.parametrize("limit", [100, 1500])
def test_answers_made_before_a_full_disk_are_kept_and_said(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    (tmp_path / "p.txt").write_text("".join(f"mugs {number}\n" for number in range(30)))
    output, kept = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    with no_file_larger_than(limit):
        assert run(tiny_model_dir, tmp_path / "p.txt", output, "--batch-size", "4") == 1
    told = capsys.readouterr().err
    assert f"error: {kept}: File too large" in told
    assert "fault" not in told
    assert sorted(tmp_path.glob("*a.jsonl*")) == ([kept] if limit == 1500 else [])
    if limit == 100:
        assert "answers are in" not in told
        return
    num_said = int(re.search(r"(\d+) of 30 answers are in .*partial, in the order", told)[1])
    whole = [json.loads(line) for line in kept.read_text().splitlines()[:num_said]]
    expected = answers_to(tiny_model_dir, [user(f"mugs {n}") for n in range(30)])
    assert num_said in range(4, 27, 4)
    for row in whole:
        number = int(row["sample_id"].rpartition(":")[2]) - 1
        assert row["answer"] == expected[number]

    # The next call overwrites none of it.
    assert run(tiny_model_dir, tmp_path / "p.txt", output) == 2
    assert f"{kept}: holds answers of a call that was cut short. Remove" in capsys.readouterr().err
    kept.unlink()
    assert run(tiny_model_dir, tmp_path / "p.txt", output) == 0
    assert [row["answer"] for row in rows_of(output)] == expected
    assert not kept.exists()


def test_a_killed_call_leaves_the_answers_that_it_had_made(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("".join(f"mugs {number}\n" for number in range(400)))
    words = [tiny_model_dir, "--prompts", tmp_path / "p.txt", "--output", tmp_path / "a.jsonl"]
    command = [sys.executable, "-m", "legato", "generate", *words, "--batch-size", "1"]
    killed = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    kept = tmp_path / "a.jsonl.partial"
    deadline = time.monotonic() + 120
    while not (kept.exists() and kept.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert "answer" in rows_of(kept)[0]
    assert not (tmp_path / "a.jsonl").exists()
