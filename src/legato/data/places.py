"""Where each step begins and ends in data that was read before training: arithmetic in rows."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochPlace:
    """Where training stands in data that was read before it.

    Attributes:
        epoch: The pass over the data, from 0.
        taken: Rows of the epoch, in its order, that have been trained on.
        steps: Steps of the epoch that have been taken.
    """

    epoch: int = 0
    taken: int = 0
    steps: int = 0


_BEGINNING = EpochPlace()


class StepPlaces:
    """The place that every step leaves the data at: a pure function of the arguments.

    Steps may have had another size up to a certain one; what they left of its epoch is cut into
    steps of this size.

    Args:
        num_rows: Rows that an epoch visits unless it ends early.
        rows_per_step: Rows of every step but an epoch's last one.
        max_steps_per_epoch: Ends every epoch early; 0 leaves no steps.
        step: A step that has been taken; 0: none.
        place: Where it left the data.

    Attributes:
        steps_per_epoch: Steps of a whole epoch.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        rows_per_step: int,
        max_steps_per_epoch: int | None = None,
        step: int = 0,
        place: EpochPlace = _BEGINNING,
    ) -> None:
        self._num_rows, self._rows_per_step = num_rows, rows_per_step
        self._max_steps_per_epoch = max_steps_per_epoch
        self.steps_per_epoch = self._steps_from(_BEGINNING)
        self._step, self._place = step, place
        self._steps_left = self._steps_from(place)
        if not self._steps_left:  # epochs are shorter than what has been trained of this one
            self._place, self._steps_left = EpochPlace(place.epoch + 1), self.steps_per_epoch

    def after(self, step: int) -> EpochPlace:
        """Where ``step`` leaves the data: at its next row, which may be the next epoch's first."""
        place, steps = self._place, step - self._step
        if steps >= self._steps_left and self.steps_per_epoch:
            epochs, steps = divmod(steps - self._steps_left, self.steps_per_epoch)
            place = EpochPlace(place.epoch + 1 + epochs)
        taken = place.taken + steps * self._rows_per_step
        return EpochPlace(place.epoch, taken, place.steps + steps)

    def end_of(self, epochs: int) -> int:
        """The step that ends the last one of so many epochs, counted from the run's first one."""
        more = epochs - (self._place.epoch + 1)
        return max(0, self._step + self._steps_left + more * self.steps_per_epoch)

    def _steps_from(self, place: EpochPlace) -> int:
        steps = math.ceil((self._num_rows - place.taken) / self._rows_per_step)
        if self._max_steps_per_epoch is not None:
            steps = min(steps, self._max_steps_per_epoch - place.steps)
        return max(0, steps)
