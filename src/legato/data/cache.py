"""Tokenized rows on disk: the same files, tokenizer, template and options are tokenized once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from legato.data.build import build_data
from legato.data.chat import ChatFormatter
from legato.data.formats import DatasetSpec
from legato.data.pruning import mark_used, prune_rows
from legato.data.samples import DataReport, DatasetReport, TokenizedData
from legato.data.sources import local_files

logger = logging.getLogger(__name__)

OFF = "off"
_ARRAYS = ("tokens", "trained", "lengths", "id_bytes", "id_lengths", "rows", "datasets")
_FACTS, _DIGESTS = "facts.json", "digests.json"
_FILES = (*(f"{name}.npy" for name in _ARRAYS), _FACTS)
_HASHED_AT_ONCE = 1 << 20


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Where tokenized rows are kept.

    Args:
        environment: Of the process. ``LEGATO_CACHE`` names a folder, or is ``off``.

    Returns:
        The folder; ``~/.cache/legato`` unless another is named; None: nothing is kept.
    """
    named = environment.get("LEGATO_CACHE")
    if named == OFF:
        return None
    return Path(named or "~/.cache/legato").expanduser() / "rows"


def build_cached(
    specs: Sequence[DatasetSpec],
    *,
    folder: Path | None,
    formatter: ChatFormatter,
    max_seq_len: int,
    excess_length: str = "drop",
    on_bad_row: str = "error",
    num_workers: int = 0,
) -> TokenizedData:
    """:func:`build_data`, or what an earlier call with the same input made.

    Safe with several processes: an entry appears whole, by one rename. A folder that can't be
    written to costs the time of tokenizing, not the run.

    Args:
        specs: What to read, in order.
        folder: Where entries are kept; None: nowhere.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Most tokens of a sample.
        excess_length: As :func:`build_data` takes it.
        on_bad_row: As :func:`build_data` takes it.
        num_workers: As :func:`build_data` takes it.

    Returns:
        The samples; the report's notes say whether they were read or made.

    Raises:
        DataError: A file, a row or a column that can't be used; nothing left to train on.
    """
    options: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "excess_length": excess_length,
        "on_bad_row": on_bad_row,
    }
    before = _file_states(specs)
    key = None if folder is None else rows_key(specs, formatter=formatter, options=options)
    if folder is None or key is None:
        return build_data(specs, formatter=formatter, num_workers=num_workers, **options)
    entry = folder / key
    data = load_rows(entry)
    if data is not None:
        mark_used(entry)
        return _noted(data, f"tokenized rows: read from {entry}")
    data = build_data(specs, formatter=formatter, num_workers=num_workers, **options)
    after = _file_states(specs)
    if after != before:
        # Under the name of the old bytes the rows of the new ones would be found later.
        changed = min({file for file, _ in before.items() ^ after.items()})
        warning = f"warning: {changed} changed while it was read: rows of both may be trained on"
        report = replace(data.report, warnings=(*data.report.warnings, warning))
        return _noted(replace(data, report=report), "tokenized rows: not kept, as a file changed")
    try:
        store_rows(entry, data)
    except OSError as error:
        # Of a full disk numpy tells how many bytes went there, without an error number.
        problem = error.strerror or f"no room there? {error}"
        return _noted(data, f"tokenized rows: not kept, {entry}: {problem}")
    prune_rows(folder)
    return _noted(data, f"tokenized rows: made, and kept in {entry}")


