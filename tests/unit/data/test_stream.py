"""A stream: which rows its steps get, from any place on, on any world, whoever works ahead."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from legato.data import ChatFormatter, DatasetSpec
from legato.data.dealing import Dealer, StepBatches
from legato.data.prefetch import Prefetcher
from legato.data.stream import Stream, StreamLoader
from legato.errors import DataError
from tests.helpers import tiny

NUM_ROWS = 23
BLOCK_ROWS = 8  # 8, 8 and 7 rows a pass


@pytest.fixture(scope="module")
def formatter() -> ChatFormatter:
    return ChatFormatter(tiny.build_tokenizer())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row i has i % 5 + 2 characters."""
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": chr(97 + i) * (i % 5 + 2)}) + "\n" for i in range(NUM_ROWS))
    )
    return path


@contextmanager
def open_loader(
    path: Path,
    formatter: ChatFormatter,
    *,
    rank: int = 0,
    world_size: int = 1,
    global_batch_size: int = 4,
    seed: int = 7,
    pack_to: int | None = None,
    step: int = 0,
    place: Mapping[str, Any] | None = None,
    split: str | None = None,
    **options: Any,
) -> Iterator[StreamLoader]:
    settings = {"max_seq_len": 16, "block_rows": BLOCK_ROWS} | options
    stream = Stream(DatasetSpec(str(path), split=split), formatter=formatter, **settings)
    loader = StreamLoader(
        stream,
        dealer=Dealer(batch_size=2, pad_id=0, rank=rank, world_size=world_size),
        global_batch_size=global_batch_size,
        seed=seed,
        pack_to=pack_to,
        step=step,
        place=place,
    )
    with closing(loader):
        yield loader


def ids(fetched: StepBatches) -> list[str]:
    return sorted(i for batch in fetched.batches for i in batch.sample_ids)


def numbers(fetched: StepBatches) -> list[int]:
    return sorted(int(i.split(":")[1]) for i in ids(fetched))


def fetch(loader: StreamLoader, first: int, last: int) -> list[StepBatches]:
    return [loader.fetch(step) for step in range(first, last + 1)]


def same_tensors(one: StepBatches, other: StepBatches) -> bool:
    return len(one.batches) == len(other.batches) and all(
        a.sample_ids == b.sample_ids
        and a.input_ids.tolist() == b.input_ids.tolist()
        and a.trained.tolist() == b.trained.tolist()
        for a, b in zip(one.batches, other.batches, strict=True)
    )


def test_a_pass_visits_every_row_once_block_by_block_and_the_next_one_in_another_order(
    rows: Path, formatter: ChatFormatter
) -> None:
    with open_loader(rows, formatter) as loader:
        steps = fetch(loader, 1, 12)
    # 23 rows, 4 a step: six steps a pass, the last one of three rows.
    assert [each.num_rows for each in steps] == [4, 4, 4, 4, 4, 3] * 2
    assert [each.epoch for each in steps] == [0] * 6 + [1] * 6
    assert [each.ends_epoch for each in steps] == ([False] * 5 + [True]) * 2
    for begin in (0, 6):
        pairs = [steps[begin + k : begin + k + 2] for k in (0, 2, 4)]
        blocks = [sorted(numbers(one) + numbers(other)) for one, other in pairs]
        assert blocks == [list(range(1, 9)), list(range(9, 17)), list(range(17, 24))]
    assert [numbers(each) for each in steps[:6]] != [numbers(each) for each in steps[6:]]


def test_the_order_is_frozen_across_versions_and_machines(
    rows: Path, formatter: ChatFormatter
) -> None:
    with open_loader(rows, formatter) as loader:
        found = [numbers(each) for each in fetch(loader, 1, 4)]
    expected = []
    for first_row in (0, 8):
        # numpy's own bits: key (seed, pass), counter from the block's first row.
        philox = np.random.Philox(
            counter=np.array([0, 0, 0, first_row], dtype=np.uint64),
            key=np.array([7, 0], dtype=np.uint64),
        )
        order = first_row + np.argsort(philox.random_raw(8)) + 1
        expected += [sorted(order[:4].tolist()), sorted(order[4:].tolist())]
    assert found == expected


