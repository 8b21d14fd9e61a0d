"""Which rows a step trains on, and how they are dealt: literals, and the same rows on any world."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.data import Batch, DataReport, Loader, Sample, TokenizedData
from legato.data.order import permutation
from legato.data.packing import pack_samples
from legato.data.samples import Rows, SampleColumns
from legato.errors import ConfigError, DataError


def make_data(
    *lengths: int, weights: tuple[float, ...] = (1.0,), second_from: int = 999
) -> TokenizedData:
    """Sample i holds the token 100 + i, ``lengths[i]`` times; all but the first two are trained."""
    columns = SampleColumns()
    for i, length in enumerate(lengths):
        ids = np.full(length, 100 + i, dtype=np.int32)
        sample = Sample(ids, np.arange(length) >= 2, f"a:{i}")
        columns.append(sample, row=i, dataset=int(i >= second_from))
    return columns.finish(weights=weights, report=DataReport(()))


def make_loader(data: Rows, **options: object) -> Loader:
    defaults = {"global_batch_size": 4, "batch_size": 2, "seed": 7, "pad_id": 0}
    return Loader(data, **(defaults | options))  # type: ignore[arg-type]


def ids_of(batches: list[Batch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def test_every_epoch_visits_every_row_once_and_the_last_step_may_be_short() -> None:
    loader = make_loader(make_data(*[3] * 10))
    assert loader.steps_per_epoch == 3
    for first in (1, 4):
        rows = [loader.step_rows(step) for step in range(first, first + 3)]
        assert [len(each) for each in rows] == [4, 4, 2]
        assert sorted(i for each in rows for i in each) == list(range(10))
    assert [loader.epoch_of(step) for step in (1, 3, 4, 7)] == [0, 0, 1, 2]
    assert [loader.last_step_of(epochs) for epochs in (1, 2, 5)] == [3, 6, 15]


def test_the_order_is_frozen_across_versions_and_machines() -> None:
    loader = make_loader(make_data(*[3] * 10))
    rows = [loader.step_rows(step) for step in (1, 2, 3, 4)]
    assert rows == [[8, 4, 1, 6], [3, 2, 7, 5], [9, 0], [3, 9, 1, 6]]
    raw = np.random.Philox(key=np.array([7, 0], dtype=np.uint64)).random_raw(10)
    assert [i for step in rows[:3] for i in step] == np.argsort(raw).tolist()
    assert permutation(5, seed=2**64 - 1, epoch=0).tolist() == [0, 4, 2, 3, 1]
    assert permutation(5, seed=2**64 - 2, epoch=0).tolist() == [4, 0, 2, 3, 1]


def test_steps_can_be_asked_for_in_any_order() -> None:
    data = make_data(*[3] * 10)
    forward = make_loader(data)
    expected = [forward.step_rows(step) for step in range(1, 10)]
    backward = make_loader(data)
    assert [backward.step_rows(step) for step in range(9, 0, -1)] == expected[::-1]


def test_another_seed_or_epoch_is_another_order_and_no_shuffle_is_the_files() -> None:
    data = make_data(*[3] * 10)
    assert make_loader(data, seed=8).step_rows(1) != make_loader(data).step_rows(1)
    assert make_loader(data).step_rows(4) != make_loader(data).step_rows(1)
    plain = make_loader(data, shuffle=False)
    assert [plain.step_rows(step) for step in (1, 3, 4)] == [[0, 1, 2, 3], [8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sequence_of_sample_ids_is_the_same_on_every_world_size(world_size: int) -> None:
    data = make_data(*[3 + i % 4 for i in range(10)])
    alone = make_loader(data)
    ranks = [make_loader(data, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(1, 3 * 3 + 1):
        expected = sorted(data.sample_id(i) for i in alone.step_rows(step))
        dealt = [rank.micro_batches(step) for rank in ranks]
        assert sorted(ids_of([b for batches in dealt for b in batches])) == expected
        assert len({len(batches) for batches in dealt}) == 1
        counts = [len(ids_of(batches)) for batches in dealt]
        assert max(counts) - min(counts) <= 1


def test_a_rank_without_rows_gets_a_row_of_padding() -> None:
    data = make_data(4, 3)
    (batch,) = make_loader(data, rank=3, world_size=4).micro_batches(1)
    assert batch.input_ids.tolist() == [[0]]
    assert batch.trained.tolist() == [[False]]
    assert (batch.sample_ids, batch.num_tokens, batch.num_loss_tokens) == ((), 0, 0)


def test_rows_are_padded_on_the_right_and_padding_is_never_trained() -> None:
    data = make_data(4, 2, 3)
    loader = make_loader(data, global_batch_size=3, batch_size=3, shuffle=False, pad_id=101)
    (batch,) = loader.micro_batches(1)
    assert batch.input_ids.tolist() == [
        [100, 100, 100, 100],
        [102, 102, 102, 101],
        [101, 101, 101, 101],
    ]
    no, yes = False, True
    assert batch.trained.tolist() == [[no, no, yes, yes], [no, no, yes, no], [no, no, no, no]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.trained.dtype == torch.bool
    assert batch.sample_ids == ("a:0", "a:2", "a:1")
    assert (batch.num_tokens, batch.num_loss_tokens) == (9, 3)


def test_rows_are_dealt_longest_first() -> None:
    loader = make_loader(make_data(3, 9, 4, 8), shuffle=False)
    assert [b.sample_ids for b in loader.micro_batches(1)] == [("a:1", "a:3"), ("a:2", "a:0")]
    second = make_loader(make_data(3, 9, 4, 8), shuffle=False, rank=1, world_size=2)
    assert [b.sample_ids for b in second.micro_batches(1)] == [("a:3", "a:0")]


def test_fill_rows_and_length_buckets_leave_one_shape() -> None:
    data = make_data(3, 5, 6, 3, 4)
    loader = make_loader(data, fill_rows=True, length_buckets=[8, 4], shuffle=False)
    shapes = [tuple(b.input_ids.shape) for step in (1, 2) for b in loader.micro_batches(step)]
    assert shapes == [(2, 8), (2, 4), (2, 4)]
    (short,) = loader.micro_batches(2)
    assert short.sample_ids == ("a:4",)
    assert short.trained.tolist()[1] == [False] * 4
    with pytest.raises(ConfigError, match="length_buckets end at 5, but the longest row has 6"):
        make_loader(data, length_buckets=[5])


def test_the_first_token_is_never_trained_whatever_the_data_says() -> None:
    columns = SampleColumns()
    columns.append(Sample(np.ones(3, np.int32), np.ones(3, np.bool_), "a:1"), row=0, dataset=0)
    data = columns.finish(weights=[1.0], report=DataReport(()))
    (batch,) = make_loader(data).micro_batches(1)
    assert batch.trained.tolist() == [[False, True, True]]
    assert batch.num_loss_tokens == 2


def test_max_steps_per_epoch_ends_every_epoch_early() -> None:
    loader = make_loader(make_data(*[3] * 10), max_steps_per_epoch=2)
    assert loader.steps_per_epoch == 2
    assert [loader.epoch_of(step) for step in (1, 2, 3)] == [0, 0, 1]
    assert loader.last_step_of(3) == 6
    assert loader.rows_per_epoch == 8
    whole = make_loader(make_data(*[3] * 10))
    assert loader.step_rows(3) == whole.step_rows(4)
    none = make_loader(make_data(3), max_steps_per_epoch=0)
    assert (none.steps_per_epoch, none.last_step_of(2), none.first_document()) == (0, 0, None)


Chain = list[tuple[int, int]]


def dealt_with(chain: Chain, data: Rows, *, epochs: int) -> list[list[list[int]]]:
    """Each epoch's rows, step by step, of a run whose parts take so many steps of so many rows.

    The last part goes on to the end of ``epochs``. Every part is another process: what it knows of
    those before is what a checkpoint holds.
    """
    found: list[list[list[int]]] = [[] for _ in range(epochs)]
    rows_per_epoch = make_loader(data, global_batch_size=1).steps_per_epoch
    step, place = 0, None
    for number, (num_steps, rows) in enumerate(chain):
        loader = make_loader(data, global_batch_size=rows, step=step, place=place)
        end = step + num_steps if number < len(chain) - 1 else loader.last_step_of(epochs)
        for step in range(step + 1, end + 1):  # noqa: B020
            fetched = loader.fetch(step)
            found[fetched.epoch].append(loader.step_rows(step))
            assert fetched.num_rows == len(found[fetched.epoch][-1])
            assert fetched.ends_epoch == (sum(map(len, found[fetched.epoch])) == rows_per_epoch)
            place = json.loads(json.dumps(fetched.data_place))
    return found


@pytest.mark.parametrize(
    ("chain", "sizes"),
    [
        ([(2, 4), (0, 4)], [[4, 4, 4, 4, 4, 1], [4, 4, 4, 4, 4, 1]]),
        ([(2, 4), (0, 8)], [[4, 4, 8, 5], [8, 8, 5]]),
        ([(2, 8), (0, 3)], [[8, 8, 3, 2], [3, 3, 3, 3, 3, 3, 3]]),
        ([(3, 8), (0, 4)], [[8, 8, 5], [4, 4, 4, 4, 4, 1]]),  # changed where an epoch ends
        ([(4, 8), (1, 3), (2, 5), (0, 2)], [[8, 8, 5], [8, 3, 5, 5]]),
        ([(1, 4), (1, 100), (0, 21)], [[4, 17], [21]]),
    ],
)
def test_steps_of_another_size_go_on_with_the_next_row_and_every_row_comes_once_an_epoch(
    chain: Chain, sizes: list[list[int]]
) -> None:
    data = make_data(*[3] * 21)
    found = dealt_with(chain, data, epochs=2)
    assert [[len(rows) for rows in epoch] for epoch in found] == sizes
    for epoch, steps in enumerate(found):
        # In the order that the epoch has whatever the steps are.
        assert [i for rows in steps for i in rows] == permutation(21, seed=7, epoch=epoch).tolist()


def test_steps_of_another_size_go_on_with_the_next_row_of_packs_and_of_mixed_data_sets() -> None:
    mixed = make_data(*[3] * 12, weights=(2.5, 0.5), second_from=4)
    packed = pack_samples(make_data(*[3 + i % 3 for i in range(40)]), max_seq_len=10, seed=7)
    for data, num_rows in ((mixed, 14), (packed, len(packed))):
        whole = dealt_with([(0, num_rows)], data, epochs=2)
        for chain in ([(2, 4), (0, 8)], [(1, 8), (2, 3), (0, 5)]):
            found = dealt_with(chain, data, epochs=2)
            assert [[i for rows in epoch for i in rows] for epoch in found] == [
                epoch[0] for epoch in whole
            ]


def test_max_steps_per_epoch_counts_the_steps_that_had_another_size() -> None:
    data = make_data(*[3] * 40)
    place = make_loader(data, max_steps_per_epoch=5).fetch(2).data_place
    assert place == {"epoch": 0, "taken": 8, "steps": 2}
    for most, sizes in ((5, [8, 8, 8]), (4, [8, 8]), (2, []), (1, [])):
        loader = make_loader(
            data, global_batch_size=8, max_steps_per_epoch=most, step=2, place=place
        )
        assert loader.last_step_of(1) == 2 + len(sizes)
        assert [len(loader.step_rows(3 + n)) for n in range(len(sizes))] == sizes
        first_of_next = 3 + len(sizes)
        assert loader.epoch_of(first_of_next) == 1
        expected = permutation(40, seed=7, epoch=1).tolist()
        assert loader.step_rows(first_of_next) == expected[:8]
        assert loader.last_step_of(2) == 2 + len(sizes) + most


def test_a_place_behind_the_end_of_smaller_data_is_the_next_epoch() -> None:
    place = make_loader(make_data(*[3] * 20)).fetch(3).data_place
    loader = make_loader(make_data(*[3] * 12), step=3, place=place)
    assert loader.epoch_of(4) == 1
    assert loader.step_rows(4) == permutation(12, seed=7, epoch=1).tolist()[:4]
    assert [loader.last_step_of(epochs) for epochs in (1, 2)] == [3, 6]


def test_the_next_row_is_told_and_shown() -> None:
    data = make_data(*[3] * 10)
    for step, said in ((0, "row 1 of the 10 of epoch 1"), (5, "row 9 of the 10 of epoch 2")):
        place = make_loader(data).fetch(step).data_place if step else None
        loader = make_loader(data, global_batch_size=8, step=step, place=place)
        assert loader.next_row() == said
        shown = loader.first_document()
        assert shown is not None
        assert shown.sample_id == data.sample_id(loader.step_rows(step + 1)[0])


def test_weights_repeat_rows_and_draw_a_new_part_in_every_epoch() -> None:
    data = make_data(*[3] * 12, weights=(2.5, 0.5), second_from=4)
    loader = make_loader(data, global_batch_size=14)
    assert loader.steps_per_epoch == 1
    drawn = []
    for step in range(1, 9):
        counts = Counter(loader.step_rows(step))
        assert sorted(counts[i] for i in range(4)) == [2, 2, 3, 3]
        part = [i for i in range(4, 12) if counts[i]]
        assert len(part) == 4
        assert all(counts[i] == 1 for i in part)
        drawn.append(tuple(part))
    assert len(set(drawn)) > 1
    assert loader.step_rows(3) == make_loader(data, global_batch_size=14).step_rows(3)


def test_the_parts_drawn_of_two_data_sets_are_independent() -> None:
    data = make_data(*[3] * 40, weights=(0.5, 0.5), second_from=20)
    rows = make_loader(data, global_batch_size=40).step_rows(1)
    first, second = [i for i in rows if i < 20], [i - 20 for i in rows if i >= 20]
    assert len(first) == len(second) == 10
    assert set(first) != set(second)


def test_a_small_weight_still_leaves_a_row() -> None:
    data = make_data(*[3] * 6, weights=(1.0, 0.01), second_from=3)
    rows = make_loader(data).step_rows(1)
    assert len(rows) == 4
    assert len([i for i in rows if i >= 3]) == 1


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 300), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_a_permutation_holds_every_index_once(length: int, seed: int, epoch: int) -> None:
    found = permutation(length, seed=seed, epoch=epoch)
    assert sorted(found.tolist()) == list(range(length))


def test_sizes_and_empty_data_are_refused() -> None:
    with pytest.raises(DataError, match="no rows to train on"):
        make_loader(make_data(3).select([]))
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        make_loader(make_data(3), rank=2, world_size=2)
    with pytest.raises(ConfigError, match="batch_size 0"):
        make_loader(make_data(3), batch_size=0)


def test_a_selection_shares_the_tokens() -> None:
    data = make_data(3, 4, 5)
    part = data.select([2, 0])
    assert part.tokens is data.tokens
    assert [part[i].sample_id for i in range(2)] == ["a:2", "a:0"]
    assert part.lengths.tolist() == [5, 3]
    assert (part.num_tokens, part.num_loss_tokens) == (8, 4)
