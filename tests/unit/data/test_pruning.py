"""Kept rows that go: old ones, too many of them, and what a crash left."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from legato.data import ChatFormatter, DatasetSpec
from legato.data.cache import build_cached
from legato.data.pruning import Entry, plan_pruning, prune_rows
from tests.helpers import tiny

DAY = 24 * 3600.0


def entries(*facts: tuple[str, float, int]) -> list[Entry]:
    return [Entry(Path(name), used_at=day * DAY, num_bytes=size) for name, day, size in facts]


@pytest.mark.parametrize(
    ("found", "removed"),
    [
        ([], []),
        # Today is day 100; 30 days are the limit.
        ([("a", 99, 1), ("b", 71, 1), ("c", 69, 1)], ["c"]),
        # 10 bytes are the limit: those used last stay.
        ([("a", 97, 4), ("b", 99, 5), ("c", 98, 2)], ["a"]),
        # The one that was just made stays, however large it is.
        ([("a", 100, 50), ("b", 99, 1)], ["b"]),
        ([("a", 1, 50)], []),
    ],
)
def test_what_is_old_or_too_much_goes(
    found: list[tuple[str, float, int]], removed: list[str]
) -> None:
    chosen = plan_pruning(entries(*found), now=100 * DAY, most_days_unused=30, most_bytes=10)
    assert [str(path) for path in chosen] == removed


def build(folder: Path, *, max_seq_len: int, cache: Path) -> str:
    rows = folder / "orders.jsonl"
    if not rows.exists():
        tiny.write_orders(rows, num_rows=3)
    data = build_cached(
        [DatasetSpec(str(rows))],
        folder=cache,
        formatter=ChatFormatter(tiny.build_tokenizer()),
        max_seq_len=max_seq_len,
    )
    return data.report.notes[-1].rsplit("/", 1)[1]


def test_making_an_entry_removes_those_that_were_not_read_for_long(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    read, unread = (build(tmp_path, max_seq_len=n, cache=cache) for n in (300, 301))
    long_ago = time.time() - 31 * DAY
    for name in (read, unread):
        os.utime(cache / name, (long_ago, long_ago))
    being_made = f".{'1e' * 16}-x_y2"
    for name in (f".{'0f' * 16}-crashed", "of somebody else"):
        (cache / name).mkdir()
        os.utime(cache / name, (long_ago, long_ago))
    (cache / being_made).mkdir()
    (cache / "a file").write_text("of somebody else")
    others = {being_made, "of somebody else", "a file"}

    assert build(tmp_path, max_seq_len=300, cache=cache) == read
    made = build(tmp_path, max_seq_len=302, cache=cache)
    assert {path.name for path in cache.iterdir()} == {read, made} | others

    prune_rows(cache, most_bytes=1)
    assert {path.name for path in cache.iterdir()} == {made} | others


def test_what_cannot_be_removed_is_said_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    caplog.set_level("INFO")
    left = tmp_path / f".{'0f' * 16}-crashed"
    left.mkdir()
    os.utime(left, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        prune_rows(tmp_path)
    prune_rows(tmp_path)
    assert caplog.messages == [
        f"tokenized rows: {left} is too old or too much, and stays: [Errno 13] Permission denied: "
        f"'{left}'",
        f"tokenized rows: removed {left}, not used for long or too much",
    ]
