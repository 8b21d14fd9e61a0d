from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.cli.chat import Conversation
from legato.cli.main import main
from legato.errors import ModelError
from legato.generate import generate_batch, load_for_generation
from tests.helpers import tiny
from tests.helpers.faults import no_file_larger_than

Turns = list[dict[str, str]]


class Echo:
    """Answers with what it was told, a piece a word."""

    def __init__(self) -> None:
        self.heard: list[Turns] = []
        self.fail_with: BaseException | None = None

    def __call__(self, messages: Turns, on_text: Callable[[str], None]) -> str:
        self.heard.append(messages)
        if self.fail_with is not None:
            raise self.fail_with
        answer = f"you said {messages[-1]['content']}"
        for word in answer.split(" "):
            on_text(word)
        return answer


@pytest.fixture
def echo() -> Echo:
    return Echo()


def talk(echo: Echo, lines: list[str], *, system: str | None = None) -> tuple[Conversation, str]:
    shown: list[str] = []
    conversation = Conversation(echo, system=system, show=shown.append)
    conversation.run(lines)
    return conversation, "".join(shown)


def test_every_turn_hears_all_turns_before_it(echo: Echo) -> None:
    conversation, shown = talk(echo, ["one\n", "\n", "two\n"], system="Be brief.")
    assert shown == "yousaidone\nyousaidtwo\n"
    assert echo.heard[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said one"},
        {"role": "user", "content": "two"},
    ]
    assert len(conversation.messages) == 5


def test_clear_forgets_all_but_the_system_message(echo: Echo) -> None:
    talk(echo, ["one", "/clear", "two"], system="Be brief.")
    assert [turn["content"] for turn in echo.heard[1]] == ["Be brief.", "two"]


def test_exit_ends_and_what_follows_is_not_asked(echo: Echo) -> None:
    talk(echo, ["one", "/exit", "two"])
    assert len(echo.heard) == 1


def test_save_adds_one_row_of_messages_data(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "good.jsonl"
    talk(echo, [f"/save {file}", "grüß", f"/save {file}", "/clear", "two", f"/save {file}"])
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [[turn["content"] for turn in row["messages"]] for row in rows] == [
        ["grüß", "you said grüß"],
        ["two", "you said two"],
    ]
    assert "error: /save: nothing has been said yet" in capsys.readouterr().err


@pytest.mark.parametrize("is_new", [True, False])
def test_a_save_onto_a_full_disk_is_told_and_leaves_no_half_row(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_new: bool
) -> None:
    file = tmp_path / "good.jsonl"
    row = '{"messages": []}\n'
    if not is_new:
        file.write_text(row)
    with no_file_larger_than(100):
        conversation, _ = talk(echo, ["a" * 200, f"/save {file}", "two"])
    assert f"error: {file}: File too large. Choose a place that takes" in capsys.readouterr().err
    assert not file.exists() if is_new else file.read_text() == row
    assert len(conversation.messages) == 4


def test_a_command_that_isnt_one_is_told_and_not_asked(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(echo, ["/sav x", "/save", "/etc/passwd is a file", f"/save {tmp_path}", "/help"])
    told = capsys.readouterr().err
    assert "error: /sav: no such command. /save FILE keeps" in told
    assert "error: /save needs a file" in told
    assert f"error: {tmp_path}: Is a directory" in told
    assert [turns[-1]["content"] for turns in echo.heard] == ["/etc/passwd is a file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("the positions end")])
def test_a_turn_that_was_stopped_or_failed_is_forgotten(
    echo: Echo, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    conversation = Conversation(echo, system=None, show=shown.append)
    echo.fail_with = error
    conversation.run(["one"])
    assert conversation.messages == []
    assert capsys.readouterr().err != ""
    echo.fail_with = None
    conversation.run(["two"])
    assert [turn["content"] for turn in conversation.messages] == ["two", "you said two"]


def expected_answer(folder: Path, *turns: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return generate_batch(*load_for_generation(folder), [messages], max_new_tokens=9)[0].text


def test_ask_answers_one_question_on_standard_output(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", str(tiny_model_dir), "--max-new-tokens", "9", "--device", "cpu", "--ask"]
    assert main([*words, "two mugs"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected_answer(tiny_model_dir, "two mugs") + "\n"
    assert "cut here" in shown.err  # a random model doesn't end by itself


def test_lines_from_a_pipe_are_turns_and_a_dash_is_one_question(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", str(tiny_model_dir), "--max-new-tokens", "9", "--device", "cpu"]
    first = expected_answer(tiny_model_dir, "two")
    second = expected_answer(tiny_model_dir, "two", first, "mugs")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nmugs\n"))
    assert main(words) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"

    monkeypatch.setattr("sys.stdin", io.StringIO("two\nmugs\n"))
    assert main([*words, "--ask", "-"]) == 0
    assert capsys.readouterr().out == expected_answer(tiny_model_dir, "two\nmugs") + "\n"


def test_a_base_model_without_a_template_gets_the_packaged_one_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.write_model(tmp_path / "base", chat_template=None)
    assert main(["chat", str(folder), "--ask", "two", "--max-new-tokens", "2"]) == 0
    assert "chat template: the packaged alpaca (the tokenizer has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ask", " "], "--ask: the question is empty"),
        (["--ask", "a", "--dtype", "int4"], "--dtype int4: expected bf16, fp16, fp32"),
        (["--ask", "a", "--device", "cpux"], "device: expected auto, cpu, mps, cuda or cuda:N"),
        (["--ask", "a", "--chat-template", "none.jinja"], "none.jinja: no such file"),
    ],
)
def test_options_that_make_no_sense_end_with_2(
    tiny_model_dir: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(tiny_model_dir), *options]) == 2
    assert message in capsys.readouterr().err
