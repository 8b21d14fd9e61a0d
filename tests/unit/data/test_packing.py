from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.data.loader import Loader
from legato.data.packing import PackedData, best_fit, pack_samples
from legato.errors import ConfigError
from tests.helpers.rows import as_data, random_rows


def test_each_length_goes_where_the_least_space_is_left() -> None:
    # 7 | 5 | 4 fits behind 5 (space 5) and not behind 7 (space 3); 3 fills up 7; 1 fills up 5 + 4.
    assert best_fit([7, 5, 4, 3, 1, 2], capacity=10) == [[0, 3], [1, 2, 4], [5]]


@given(st.lists(st.integers(1, 50), max_size=200))
def test_packs_hold_everything_once_and_never_too_much(lengths: list[int]) -> None:
    packs = best_fit(lengths, capacity=50)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in pack) for pack in packs]
    assert all(total <= 50 for total in totals)
    # A pack is only opened when nothing else has room: two can't both be half empty.
    assert sum(total <= 25 for total in totals) <= 1


def test_a_hundred_thousand_samples_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, size=100_000).tolist()
    packs = best_fit(lengths, capacity=2048)
    assert sum(lengths) / (2048 * len(packs)) > 0.99


def test_rows_are_a_function_of_the_seed() -> None:
    data = as_data(random_rows([5, 9, 3, 7, 2, 8, 4, 6, 1, 10] * 3))
    first, again, other = (pack_samples(data, max_seq_len=20, seed=s) for s in (1, 1, 2))
    assert first.members.tolist() == again.members.tolist()
    assert first.starts.tolist() == again.starts.tolist()
    assert first.members.tolist() != other.members.tolist()
    assert sorted(first.members.tolist()) == list(range(30))
    assert first.lengths.tolist() == [
        sum(len(d.input_ids) for d in first.documents(row)) for row in range(len(first))
    ]
    assert first.efficiency == 165 / (20 * len(first))


def test_a_row_holds_samples_of_one_data_set_so_that_weights_apply_to_rows() -> None:
    data = as_data(random_rows([4] * 12), datasets=[0, 1] * 6, weights=(1.0, 2.0))
    packed = pack_samples(data, max_seq_len=12, seed=0)
    assert packed.datasets.tolist() == [0, 0, 1, 1]
    loader = Loader(packed, global_batch_size=1, batch_size=1, seed=0, pad_id=0)
    visited = [loader.step_rows(step)[0] for step in range(1, loader.steps_per_epoch + 1)]
    assert sorted(visited) == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("num_samples", [7, 900])
def test_every_epoch_has_other_packs_of_the_same_samples_and_as_many_of_them(
    num_samples: int,
) -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(3, 30, size=num_samples).tolist()
    datasets = draw.integers(0, 2, size=num_samples).tolist()
    data = as_data(random_rows(lengths), datasets=datasets, weights=(1.0, 1.0))
    first, again = (pack_samples(data, max_seq_len=60, seed=3) for _ in range(2))
    assert first.at_epoch(0) is first
    epochs = [first.at_epoch(epoch) for epoch in range(5)]
    for rows in epochs:
        assert sorted(rows.members.tolist()) == list(range(num_samples))
        assert sorted(rows.datasets.tolist()) == sorted(first.datasets.tolist())
        assert rows.lengths.max() <= 60
        assert rows.efficiency == first.efficiency
        for row in range(len(rows)):
            assert len({data.datasets[i] for i in members_of(rows, row)}) == 1
    assert again.at_epoch(4).members.tolist() == epochs[4].members.tolist()
    if num_samples > 100:
        packs = [{frozenset(members_of(rows, i)) for i in range(len(rows))} for rows in epochs]
        for one, other in itertools.combinations(packs, 2):
            assert len(one & other) < 0.1 * len(one)


def members_of(rows: PackedData, row: int) -> list[int]:
    start = int(rows.starts[row])
    return [int(i) for i in rows.members[start : start + int(rows.counts[row])]]


def test_a_loader_deals_the_packs_of_its_epoch() -> None:
    data = as_data(random_rows([4, 5, 6, 7] * 20))
    packed = pack_samples(data, max_seq_len=22, seed=0)
    loader = Loader(packed, global_batch_size=4, batch_size=2, seed=0, pad_id=0)
    for epoch in (0, 2, 1):
        steps = range(1 + epoch * loader.steps_per_epoch, 1 + (epoch + 1) * loader.steps_per_epoch)
        batches = [batch for step in steps for batch in loader.micro_batches(step)]
        assert sorted(i for batch in batches for i in batch.sample_ids) == sorted(
            data.sample_id(i) for i in range(80)
        )
        rows = packed.at_epoch(epoch)
        (row, _), *_ = loader.micro_batch_rows(steps[0])
        expected = tuple(document.sample_id for document in rows.documents(row))
        assert batches[0].sample_ids[: len(expected)] == expected


def test_packs_stay_those_of_the_first_epoch_where_another_order_needs_more_rows() -> None:
    """By hand: two rows, which only one way of packing fits into."""
    data = as_data(random_rows([6, 4, 5, 3, 2]))
    packed = pack_samples(data, max_seq_len=10, seed=0)
    exact = replace(
        packed,
        members=np.array([0, 1, 2, 3, 4]),
        starts=np.array([0, 2]),
        counts=np.array([2, 3]),
        lengths=np.array([10, 10]),
        datasets=np.array([0, 0]),
    )
    for epoch in range(1, 30):
        rows = exact.at_epoch(epoch)
        assert len(rows) == 2
        assert {frozenset(members_of(rows, i)) for i in (0, 1)} == {
            frozenset({0, 1}),
            frozenset({2, 3, 4}),
        }


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sample has 9 tokens, a row takes 8"):
        pack_samples(as_data(random_rows([3, 9])), max_seq_len=8, seed=0)


def test_a_batch_of_packed_rows_restarts_positions_and_never_trains_a_first_token() -> None:
    data = as_data(random_rows([3, 2, 4]))
    packed = pack_samples(data, max_seq_len=9, seed=0)
    (batch,) = Loader(
        packed, global_batch_size=1, batch_size=1, seed=0, pad_id=7, length_buckets=[12]
    ).micro_batches(1)
    documents = packed.documents(0)
    assert batch.position_ids is not None
    positions = [i for d in documents for i in range(len(d.input_ids))] + [0, 1, 2]
    assert batch.position_ids.tolist() == [positions]
    ids = [int(i) for d in documents for i in d.input_ids] + [7, 7, 7]
    assert batch.input_ids.tolist() == [ids]
    trained = [bool(t) for d in documents for t in [False, *d.trained[1:]]] + [False] * 3
    assert batch.trained.tolist() == [trained]
    assert batch.sample_ids == tuple(d.sample_id for d in documents)
    assert batch.num_tokens == 9


def test_rows_of_single_samples_have_no_position_ids() -> None:
    (batch,) = Loader(
        as_data(random_rows([3, 2])), global_batch_size=2, batch_size=2, seed=0, pad_id=7
    ).micro_batches(1)
    assert batch.position_ids is None
