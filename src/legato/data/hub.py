"""A data set that the ``datasets`` library loads, as rows; a streamed one is entered by shards."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from legato.data.rows import BadRow, Row, Skip
from legato.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from datasets import IterableDataset


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set that the ``datasets`` library can load: on the hub, or a folder laid out so.

    Attributes:
        path: Its name on the hub, or the folder.
        name: What its rows are called by.
        subset: A part of it with files of its own; None: it has no such parts.
        split: ``train``, or another one's name.
        streaming: It is read row by row, and not fetched before.
    """

    path: str
    name: str
    subset: str | None
    split: str
    streaming: bool


@dataclass(frozen=True, slots=True)
class ShardStart:
    """Where a streamed data set can be entered: a shard, which mostly is a file.

    Attributes:
        row: Number of the shard's first row in the data set, from 0.
        shard: Its own number, from 0.
        num_shards: All of them; where they are more or fewer now, none is where it was.
    """

    row: int
    shard: int
    num_shards: int


class ShardStarts:
    """Where one reading begins, and where it could be entered again: noted as it comes there.

    Args:
        entry: The shard to begin in; None: the first.

    Attributes:
        entry: The same.
    """

    def __init__(self, entry: ShardStart | None = None) -> None:
        self.entry = entry
        self._found: list[ShardStart] = []

    def note(self, dataset: IterableDataset, *, row: int) -> None:
        """The data set has just given row number ``row``."""
        shard = _shard_in(dataset.state_dict())
        if shard is not None and (not self._found or self._found[-1].shard != shard):
            self._found.append(ShardStart(row, shard, dataset.num_shards))

    def before(self, row: int) -> ShardStart | None:
        """The last one at row number ``row`` or before; None: of a source without shards."""
        return next((start for start in reversed(self._found) if start.row <= row), None)


def read_hub(
    source: HubSource, past: Skip, starts: ShardStarts
) -> Generator[Row | BadRow, None, None]:
    """Rows of a data set, in its order.

    Args:
        source: The data set.
        past: Rows to pass over at its beginning.
        starts: Where a streamed one is entered; shards that it comes to are noted there.

    Yields:
        Row | BadRow: What is left.

    Raises:
        DataError: It can't be loaded, or not be read to its end.
        MissingDependencyError: The library isn't installed.
    """
    loaded = _load(source)
    place = f"{source.path} ({source.split})"
    number = 0
    try:
        begin = _enter(loaded, past, starts.entry) if source.streaming else 0
        for number, value in enumerate(loaded, start=begin + 1):
            if source.streaming:
                starts.note(loaded, row=number - 1)
            if past.left:
                past.take()
            else:
                yield Row.of_table(f"{source.name}:{number}", f"{place}: row {number}", value)
    except Exception as error:  # of a network, or of a file of the data set
        raise DataError(
            f"{place}: can't be read on after row {number}: {type(error).__name__}: {error}",
            path=source.path,
        ) from error


def _load(source: HubSource) -> Any:
    path, split = source.path, source.split
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is read with the datasets package. Install it: pip install datasets"
        ) from error
    try:
        return datasets.load_dataset(path, source.subset, split=split, streaming=source.streaming)
    except Exception as error:  # the library raises a dozen kinds, from ValueError to requests' own
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise DataError(
            f"{path}: there is no such file or folder here, and the hub's data set can't be "
            "loaded: "
            f"{type(error).__name__}: {error}{offline}",
            path=path,
        ) from error


def _enter(dataset: IterableDataset, past: Skip, entry: ShardStart | None) -> int:
    """Let a data set begin with a shard, if it is where it was; returns the rows before it."""
    if entry is None or entry.shard == 0 or entry.num_shards != dataset.num_shards:
        return 0
    rows = iter(dataset)
    next(rows, None)  # before its first row a data set has no state
    state = _with_shard(dataset.state_dict(), entry.shard)
    rows.close()
    if state is None:
        return 0
    dataset.load_state_dict(state)
    past.leave_out(entry.row)
    return entry.row


def _shard_in(state: Mapping[str, Any]) -> int | None:
    """The shard that a data set stands in: what it reads from says so, under any number of steps.

    A step beyond it (as casting columns is one) keeps the state of what it reads from as
    ``examples_iterable``; where a step reads from several, there is no such thing.
    """
    while "shard_idx" not in state:
        inner = state.get("examples_iterable")
        if not isinstance(inner, Mapping):
            return None
        state = inner
    shard: int = state["shard_idx"]
    return shard


def _with_shard(state: Mapping[str, Any], shard: int) -> dict[str, Any] | None:
    """The state at the beginning of a shard: of what isn't named, a data set takes its own."""
    if _shard_in(state) is None:
        return None
    if "shard_idx" in state:
        return {"shard_idx": shard}
    inner = _with_shard(state["examples_iterable"], shard)
    epoch = {"epoch": state["epoch"]} if "epoch" in state else {}
    return {"examples_iterable": inner, **epoch}