def rows_key(
    specs: Sequence[DatasetSpec], *, formatter: ChatFormatter, options: Mapping[str, Any]
) -> str | None:
    """A name for everything that tokenized rows depend on: files' bytes, formatter, options, code.

    Args:
        specs: Data sets.
        formatter: Its fingerprint holds tokenizer and template.
        options: JSON values.

    Returns:
        32 hexadecimal digits; None where a data set isn't made of local files.
    """
    files: list[list[str]] = []
    for spec in specs:
        found = local_files(spec.path, split=spec.split)
        if found is None:
            return None
        files += [[str(file), _digest([file])] for file in found]
    parts = {
        "files": files,
        "specs": [{**asdict(spec), "columns": dict(spec.columns)} for spec in specs],
        "formatter": formatter.fingerprint,
        "options": dict(options),
        "code": _digest(sorted(Path(__file__).parent.rglob("*.py"))),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _file_states(specs: Sequence[DatasetSpec]) -> dict[str, tuple[int, ...]]:
    """What changes with a file's bytes, also where its time is set back."""
    files = [file for spec in specs for file in local_files(spec.path, split=spec.split) or ()]
    found = {str(file): file.stat() for file in files}
    return {
        file: (each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for file, each in found.items()
    }


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_HASHED_AT_ONCE):
                digest.update(chunk)
    return digest.hexdigest()


def store_rows(entry: Path, data: TokenizedData) -> None:
    """Write samples as a new entry; nothing happens if another process was faster.

    Args:
        entry: A folder that isn't there yet.
        data: All samples of a build, none left out.

    Raises:
        OSError: It can't be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": data.tokens,
        "trained": data.trained,
        "lengths": data.lengths,
        "id_bytes": np.frombuffer(data.id_bytes, dtype=np.uint8),
        "id_lengths": data.id_ends - data.id_starts,
        "rows": data.rows,
        "datasets": data.datasets,
    }
    facts = {"weights": list(data.weights), "report": asdict(data.report)}
    made = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        for name, values in arrays.items():
            with (made / f"{name}.npy").open("wb") as file:
                np.save(file, values, allow_pickle=False)
                _sync(file.fileno())
        _write_json(made / _FACTS, facts)
        _write_json(made / _DIGESTS, {name: _file_digest(made / name) for name in _FILES})
        try:
            made.rename(entry)
        except OSError:
            if not entry.is_dir():  # another process's entry is as good
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_json(file: Path, value: object) -> None:
    with file.open("w", encoding="utf-8") as text:
        json.dump(value, text)
        text.flush()
        _sync(text.fileno())


def _file_digest(file: Path) -> str:
    """Not the one that names entries: a changed bit is to be found, and at the disk's speed."""
    digest = xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_HASHED_AT_ONCE):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(descriptor: int) -> None:
    # Before the rename: after a power cut an entry is whole or absent.
    os.fsync(descriptor)


def load_rows(entry: Path) -> TokenizedData | None:
    """Read an entry. Its bytes are what was written; its tokens stay on disk until looked at.

    Args:
        entry: A folder that :func:`store_rows` wrote, or that isn't there.

    Returns:
        The samples; None if there is no entry, or a damaged one, which is removed.
    """
    if not entry.is_dir():
        return None
    try:
        digests = json.loads((entry / _DIGESTS).read_text("utf-8"))
        for name in _FILES:
            if _file_digest(entry / name) != digests[name]:
                raise ValueError(f"{name} isn't what was written")
        facts = json.loads((entry / _FACTS).read_text("utf-8"))
        arrays = {
            name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in _ARRAYS
        }
        return _as_data(arrays, facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: damaged (%s), tokenized anew", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _as_data(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> TokenizedData:
    lengths, id_lengths = np.array(arrays["lengths"]), np.array(arrays["id_lengths"])
    if int(lengths.sum()) != len(arrays["tokens"]) or len(arrays["trained"]) != lengths.sum():
        raise ValueError("its arrays don't belong together")
    report = facts["report"]
    id_ends = np.cumsum(id_lengths)
    return TokenizedData(
        tokens=arrays["tokens"],
        trained=arrays["trained"],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        id_bytes=arrays["id_bytes"].tobytes(),
        id_starts=id_ends - id_lengths,
        id_ends=id_ends,
        rows=np.array(arrays["rows"]),
        datasets=np.array(arrays["datasets"]),
        weights=tuple(facts["weights"]),
        report=DataReport(
            datasets=tuple(DatasetReport(**each) for each in report["datasets"]),
            notes=tuple(report["notes"]),
            warnings=tuple(report["warnings"]),
        ),
    )


def _noted(data: TokenizedData, note: str) -> TokenizedData:
    return replace(data, report=replace(data.report, notes=(*data.report.notes, note)))