@pytest.mark.parametrize("pack_to", [None, 16])
def test_a_stream_entered_after_any_step_goes_on_as_the_one_that_was_never_left(
    rows: Path, formatter: ChatFormatter, pack_to: int | None
) -> None:
    with open_loader(rows, formatter, pack_to=pack_to) as loader:
        whole = fetch(loader, 1, 14)
    assert whole[-1].epoch >= 2
    for step in range(1, 14):
        place = json.loads(json.dumps(whole[step - 1].data_place))
        with open_loader(rows, formatter, pack_to=pack_to, step=step, place=place) as loader:
            rest = fetch(loader, step + 1, 14)
        assert all(map(same_tensors, rest, whole[step:]))
        assert [each.data_place for each in rest] == [each.data_place for each in whole[step:]]


def test_a_resumed_stream_reads_again_at_most_one_block(
    rows: Path, formatter: ChatFormatter, tmp_path: Path
) -> None:
    with open_loader(rows, formatter) as loader:
        whole = fetch(loader, 1, 4)
    place = whole[2].data_place
    assert place is not None
    assert place.pop("digest")
    assert place == {"epoch": 0, "first_row": 8, "taken": 4}
    # The first row says the format; the others before the block aren't even parsed.
    lines = rows.read_text().splitlines()
    broken = tmp_path / "a.jsonl"
    broken.write_text("\n".join([lines[0], *["{"] * 7, *lines[8:]]))
    with open_loader(broken, formatter, step=3, place=place) as loader:
        assert same_tensors(loader.fetch(4), whole[3])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_stream_of_the_hub_begins_with_the_shard_that_its_block_is_in(
    formatter: ChatFormatter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """A folder with splits is read as the hub is: here 23 rows in three files, blocks of 8."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    texts = [chr(97 + i) * (i % 5 + 2) for i in range(NUM_ROWS)]
    for shard, (begin, end) in enumerate([(0, 10), (10, 16), (16, NUM_ROWS)]):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[begin:end]]
        (folder / f"train-{shard}.jsonl").write_text("".join(lines))
    options: dict[str, Any] = {"split": "train", "num_workers": num_workers, "num_held_out": 1}
    with open_loader(folder, formatter, **options) as loader:
        whole = fetch(loader, 1, 8)
    places = [json.loads(json.dumps(each.data_place)) for each in whole]
    assert [place["first_row"] for place in places] == [1, 9, 9, 17, 17, 1, 1, 9]
    starts = [place["start"] for place in places]
    first, last = ({"row": row, "shard": n, "num_shards": 3} for row, n in ((0, 0), (16, 2)))
    assert starts == [first] * 3 + [last] * 2 + [first] * 3
    # Rows of earlier shards aren't read again, but for the very first ones.
    (folder / "train-0.jsonl").write_text('{"text": "?"}\n' * 2)
    with open_loader(folder, formatter, step=4, place=places[3], **options) as loader:
        assert same_tensors(loader.fetch(5), whole[4])
    (folder / "train-0.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[:10])
    )
    with open_loader(folder, formatter, step=4, place=places[3], **options) as loader:
        rest = fetch(loader, 5, 8)
    assert all(map(same_tensors, rest, whole[4:]))
    assert [each.data_place for each in rest] == [each.data_place for each in whole[4:]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_world_takes_the_same_rows_in_the_same_steps(
    rows: Path, formatter: ChatFormatter, world_size: int
) -> None:
    with open_loader(rows, formatter) as loader:
        alone = fetch(loader, 1, 8)
    dealt = []
    for rank in range(world_size):
        with open_loader(rows, formatter, rank=rank, world_size=world_size) as loader:
            dealt.append(fetch(loader, 1, 8))
    for number, together in enumerate(zip(*dealt, strict=True)):
        assert sorted(i for each in together for i in ids(each)) == ids(alone[number])
        assert {each.num_rows for each in together} == {alone[number].num_rows}
        assert len({len(each.batches) for each in together}) == 1
        assert [each.data_place for each in together] == [alone[number].data_place] * world_size


def test_a_stream_that_one_rank_left_goes_on_on_two(rows: Path, formatter: ChatFormatter) -> None:
    with open_loader(rows, formatter) as loader:
        whole = fetch(loader, 1, 8)
    place = whole[2].data_place
    rest = []
    for rank in range(2):
        with open_loader(rows, formatter, rank=rank, world_size=2, step=3, place=place) as loader:
            rest.append(fetch(loader, 4, 8))
    found = [sorted(ids(a) + ids(b)) for a, b in zip(*rest, strict=True)]
    assert found == [ids(each) for each in whole[3:]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_and_a_thread_ahead_change_nothing(
    rows: Path, formatter: ChatFormatter, num_workers: int
) -> None:
    with open_loader(rows, formatter) as loader:
        alone = fetch(loader, 1, 9)
    with (
        open_loader(rows, formatter, num_workers=num_workers) as loader,
        closing(Prefetcher(loader, last_step=9)) as ahead,
    ):
        found = [ahead.fetch(step) for step in range(1, 10)]
    assert all(map(same_tensors, found, alone))
    assert [each.data_place for each in found] == [each.data_place for each in alone]


def test_packs_hold_samples_of_their_block_and_lose_none(
    rows: Path, formatter: ChatFormatter
) -> None:
    with open_loader(rows, formatter, pack_to=16) as loader:
        first = fetch(loader, 1, 1)
        assert first[0].batches[0].position_ids is not None
        steps = first
        while not steps[-1].ends_epoch:
            steps += fetch(loader, len(steps) + 1, len(steps) + 1)
    seen = [i for each in steps for i in numbers(each)]
    assert sorted(seen) == list(range(1, NUM_ROWS + 1))
    assert sum(each.num_rows for each in steps) < NUM_ROWS
    for each in steps:
        for batch in each.batches:
            assert batch.input_ids.shape[1] <= 16


def test_held_out_rows_are_the_first_ones_and_no_pass_trains_on_them(
    rows: Path, formatter: ChatFormatter
) -> None:
    stream = Stream(
        DatasetSpec(str(rows)), formatter=formatter, max_seq_len=16, block_rows=8, num_held_out=5
    )
    held_out = stream.held_out()
    assert [held_out.sample_id(i) for i in range(len(held_out))] == [
        f"a.jsonl:{n}" for n in range(1, 6)
    ]
    with open_loader(rows, formatter, num_held_out=5) as loader:
        steps = fetch(loader, 1, 10)
    first_pass = sorted(n for each in steps if each.epoch == 0 for n in numbers(each))
    assert first_pass == list(range(6, NUM_ROWS + 1))
    assert min(n for each in steps for n in numbers(each)) == 6


def test_dropped_rows_are_counted_and_the_steps_stay_full(
    rows: Path, formatter: ChatFormatter
) -> None:
    # A row of six characters makes seven tokens with its end: rows 5, 10, 15 and 20 are too long.
    with open_loader(rows, formatter, max_seq_len=6) as loader:
        steps = fetch(loader, 1, 4)
        assert [each.num_rows for each in steps] == [4, 4, 4, 4]
        counts = loader.report().datasets[0].counts
    assert counts == {"longer than max_seq_len, dropped": 4}
    assert not {n for each in steps for n in numbers(each)} & {5, 10, 15, 20}


def test_a_bad_row_is_named_when_the_stream_comes_to_it_or_skipped_and_counted(
    rows: Path, formatter: ChatFormatter, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    lines = rows.read_text().splitlines()
    path.write_text("\n".join([*lines[:18], '{"text": 3}', *lines[19:]]))
    for num_workers in (0, 1):
        with open_loader(path, formatter, num_workers=num_workers) as loader:
            assert len(fetch(loader, 1, 3)) == 3
            with pytest.raises(DataError, match=rf"^{path}:19: text is of type int; expected text"):
                fetch(loader, 4, 5)
    with open_loader(path, formatter, on_bad_row="skip") as loader:
        steps = fetch(loader, 1, 6)
        assert sorted(n for each in steps for n in numbers(each)) == [*range(1, 19), *range(20, 24)]
        assert steps[-1].ends_epoch


def test_a_row_that_its_template_cannot_render_is_named_as_in_data_read_before(
    formatter: ChatFormatter, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    good = {"prompt": "Hi", "completion": "Ho"}
    bad = {"prompt": "<|im_end|>", "completion": "Ho"}
    path.write_text("\n".join(json.dumps(row) for row in [*[good] * 10, bad]))
    with (
        open_loader(path, formatter, max_seq_len=64) as loader,
        pytest.raises(DataError, match=rf"{path}:11: message 1 holds the control token"),
    ):
        fetch(loader, 1, 3)


def test_the_end_of_a_pass_says_what_became_of_its_rows(
    rows: Path, formatter: ChatFormatter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with open_loader(rows, formatter, max_seq_len=6) as loader:
        fetch(loader, 1, 5)
    assert caplog.messages == [
        f"pass 1 has ended: {rows}: text (detected from its columns), 23 rows, 19 samples, "
        "84 tokens, 77% of them trained",
        f"pass 1 has ended: {rows}: longer than max_seq_len, dropped: 4 "
        "(a.jsonl:5, a.jsonl:10, a.jsonl:15, ...)",
        f"pass 1 has ended: warning: {rows}: 4 of 23 samples longer than max_seq_len, dropped; "
        "max_seq_len is 6",
    ]


def test_a_stream_without_a_usable_row_is_an_error_and_no_endless_reading(
    rows: Path, formatter: ChatFormatter, tmp_path: Path
) -> None:
    with (
        pytest.raises(DataError, match="nothing left to train on of 23 rows"),
        open_loader(rows, formatter, max_seq_len=2),
    ):
        pass
    empty = tmp_path / "b.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match=r"b\.jsonl: no rows"), open_loader(empty, formatter):
        pass
    for count in (NUM_ROWS, NUM_ROWS + 1):
        with (
            pytest.raises(
                DataError,
                match=rf"^val_set_size: {count} rows of .*a.jsonl are held out, and it has no "
                "others to train on",
            ),
            open_loader(rows, formatter, num_held_out=count),
        ):
            pass


def test_a_place_that_the_data_no_longer_has_is_refused(
    rows: Path, formatter: ChatFormatter, tmp_path: Path
) -> None:
    shorter = tmp_path / "a.jsonl"
    shorter.write_text("\n".join(rows.read_text().splitlines()[:18]))
    for place in (
        {"epoch": 0, "first_row": 16, "taken": 3},
        {"epoch": 0, "first_row": 24, "taken": 0},
    ):
        with (
            pytest.raises(DataError, match=r"there is no such row any more|no rows behind"),
            open_loader(shorter, formatter, step=5, place=place),
        ):
            pass


def bytes_read(path: Path) -> int | None:
    """How far this process has read a file that it has open; None: it hasn't."""
    found = [file for file in psutil.Process().open_files() if file.path == str(path)]
    return found[0].position if found else None


def test_a_stream_that_cannot_be_entered_leaves_nothing_open(
    rows: Path, formatter: ChatFormatter
) -> None:
    with (
        pytest.raises(DataError, match="there is no such row any more") as kept,
        open_loader(rows, formatter, step=5, place={"epoch": 0, "first_row": 8, "taken": 8}),
    ):
        pass
    # The error is still here, and with it all that stood on the stack when it was raised.
    assert kept.tb is not None
    assert bytes_read(rows) is None
    with open_loader(rows, formatter):
        assert bytes_read(rows) is not None
    assert bytes_read(rows) is None


def test_the_next_block_is_read_while_one_is_dealt(
    formatter: ChatFormatter, tmp_path: Path
) -> None:
    path, row = tmp_path / "a.jsonl", json.dumps({"text": "a", "note": "n" * 100_000}) + "\n"
    path.write_text(row * NUM_ROWS)
    with open_loader(path, formatter) as loader:
        until = time.monotonic() + 5
        # Nobody has asked for a batch; the first block has been read, and the second one is.
        while (bytes_read(path) or 0) < 16 * len(row) and time.monotonic() < until:
            time.sleep(0.01)
        assert 16 * len(row) <= (bytes_read(path) or 0) < 17 * len(row)
        found = fetch(loader, 1, 1)
    place = found[0].data_place
    assert place is not None
    assert (place["epoch"], place["first_row"], place["taken"]) == (0, 0, 4)


def test_closing_a_stream_does_not_wait_for_the_block_that_is_being_read(
    formatter: ChatFormatter, tmp_path: Path
) -> None:
    path, many = tmp_path / "a.jsonl", 200_000
    path.write_text('{"text": "abc"}\n' * (many + 250))
    last = {"epoch": 0, "first_row": many, "taken": 200}
    with open_loader(path, formatter, block_rows=many, step=1, place=last) as loader:
        assert loader.fetch(2).num_rows == 4  # the next pass's block of 200,000 rows is begun
        began = time.process_time()
    assert time.process_time() - began < 2  # reading it takes more than 5


def test_what_fails_ahead_is_raised_at_its_step_and_not_before(
    rows: Path, formatter: ChatFormatter, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    lines = rows.read_text().splitlines()
    path.write_text("\n".join([*lines[:16], "{", *lines[17:]]))
    with (
        open_loader(path, formatter) as loader,
        closing(Prefetcher(loader, last_step=9)) as ahead,
    ):
        assert [ahead.fetch(step).num_rows for step in (1, 2, 3)] == [4, 4, 4]
        with pytest.raises(DataError, match=rf"{path}:17: isn't valid JSON"):
            ahead.fetch(4)
