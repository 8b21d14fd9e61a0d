"""Several samples in one row, so that little of a batch is padding."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from legato.data.order import permutation
from legato.data.samples import Indices, Sample, TokenizedData
from legato.errors import ConfigError

# Draws of packs, apart from those of an epoch's order.
_STREAMS = 2**32
# Another order fills nearly as many rows, seldom exactly as many: this share more makes room for
# the packs of other epochs.
_SPARE_ROWS = 0.005
_ATTEMPTS = 8

_Packs: TypeAlias = tuple[Indices, Indices]
"""Numbers of samples, row after row, and how many each row holds."""


@dataclass(frozen=True)
class PackedData:
    """Rows that hold one or more samples each, one after the other.

    Attributes:
        samples: What is packed.
        members: Numbers of the samples, row after row, int64 ``[N]``.
        starts: Index in ``members`` of each row's first sample, int64 ``[R]``.
        counts: Samples of each row, int64 ``[R]``.
        lengths: Tokens of each row, int64 ``[R]``.
        datasets: Number of each row's data set, int64 ``[R]``.
        max_seq_len: Most tokens of a row.
        seed: Of the packs of other epochs.
    """

    is_packed: ClassVar[bool] = True

    samples: TokenizedData
    members: Indices
    starts: Indices
    counts: Indices
    lengths: Indices
    datasets: Indices
    max_seq_len: int
    seed: int

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def weights(self) -> tuple[float, ...]:
        """How many times a row of each data set appears in an epoch."""
        return self.samples.weights

    @property
    def efficiency(self) -> float:
        """Tokens per slot of the rows; 1.0 would be no padding at all."""
        return int(self.lengths.sum()) / (len(self) * self.max_seq_len)

    def documents(self, row: int) -> list[Sample]:
        """The samples of one row, in their order."""
        start = int(self.starts[row])
        members = self.members[start : start + int(self.counts[row])]
        return [self.samples[int(i)] for i in members]

    def at_epoch(self, epoch: int) -> PackedData:
        """The rows of another epoch (from 0): other packs, as many of each data set as here.

        Args:
            epoch: Which.

        Returns:
            A pure function of the samples, the seed and the epoch. Where a data set's samples find
            no place in as many rows, they stay as they are in the first epoch.
        """
        if epoch == 0:
            return self
        packs = [self._packs_of(number, epoch=epoch) for number in range(len(self.weights))]
        return _as_rows(self.samples, packs, max_seq_len=self.max_seq_len, seed=self.seed)

    def _packs_of(self, number: int, *, epoch: int) -> _Packs:
        rows = np.flatnonzero(self.datasets == number)
        members = np.flatnonzero(self.samples.datasets == number)
        for attempt in range(_ATTEMPTS):
            order = _order(
                len(members), seed=self.seed, epoch=epoch, number=number, attempt=attempt
            )
            lengths = self.samples.lengths[members[order]]
            packs = best_fit(lengths.tolist(), capacity=self.max_seq_len)
            if len(packs) <= len(rows):
                return _packs(members[order], _spread(packs, len(rows)))
        is_member = np.repeat(self.datasets == number, self.counts)
        return self.members[is_member], self.counts[rows]


def pack_samples(data: TokenizedData, *, max_seq_len: int, seed: int) -> PackedData:
    """Put samples together into rows of at most ``max_seq_len`` tokens; none is cut.

    Every epoch has other packs and as many rows: so a step's rows and the place to resume at are
    what they are without packing. A row holds samples of one data set, so that weights apply to
    rows.

    Args:
        data: Samples of at most ``max_seq_len`` tokens each.
        max_seq_len: Most tokens of a row.
        seed: Of the order in which samples look for a place.

    Returns:
        The rows of the first epoch: a pure function of the arguments.

    Raises:
        ConfigError: A sample is longer than a row.
    """
    if len(data) and int(data.lengths.max()) > max_seq_len:
        raise ConfigError(
            f"packing: a sample has {int(data.lengths.max())} tokens, a row takes {max_seq_len}"
        )
    packs: list[_Packs] = []
    for number in range(len(data.weights)):
        members = np.flatnonzero(data.datasets == number)
        order = members[_order(len(members), seed=seed, epoch=0, number=number)]
        places = best_fit(data.lengths[order].tolist(), capacity=max_seq_len)
        num_rows = len(places) + int(len(places) * _SPARE_ROWS)
        packs.append(_packs(order, _spread(places, num_rows)))
    return _as_rows(data, packs, max_seq_len=max_seq_len, seed=seed)


def _order(length: int, *, seed: int, epoch: int, number: int, attempt: int = 0) -> Indices:
    # Not longest first: rows would hold samples of like length only, and a step's rows are to be a
    # fair draw. A random order fills rows nearly as well.
    stream = _STREAMS + attempt * 2**24 + number
    return permutation(length, seed=seed, epoch=epoch, stream=stream)


def _packs(samples: Indices, places: list[list[int]]) -> _Packs:
    """Samples by their places in the order that they were packed in."""
    counts = np.fromiter(map(len, places), dtype=np.int64, count=len(places))
    chosen = np.fromiter(itertools.chain.from_iterable(places), dtype=np.int64, count=len(samples))
    return samples[chosen], counts


def _spread(packs: list[list[int]], num_rows: int) -> list[list[int]]:
    """The packs, as many as ``num_rows``: those of most samples are cut in two for it."""
    packs = list(packs)
    while len(packs) < num_rows:
        fullest = sorted(range(len(packs)), key=lambda i: -len(packs[i]))
        chosen = [i for i in fullest[: num_rows - len(packs)] if len(packs[i]) > 1]
        if not chosen:  # a sample in each
            break
        for i in chosen:
            packs.append(packs[i][1::2])
            packs[i] = packs[i][::2]
    return packs


def _as_rows(
    data: TokenizedData, packs: list[_Packs], *, max_seq_len: int, seed: int
) -> PackedData:
    counts = np.concatenate([each for _, each in packs])
    starts = np.cumsum(counts) - counts
    flat = np.concatenate([members for members, _ in packs])
    return PackedData(
        samples=data,
        members=flat,
        starts=starts,
        counts=counts,
        lengths=np.add.reduceat(data.lengths[flat], starts) if len(counts) else counts,
        datasets=data.datasets[flat[starts]] if len(counts) else counts,
        max_seq_len=max_seq_len,
        seed=seed,
    )


def best_fit(lengths: Iterable[int], *, capacity: int) -> list[list[int]]:
    """Put each length, in the order given, where the least space is left that it fits into.

    Args:
        lengths: 1 to ``capacity`` each.
        capacity: Of a pack.

    Returns:
        For each pack the numbers of its lengths, ascending.
    """
    packs: list[list[int]] = []
    spaces: list[int] = []  # free spaces that some pack has, ascending
    open_packs: dict[int, list[int]] = {}  # free space -> packs that have it
    for number, length in enumerate(lengths):
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            space, pack = capacity, len(packs)
            packs.append([])
        else:
            space = spaces[at]
            pack = open_packs[space].pop()
            if not open_packs[space]:
                del open_packs[space], spaces[at]
        packs[pack].append(number)
        if rest := space - length:
            if rest not in open_packs:
                bisect.insort(spaces, rest)
            open_packs.setdefault(rest, []).append(pack)
    return packs
