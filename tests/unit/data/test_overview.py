from __future__ import annotations

import numpy as np
import pytest

from legato.data.overview import LengthBin, Repeats, build_overview, length_histogram
from legato.data.samples import DataReport, Sample, SampleColumns, TokenizedData
from tests.helpers.rows import as_data, random_rows


def rows(*contents: list[int]) -> TokenizedData:
    columns = SampleColumns()
    for number, ids in enumerate(contents):
        trained = np.array([i > 0 for i in range(len(ids))])
        sample = Sample(np.array(ids, dtype=np.int32), trained, f"a:{number + 1}")
        columns.append(sample, row=number, dataset=0)
    return columns.finish(weights=[1.0], report=DataReport(()))


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([1], [LengthBin(1, 1, 1)]),
        ([1, 5, 5, 12], [LengthBin(n, n, {1: 1, 5: 2, 12: 1}.get(n, 0)) for n in range(1, 13)]),
        (
            [100, 101, 700],
            [
                LengthBin(1, 100, 1),
                LengthBin(101, 200, 1),
                LengthBin(201, 300, 0),
                LengthBin(301, 400, 0),
                LengthBin(401, 500, 0),
                LengthBin(501, 600, 0),
                LengthBin(601, 700, 1),
            ],
        ),
    ],
)
def test_bins_are_round_and_count_every_sample(lengths: list[int], bins: list[LengthBin]) -> None:
    assert length_histogram(lengths) == tuple(bins)


def test_duplicates_and_held_out_samples_that_are_trained_on_are_named() -> None:
    train = rows([1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3])
    overview = build_overview(
        train, rows([4, 5], [6, 6]), max_seq_len=8, batch_size=2, global_batch_size=4, seed=0
    )
    assert overview.duplicates == Repeats(2, (("a:3", "a:1"), ("a:4", "a:1")))
    assert overview.leaked == Repeats(1, (("a:1", "a:2"),))
    assert (overview.num_samples, overview.num_held_out) == (4, 2)
    assert (overview.num_tokens, overview.num_loss_tokens) == (11, 7)


def test_efficiencies_count_tokens_per_slot() -> None:
    # As rows of their own: 9 tokens in 2 rows of 8. Packed, in whatever order: 9 in a row of 10.
    data = as_data(random_rows([8, 1]))
    overview = build_overview(data, None, max_seq_len=10, batch_size=2, global_batch_size=4, seed=0)
    assert overview.padded_efficiency == 9 / 16
    assert (overview.packed_efficiency, overview.num_packed_rows) == (9 / 10, 1)
