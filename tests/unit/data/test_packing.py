from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.data.loader import Loader
from legato.data.packing import best_fit, pack_samples
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
