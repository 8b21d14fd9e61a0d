"""What the demo counts and says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from legato.demo.measure import (
    Answers,
    count_exact,
    is_exact,
    read_answers,
    write_answers,
)
from legato.demo.orders import Order, OrderData
from legato.demo.story import SavedStep, examples, saved_steps, scores, shortfall, what_next

MUGS = Order("Six red mugs to Oslo.", "A", "mugs", "red", 6, "Oslo")
ROPES = Order("I need 2 blue ropes in Rome.", "B", "ropes", "blue", 2, "Rome")
RUGS = Order("Nine pink rugs to Porto.", "A", "rugs", "pink", 9, "Porto")
DATA = OrderData(train=(), held_out=(MUGS, ROPES), unseen_names=(RUGS,))
BEFORE = Answers(step=0, held_out=("Mugs are\ncups.", "x" * 200), unseen_names=("",))
AFTER = Answers(step=24, held_out=(MUGS.answer, MUGS.answer), unseen_names=(RUGS.answer,))


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ('{"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"}', True),
        ('{"city":"Oslo","item":"mugs","color":"red","quantity":6}\n', True),
        ('{"item": "mugs", "color": "red", "quantity": "6", "city": "Oslo"}', False),
        ('{"item": "mug", "color": "red", "quantity": 6, "city": "Oslo"}', False),
        ('{"item": "mugs", "color": "red", "quantity": 6}', False),
        ('Sure: {"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"}', False),
        ('{"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"', False),
        ("", False),
    ],
)
def test_only_one_json_object_with_the_right_values_is_exact(answer: str, exact: bool) -> None:
    assert is_exact(answer, MUGS) is exact


def test_a_missing_answer_is_an_error_and_not_a_lower_score() -> None:
    with pytest.raises(ValueError, match="longer"):
        count_exact([MUGS.answer], [MUGS, ROPES])


def test_scores_show_both_parts_before_and_after() -> None:
    assert scores(DATA, before=BEFORE, after=AFTER).splitlines() == [
        "                                      before     after",
        "exact, new phrasings and combinations 0 of 2     1 of 2",
        "exact, names that training never said 0 of 1     1 of 1",
    ]


def test_examples_show_one_order_of_each_phrasing_on_single_lines() -> None:
    assert examples(DATA, before=BEFORE, after=AFTER).splitlines() == [
        "Six red mugs to Oslo.",
        "  before  Mugs are cups.",
        '  after   {"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"}',
        "I need 2 blue ropes in Rome.",
        "  before  " + "x" * 84 + " ...",
        '  after   {"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"}',
    ]


def test_checkpoints_are_listed_with_the_time_that_training_waited() -> None:
    saves = [
        SavedStep(step=8, size_bytes=1_883_000_000, blocked_seconds=0.101, committed_seconds=2.345),
        SavedStep(step=16, size_bytes=84_000_000, blocked_seconds=0.0951, committed_seconds=14.2),
    ]
    assert saved_steps(saves).splitlines() == [
        "checkpoint  size      on disk after  training waited",
        "step_8      1.88 GB   2.35 s         0.10 s",
        "step_16     84.0 MB   14 s           0.10 s",
    ]


def test_too_few_exact_answers_are_warned_of_with_what_to_do() -> None:
    warning = shortfall(DATA, after=AFTER, folder=Path("x"))
    assert warning == (
        "WARNING: only 1 of 2 held-out orders are exact after 24 steps, and 2 (95%) were "
        "expected. Train on:\n    legato demo --dir x --steps 32"
    )
    many = replace(DATA, held_out=(MUGS,) * 80)
    for num_exact, is_enough in ((75, False), (76, True), (80, True)):
        answers = (MUGS.answer,) * num_exact + ("",) * (80 - num_exact)
        warning = shortfall(many, after=replace(AFTER, held_out=answers), folder=Path("x"))
        assert (warning is None) is is_enough


def test_what_next_names_the_folder_where_it_isnt_the_usual_one() -> None:
    usual = what_next(
        step_dir=Path("out/demo/run/step_24"),
        config_path=Path("out/demo/demo.yaml"),
        folder=Path("out/demo"),
        steps=24,
    )
    other = what_next(
        step_dir=Path("x/run/step_24"), config_path=Path("x/demo.yaml"), folder=Path("x"), steps=24
    )
    assert 'legato demo --ask "' in usual
    assert 'legato demo --dir x --ask "' in other
    assert "legato run --config x/demo.yaml max_steps=32" in other
    assert 'from_pretrained("x/run/step_24")' in other


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    assert read_answers(path) is None
    write_answers(path, AFTER)
    assert read_answers(path) == AFTER
    assert [entry.name for entry in tmp_path.iterdir()] == ["answers.json"]
