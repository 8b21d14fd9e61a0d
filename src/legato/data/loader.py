"""Which rows a step trains on, and the tensors they become.

The order of an epoch is a pure function of (seed, epoch), so a place in the data is an epoch and a
number of its rows: seeking is O(1), nothing has to be replayed, and the rows of a step are the same
on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from legato.data.dealing import Batch, Dealer, StepBatches
from legato.data.order import EpochOrder
from legato.data.places import EpochPlace, StepPlaces
from legato.data.samples import Rows, Sample
from legato.errors import ConfigError, DataError

__all__ = ["Batch", "Loader"]


class Loader:
    """Deals the rows of each step to ranks and micro-batches, as :class:`Dealer` says.

    Every epoch visits every row as often as its data set's weight says. The last step of an epoch
    may hold fewer rows than ``global_batch_size``.

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
        step: The last step that has been taken; 0: none.
        place: Where it left the data, as :class:`StepBatches` gave it, however many rows a step had
            then; None: where so many steps of this global batch lead.
        length_buckets: Row lengths, ascending: each micro-batch is padded to the next one of these,
            so that a compiled model sees few shapes.
        fill_rows: Pad every micro-batch to exactly ``batch_size`` rows.

    Attributes:
        global_batch_size: Rows of one optimizer step over all ranks.
        batch_size: Most rows of one micro-batch.
        steps_per_epoch: Optimizer steps in one epoch.
        rows_per_epoch: Rows that an epoch visits, repeated ones included.
        reads_while_training: False: everything has been read.

    Raises:
        ConfigError: A size below 1, or a bucket list that the longest row doesn't fit in.
        DataError: No rows.
    """

    reads_while_training = False

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
        step: int = 0,
        place: Mapping[str, Any] | None = None,
        length_buckets: Sequence[int] | None = None,
        fill_rows: bool = False,
    ) -> None:
        if global_batch_size < 1:
            raise ConfigError(f"global batch {global_batch_size}: must be at least 1")
        self._dealer = Dealer(
            batch_size=batch_size,
            pad_id=pad_id,
            rank=rank,
            world_size=world_size,
            length_buckets=length_buckets,
            fill_rows=fill_rows,
        )
        self._data = data
        self._epoch_rows = (0, data.at_epoch(0))
        self._order = EpochOrder(data, seed=seed, shuffle=shuffle)
        if len(self._order) == 0:
            raise DataError(
                "no rows to train on: the data set is empty, or its weights leave no row"
            )
        self._dealer.check_longest(int(data.lengths.max()))
        self.global_batch_size = global_batch_size
        self.batch_size = batch_size
        self._places = StepPlaces(
            len(self._order),
            rows_per_step=global_batch_size,
            max_steps_per_epoch=max_steps_per_epoch,
            step=0 if place is None else step,
            place=EpochPlace(**(place or {})),
        )
        self._next_step = step + 1
        self.steps_per_epoch = self._places.steps_per_epoch
        self.rows_per_epoch = min(len(self._order), self.steps_per_epoch * global_batch_size)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that each rank runs in a full step."""
        return self._dealer.micro_batches_of(self.global_batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that ``step`` (from 1) belongs to."""
        return self._places.after(step - 1).epoch

    def last_step_of(self, epochs: int) -> int:
        """The step that ends the last one of so many epochs, counted from the run's first one."""
        return self._places.end_of(epochs)

    def next_row(self) -> str:
        """Where the next step begins, in words."""
        place = self._places.after(self._next_step - 1)
        return f"row {place.taken + 1:,} of the {len(self._order):,} of epoch {place.epoch + 1}"

    def step_rows(self, step: int) -> list[int]:
        """Indices into the data of the rows of ``step`` (from 1), over all ranks."""
        place = self._places.after(step - 1)
        order = self._order.epoch(place.epoch)
        return [int(i) for i in order[place.taken : place.taken + self.global_batch_size]]

    def fetch(self, step: int) -> StepBatches:
        """This rank's part of ``step``; those not yet taken may be asked for in any order."""
        epoch, place = self.epoch_of(step), self._places.after(step)
        return StepBatches(
            batches=self.micro_batches(step),
            num_rows=len(self.step_rows(step)),
            epoch=epoch,
            ends_epoch=place.epoch != epoch,
            data_place=asdict(place),
        )

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's part of ``step`` (from 1); the same number of batches on every rank."""
        data = self._rows_at(step)
        return [
            self._dealer.batch([data.documents(i) for i in rows], is_packed=data.is_packed)
            for rows in self.micro_batch_rows(step)
        ]

    def _rows_at(self, step: int) -> Rows:
        """The data's rows in the epoch of ``step``."""
        epoch, known = self.epoch_of(step), self._epoch_rows
        if known[0] != epoch:
            known = self._epoch_rows = (epoch, self._data.at_epoch(epoch))
        return known[1]

    def micro_batch_rows(self, step: int) -> list[list[int]]:
        """Numbers of the rows in each of this rank's micro-batches; none in one of padding only."""
        rows, lengths = self.step_rows(step), self._rows_at(step).lengths
        return self._dealer.deal(rows, [int(lengths[i]) for i in rows])

    def width(self, rows: Sequence[int]) -> int:
        """Slots of each row, in tokens, of a micro-batch of these rows."""
        return self._dealer.width(max((int(self._data.lengths[i]) for i in rows), default=1))

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Tokens of these rows, without padding."""
        return sum(int(self._data.lengths[i]) for i in rows)

    def first_document(self) -> Sample | None:
        """What the next step begins with; None if there are no steps."""
        if not self.steps_per_epoch:
            return None
        return self._rows_at(self._next_step).documents(self.step_rows(self._next_step)[0])[0]

    def close(self) -> None:
        """Nothing is open: all is in memory."""
