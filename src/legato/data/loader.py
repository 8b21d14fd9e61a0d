"""Which rows a step trains on, and the tensors they become.

The order of an epoch is a pure function of (seed, epoch), so a position is only a step number:
seeking is O(1), nothing has to be replayed, and the rows of a step are the same on any number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from legato.data.order import EpochOrder
from legato.data.samples import Rows, Sample
from legato.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank, padded on the right. No attention mask: attention is causal.

    Attributes:
        input_ids: Int64 ``[B, T]``.
        trained: Bool ``[B, T]``; ``trained[b, t]``: the model must produce ``input_ids[b, t]``.
            Always False at ``t = 0`` and on padding.
        sample_ids: Of every document in its rows, in their order; rows of padding have none.
        num_tokens: Tokens that aren't padding.
        num_loss_tokens: True entries of ``trained``.
        position_ids: Int64 ``[B, T]``, from 0 in each document, where rows hold several; None: 0,
            1, 2, ... in every row.
    """

    input_ids: torch.Tensor
    trained: torch.Tensor
    sample_ids: tuple[str, ...]
    num_tokens: int
    num_loss_tokens: int
    position_ids: torch.Tensor | None = None


class Loader:
    """Deals the rows of each step to ranks and micro-batches.

    Every epoch visits every row as often as its data set's weight says. The last step of an epoch
    may hold fewer rows than ``global_batch_size``; every rank gets as many micro-batches as the
    others, filled up with a row of padding where rows run out. Within a step, rows are dealt
    longest first, so that ranks carry equal loads and micro-batches pad little.

    Args:
        data: The rows: a sample each, or packs.
        global_batch_size: Rows of one optimizer step over all ranks.
        batch_size: Most rows of one micro-batch.
        seed: Of the order; 0 to 2**64 - 1.
        pad_id: Token id of padding; never trained, and it may be any token's id.
        shuffle: False keeps the rows in the order of the files.
        max_steps_per_epoch: Ends every epoch early; 0 leaves no steps.
        rank: This process, from 0.
        world_size: Number of processes.
        length_buckets: Row lengths, ascending: each micro-batch is padded to the next one of these,
            so that a compiled model sees few shapes.
        fill_rows: Pad every micro-batch to exactly ``batch_size`` rows.

    Attributes:
        global_batch_size: Rows of one optimizer step over all ranks.
        batch_size: Most rows of one micro-batch.
        steps_per_epoch: Optimizer steps in one epoch.
        rows_per_epoch: Rows that an epoch visits, repeated ones included.

    Raises:
        ConfigError: A size below 1, or a bucket list that the longest row doesn't fit in.
        DataError: No rows.
    """

    def __init__(
        self,
        data: Rows,
        *,
        global_batch_size: int,
        batch_size: int,
        seed: int,
        pad_id: int,
        shuffle: bool = True,
        max_steps_per_epoch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        length_buckets: Sequence[int] | None = None,
        fill_rows: bool = False,
    ) -> None:
        if min(global_batch_size, batch_size, world_size) < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"global batch {global_batch_size}, batch_size {batch_size}, rank {rank} of "
                f"{world_size}: "
                "sizes must be at least 1, and the rank below the world size"
            )
        self._data = data
        self._epoch_rows = (0, data.at_epoch(0))
        self._order = EpochOrder(data, seed=seed, shuffle=shuffle)
        if len(self._order) == 0:
            raise DataError(
                "no rows to train on: the data set is empty, or its weights leave no row"
            )
        longest = int(data.lengths.max())
        self._buckets = sorted(length_buckets) if length_buckets else []
        if self._buckets and self._buckets[-1] < longest:
            raise ConfigError(
                f"length_buckets end at {self._buckets[-1]}, but the longest row has {longest} "
                "tokens"
            )
        self.global_batch_size = global_batch_size
        self.batch_size = batch_size
        self._pad_id = pad_id
        self._rank, self._world_size = rank, world_size
        self._fill_rows = fill_rows
        steps = math.ceil(len(self._order) / global_batch_size)
        self.steps_per_epoch = (
            steps if max_steps_per_epoch is None else min(steps, max_steps_per_epoch)
        )
        self.rows_per_epoch = min(len(self._order), self.steps_per_epoch * global_batch_size)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that each rank runs in a full step."""
        return math.ceil(math.ceil(self.global_batch_size / self._world_size) / self.batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that ``step`` (from 1) belongs to."""
        return (step - 1) // self.steps_per_epoch if self.steps_per_epoch else 0

    def rows_seen(self, step: int) -> int:
        """Rows consumed by all ranks after ``step`` steps; 0 after none."""
        if self.steps_per_epoch == 0:
            return 0
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.rows_per_epoch + min(
            steps * self.global_batch_size, self.rows_per_epoch
        )

    def step_rows(self, step: int) -> list[int]:
        """Indices into the data of the rows of ``step`` (from 1), over all ranks: f(seed, step)."""
        first = ((step - 1) % self.steps_per_epoch) * self.global_batch_size
        order = self._order.epoch(self.epoch_of(step))
        return [int(i) for i in order[first : first + self.global_batch_size]]

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's part of ``step`` (from 1); the same number of batches on every rank."""
        data = self._rows_at(step)
        return [self._batch(data, rows) for rows in self.micro_batch_rows(step)]

    def _rows_at(self, step: int) -> Rows:
        """The data's rows in the epoch of ``step``."""
        epoch, known = self.epoch_of(step), self._epoch_rows
        if known[0] != epoch:
            known = self._epoch_rows = (epoch, self._data.at_epoch(epoch))
        return known[1]

    def micro_batch_rows(self, step: int) -> list[list[int]]:
        """Numbers of the rows in each of this rank's micro-batches; none in one of padding only."""
        rows = self.step_rows(step)
        lengths = self._rows_at(step).lengths
        longest_first = sorted(rows, key=lambda i: -int(lengths[i]))
        mine = longest_first[self._rank :: self._world_size]
        most = math.ceil(len(rows) / self._world_size)
        return [mine[first : first + self.batch_size] for first in range(0, most, self.batch_size)]

    def width(self, rows: Sequence[int]) -> int:
        """Slots of each row, in tokens, of a micro-batch of these rows."""
        return self._width([int(self._data.lengths[i]) for i in rows])

    def _width(self, lengths: Sequence[int]) -> int:
        longest = max(lengths, default=1)
        return next((bucket for bucket in self._buckets if bucket >= longest), longest)

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of these rows, without padding."""
        return sum(int(self._data.lengths[i]) for i in rows)

    def first_document(self) -> Sample | None:
        """What step 1 begins with; None if there are no steps."""
        return self._data.documents(self.step_rows(1)[0])[0] if self.steps_per_epoch else None

    def _batch(self, data: Rows, rows: list[int]) -> Batch:
        num_rows = self.batch_size if self._fill_rows else max(1, len(rows))
        lengths = [int(data.lengths[i]) for i in rows]
        width = self._width(lengths)
        input_ids = np.full((num_rows, width), self._pad_id, dtype=np.int64)
        trained = np.zeros((num_rows, width), dtype=np.bool_)
        # Padding is a document of its own, behind the last one.
        position_ids = np.tile(np.arange(width, dtype=np.int64), (num_rows, 1))
        sample_ids: list[str] = []
        for b, i in enumerate(rows):
            start = 0
            for document in data.documents(i):
                end = start + len(document.input_ids)
                input_ids[b, start:end] = document.input_ids
                trained[b, start:end] = document.trained
                trained[b, start] = False  # what stands before it belongs to another document
                position_ids[b, end:] -= end - start
                sample_ids.append(document.sample_id)
                start = end
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            trained=torch.from_numpy(trained),
            sample_ids=tuple(sample_ids),
            num_tokens=sum(lengths),
            num_loss_tokens=int(np.count_nonzero(trained)),
            position_ids=torch.from_numpy(position_ids) if data.is_packed else None,
        )
