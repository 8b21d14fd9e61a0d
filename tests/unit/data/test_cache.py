"""Tokenized rows that are kept: hit, miss, damage, races; never other rows than a build makes."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legato.data import ChatFormatter, DatasetSpec, TokenizedData, build_data
from legato.data.cache import build_cached, cache_folder, load_rows, store_rows
from tests.helpers import tiny

OPTIONS = {"max_seq_len": 500}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tiny.write_orders(tmp_path / "orders.jsonl", num_rows=6)


def build(rows: Path, folder: Path | None, **changes: Any) -> TokenizedData:
    formatter = changes.pop("formatter", None) or ChatFormatter(tiny.build_tokenizer())
    spec = changes.pop("spec", None) or DatasetSpec(str(rows))
    return build_cached([spec], folder=folder, formatter=formatter, **(OPTIONS | changes))


def note_of(data: TokenizedData) -> str:
    return data.report.notes[-1].split(":")[1].split("/")[0].strip()


def test_the_second_build_reads_what_the_first_one_made(tmp_path: Path, rows: Path) -> None:
    first = build(rows, tmp_path / "cache")
    second = build(rows, tmp_path / "cache")
    assert (note_of(first), note_of(second)) == ("made, and kept in", "read from")
    plain = build_data(
        [DatasetSpec(str(rows))], formatter=ChatFormatter(tiny.build_tokenizer()), **OPTIONS
    )
    for name in ("tokens", "trained", "starts", "lengths", "id_starts", "id_ends", "rows"):
        assert np.array_equal(getattr(second, name), getattr(plain, name)), name
        assert getattr(second, name).dtype == getattr(plain, name).dtype
    assert [second.sample_id(i) for i in range(6)] == [f"orders.jsonl:{i}" for i in range(1, 7)]
    assert replace(second.report, notes=()) == replace(plain.report, notes=())
    assert second.weights == (1.0,)


def test_rows_of_a_file_that_changes_while_it_is_read_are_not_kept_under_its_old_bytes(
    tmp_path: Path, rows: Path
) -> None:
    was = rows.read_text()

    class Meanwhile(ChatFormatter):
        @property
        def fingerprint(self) -> Any:  # asked for once the bytes are known
            rows.write_text(was.replace("Oslo", "Bonn"))
            return super().fingerprint

    made = build(rows, tmp_path / "cache", formatter=Meanwhile(tiny.build_tokenizer()))
    assert made.report.lines()[0] == "tokenized rows: not kept, as a file changed"
    assert made.report.warnings == (
        f"warning: {rows} changed while it was read: rows of both may be trained on",
    )
    rows.write_text(was)
    assert note_of(build(rows, tmp_path / "cache")) == "made, and kept in"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seq_len": 90},
        {"excess_length": "truncate"},
        {"on_bad_row": "skip"},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), template="alpaca")},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), train_on_inputs=True)},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), turns_to_train="last")},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), roles_to_train=["user"])},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), special_tokens_in_text="allow")},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), template_kwargs={"a": 1})},
        {"formatter": ChatFormatter(tiny.build_tokenizer(), eos_ids=[7])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_options_are_another_entry(
    tmp_path: Path, rows: Path, changes: dict[str, Any]
) -> None:
    build(rows, tmp_path / "cache")
    assert note_of(build(rows, tmp_path / "cache", **changes)) == "made, and kept in"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_another_tokenizer_and_another_weight_are_another_entry(tmp_path: Path, rows: Path) -> None:
    build(rows, tmp_path / "cache")
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens(["mugs"])
    assert (
        note_of(build(rows, tmp_path / "cache", formatter=ChatFormatter(tokenizer))) != "read from"
    )
    spec = DatasetSpec(str(rows), weight=2.0)
    assert build(rows, tmp_path / "cache", spec=spec).weights == (2.0,)


def test_a_changed_file_is_tokenized_anew(tmp_path: Path, rows: Path) -> None:
    build(rows, tmp_path / "cache")
    rows.write_text(rows.read_text().replace("Oslo", "Bonn"))  # same size, same name
    changed = build(rows, tmp_path / "cache")
    assert note_of(changed) == "made, and kept in"
    assert "Bonn" in tiny.build_tokenizer().decode(changed[0].input_ids.tolist())


@pytest.mark.parametrize("damage", ["cut", "absent", "json", "mixed", "digests"])
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path, rows: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    build(rows, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    tokens = entry / "tokens.npy"
    match damage:
        case "cut":
            tokens.write_bytes(tokens.read_bytes()[:-4])
        case "absent":
            tokens.unlink()
        case "json":
            (entry / "facts.json").write_text("{")
        case "digests":
            (entry / "digests.json").write_text("{}")
        case "mixed":
            np.save(tokens, np.zeros(3, dtype=np.int32))
    assert note_of(build(rows, tmp_path / "cache")) == "made, and kept in"
    assert "damaged" in caplog.text
    assert note_of(build(rows, tmp_path / "cache")) == "read from"


def test_a_flipped_bit_in_any_file_is_never_trained_on(
    tmp_path: Path, rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = build(rows, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    files = sorted(entry.iterdir())
    assert len(files) == 9
    for file in files:
        content = bytearray(file.read_bytes())
        content[-3] ^= 1  # of a list in JSON, or in an array's last value
        file.write_bytes(content)
        after = build(rows, tmp_path / "cache")
        assert note_of(after) == "made, and kept in", file.name
        np.testing.assert_array_equal(after.tokens, before.tokens)
    assert caplog.text.count("damaged") == 9
    assert caplog.text.count("isn't what was written") >= 7


def test_nothing_in_an_entry_needs_pickle(tmp_path: Path, rows: Path) -> None:
    build(rows, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    assert {path.suffix for path in entry.iterdir()} == {".npy", ".json"}
    for path in entry.glob("*.npy"):
        assert np.load(path, allow_pickle=False).dtype != object
    json.loads((entry / "facts.json").read_text())


def _build_at_once(rows: Path, folder: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    data = build(rows, folder)
    results.put((len(data), data.num_tokens, int(np.sum(data.tokens))))


def test_processes_that_build_at_once_get_the_same_rows(tmp_path: Path, rows: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (rows, tmp_path / "cache", barrier, results)
    workers = [context.Process(target=_build_at_once, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join()
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_whoever_is_second_leaves_the_first_entry_alone(tmp_path: Path, rows: Path) -> None:
    data = build(rows, None)
    store_rows(tmp_path / "cache" / "key", data)
    before = (tmp_path / "cache" / "key" / "tokens.npy").stat().st_ino
    store_rows(tmp_path / "cache" / "key", data)
    assert (tmp_path / "cache" / "key" / "tokens.npy").stat().st_ino == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]
    loaded = load_rows(tmp_path / "cache" / "key")
    assert loaded is not None
    assert len(loaded) == 6


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    data = build(rows, tmp_path / "cache")
    assert len(data) == 6
    assert "not kept" in data.report.notes[-1]


def test_where_the_cache_is() -> None:
    assert cache_folder({"LEGATO_CACHE": "off"}) is None
    assert cache_folder({"LEGATO_CACHE": "/a"}) == Path("/a/rows")
    assert cache_folder({}) == Path("~/.cache/legato/rows").expanduser()
