"""Files of each kind as rows: JSON lines, JSON, CSV, tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from legato.config.names import COMPRESSIONS, FILE_KINDS, kind_of_file
from legato.data.json_text import fault_of, parse_json
from legato.data.rows import BadRow, Row, Skip
from legato.errors import DataError, first_line

# What a file says that ends too early, or whose compressed bytes are damaged.
_UNREADABLE = (OSError, EOFError, zlib.error)


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
    match kind_of_file(file):
        case ".jsonl" | ".ndjson":
            return _read_json_lines(_open(file), file, name, past)
        case ".json":
            return _read_json(file, name)
        case ".csv" | ".tsv":
            return _read_csv(file, name)
        case ".parquet" | ".arrow":
            if file.suffix.lower() in COMPRESSIONS:
                tool = {".gz": "gunzip", ".zst": "unzstd"}[file.suffix.lower()]
                raise DataError(
                    f"{file}: a compressed table can't be read; its columns may be compressed "
                    f"inside. Unpack it: {tool} {shlex.quote(str(file))}",
                    path=str(file),
                )
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


# Byte order marks; that of UTF-32 begins with that of UTF-16.
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def _decode(data: bytes) -> str:
    """UTF-8 without a byte order mark; ``ValueError`` says what is there instead."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            raise ValueError(f"is {encoding}, not UTF-8. Save the file as UTF-8.")
    # Of what such files hold, which is mostly ASCII, every other byte is 0, or three of four.
    if data.count(0) * 3 > len(data):
        raise ValueError("is UTF-16 or UTF-32, not UTF-8. Save the file as UTF-8.")
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
                value = parse_json(_decode(line.rstrip(b"\r\n")))
            except json.JSONDecodeError as error:
                reason = f"isn't valid JSON: {error.msg} at column {error.colno}"
                if b"\r" in line.rstrip(b"\r\n"):
                    reason += (
                        ". Its lines end in a carriage return alone: save them with line feeds"
                    )
                yield BadRow(sample_id, where, reason)
            except ValueError as error:
                yield BadRow(sample_id, where, str(error))
            else:
                yield _as_row(value, sample_id, where)


def _lines(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    test = {".gz": "gzip -t", ".zst": "zstd -t"}.get(file.suffix.lower())
    remedy = f" Fetch or make it again; `{test} {shlex.quote(str(file))}` tests it." if test else ""
    return DataError(f"{file}: can't be read to its end: {error}.{remedy}", path=str(file))


def _as_row(value: object, sample_id: str, where: str) -> Row | BadRow:
    if not isinstance(value, dict):
        kind = type(value).__name__
        return BadRow(sample_id, where, f"is of type {kind}, not an object with columns")
    fault = fault_of(value)
    return Row(sample_id, where, value) if fault is None else BadRow(sample_id, where, fault)


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
        rows = parse_json(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_json_lines(io.BytesIO(data), file, name, Skip(0, path=name))
            return
        raise DataError(
            f"{file}:{error.lineno}: isn't valid JSON: {error.msg} at column {error.colno}",
            path=str(file),
            row=error.lineno,
        ) from None
    except ValueError as error:
        raise DataError(f"{file}: {error}", path=str(file)) from None
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
    delimiter = "\t" if kind_of_file(file) == ".tsv" else ","
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
                    raise DataError(
                        f"{where}: isn't valid CSV: {error}. A quote that opens a field must be "
                        'closed; one inside of a field is written twice: ""',
                        path=where,
                    ) from None
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
                _refuse_doubles(header, where)
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
                if (not line.isascii() and _NO_UTF8.search(line)) or "\0" in line:
                    problem = _undecodable(line.encode(errors="surrogateescape"))
                    problems |= {number: problem} if problem else {}
                yield line
        except _UNREADABLE as error:
            raise _unreadable(file, error) from error


def _refuse_doubles(names: Sequence[str], where: str) -> None:
    """Of two columns with one name the first one would be lost."""
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise DataError(f"{where}: two columns are called {doubled!r}. Rename one.", path=where)


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
        is_parquet = kind_of_file(file) == ".parquet"
        batches = _parquet_batches(file, past) if is_parquet else _batches(file)
        for batch in batches:
            if batch.num_rows <= past.left:
                past.take(batch.num_rows)
                continue
            number = number or before - past.left  # not from 1 where batches were passed over
            _refuse_doubles(batch.schema.names, str(file))
            for value in _values(batch):
                number += 1
                sample_id, where = f"{name}:{number}", f"{file}: row {number}"
                if isinstance(value, Exception):
                    yield BadRow(sample_id, where, f"holds what can't be read: {value}")
                else:
                    yield Row.of_table(sample_id, where, value)
        if not is_parquet and _lacks_end(file):
            number = (number or before - past.left) + 1
            reason = "isn't there: the stream has no end mark, as one that was cut. Make it again"
            yield BadRow(f"{name}:{number}", f"{file}: row {number}", reason)
    except (pa.ArrowException, OSError) as error:
        # The system's own errors, such as a right that lacks, have a number; damage has none.
        again = "" if getattr(error, "errno", None) else " Fetch or make it again."
        problem = first_line(error).rstrip(".")
        raise DataError(
            f"{file}: can't be read as {kind_of_file(file)}: {problem}.{again}", path=str(file)
        ) from error


def _values(batch: Any) -> Iterator[dict[str, Any] | Exception]:
    """Rows of a batch, by column; of one that Python has no values for, why."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # text that isn't UTF-8, a date before the year 1
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield error


def _parquet_batches(file: Path, past: Skip) -> Iterator[Any]:
    """Batches of a parquet file from the row group on that the next row is in."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, page_checksum_verification=True)  # where it has checksums
    groups = list(range(table.metadata.num_row_groups))
    while groups and table.metadata.row_group(groups[0]).num_rows <= past.left:
        past.take(table.metadata.row_group(groups.pop(0)).num_rows)
    yield from table.iter_batches(batch_size=1024, row_groups=groups)


# How Arrow's two forms begin, and how a stream ends.
_FILE_FORM = b"ARROW1"
_CONTINUES, _STREAM_END = b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\0\0\0\0"


def _lacks_end(file: Path) -> bool:
    """Whether a stream stops between two batches: what is left of it reads like a whole one."""
    with file.open("rb") as opened:
        # Before Arrow 0.15 streams began otherwise; their end can't be told from zeros.
        if opened.read(len(_CONTINUES)) != _CONTINUES:
            return False
        opened.seek(-len(_STREAM_END), io.SEEK_END)
        return opened.read() != _STREAM_END


def _batches(file: Path) -> Iterator[Any]:
    """Batches of an arrow file of either form."""
    import pyarrow as pa
    from pyarrow import ipc

    source = pa.memory_map(str(file))
    try:
        reader = ipc.open_file(source)
    except pa.ArrowInvalid:  # the other form of the same kind: a stream
        source.seek(0)
        if source.read(len(_FILE_FORM)) == _FILE_FORM:
            raise
        yield from ipc.open_stream(pa.memory_map(str(file)))
    else:
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
