"""From the config's data sets to tokenized samples, with an account of every row."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from legato.data.chat import ChatFormatter
from legato.data.chunks import Account, Chunk, RowFormatter, row_chunks, settle_type
from legato.data.formats import DatasetSpec
from legato.data.order import BEFORE_ALL_EPOCHS, permutation
from legato.data.samples import (
    DataReport,
    DatasetReport,
    SampleColumns,
    TokenizedData,
    samples_digest,
)
from legato.data.sources import BadRow, Row, local_places, read_rows
from legato.data.workers import map_ahead
from legato.errors import ConfigError

# For each worker one to do and two that wait, so that none waits for whoever reads.
_CHUNKS_AHEAD = 3
# Rows that are read behind the first bad one, so that others are named with it.
_ROWS_BEHIND_BAD = 5000


def build_data(
    specs: Sequence[DatasetSpec],
    *,
    formatter: ChatFormatter,
    max_seq_len: int,
    excess_length: str = "drop",
    on_bad_row: str = "error",
    num_workers: int = 0,
) -> TokenizedData:
    """Read, format and tokenize every data set.

    Args:
        specs: What to read, in order.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Most tokens of a sample.
        excess_length: ``drop``, ``truncate`` or ``error``: what happens to a longer one.
        on_bad_row: ``error`` or ``skip``: what happens to a row that can't be used.
        num_workers: Processes that format and tokenize; the samples don't depend on it.

    Returns:
        The samples; ``.report`` says what became of each row.

    Raises:
        DataError: A file, a row or a column that can't be used; nothing left to train on.
    """
    check_options(specs, max_seq_len, excess_length, on_bad_row)
    columns = SampleColumns()
    reports: list[DatasetReport] = []
    warnings: list[str] = []
    rows_before = 0
    places = [place for spec in specs for place in local_places(spec.path, split=spec.split)]
    for number, spec in enumerate(specs):
        read = read_rows(spec.path, split=spec.split, beside=places)
        name, mapping, rows = settle_type(spec, read)
        maker = RowFormatter(spec, name, mapping, formatter, max_seq_len, excess_length, on_bad_row)
        account = Account(maker)
        with closing(_chunks_of(rows, account, num_workers=num_workers)) as chunks:
            for chunk in chunks:
                for row, sample in chunk.samples:
                    columns.append(sample, row=rows_before + row, dataset=number)
        account.refuse_bad_rows()
        account.refuse_nothing_left()
        rows_before += account.num_rows
        warnings += account.warnings()
        reports.append(account.report())
    report = DataReport((), notes=formatter.notes, warnings=tuple(warnings))
    data = columns.finish(weights=[spec.weight for spec in specs], report=report)
    datasets = tuple(
        replace(each, digest=samples_digest(data, dataset=number))
        for number, each in enumerate(reports)
    )
    return replace(data, report=replace(report, datasets=datasets))


def _chunks_of(
    rows: Iterable[Row | BadRow], account: Account, *, num_workers: int
) -> Generator[Chunk, None, None]:
    """What rows are made into, each chunk in the account; a bad row that is an error ends it."""
    maker, ahead = account.maker, _CHUNKS_AHEAD * num_workers
    enough: int | None = None
    with closing(map_ahead(maker, row_chunks(rows), num_workers=num_workers, ahead=ahead)) as made:
        for chunk in made:
            account.add(chunk)
            yield chunk
            if account.num_bad and maker.on_bad_row == "error":
                enough = enough or account.num_rows + _ROWS_BEHIND_BAD
                if account.num_rows >= enough:
                    return


def check_options(
    specs: Sequence[DatasetSpec], max_seq_len: int, excess_length: str, on_bad_row: str
) -> None:
    """Refuse what no reading could follow.

    Args:
        specs: What to read.
        max_seq_len: Most tokens of a sample.
        excess_length: What happens to a longer one.
        on_bad_row: What happens to a row that can't be used.

    Raises:
        ConfigError: All that is wrong, at once; ``.problems``.
    """
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
            f"val_set_size: {val_set_size:g}, as the config has it, holds out {count:,} of the "
            f"{len(rows):,} rows of its datasets; at least one must stay on each side. Set it to a "
            "share (val_set_size=0.1), to fewer rows, or to 0 for no evaluation"
        )
    held_out = rows[permutation(len(rows), seed=seed, epoch=BEFORE_ALL_EPOCHS)[:count]]
    is_held_out = np.isin(data.rows, held_out)
    evaluation = data.select(np.flatnonzero(is_held_out))
    # Weights say how often to train on a row; each held-out row is measured once.
    evaluation = replace(evaluation, weights=(1.0,) * len(data.weights))
    return data.select(np.flatnonzero(~is_held_out)), evaluation
