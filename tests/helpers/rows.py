"""Random token rows, as micro-batches and as the labels that transformers' own loss takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from legato.data.loader import Batch
from legato.data.samples import DataReport, Sample, SampleColumns, TokenizedData

PAD_ID = 3  # occurs as a token as well, so that a mask made by pad id would be wrong


class Row(NamedTuple):
    input_ids: list[int]
    trained: list[bool]


def random_rows(lengths: Sequence[int], *, vocab_size: int = 272, seed: int = 0) -> list[Row]:
    """Rows of the given lengths; about 60 % of their tokens are trained, the last one always."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        trained = draw.random(length) < 0.6
        trained[0], trained[-1] = False, True
        rows.append(Row(draw.integers(0, vocab_size, length).tolist(), trained.tolist()))
    return rows


def as_batch(rows: Sequence[Row], *, name: str = "row") -> Batch:
    """One micro-batch, padded on the right."""
    width = max(len(row.input_ids) for row in rows)
    input_ids = torch.full((len(rows), width), PAD_ID)
    trained = torch.zeros((len(rows), width), dtype=torch.bool)
    for b, row in enumerate(rows):
        input_ids[b, : len(row.input_ids)] = torch.tensor(row.input_ids)
        trained[b, : len(row.trained)] = torch.tensor(row.trained)
    return Batch(
        input_ids=input_ids,
        trained=trained,
        sample_ids=tuple(f"{name}:{b}" for b in range(len(rows))),
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_loss_tokens=int(trained.sum()),
    )


def as_batches(rows: Sequence[Row], batch_size: int) -> list[Batch]:
    return [
        as_batch(rows[first : first + batch_size], name=f"batch{first // batch_size}")
        for first in range(0, len(rows), batch_size)
    ]


def as_labels(batch: Batch) -> Tensor:
    """What transformers' loss takes: the token, or -100 where it isn't trained."""
    return batch.input_ids.masked_fill(~batch.trained, -100)


def as_data(
    rows: Sequence[Row], *, datasets: Sequence[int] | None = None, weights: Sequence[float] = (1.0,)
) -> TokenizedData:
    """The rows as tokenized data, all of one data set unless ``datasets`` has their numbers."""
    columns = SampleColumns()
    for i, row in enumerate(rows):
        sample = Sample(
            np.array(row.input_ids, dtype=np.int32), np.array(row.trained), f"rows.jsonl:{i + 1}"
        )
        columns.append(sample, row=i, dataset=datasets[i] if datasets is not None else 0)
    return columns.finish(weights=weights, report=DataReport(datasets=()))
