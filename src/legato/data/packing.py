"""Several samples in one row, so that little of a batch is padding."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from legato.data.order import BEFORE_ALL_EPOCHS, permutation
from legato.data.samples import Indices, Sample, TokenizedData
from legato.errors import ConfigError


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
    """

    is_packed: ClassVar[bool] = True

    samples: TokenizedData
    members: Indices
    starts: Indices
    counts: Indices
    lengths: Indices
    datasets: Indices
    max_seq_len: int

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


def pack_samples(data: TokenizedData, *, max_seq_len: int, seed: int) -> PackedData:
    """Put samples together into rows of at most ``max_seq_len`` tokens; none is cut.

    Packs are made once for a run: a row is a pack from then on, so that an epoch's order, a step's
    rows and the place to resume at stay what they are without packing. A row holds samples of one
    data set, so that weights apply to rows.

    Args:
        data: Samples of at most ``max_seq_len`` tokens each.
        max_seq_len: Most tokens of a row.
        seed: Of the order in which samples look for a place.

    Returns:
        The rows: a pure function of the arguments.

    Raises:
        ConfigError: A sample is longer than a row.
    """
    if len(data) and int(data.lengths.max()) > max_seq_len:
        raise ConfigError(
            f"packing: a sample has {int(data.lengths.max())} tokens, a row takes {max_seq_len}"
        )
    packs: list[list[int]] = []
    for number in range(len(data.weights)):
        members = np.flatnonzero(data.datasets == number)
        # Not longest first: rows would hold samples of like length only, and a step's rows are to
        # be a fair draw. The random order fills rows nearly as well.
        order = permutation(len(members), seed=seed, epoch=BEFORE_ALL_EPOCHS, stream=1 + number)
        members = members[order]
        places = best_fit(data.lengths[members].tolist(), capacity=max_seq_len)
        packs += [[int(members[i]) for i in place] for place in places]
    counts = np.array([len(pack) for pack in packs], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    flat = np.array([i for pack in packs for i in pack], dtype=np.int64)
    return PackedData(
        samples=data,
        members=flat,
        starts=starts,
        counts=counts,
        lengths=np.add.reduceat(data.lengths[flat], starts) if packs else counts,
        datasets=data.datasets[flat[starts]] if packs else counts,
        max_seq_len=max_seq_len,
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
