"""From a path to rows: local files of several kinds, globs, folders, or a data set on the hub.

A row that can't be read becomes a ``BadRow`` and reading goes on; a file that can't be read is an
error.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from legato.errors import DataError, MissingDependencyError

FILE_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
# "owner/name" or "name", and a subset after a colon: openai/gsm8k:main
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its file.

    Attributes:
        sample_id: ``orders.jsonl:17``.
        where: The same with the whole path, for messages.
        columns: The row's values by column name.
    """

    sample_id: str
    where: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be read, and why."""

    sample_id: str
    where: str
    reason: str


def read_rows(path: str, *, split: str | None = None) -> Iterator[Row | BadRow]:
    """Every row of ``path``, in a fixed order.

    Args:
        path: A file, a glob, a folder, or a hub name, with a subset after a colon if there is one.
        split: Of a hub data set or of a folder laid out like one; a hub data set's is ``train`` if
            absent.

    Returns:
        Rows in the order of sorted file names; rows that can't be read among them.

    Raises:
        DataError: Nothing there, an unknown kind of file, a file that can't be read.
    """
    place = os.path.expanduser(path)
    if os.path.isdir(place) and split is not None:
        return _read_hub(place, name=Path(place).name, subset=None, split=split)
    if os.path.isfile(place) or os.path.isdir(place) or glob.has_magic(place):
        if split is not None:
            raise DataError(
                f"{path}: split {split!r} is for data sets on the hub and for folders. Remove it.",
                path=path,
            )
        return _read_files(_find_files(place), path=path)
    if HUB_NAME.fullmatch(path) and not path.endswith(FILE_KINDS + COMPRESSIONS):
        name, _, subset = path.partition(":")
        return _read_hub(name, name=name, subset=subset or None, split=split or "train")
    raise DataError(
        f"{path}: no such file or folder (looked in {os.getcwd()}), and not a hub name either",
        path=path,
    )


def local_files(path: str, *, split: str | None = None) -> list[Path] | None:
    """The files that :func:`read_rows` would read, in its order; None for a data set on the hub."""
    place = os.path.expanduser(path)
    if split is not None or not (os.path.exists(place) or glob.has_magic(place)):
        return None
    return _find_files(place)


def _find_files(place: str) -> list[Path]:
    if os.path.isfile(place):
        return [Path(place)]
    if os.path.isdir(place):
        found = [Path(root) / file for root, _, files in os.walk(place) for file in files]
        hidden = [any(part.startswith(".") for part in p.relative_to(place).parts) for p in found]
        files = sorted(p for p, skip in zip(found, hidden, strict=True) if not skip and _kind(p))
        _refuse_mixed_splits(place, files)
    else:
        files = sorted(p for p in map(Path, glob.glob(place, recursive=True)) if p.is_file())
    if not files:
        raise DataError(
            f"{place}: no data file there. Known: {', '.join(FILE_KINDS)}, also .gz, .zst",
            path=place,
        )
    return files


def _refuse_mixed_splits(folder: str, files: list[Path]) -> None:
    """A folder with a train and a test file must not be read as one heap."""
    held_out = [
        p.name for p in files if re.match(r"(test|valid|validation|val|dev|eval)\b", p.name)
    ]
    if held_out and len(held_out) < len(files):
        raise DataError(
            f"{folder} holds {', '.join(held_out)} beside other files. Name a split (split: "
            "train), "
            "a file or a glob, so that no row is trained on that is meant for testing.",
            path=folder,
        )


def _kind(path: Path) -> str | None:
    """The file's kind by its suffix, compression aside; None if it isn't a data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FILE_KINDS else None


