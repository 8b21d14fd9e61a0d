"""docs/data.md: the five-line file of each format is built; its first sample is what is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from legato.data import ChatFormatter, DatasetSpec, build_data, marked_sample
from legato.data.formats import FORMATS
from tests.helpers import tiny

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
SECTIONS = re.findall(r"### (\w+)\n\n```jsonl\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_every_format() -> None:
    assert sorted(name for name, _, _ in SECTIONS) == sorted(FORMATS)


@pytest.mark.parametrize(("name", "rows", "shown"), SECTIONS, ids=[s[0] for s in SECTIONS])
def test_the_page_shows_what_is_trained(tmp_path: Path, name: str, rows: str, shown: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows, encoding="utf-8")
    tokenizer = tiny.build_tokenizer()
    formatter = ChatFormatter(tokenizer)
    data = build_data([DatasetSpec(str(path))], formatter=formatter, max_seq_len=512)
    assert data.report.datasets[0].type == name
    assert len(data) == 5
    assert marked_sample(data[0], tokenizer, brackets=True).plain == shown.rstrip("\n")
