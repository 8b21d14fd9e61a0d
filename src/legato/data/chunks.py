"""From the rows of a data set to samples, some rows at a time, and what became of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from legato.data.chat import ChatFormatter
from legato.data.examples import Example
from legato.data.formats import DatasetSpec, check_columns, convert_row, detect_format
from legato.data.hub import ShardStart
from legato.data.samples import DataReport, DatasetReport, Sample, Tally
from legato.data.sources import BadRow, Row
from legato.data.unread import unread_names
from legato.errors import DataError
from legato.words import counted

# Tokenized in one batch: enough for the tokenizer's threads, and soon done.
CHUNK_ROWS = 250
# Above this share of a data set, dropped samples are a mistake more often than noise.
LOST_SHARE_WARNED = 0.05

TOO_LONG = "longer than max_seq_len, dropped"
TRUNCATED = "longer than max_seq_len, cut"
UNTRAINED = "without a trained token, dropped"
BAD = "bad rows, skipped"
NULLS_LEFT_OUT = "rows of a table, nulls inside of their objects left out (tables fill them up so)"


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that follow each other in a data set.

    Attributes:
        epoch: The pass over the data set, from 0.
        first_row: Number of the first one in the data set, from 0.
        rows: They.
        start: Of a streamed hub data set: the shard that the first one is in.
    """

    epoch: int
    first_row: int
    rows: Sequence[Row | BadRow]
    start: ShardStart | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What such rows became.

    Attributes:
        epoch: The pass over the data set, from 0.
        first_row: Number of the first row in the data set, from 0.
        num_rows: Rows read, bad ones included.
        samples: Usable samples, each with the number of its row.
        tally: What is worth saying about them.
        first_problem: What is wrong with the first bad row.
        unread: Columns and keys of turns that the format has no use for.
        num_stopped: Samples that train a stop token.
        start: Of a streamed hub data set: the shard that the first row is in.
    """

    epoch: int
    first_row: int
    num_rows: int
    samples: Sequence[tuple[int, Sample]]
    tally: Tally
    first_problem: DataError | None
    unread: frozenset[str]
    num_stopped: int
    start: ShardStart | None = None


@dataclass(frozen=True)
class RowFormatter:
    """Makes samples of rows: a pure function of them, so that any process may do it.

    Attributes:
        spec: The data set.
        type: Its format: a key of ``FORMATS``.
        mapping: Our column name: the file's.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Most tokens of a sample.
        excess_length: ``drop``, ``truncate`` or ``error``: what happens to a longer one.
        on_bad_row: ``error`` or ``skip``: what becomes of rows that can't be used, for whoever
            accounts for them.
    """

    spec: DatasetSpec
    type: str
    mapping: Mapping[str, str]
    formatter: ChatFormatter
    max_seq_len: int
    excess_length: str = "drop"
    on_bad_row: str = "error"

    def __call__(self, chunk: RowChunk) -> Chunk:
        """Convert, render, tokenize and fit.

        Args:
            chunk: Rows.

        Returns:
            What became of them.

        Raises:
            DataError: A sample that is too long, if that is an error.
        """
        tally, problems = Tally(), dict[str, DataError]()

        def bad(error: DataError, sample_id: str) -> None:
            problems[sample_id] = error

        numbers, examples, unread = list[int](), list[Example](), set[str]()
        for number, row in enumerate(chunk.rows, start=chunk.first_row):
            try:
                if isinstance(row, BadRow):
                    raise DataError(f"{row.where}: {row.reason}", path=row.where)
                examples.append(convert_row(row, self.type, self.mapping))
            except DataError as error:
                bad(error, row.sample_id)
            else:
                numbers.append(number)
                if row.had_nulls:
                    tally.add(NULLS_LEFT_OUT, row.sample_id)
                unread |= unread_names(row.columns, self.type, self.mapping)
        made = self.formatter.format(examples, tally=tally, on_bad=bad)
        bad_ids = [row.sample_id for row in chunk.rows if row.sample_id in problems]
        for sample_id in bad_ids:
            tally.add(BAD, sample_id)
        fitted = [
            (number, fitting)
            for number, example, samples in zip(numbers, examples, made, strict=True)
            for sample in samples
            if (fitting := self._within_limits(sample, tally, where=example.where)) is not None
        ]
        return Chunk(
            epoch=chunk.epoch,
            first_row=chunk.first_row,
            num_rows=len(chunk.rows),
            samples=fitted,
            tally=tally,
            first_problem=problems[bad_ids[0]] if bad_ids else None,
            unread=frozenset(unread),
            num_stopped=sum(self._trains_stop(sample) for _, sample in fitted),
            start=chunk.start,
        )

    def _trains_stop(self, sample: Sample) -> bool:
        trained = sample.input_ids[sample.trained].tolist()
        return not self.formatter.stop_ids.isdisjoint(trained)

    def _within_limits(self, sample: Sample, tally: Tally, *, where: str) -> Sample | None:
        if len(sample.input_ids) > self.max_seq_len:
            if self.excess_length == "error":
                raise DataError(
                    f"{where}: {len(sample.input_ids)} tokens, and max_seq_len is "
                    f"{self.max_seq_len}. Raise it, or set excess_length: drop or truncate",
                    path=where,
                )
            if self.excess_length == "drop":
                tally.add(TOO_LONG, sample.sample_id)
                return None
            tally.add(TRUNCATED, sample.sample_id)
            sample = Sample(
                sample.input_ids[: self.max_seq_len],
                sample.trained[: self.max_seq_len],
                sample.sample_id,
            )
        if sample.num_loss_tokens == 0:
            tally.add(UNTRAINED, sample.sample_id)
            return None
        return sample


def settle_type(
    spec: DatasetSpec, rows: Iterator[Row | BadRow]
) -> tuple[str, Mapping[str, str], Iterator[Row | BadRow]]:
    """The first row decides the format, where the config doesn't, and must have its columns.

    Args:
        spec: The data set.
        rows: All of it.

    Returns:
        A key of ``FORMATS`` (``unknown`` if no row can be read), our column names mapped to the
        file's, and the same rows again.

    Raises:
        DataError: Columns that fit no format, or not the configured one.
    """
    seen: list[Row | BadRow] = []
    for row in rows:
        seen.append(row)
        if isinstance(row, Row):
            break
    name, mapping = spec.type or "unknown", spec.columns
    first = seen[-1] if seen else None
    if isinstance(first, Row):
        if spec.type is None:
            renamed = {
                ours: first.columns[theirs]
                for ours, theirs in spec.columns.items()
                if theirs in first.columns
            }
            name, extra = detect_format(first.columns | renamed, where=first.where)
            mapping = extra | dict(spec.columns)
        check_columns(name, mapping, first.columns, where=first.where)
    return name, mapping, itertools.chain(seen, rows)


def row_chunks(
    rows: Iterable[Row | BadRow], *, epoch: int = 0, first_row: int = 0
) -> Iterator[RowChunk]:
    """Cut rows into chunks.

    Args:
        rows: Rows that follow each other.
        epoch: The pass that they belong to.
        first_row: Number of the first one in its data set.

    Yields:
        RowChunk: ``CHUNK_ROWS`` rows; the last one may be shorter.
    """
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield RowChunk(epoch, first_row, chunk)
        first_row += len(chunk)


@dataclass
class Account:
    """What became of a data set's rows so far.

    Attributes:
        maker: Who makes samples of them.
        num_rows: Rows read, bad ones included.
        num_samples: Samples kept.
        num_tokens: Their tokens.
        num_loss_tokens: Tokens that the model is trained to produce.
        tally: What is worth saying about samples.
        first_problem: What is wrong with the first bad row.
        unread: Columns and keys of turns that the format has no use for.
        num_stopped: Samples that train a stop token.
    """

    maker: RowFormatter
    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    tally: Tally = field(default_factory=Tally)
    first_problem: DataError | None = None
    unread: set[str] = field(default_factory=set)
    num_stopped: int = 0

    def add(self, chunk: Chunk) -> None:
        """Count some rows."""
        self.num_rows += chunk.num_rows
        self.num_samples += len(chunk.samples)
        self.num_tokens += sum(len(sample.input_ids) for _, sample in chunk.samples)
        self.num_loss_tokens += sum(sample.num_loss_tokens for _, sample in chunk.samples)
        self.tally.merge(chunk.tally)
        self.first_problem = self.first_problem or chunk.first_problem
        self.unread |= chunk.unread
        self.num_stopped += chunk.num_stopped

    @property
    def num_bad(self) -> int:
        """Rows that can't be used."""
        return self.tally.counts.get(BAD, 0)

    def refuse_bad_rows(self) -> None:
        """Raise :class:`DataError` if a row can't be used and none may be skipped."""
        first = self.first_problem
        if first is None or self.maker.on_bad_row == "skip":
            return
        others = "Mend the row"
        if self.num_bad > 1:
            named = self.tally.examples[BAD]
            more = ", ..." if self.num_bad > len(named) else ""
            others = (
                f"Of {self.num_rows:,} rows read, {self.num_bad:,} can't be used "
                f"({', '.join(named)}{more}). Mend them"
            )
        raise DataError(
            f"{str(first).rstrip('.')}. {others}, or leave such rows out with on_bad_row: skip",
            path=self.maker.spec.path,
            num_bad=self.num_bad,
        ) from first

    def refuse_nothing_left(self) -> None:
        """Raise :class:`DataError` if no sample was kept."""
        path = self.maker.spec.path
        if self.num_samples:
            return
        if self.num_rows == 0:
            raise DataError(
                f"{path}: no rows; at least one is needed. Is it the right file, and whole?",
                path=path,
            )
        asked = f"max_seq_len is {self.maker.max_seq_len}"
        counts = self.tally.counts
        if counts.get(UNTRAINED) == self.num_rows and TRUNCATED not in counts:
            asked = (
                "Trained are the turns that roles_to_train and turns_to_train name, but for those "
                "of weight 0, and with train_on_inputs: true the others too"
            )
        elif counts.get(BAD) == self.num_rows:
            asked = "Mend them, or see whether type and columns are those of these rows"
        fates = "; ".join(f"{sentence}: {count:,}" for sentence, count in self.tally.counts.items())
        problem = str(self.first_problem).rstrip(".")
        first = f" The first: {problem}." if self.first_problem else ""
        raise DataError(
            f"{path}: nothing left to train on of {counted(self.num_rows, 'row')}: {fates}.{first} "
            f"{asked}.",
            path=path,
            counts=dict(self.tally.counts),
        )

    def warnings(self) -> list[str]:
        """What must not go unseen: much of the data not trained on, or no end of an answer."""
        path, limit = self.maker.spec.path, self.maker.max_seq_len
        counts = self.tally.counts
        before = self.num_samples + counts.get(UNTRAINED, 0) + counts.get(TOO_LONG, 0)
        cut = f"; max_seq_len is {limit}"
        warnings = [
            f"warning: {path}: {counts[sentence]:,} of {before:,} samples {sentence}"
            + (cut if sentence != UNTRAINED or TRUNCATED in counts else "")
            for sentence in (UNTRAINED, TOO_LONG, TRUNCATED)
            if counts.get(sentence, 0) > LOST_SHARE_WARNED * before
        ]
        if counts.get(BAD, 0) > LOST_SHARE_WARNED * self.num_rows:
            warnings.append(
                f"warning: {path}: {counts[BAD]:,} of {self.num_rows:,} rows are {BAD}. The first: "
                f"{self.first_problem}"
            )
        if self.num_samples and not self.num_stopped:
            warnings.append(
                f"warning: {path}: NO STOP TOKEN is trained in any of {self.num_samples:,} "
                f"samples, so that a model learns no end of an answer from them"
                + (cut if TRUNCATED in counts else "")
            )
        return warnings

    def report(self) -> DatasetReport:
        """The account of this data set."""
        return DatasetReport(
            path=self.maker.spec.path,
            type=self.maker.type,
            detected=self.maker.spec.type is None,
            num_rows=self.num_rows,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            num_loss_tokens=self.num_loss_tokens,
            counts=dict(self.tally.counts),
            examples={sentence: list(ids) for sentence, ids in self.tally.examples.items()},
            unread=sorted(self.unread),
        )

    def as_report(self) -> DataReport:
        """The account as that of all data, with its warnings."""
        return DataReport(datasets=(self.report(),), warnings=tuple(self.warnings()))
