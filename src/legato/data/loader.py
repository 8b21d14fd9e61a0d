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

from legato.data.samples import Indices, TokenizedData
from legato.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank, padded on the right. No attention mask: attention is causal.

    Attributes:
        input_ids: Int64 ``[B, T]``.
        trained: Bool ``[B, T]``; ``trained[b, t]``: the model must produce ``input_ids[b, t]``.
            Always False at ``t = 0`` and on padding.
        sample_ids: Of the rows that hold a sample; these come first. Rows of padding have none.
        num_tokens: Tokens that aren't padding.
        num_loss_tokens: True entries of ``trained``.
    """

    input_ids: torch.Tensor
    trained: torch.Tensor
    sample_ids: tuple[str, ...]
    num_tokens: int
    num_loss_tokens: int


class Loader:
    """Deals the rows of each step to ranks and micro-batches.

    Every epoch visits every row as often as its data set's weight says. The last step of an epoch
    may hold fewer rows than ``global_batch_size``; every rank gets as many micro-batches as the
    others, filled up with a row of padding where rows run out. Within a step, rows are dealt
    longest first, so that ranks carry equal loads and micro-batches pad little.

    Args:
        data: The samples.
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
        data: TokenizedData,
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
        rows = self.step_rows(step)
        longest_first = sorted(rows, key=lambda i: -int(self._data.lengths[i]))
        mine = longest_first[self._rank :: self._world_size]
        most = math.ceil(len(rows) / self._world_size)
        return [
            self._batch(mine[first : first + self.batch_size])
            for first in range(0, most, self.batch_size)
        ]

    def _batch(self, rows: list[int]) -> Batch:
        num_rows = self.batch_size if self._fill_rows else max(1, len(rows))
        longest = max((int(self._data.lengths[i]) for i in rows), default=1)
        width = next((bucket for bucket in self._buckets if bucket >= longest), longest)
        input_ids = np.full((num_rows, width), self._pad_id, dtype=np.int64)
        trained = np.zeros((num_rows, width), dtype=np.bool_)
        for b, i in enumerate(rows):
            sample = self._data[i]
            input_ids[b, : len(sample.input_ids)] = sample.input_ids
            trained[b, : len(sample.trained)] = sample.trained
        trained[:, 0] = False
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            trained=torch.from_numpy(trained),
            sample_ids=tuple(self._data.sample_id(i) for i in rows),
            num_tokens=sum(int(self._data.lengths[i]) for i in rows),
            num_loss_tokens=int(np.count_nonzero(trained)),
        )


class EpochOrder:
    """The order of every epoch: a pure function of (seed, epoch), the same on every machine.

    A data set of weight 2.5 gives each row twice, and half of its rows a third time; which half is
    drawn anew in each epoch. The number of rows is the same in every epoch.
    """

    def __init__(self, data: TokenizedData, *, seed: int, shuffle: bool) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._members = [
            np.flatnonzero(data.datasets == number) for number in range(len(data.weights))
        ]
        self._counts = [
            max(1, round(len(m) * w)) if len(m) else 0
            for m, w in zip(self._members, data.weights, strict=True)
        ]
        self._cached: tuple[int, Indices] | None = None

    def __len__(self) -> int:
        return sum(self._counts)

    def epoch(self, epoch: int) -> Indices:
        """Indices into the data, in the order of ``epoch`` (from 0)."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._build(epoch))
        return self._cached[1]

    def _build(self, epoch: int) -> Indices:
        parts: list[Indices] = []
        for number, (members, count) in enumerate(zip(self._members, self._counts, strict=True)):
            if count == 0:
                continue
            repeats, rest = divmod(count, len(members))
            parts.extend([members] * repeats)
            if rest:
                drawn = permutation(len(members), seed=self._seed, epoch=epoch, stream=1 + number)[
                    :rest
                ]
                parts.append(members[np.sort(drawn)])
        rows = np.concatenate(parts)
        return rows[permutation(len(rows), seed=self._seed, epoch=epoch)] if self._shuffle else rows


def permutation(length: int, *, seed: int, epoch: int, stream: int = 0) -> Indices:
    """A permutation of ``range(length)`` from Philox's raw bits.

    Not ``Generator.permutation``: numpy promises its bit streams across versions, but not its
    distributions, and a resumed run must find the same rows after an upgrade.

    Args:
        length: Number of rows.
        seed: First word of the key.
        epoch: Second word of the key.
        stream: Tells draws of one epoch apart.

    Returns:
        Int64 ``[length]``.
    """
    # Arrays, not lists: numpy makes floats of a list that holds an integer above 2**63.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    source = np.random.Philox(counter=np.array([0, 0, 0, stream], dtype=np.uint64), key=key)
    # The low bits carry the index: keys can't tie, so the result doesn't depend on the kind of
    # sort.
    bits = np.uint64(length.bit_length())
    keys = (source.random_raw(length) >> bits << bits) | np.arange(length, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(2 ** length.bit_length() - 1)).astype(np.int64)
