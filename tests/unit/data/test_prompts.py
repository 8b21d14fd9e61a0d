"""Where a sample is cut into a prompt and what is expected after it."""

from __future__ import annotations

import pytest

from legato.data.prompts import first_prompts
from tests.helpers.rows import Row, as_data


@pytest.mark.parametrize(
    ("trained", "prompt", "expected"),
    [
        ("...tttt", [0, 1, 2], [3, 4, 5, 6]),
        # Two answers: the last one, to all that comes before it.
        ("..tt..tt.", [0, 1, 2, 3, 4, 5], [6, 7]),
        # Plain text is trained from its second token on, and holds no prompt: its first half is.
        (".ttttt", [0, 1, 2], [3, 4, 5]),
        (".t", [0], [1]),
    ],
)
def test_a_prompt_ends_where_the_last_answer_begins(
    trained: str, prompt: list[int], expected: list[int]
) -> None:
    row = Row(list(range(len(trained))), [mark == "t" for mark in trained])
    [found] = first_prompts(as_data([row]), count=3)
    assert found.sample_id == "rows.jsonl:1"
    assert found.prompt_ids.tolist() == prompt
    assert found.expected_ids.tolist() == expected


def test_prompts_are_the_first_samples_and_never_more_than_there_are() -> None:
    data = as_data([Row([i, i], [False, True]) for i in range(3)])
    assert [each.prompt_ids.tolist() for each in first_prompts(data, count=2)] == [[0], [1]]
    assert len(first_prompts(data, count=9)) == 3
