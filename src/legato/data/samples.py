"""Tokenized samples, held as columns: a few arrays, not one Python object for each row."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from legato.storage.fingerprint import fingerprint
from legato.words import counted

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row for the model.

    Attributes:
        input_ids: Token ids, int32 ``[T]``.
        trained: Bool ``[T]``; ``trained[t]`` means that the model must produce token ``t``. The
            first token is never trained: nothing comes before it.
        sample_id: Where the sample came from, ``orders.jsonl:17``; a conversation's turn that had
            to become a sample of its own ends in ``#`` and the number of the message.
    """

    input_ids: Tokens
    trained: Mask
    sample_id: str

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that count in the loss."""
        return int(np.count_nonzero(self.trained[1:]))


class Tally:
    """Counts things that happened to samples, and remembers the first few by id.

    Attributes:
        counts: Sentence -> how often.
        examples: Sentence -> ids of the first few.
    """

    NAMED_AT_MOST = 3

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, sentence: str, sample_id: str) -> None:
        """One more sample that ``sentence`` is true of."""
        self.counts[sentence] = self.counts.get(sentence, 0) + 1
        named = self.examples.setdefault(sentence, [])
        if len(named) < self.NAMED_AT_MOST:
            named.append(sample_id)

    def merge(self, later: Tally) -> None:
        """Add what happened to samples that come after these."""
        for sentence, count in later.counts.items():
            self.counts[sentence] = self.counts.get(sentence, 0) + count
            named = self.examples.setdefault(sentence, [])
            named += later.examples[sentence][: self.NAMED_AT_MOST - len(named)]


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """What became of one data set's rows.

    Attributes:
        path: As given in the config.
        type: The format.
        detected: True if the format was found by looking at the columns.
        num_rows: Rows read, bad ones included.
        num_samples: Samples kept.
        num_tokens: Their tokens.
        num_loss_tokens: Tokens that the model is trained to produce.
        counts: Sentence -> how many samples it is true of: what was dropped, cut, split, skipped.
        examples: Sentence -> ids of the first few.
        unread: Columns that its format has no use for, and keys of turns as ``messages[].name``.
        digest: Of its samples, as :func:`samples_digest` has it; None: of a stream, whose samples
            nobody has seen to their end.
    """

    path: str
    type: str
    detected: bool
    num_rows: int
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    counts: dict[str, int]
    examples: dict[str, list[str]]
    unread: list[str] = field(default_factory=list)
    digest: str | None = None

    def lines(self) -> list[str]:
        """The report as text, one line per fact, the totals first."""
        how = "detected from its columns" if self.detected else "as configured"
        share = self.num_loss_tokens / max(1, self.num_tokens)
        lines = [
            f"{self.path}: {self.type} ({how}), {counted(self.num_rows, 'row')}, "
            f"{counted(self.num_samples, 'sample')}, {counted(self.num_tokens, 'token')}, "
            f"{share:.0%} of them trained"
        ]
        for sentence, count in self.counts.items():
            named = self.examples[sentence]
            more = ", ..." if count > len(named) else ""
            lines.append(f"{self.path}: {sentence}: {count:,} ({', '.join(named)}{more})")
        if self.unread:
            # pandas writes its index as a column without a name.
            unread = ", ".join(name or repr(name) for name in self.unread)
            lines.append(f"{self.path}: columns not read: {unread}")
        return lines


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of all rows.

    Attributes:
        datasets: One report for each data set, in the config's order.
        notes: Facts about the template, said once.
        warnings: What the person should look at before training on this.
    """

    datasets: tuple[DatasetReport, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report as text: notes, data sets, warnings."""
        return [
            *self.notes,
            *(line for each in self.datasets for line in each.lines()),
            *self.warnings,
        ]

    def lines_beyond(self, other: DataReport) -> list[str]:
        """Those lines that ``other`` doesn't have: rows held out of the same data have none."""
        said = set(other.lines())
        return [line for line in self.lines() if line not in said]


class Rows(Protocol):
    """What a loader deals: rows of one sample each, or of several."""

    is_packed: ClassVar[bool]

    @property
    def lengths(self) -> Indices:
        """Tokens of each row, int64 ``[R]``."""

    @property
    def datasets(self) -> Indices:
        """Number of each row's data set, int64 ``[R]``."""

    @property
    def weights(self) -> tuple[float, ...]:
        """How many times a row of each data set appears in an epoch."""

    def __len__(self) -> int: ...

    def documents(self, row: int) -> list[Sample]:
        """The samples of one row, in their order."""

    def at_epoch(self, epoch: int) -> Rows:
        """What the rows are in an epoch (from 0): as many, of the same data sets."""


@dataclass(frozen=True)
class TokenizedData:
    """Samples as columns; ``len(data)``, ``data[i]``, and any subset without copying a token.

    Attributes:
        tokens: Every sample's ids, one after the other, int32.
        trained: Same length, bool.
        starts: Index in ``tokens`` of each sample's first token, int64 ``[N]``.
        lengths: Tokens of each sample, int64 ``[N]``.
        id_bytes: The sample ids in UTF-8, one after the other.
        id_starts: Offsets of each sample's id in ``id_bytes``, int64 ``[N]``.
        id_ends: Where each id ends, int64 ``[N]``.
        rows: Number of the source row over all data sets, int64 ``[N]``; samples that were made
            from one row share it.
        datasets: Number of each sample's data set, int64 ``[N]``.
        weights: How many times a row of each data set appears in an epoch.
        report: What became of the rows.
    """

    is_packed: ClassVar[bool] = False

    tokens: Tokens
    trained: Mask
    starts: Indices
    lengths: Indices
    id_bytes: bytes
    id_starts: Indices
    id_ends: Indices
    rows: Indices
    datasets: Indices
    weights: tuple[float, ...]
    report: DataReport

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        start, length = int(self.starts[index]), int(self.lengths[index])
        return Sample(
            input_ids=self.tokens[start : start + length],
            trained=self.trained[start : start + length],
            sample_id=self.sample_id(index),
        )

    def documents(self, row: int) -> list[Sample]:
        """The one sample of a row."""
        return [self[row]]

    def at_epoch(self, epoch: int) -> TokenizedData:
        """Rows of one sample are the same in every epoch."""
        return self

    def sample_id(self, index: int) -> str:
        """The id of one sample, without touching its tokens."""
        return self.id_bytes[int(self.id_starts[index]) : int(self.id_ends[index])].decode()

    def select(self, indices: Sequence[int] | Indices) -> TokenizedData:
        """The given samples, in the given order; shares the tokens."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            id_starts=self.id_starts[chosen],
            id_ends=self.id_ends[chosen],
            rows=self.rows[chosen],
            datasets=self.datasets[chosen],
        )

    @property
    def num_tokens(self) -> int:
        """Tokens over all samples."""
        return int(self.lengths.sum())

    @property
    def num_loss_tokens(self) -> int:
        """Trained tokens over all samples."""
        before = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        return int((before[self.starts + self.lengths] - before[self.starts]).sum())


def samples_digest(data: TokenizedData, *, dataset: int = 0) -> str:
    """What tells one data set's samples from others: every token, the mask, and their order.

    Args:
        data: Samples as they were read, of which none was left out.
        dataset: Number of the data set.

    Returns:
        See :func:`fingerprint`.
    """
    chosen = np.flatnonzero(data.datasets == dataset)
    lengths = data.lengths[chosen]
    begin = int(data.starts[chosen[0]]) if len(chosen) else 0
    end = begin + int(lengths.sum())
    return fingerprint(
        [lengths.tobytes(), data.tokens[begin:end].data, data.trained[begin:end].data]
    )


class SampleColumns:
    """Grows a ``TokenizedData`` sample by sample, without an object for each."""

    def __init__(self) -> None:
        self._tokens = array.array("i")
        self._trained = bytearray()
        self._lengths = array.array("q")
        self._ids = bytearray()
        self._id_lengths = array.array("q")
        self._rows = array.array("q")
        self._datasets = array.array("q")

    def append(self, sample: Sample, *, row: int, dataset: int) -> None:
        """Add a sample.

        Args:
            sample: It is copied.
            row: Number, from 0, of the source row over all data sets that it was made from.
            dataset: Number of its data set, from 0.
        """
        sample_id = sample.sample_id.encode()
        self._tokens.frombytes(sample.input_ids.astype(np.intc).tobytes())
        self._trained += sample.trained.tobytes()
        self._lengths.append(len(sample.input_ids))
        self._ids += sample_id
        self._id_lengths.append(len(sample_id))
        self._rows.append(row)
        self._datasets.append(dataset)

    def finish(self, *, weights: Iterable[float], report: DataReport) -> TokenizedData:
        """All samples so far as columns.

        Args:
            weights: How many times a row of each data set appears in an epoch.
            report: What became of the rows.

        Returns:
            The samples, in the order in which they were added.
        """
        lengths = np.array(self._lengths, dtype=np.int64)
        id_lengths = np.array(self._id_lengths, dtype=np.int64)
        id_ends = np.cumsum(id_lengths)
        return TokenizedData(
            tokens=np.frombuffer(self._tokens, dtype=np.int32),
            trained=np.frombuffer(self._trained, dtype=np.bool_),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            id_bytes=bytes(self._ids),
            id_starts=id_ends - id_lengths,
            id_ends=id_ends,
            rows=np.array(self._rows, dtype=np.int64),
            datasets=np.array(self._datasets, dtype=np.int64),
            weights=tuple(weights),
            report=report,
        )
