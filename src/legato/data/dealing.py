"""What a step gets of the rows: who takes which, and the tensors they become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from legato.data.samples import Sample
from legato.errors import ConfigError

Row = TypeVar("Row")


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


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What a rank trains on in one optimizer step.

    Attributes:
        batches: Its micro-batches; the same number on every rank.
        num_rows: Rows of the step over all ranks.
        epoch: The pass over the data that they belong to, from 0.
        ends_epoch: Whether the next step belongs to the next pass.
        data_place: Where the step leaves the data, as JSON: what its loader is to be given again.
    """

    batches: list[Batch]
    num_rows: int
    epoch: int
    ends_epoch: bool
    data_place: Mapping[str, Any]


class BatchSource(Protocol):
    """Who gives the loop its batches, step after step."""

    @property
    def reads_while_training(self) -> bool:
        """Whether a file or a row may turn out to be unusable at any step."""

    def fetch(self, step: int) -> StepBatches:
        """This rank's part of ``step``, from 1; asked for in order."""


class Dealer:
    """Deals the rows of a step to ranks and micro-batches, and makes tensors of them.

    Rows are dealt longest first, so that ranks carry equal loads and micro-batches pad little.
    Every rank gets as many micro-batches as the others, filled up with a row of padding where rows
    run out.

    Args:
        batch_size: Most rows of one micro-batch.
        pad_id: Token id of padding; never trained, and it may be any token's id.
        rank: This process, from 0.
        world_size: Number of processes.
        length_buckets: Row lengths, ascending: each micro-batch is padded to the next one of these,
            so that a compiled model sees few shapes.
        fill_rows: Pad every micro-batch to exactly ``batch_size`` rows.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        length_buckets: Sequence[int] | None = None,
        fill_rows: bool = False,
    ) -> None:
        if min(batch_size, world_size) < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"batch_size {batch_size}, rank {rank} of {world_size}: sizes must be at least 1, "
                "and the rank below the world size"
            )
        self.batch_size = batch_size
        self._pad_id = pad_id
        self._rank, self._world_size = rank, world_size
        self._buckets = sorted(length_buckets) if length_buckets else []
        self._fill_rows = fill_rows

    def check_longest(self, num_tokens: int) -> None:
        """Raise :class:`ConfigError` if a row of so many tokens fits into no bucket."""
        if self._buckets and self._buckets[-1] < num_tokens:
            raise ConfigError(
                f"length_buckets end at {self._buckets[-1]}, but the longest row has {num_tokens} "
                "tokens"
            )

    def micro_batches_of(self, num_rows: int) -> int:
        """Micro-batches that each rank runs in a step of so many rows."""
        return math.ceil(math.ceil(num_rows / self._world_size) / self.batch_size)

    def deal(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[list[Row]]:
        """Choose this rank's rows of a step.

        Args:
            rows: The step's, over all ranks.
            lengths: Tokens of each.

        Returns:
            The rows of each of this rank's micro-batches; none in one of padding only.
        """
        longest_first = sorted(range(len(rows)), key=lambda i: -lengths[i])
        mine = [rows[i] for i in longest_first[self._rank :: self._world_size]]
        return [
            mine[number * self.batch_size : (number + 1) * self.batch_size]
            for number in range(self.micro_batches_of(len(rows)))
        ]

    def width(self, longest: int) -> int:
        """Slots of each row, in tokens, of a micro-batch whose longest row has so many tokens."""
        return next((bucket for bucket in self._buckets if bucket >= longest), max(1, longest))

    def batch(self, rows: Sequence[Sequence[Sample]], *, is_packed: bool) -> Batch:
        """Make tensors.

        Args:
            rows: The documents of each row of a micro-batch.
            is_packed: Whether rows may hold several.

        Returns:
            The micro-batch.
        """
        lengths = [sum(len(document.input_ids) for document in row) for row in rows]
        num_rows = self.batch_size if self._fill_rows else max(1, len(rows))
        width = self.width(max(lengths, default=1))
        input_ids = np.full((num_rows, width), self._pad_id, dtype=np.int64)
        trained = np.zeros((num_rows, width), dtype=np.bool_)
        # Padding is a document of its own, behind the last one.
        position_ids = np.tile(np.arange(width, dtype=np.int64), (num_rows, 1))
        sample_ids: list[str] = []
        for b, row in enumerate(rows):
            start = 0
            for document in row:
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
            position_ids=torch.from_numpy(position_ids) if is_packed else None,
        )
