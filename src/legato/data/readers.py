"""Files of each kind as rows: JSON lines, JSON, CSV, tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from legato.config.names import COMPRESSIONS, FILE_KINDS
from legato.data.rows import BadRow, Row, Skip
from legato.errors import DataError

# Far more than any format has, and far less than what reading, pickling or a template breaks at.
MOST_LEVELS = 100
_TOO_DEEP = f"holds lists and objects in more than {MOST_LEVELS} levels; expected a few"


def kind_of(path: Path) -> str | None:
    """The file's kind by its suffix, compression aside; None if it isn't a data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FILE_KINDS else None


def read_file(file: Path, name: str, past: Skip) -> Iterator[Row | BadRow]:
    """Rows of one file.

    Args:
        file: The file.
        name: What its rows are called by.
        past: Rows to pass over at its beginning; what is left of them is the caller's to pass over.

    Returns:
        Rows, and what can't be read as one.

    Raises:
        DataError: An unknown kind of file, a file that can't be read.
    """
    match kind_of(file):
        case ".jsonl" | ".ndjson":
            return _read_json_lines(_open(file), file, name, past)
        case ".json":
            return _read_json(file, name)
        case ".csv" | ".tsv":
            return _read_csv(file, name)
        case ".parquet" | ".arrow":
            return _read_arrow(file, name, past)
        case _:
            raise DataError(
                f"{file}: unknown kind of file. Known: {', '.join(FILE_KINDS)}, also with .gz "
                "or .zst",
                path=str(file),
            )


def _open(file: Path) -> IO[bytes]:
    """The file's bytes, decompressed."""
    try:
        if file.suffix.lower() == ".gz":
            return io.BufferedReader(gzip.GzipFile(file, "rb"))
        if file.suffix.lower() == ".zst":
            import pyarrow as pa

            return io.BufferedReader(pa.input_stream(str(file), compression="zstd"))
        return file.open("rb")
    except OSError as error:
        raise DataError(
            f"{file}: can't be opened: {error.strerror or error}", path=str(file)
        ) from error


