"""What a person wants to know of tokenized data before training on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from legato.data.loader import Loader
from legato.data.packing import pack_samples
from legato.data.samples import Indices, TokenizedData

_MOST_BINS = 12
_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Samples of ``first`` to ``last`` tokens.

    Attributes:
        first: Shortest, tokens.
        last: Longest, tokens.
        count: How many.
    """

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """Samples that are token for token equal to an earlier one.

    Attributes:
        count: How many repeat another.
        examples: ``(this sample's id, the earlier one's)`` of the first few.
    """

    count: int
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """Figures of a run's samples.

    Attributes:
        num_samples: Samples to train on.
        num_held_out: Samples to evaluate on.
        num_tokens: Tokens to train on.
        num_loss_tokens: Those of them that the model must produce.
        histogram: Lengths of the training samples.
        duplicates: Training samples that repeat another.
        leaked: Held-out samples that are trained on as well.
        padded_efficiency: Tokens per slot, one sample in a row, batches as the run makes them.
        packed_efficiency: Tokens per slot with ``packing: true``.
        num_packed_rows: Rows with ``packing: true``.
    """

    num_samples: int
    num_held_out: int
    num_tokens: int
    num_loss_tokens: int
    histogram: tuple[LengthBin, ...]
    duplicates: Repeats
    leaked: Repeats
    padded_efficiency: float
    packed_efficiency: float
    num_packed_rows: int


def build_overview(
    train: TokenizedData,
    held_out: TokenizedData | None,
    *,
    max_seq_len: int,
    batch_size: int,
    global_batch_size: int,
    seed: int,
) -> Overview:
    """Count and compare; no model is needed.

    Args:
        train: Samples to train on.
        held_out: Samples to evaluate on.
        max_seq_len: Most tokens of a row.
        batch_size: Rows of a micro-batch.
        global_batch_size: Rows of a step.
        seed: Of the run.

    Returns:
        The figures.
    """
    packed = pack_samples(train, max_seq_len=max_seq_len, seed=seed)
    seen: dict[bytes, str] = {}
    duplicates = _repeats(train, seen, add=True)
    return Overview(
        num_samples=len(train),
        num_held_out=0 if held_out is None else len(held_out),
        num_tokens=train.num_tokens,
        num_loss_tokens=train.num_loss_tokens,
        histogram=length_histogram(train.lengths),
        duplicates=duplicates,
        leaked=Repeats(0, ()) if held_out is None else _repeats(held_out, seen, add=False),
        padded_efficiency=padded_efficiency(
            Loader(
                train,
                global_batch_size=global_batch_size,
                batch_size=batch_size,
                seed=seed,
                pad_id=0,
            )
        ),
        packed_efficiency=packed.efficiency,
        num_packed_rows=len(packed),
    )


def length_histogram(lengths: Indices | Sequence[int]) -> tuple[LengthBin, ...]:
    """At most twelve bins of equal, round width, from 1 token to the longest sample.

    Args:
        lengths: Tokens of each sample, at least one sample.

    Returns:
        The bins, ascending; empty ones between others are kept.
    """
    longest = int(np.max(lengths))
    needed = -(-longest // _MOST_BINS)
    magnitude = 10 ** (len(str(needed)) - 1)
    width = next(k * magnitude for k in (1, 2, 5, 10) if k * magnitude >= needed)
    counts = np.bincount((np.asarray(lengths) - 1) // width)
    return tuple(
        LengthBin(number * width + 1, (number + 1) * width, int(count))
        for number, count in enumerate(counts)
    )


def padded_efficiency(loader: Loader) -> float:
    """Tokens per slot over one epoch of a loader's micro-batches.

    Args:
        loader: Deals the rows; no row is built.

    Returns:
        Above 0, at most 1.
    """
    tokens = slots = 0
    for step in range(1, loader.steps_per_epoch + 1):
        for rows in loader.micro_batch_rows(step):
            tokens += loader.num_tokens(rows)
            slots += loader.width(rows) * len(rows)
    return tokens / slots


def _repeats(data: TokenizedData, seen: dict[bytes, str], *, add: bool) -> Repeats:
    """Samples whose tokens and mask are in ``seen``, which maps a digest to a sample's id."""
    count = 0
    examples: list[tuple[str, str]] = []
    for index in range(len(data)):
        sample = data[index]
        digest = hashlib.blake2b(sample.input_ids.tobytes(), digest_size=16)
        digest.update(sample.trained.tobytes())
        earlier = seen.get(digest.digest())
        if earlier is None:
            if add:
                seen[digest.digest()] = sample.sample_id
            continue
        count += 1
        if len(examples) < _NAMED_AT_MOST:
            examples.append((sample.sample_id, earlier))
    return Repeats(count, tuple(examples))