def _read_files(files: list[Path], *, path: str) -> Iterator[Row | BadRow]:
    names = [file.name for file in files]
    for file in files:
        name = file.name if names.count(file.name) == 1 else str(file)
        match _kind(file):
            case ".jsonl" | ".ndjson":
                rows = _read_json_lines(_open(file), file, name)
            case ".json":
                rows = _read_json(file, name)
            case ".csv" | ".tsv":
                rows = _read_csv(file, name)
            case ".parquet" | ".arrow":
                rows = _read_arrow(file, name)
            case _:
                raise DataError(
                    f"{file}: unknown kind of file. Known: {', '.join(FILE_KINDS)}, also with .gz "
                    "or .zst",
                    path=str(file),
                )
        yield from rows


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


def _read_json_lines(stream: IO[bytes], file: Path, name: str) -> Iterator[Row | BadRow]:
    with stream:
        for number, line in enumerate(_lines(stream, file), start=1):
            if not line.strip():
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
            else:
                yield _as_row(value, sample_id, where)


def _lines(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, EOFError) as error:
        raise DataError(f"{file}: can't be read to its end: {error}", path=str(file)) from error


def _as_row(value: object, sample_id: str, where: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(sample_id, where, value)
    return BadRow(
        sample_id, where, f"is of type {type(value).__name__}, not an object with columns"
    )


def _read_json(file: Path, name: str) -> Iterator[Row | BadRow]:
    with _open(file) as stream:
        data = b"".join(_lines(stream, file))
    try:
        text = _decode(data)
    except ValueError as error:
        raise DataError(f"{file}: {error}", path=str(file)) from None
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_json_lines(io.BytesIO(data), file, name)
            return
        raise DataError(
            f"{file}:{error.lineno}: isn't valid JSON: {error.msg} at column {error.colno}",
            path=str(file),
            row=error.lineno,
        ) from None
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


def _read_csv(file: Path, name: str) -> Iterator[Row | BadRow]:
    csv.field_size_limit(2**31 - 1)  # Python's default of 128 KiB is shorter than a long document
    with _open(file) as stream:
        data = b"".join(_lines(stream, file))
    try:
        text = _decode(data)
    except ValueError as error:
        raise DataError(f"{file}: {error}", path=str(file)) from None
    delimiter = "\t" if _kind(file) == ".tsv" else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        while True:
            line = reader.line_num + 1 if reader.line_num else 2
            row = next(reader, None)
            if row is None:
                return
            sample_id, where = f"{name}:{line}", f"{file}:{line}"
            if None in row or None in row.values():
                found = sum(value is not None for key, value in row.items() if key is not None)
                found += len(row.get(None, []))
                expected = len(reader.fieldnames or [])
                yield BadRow(
                    sample_id, where, f"has {found} fields; the first line names {expected}"
                )
            else:
                yield Row(sample_id, where, row)
    except csv.Error as error:
        raise DataError(
            f"{file}:{reader.line_num}: isn't valid CSV: {error}", path=str(file)
        ) from None


def _read_arrow(file: Path, name: str) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    number = itertools.count(1)
    try:
        if _kind(file) == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches(batch_size=1024)
        else:
            source = pa.memory_map(str(file))
            try:
                reader = ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            except pa.ArrowInvalid:  # the other form of the same kind: a stream
                batches = ipc.open_stream(pa.memory_map(str(file)))
        for batch in batches:
            for value in batch.to_pylist():
                row = next(number)
                yield Row(f"{name}:{row}", f"{file}: row {row}", value)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: can't be read as {_kind(file)}: {error}", path=str(file)
        ) from error


def _read_hub(path: str, *, name: str, subset: str | None, split: str) -> Iterator[Row | BadRow]:
    """Rows of a data set that the ``datasets`` library can load."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is read with the datasets package. Install it: pip install datasets"
        ) from error
    try:
        loaded = datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises a dozen kinds, from ValueError to requests' own
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise DataError(
            f"{path}: there is no such file or folder here, and the hub's data set can't be "
            "loaded: "
            f"{type(error).__name__}: {error}{offline}",
            path=path,
        ) from error
    for number, value in enumerate(loaded, start=1):
        yield Row(f"{name}:{number}", f"{path} ({split}): row {number}", dict(value))