def _decode(data: bytes) -> str:
    """UTF-8 without a byte order mark; ``ValueError`` says what is there instead."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("is UTF-16, not UTF-8. Save the file as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"isn't UTF-8: byte 0x{data[error.start]:02X} at position {error.start + 1}. Save the "
            "file as UTF-8."
        ) from None


def _read_json_lines(
    stream: IO[bytes], file: Path, name: str, past: Skip
) -> Iterator[Row | BadRow]:
    with stream:
        for number, line in enumerate(_lines(stream, file), start=1):
            if not line.strip():
                continue
            if past.left:
                past.take()
                continue
            sample_id, where = f"{name}:{number}", f"{file}:{number}"
            try:
                value = json.loads(_decode(line.rstrip(b"\r\n")))
            except json.JSONDecodeError as error:
                yield BadRow(
                    sample_id, where, f"isn't valid JSON: {error.msg} at column {error.colno}"
                )
            except ValueError as error:
                yield BadRow(sample_id, where, str(error))
            except RecursionError:
                yield BadRow(sample_id, where, _TOO_DEEP)
            else:
                yield _as_row(value, sample_id, where)


def _lines(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, EOFError) as error:
        raise DataError(f"{file}: can't be read to its end: {error}", path=str(file)) from error


def _as_row(value: object, sample_id: str, where: str) -> Row | BadRow:
    if isinstance(value, dict):
        return (
            BadRow(sample_id, where, _TOO_DEEP) if _is_deep(value) else Row(sample_id, where, value)
        )
    return BadRow(
        sample_id, where, f"is of type {type(value).__name__}, not an object with columns"
    )


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def _read_json(file: Path, name: str) -> Iterator[Row | BadRow]:
    with _open(file) as stream:
        data = b"".join(_lines(stream, file))
    try:
        text = _decode(data)
    except ValueError:
        lines = enumerate(map(_undecodable, data.split(b"\n")), start=1)
        number, problem = next((number, problem) for number, problem in lines if problem)
        raise DataError(f"{file}:{number}: {problem}", path=str(file), row=number) from None
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_json_lines(io.BytesIO(data), file, name, Skip(0, path=name))
            return
        raise DataError(
            f"{file}:{error.lineno}: isn't valid JSON: {error.msg} at column {error.colno}",
            path=str(file),
            row=error.lineno,
        ) from None
    except RecursionError:
        raise DataError(f"{file}: {_TOO_DEEP}", path=str(file)) from None
    if isinstance(rows, dict):
        lists = [key for key, value in rows.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(
                f"{file}: one object with {', '.join(rows) or 'nothing in it'}; "
                "expected a list of rows, or an object that holds one",
                path=str(file),
            )
        rows = rows[lists[0]]
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: is of type {type(rows).__name__}; expected a list of rows", path=str(file)
        )
    for number, value in enumerate(rows, start=1):
        yield _as_row(value, f"{name}:{number}", f"{file}: row {number}")


# What Python makes of bytes that aren't UTF-8, so that the line they stand in can be named.
_NO_UTF8 = re.compile("[\udc80-\udcff]")
# What csv says of a quote that nothing closes.
_NO_END = "unexpected end of data"


def _read_csv(file: Path, name: str) -> Iterator[Row | BadRow]:
    csv.field_size_limit(2**31 - 1)  # Python's default of 128 KiB is shorter than a long document
    delimiter = "\t" if kind_of(file) == ".tsv" else ","
    problems: dict[int, str] = {}
    with _open(file) as stream:
        lines = _text_lines(stream, file, problems)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            sample_id, where = f"{name}:{line}", f"{file}:{line}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # What an open quote swallows, up to the file's end, is more than a row.
                if header is None or _NO_END in str(error):
                    raise DataError(f"{where}: isn't valid CSV: {error}", path=where) from None
                problems.clear()
                yield BadRow(sample_id, where, f"isn't valid CSV: {error}")
                continue
            if not fields:
                continue
            if problems:
                at, problem = next(iter(problems.items()))
                problems.clear()
                if header is None:
                    raise DataError(f"{file}:{at}: {problem}", path=str(file), row=at)
                yield BadRow(sample_id, f"{file}:{at}", problem)
            elif header is None:
                header = fields
            elif len(fields) != len(header):
                reason = f"has {len(fields)} fields; the first line names {len(header)}"
                yield BadRow(sample_id, where, reason)
            else:
                yield Row(sample_id, where, dict(zip(header, fields, strict=True)))


def _text_lines(stream: IO[bytes], file: Path, problems: dict[int, str]) -> Iterator[str]:
    """Lines with their ends, whichever they are: they may stand inside of quotes.

    What is wrong with a line that isn't UTF-8 is noted under its number.
    """
    with io.TextIOWrapper(
        stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as text:
        try:
            for number, line in enumerate(text, start=1):
                if not line.isascii() and _NO_UTF8.search(line):
                    problems[number] = _undecodable(line.encode(errors="surrogateescape"))
                yield line
        except (OSError, EOFError) as error:
            raise DataError(f"{file}: can't be read to its end: {error}", path=str(file)) from error


def _undecodable(data: bytes) -> str:
    """What is wrong with bytes that aren't UTF-8; empty if they are."""
    try:
        _decode(data)
    except ValueError as error:
        return str(error)
    return ""


def _read_arrow(file: Path, name: str, past: Skip) -> Iterator[Row | BadRow]:
    import pyarrow as pa

    before = past.left
    number = 0
    try:
        batches = _parquet_batches(file, past) if kind_of(file) == ".parquet" else _batches(file)
        for batch in batches:
            if batch.num_rows <= past.left:
                past.take(batch.num_rows)
                continue
            number = number or before - past.left  # not from 1 where batches were passed over
            for value in batch.to_pylist():
                number += 1
                yield Row.of_table(f"{name}:{number}", f"{file}: row {number}", value)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: can't be read as {kind_of(file)}: {error}", path=str(file)
        ) from error


def _parquet_batches(file: Path, past: Skip) -> Iterator[Any]:
    """Batches of a parquet file from the row group on that the next row is in."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    groups = list(range(table.metadata.num_row_groups))
    while groups and table.metadata.row_group(groups[0]).num_rows <= past.left:
        past.take(table.metadata.row_group(groups.pop(0)).num_rows)
    yield from table.iter_batches(batch_size=1024, row_groups=groups)


def _batches(file: Path) -> Iterator[Any]:
    """Batches of an arrow file of either form."""
    import pyarrow as pa
    from pyarrow import ipc

    source = pa.memory_map(str(file))
    try:
        reader = ipc.open_file(source)
    except pa.ArrowInvalid:  # the other form of the same kind: a stream
        yield from ipc.open_stream(pa.memory_map(str(file)))
    else:
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
