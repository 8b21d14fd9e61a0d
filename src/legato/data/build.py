"""From the config's data sets to tokenized samples, with an account of every row."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from legato.data.chat import ChatFormatter
from legato.data.examples import Example
from legato.data.formats import DatasetSpec, check_columns, convert_row, detect_format
from legato.data.order import BEFORE_ALL_EPOCHS, permutation
from legato.data.samples import (
    DataReport,
    DatasetReport,
    Sample,
    SampleColumns,
    Tally,
    TokenizedData,
)
from legato.data.sources import BadRow, Row, read_rows
from legato.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1000
# Above this share of a data set, dropped samples are a mistake more often than noise.
LOST_SHARE_WARNED = 0.05

TOO_LONG = "longer than max_seq_len, dropped"
TRUNCATED = "longer than max_seq_len, cut"
UNTRAINED = "without a trained token, dropped"
BAD = "bad rows, skipped"


def build_data(
    specs: Sequence[DatasetSpec],
    *,
    formatter: ChatFormatter,
    max_seq_len: int,
    excess_length: str = "drop",
    on_bad_row: str = "error",
) -> TokenizedData:
    """Read, format and tokenize every data set.

    Args:
        specs: What to read, in order.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Most tokens of a sample.
        excess_length: ``drop``, ``truncate`` or ``error``: what happens to a longer one.
        on_bad_row: ``error`` or ``skip``: what happens to a row that can't be used.

    Returns:
        The samples; ``.report`` says what became of each row.

    Raises:
        DataError: A file, a row or a column that can't be used; nothing left to train on.
    """
    _check_options(specs, max_seq_len, excess_length, on_bad_row)
    columns = SampleColumns()
    reports: list[DatasetReport] = []
    warnings: list[str] = []
    rows_before = 0
    for number, spec in enumerate(specs):
        builder = _DatasetBuilder(spec, formatter, max_seq_len, excess_length, on_bad_row)
        for row, sample in builder.samples():
            columns.append(sample, row=rows_before + row, dataset=number)
        rows_before += builder.num_rows
        warnings += builder.warnings()
        reports.append(builder.report())
    report = DataReport(tuple(reports), notes=formatter.notes, warnings=tuple(warnings))
    return columns.finish(weights=[spec.weight for spec in specs], report=report)


def _check_options(
    specs: Sequence[DatasetSpec], max_seq_len: int, excess_length: str, on_bad_row: str
) -> None:
    problems = [
        f"{spec.path}: weight: {spec.weight}: above 0" for spec in specs if spec.weight <= 0
    ]
    if not specs:
        problems.append("datasets: none given")
    if max_seq_len < 2:
        problems.append(f"max_seq_len: {max_seq_len}: at least 2, a token and the one after it")
    if excess_length not in ("drop", "truncate", "error"):
        problems.append(f"excess_length: {excess_length}: drop, truncate or error")
    if on_bad_row not in ("error", "skip"):
        problems.append(f"on_bad_row: {on_bad_row}: error or skip")
    if problems:
        raise ConfigError(problems)


def split_validation(
    data: TokenizedData, *, val_set_size: float, seed: int
) -> tuple[TokenizedData, TokenizedData]:
    """Hold out rows for evaluation; samples made from one row stay together.

    Args:
        data: All samples.
        val_set_size: A share of the rows below 1, a number of rows from 1 on.
        seed: Of the draw.

    Returns:
        What to train on and what to evaluate on, each in the order of the files.

    Raises:
        ConfigError: Nothing would be left on one of the sides.
    """
    rows = np.unique(data.rows)
    count = round(val_set_size * len(rows)) if val_set_size < 1 else int(val_set_size)
    if not 0 < count < len(rows):
        raise ConfigError(
            f"val_set_size: {val_set_size} of {len(rows)} rows holds out {count}; "
            "at least one row must stay on each side"
        )
    held_out = rows[permutation(len(rows), seed=seed, epoch=BEFORE_ALL_EPOCHS)[:count]]
    is_held_out = np.isin(data.rows, held_out)
    evaluation = data.select(np.flatnonzero(is_held_out))
    # Weights say how often to train on a row; each held-out row is measured once.
    evaluation = replace(evaluation, weights=(1.0,) * len(data.weights))
    return data.select(np.flatnonzero(~is_held_out)), evaluation


@dataclass
class _DatasetBuilder:
    """One data set on its way through reading, converting, formatting and the limits."""

    spec: DatasetSpec
    formatter: ChatFormatter
    max_seq_len: int
    excess_length: str
    on_bad_row: str
    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    type: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    first_problem: DataError | None = None

    def samples(self) -> Iterator[tuple[int, Sample]]:
        """Every usable sample with the number of its row in this data set."""
        rows = read_rows(self.spec.path, split=self.spec.split)
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            numbered = [(self.num_rows + k, self._example(row)) for k, row in enumerate(chunk)]
            self.num_rows += len(chunk)
            kept = [(number, example) for number, example in numbered if example is not None]
            made = self.formatter.format(
                [example for _, example in kept], tally=self.tally, on_bad=self._bad
            )
            for (number, _), samples in zip(kept, made, strict=True):
                for sample in samples:
                    fitted = self._within_limits(sample)
                    if fitted is not None:
                        self.num_samples += 1
                        self.num_tokens += len(fitted.input_ids)
                        self.num_loss_tokens += fitted.num_loss_tokens
                        yield number, fitted
            logger.debug("%s: %d rows read", self.spec.path, self.num_rows)
        self._refuse_nothing_left()

    def _example(self, row: Row | BadRow) -> Example | None:
        if isinstance(row, BadRow):
            self._bad(DataError(f"{row.where}: {row.reason}", path=row.where), row.sample_id)
            return None
        if self.type is None:
            self._settle_type(row)
        assert self.type is not None
        try:
            return convert_row(row, self.type, self.mapping)
        except DataError as error:
            self._bad(error, row.sample_id)
            return None

    def _settle_type(self, row: Row) -> None:
        """The first row decides the format, where the config doesn't, and must have its columns."""
        self.mapping = self.spec.columns
        if self.spec.type is None:
            renamed = {
                ours: row.columns[theirs]
                for ours, theirs in self.spec.columns.items()
                if theirs in row.columns
            }
            self.type, extra = detect_format(row.columns | renamed, where=row.where)
            self.mapping = extra | dict(self.spec.columns)
        else:
            self.type = self.spec.type
        check_columns(self.type, self.mapping, row.columns, where=row.where)

    def _bad(self, error: DataError, sample_id: str) -> None:
        if self.on_bad_row == "error":
            raise error
        self.first_problem = self.first_problem or error
        self.tally.add(BAD, sample_id)

    def _within_limits(self, sample: Sample) -> Sample | None:
        if len(sample.input_ids) > self.max_seq_len:
            if self.excess_length == "error":
                raise DataError(
                    f"{self.spec.path}: {sample.sample_id} has {len(sample.input_ids)} tokens, "
                    f"max_seq_len is {self.max_seq_len}. Raise it, or set excess_length: drop or "
                    "truncate",
                    path=self.spec.path,
                )
            if self.excess_length == "drop":
                self.tally.add(TOO_LONG, sample.sample_id)
                return None
            self.tally.add(TRUNCATED, sample.sample_id)
            sample = Sample(
                sample.input_ids[: self.max_seq_len],
                sample.trained[: self.max_seq_len],
                sample.sample_id,
            )
        if sample.num_loss_tokens == 0:
            self.tally.add(UNTRAINED, sample.sample_id)
            return None
        return sample

    def _refuse_nothing_left(self) -> None:
        if self.num_samples:
            return
        if self.num_rows == 0:
            raise DataError(f"{self.spec.path}: no rows", path=self.spec.path)
        fates = "; ".join(f"{sentence}: {count:,}" for sentence, count in self.tally.counts.items())
        first = f" The first: {self.first_problem}" if self.first_problem else ""
        raise DataError(
            f"{self.spec.path}: nothing left to train on of {self.num_rows:,} rows: "
            f"{fates}.{first} "
            f"max_seq_len is {self.max_seq_len}.",
            path=self.spec.path,
            counts=dict(self.tally.counts),
        )

    def warnings(self) -> list[str]:
        """What must not go unseen: a good part of the data that isn't trained on."""
        counts = self.tally.counts
        before = self.num_samples + counts.get(UNTRAINED, 0) + counts.get(TOO_LONG, 0)
        return [
            f"warning: {self.spec.path}: {counts[sentence]:,} of {before:,} samples {sentence}; "
            f"max_seq_len is {self.max_seq_len}"
            for sentence in (UNTRAINED, TOO_LONG)
            if counts.get(sentence, 0) > LOST_SHARE_WARNED * before
        ]

    def report(self) -> DatasetReport:
        """The account of this data set."""
        return DatasetReport(
            path=self.spec.path,
            type=self.type or "unknown",
            detected=self.spec.type is None,
            num_rows=self.num_rows,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            num_loss_tokens=self.num_loss_tokens,
            counts=dict(self.tally.counts),
            examples={sentence: list(ids) for sentence, ids in self.tally.examples.items()},
        )
