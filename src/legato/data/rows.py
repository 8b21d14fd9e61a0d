"""One row of a data set, before anything is made of it, and rows that are passed over."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its file.

    Attributes:
        sample_id: ``orders.jsonl:17``.
        where: The same with the whole path, for messages.
        columns: The row's values by column name.
        had_nulls: A table's nulls inside of objects were left out of them.
    """

    sample_id: str
    where: str
    columns: dict[str, Any]
    had_nulls: bool = False

    @classmethod
    def of_table(cls, sample_id: str, where: str, columns: Mapping[str, Any]) -> Row:
        """A row of a table, its objects without null members.

        Arrow gives every object of a column the members of all of them, null where it has none.

        Args:
            sample_id: The row's.
            where: The same with the whole path.
            columns: Its values as the table has them.

        Returns:
            The row; columns that are null themselves stay.
        """
        found = dict(columns)
        kept = {name: _without_nulls(value) for name, value in found.items()}
        return cls(sample_id, where, kept, had_nulls=kept != found)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be read, and why."""

    sample_id: str
    where: str
    reason: str


class Skip:
    """Rows that are to be read past, and a word about it where that takes long.

    Args:
        num_rows: How many.
        path: Where, as the person named it.

    Attributes:
        left: How many still.
    """

    SAY_EVERY_SECONDS = 10.0

    def __init__(self, num_rows: int, *, path: str) -> None:
        self.left = num_rows
        self._num_rows, self._path = num_rows, path
        self._began = self._said = time.monotonic()

    def leave_out(self, num_rows: int) -> None:
        """So many rows needn't be read past: the source was entered behind them."""
        self.left -= num_rows
        self._num_rows -= num_rows

    def take(self, num_rows: int = 1) -> None:
        """So many rows were read past."""
        self.left -= num_rows
        now = time.monotonic()
        seconds = now - self._began
        if self.left == 0 and self._said > self._began:
            logger.info("%s: there after %.0f s", self._path, seconds)
        elif self.left and now - self._said >= self.SAY_EVERY_SECONDS:
            self._said = now
            done = self._num_rows - self.left
            logger.info(
                "%s can't be entered in the middle: %d of %d rows read past to where the run goes "
                "on, about %.0f s left",
                self._path,
                done,
                self._num_rows,
                seconds * self.left / done,
            )
