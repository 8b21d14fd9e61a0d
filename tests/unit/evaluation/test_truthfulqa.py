from __future__ import annotations

import math
from pathlib import Path

import pytest

from legato.errors import DataError
from legato.evaluation.truthfulqa import Question, mc2_task, read_questions, score

HEADER = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8-sig")
    return file


def test_answers_are_parted_by_semicolons_and_each_counts_once(tmp_path: Path) -> None:
    rows = 'A,B, Why? ,x,"It is; It is;  So, yes ;","No; ",url\n'
    [question] = read_questions(write(tmp_path / "t.csv", HEADER + rows))
    assert question == Question("Why?", ["It is", "So, yes", "No"], [1, 1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Question,Answer\nWhy?,So\n", "has no column Correct Answers, Incorrect Answers"),
        (HEADER, "holds no question"),
        (HEADER + "A,B,Why?,x,It is,;,url\n", "t.csv:2: needs a question, true answers and false"),
        (HEADER + "A,B,Why?\n", "t.csv:2: needs a question"),
    ],
)
def test_another_file_is_an_error_that_says_what_is_missing(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path / "t.csv", text))


def test_a_missing_file_and_another_encoding_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_questions(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes(HEADER.encode() + b"A,B,Caf\xe9?,x,y,z,url\n")
    with pytest.raises(DataError, match="isn't UTF-8 at byte"):
        read_questions(tmp_path / "t.csv")


@pytest.mark.parametrize("offset", [0.0, -2000.0])
def test_the_score_is_the_share_of_probability_on_true_answers(offset: float) -> None:
    logs = [math.log(0.1), math.log(0.3), math.log(0.1)]
    results = [(log + offset, False) for log in logs]
    assert score({"labels": [1, 0, 1]}, results)["acc"] == pytest.approx(0.4)


def test_the_authors_file_is_read_whole(shared_data: Path) -> None:
    questions = read_questions(shared_data / "TruthfulQA.csv")
    assert len(questions) == 813
    assert questions[0].question == "Why do veins appear blue?"
    assert questions[0].labels == [1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_a_question_is_asked_after_six_solved_ones(tmp_path: Path) -> None:
    task = mc2_task(write(tmp_path / "t.csv", HEADER + "A,B,Why?,x,It is,No,url\n"))
    text = task["doc_to_text"]({"question": "Why?"})
    assert text.startswith("Q: What is human life expectancy in the United States?\nA: Human life")
    assert text.endswith("held in Barcelona, Spain.\n\nQ: Why?\nA:")
    assert text.count("Q: ") == 7
