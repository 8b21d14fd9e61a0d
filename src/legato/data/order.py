"""The order of every epoch, and of a stream's blocks: pure functions of (seed, epoch, place)."""

from __future__ import annotations

import numpy as np

from legato.data.samples import Indices, Rows

# No epoch of a run: draws that are made once, before training, are independent of every order.
BEFORE_ALL_EPOCHS = 2**64 - 1

_INDICES_AT_ONCE = 1 << 14  # 128 KiB


class EpochOrder:
    """The order of every epoch: a pure function of (seed, epoch), the same on every machine.

    A data set of weight 2.5 gives each row twice, and half of its rows a third time; which half is
    drawn anew in each epoch. The number of rows is the same in every epoch.
    """

    def __init__(self, data: Rows, *, seed: int, shuffle: bool) -> None:
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
        cached = self._cached  # one look: a thread that prepares steps may ask as well
        if cached is None or cached[0] != epoch:
            cached = self._cached = (epoch, self._build(epoch))
        return cached[1]

    def _build(self, epoch: int) -> Indices:
        if self._shuffle and len(self._counts) == 1 and self._counts[0] == len(self._members[0]):
            return permutation(self._counts[0], seed=self._seed, epoch=epoch)  # each row once
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


def block_order(length: int, *, seed: int, epoch: int, first_row: int) -> Indices:
    """The order of a stream's block, which its place in the stream draws.

    Args:
        length: Rows that the block is dealt as: of a packed one, its packs.
        seed: Of the run.
        epoch: The pass over the source, from 0.
        first_row: Number of the block's first row in the source, from 0.

    Returns:
        Int64 ``[length]``.
    """
    return permutation(length, seed=seed, epoch=epoch, stream=first_row)


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
    low_bits = np.uint64(2 ** length.bit_length() - 1)
    keys = source.random_raw(length)
    # In place, and the indices some at a time: fresh memory costs more than what is done in it.
    keys &= ~low_bits
    for first in range(0, length, _INDICES_AT_ONCE):
        part = keys[first : first + _INDICES_AT_ONCE]
        part |= np.arange(first, first + len(part), dtype=np.uint64)
    keys.sort()
    keys &= low_bits
    return keys.view(np.int64)
