"""From a path to rows: local files of several kinds, globs, folders, or a data set on the hub.

A row that can't be read becomes a ``BadRow`` and reading goes on; a file that can't be read is an
error.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

from legato.config.names import (
    COMPRESSIONS,
    FILE_KINDS,
    HUB_NAME,
    NO_URL,
    URL,
    kind_of_file,
)
from legato.data.hub import HubSource, ShardStarts, read_hub
from legato.data.readers import read_file
from legato.data.rows import BadRow, Row, Skip
from legato.errors import DataError

__all__ = [
    "BadRow",
    "Row",
    "local_files",
    "local_places",
    "read_rows",
]

_HELD_OUT = frozenset({"test", "valid", "validation", "val", "dev", "eval", "evaluation"})
_TRAIN = frozenset({"train", "training"})
_NAMED_AT_MOST = 3


def read_rows(
    path: str,
    *,
    split: str | None = None,
    skip: int = 0,
    streaming: bool = False,
    starts: ShardStarts | None = None,
    beside: Sequence[Path] = (),
) -> Generator[Row | BadRow, None, None]:
    """Every row of ``path``, in a fixed order.

    Args:
        path: A file, a glob, a folder, or a hub name, with a subset after a colon if there is one.
        split: Of a hub data set or of a folder laid out like one; a hub data set's is ``train`` if
            absent.
        skip: Rows to leave out at the beginning. Tables are entered there at once, a streamed hub
            data set at a shard that ``starts`` names, lines are read past without being parsed.
        streaming: Take a hub data set row by row, instead of fetching all of it first.
        starts: Where a streamed hub data set is entered; it notes where it could be.
        beside: Places of other data sets, from whose rows these are told by their ids.

    Returns:
        Rows in the order of sorted file names; rows that can't be read among them.

    Raises:
        DataError: Nothing there, an unknown kind of file, a file that can't be read.
    """
    place = os.path.expanduser(path)
    past = Skip(skip, path=path)
    starts = ShardStarts() if starts is None else starts
    if os.path.isdir(place) and split is not None:
        name = _short_names([Path(place), *beside])[Path(place)]
        hub = HubSource(place, _with_split(name, split), None, split, streaming)
        return read_hub(hub, past, starts)
    if os.path.isfile(place) or os.path.isdir(place) or glob.has_magic(place):
        if split is not None:
            raise DataError(
                f"{path}: split {split!r} is for data sets on the hub and for folders. Remove it.",
                path=path,
            )
        return _read_files(_find_files(place), past, beside)
    if os.path.lexists(place):
        _refuse_what_is_no_file(Path(place))
    if URL.match(path):
        raise DataError(f"{path}: {NO_URL}", path=path)
    if HUB_NAME.fullmatch(path) and not path.endswith(FILE_KINDS + COMPRESSIONS):
        name, _, subset = path.partition(":")
        known_as = _with_split(path, split)
        hub = HubSource(name, known_as, subset or None, split or "train", streaming)
        return read_hub(hub, past, starts)
    raise DataError(
        f"{path}: no such file or folder (looked in {os.getcwd()}), and not a hub name either",
        path=path,
    )


def local_files(path: str, *, split: str | None = None) -> list[Path] | None:
    """The files that :func:`read_rows` would read.

    Args:
        path: As :func:`read_rows` takes it.
        split: As :func:`read_rows` takes it.

    Returns:
        Files in its order; None where the ``datasets`` library finds them: on the hub, or of a
        folder's split.

    Raises:
        DataError: No data file there, or one that can't be read as one; ``.path``.
    """
    place = os.path.expanduser(path)
    if split is not None or not (os.path.exists(place) or glob.has_magic(place)):
        return None
    return _find_files(place)


def local_places(path: str, *, split: str | None = None) -> list[Path]:
    """What a data set's rows are named by on this machine: its files, or a folder with splits."""
    place = os.path.expanduser(path)
    if split is not None:
        return [Path(place)] if os.path.isdir(place) else []
    return local_files(path) or []


def _with_split(name: str, split: str | None) -> str:
    return name if split in (None, "train") else f"{name}[{split}]"


def _short_names(places: Sequence[Path]) -> dict[Path, str]:
    """Each place's name, with as many of the folders above it as tell it from the others."""
    parts = {place: Path(os.path.abspath(place)).parts for place in places}
    ends = Counter(p[-n:] for p in set(parts.values()) for n in range(1, len(p) + 1))
    return {
        place: str(Path(*next(p[-n:] for n in range(1, len(p) + 1) if ends[p[-n:]] == 1)))
        for place, p in parts.items()
    }


def _find_files(place: str) -> list[Path]:
    if os.path.isfile(place):
        return [Path(place)]
    if os.path.isdir(place):
        found = [Path(root) / file for root, _, files in os.walk(place) for file in files]
        hidden = [any(part.startswith(".") for part in p.relative_to(place).parts) for p in found]
        seen = (path for path, skip in zip(found, hidden, strict=True) if not skip)
        files = sorted(path for path in seen if kind_of_file(path))
    elif os.path.exists(place):
        files = [Path(place)]
    else:
        files = sorted(p for p in map(Path, glob.glob(place, recursive=True)) if not p.is_dir())
    if not files:
        raise DataError(
            f"{place}: no data file there. Known: {', '.join(FILE_KINDS)}, also .gz, .zst",
            path=place,
        )
    for file in files:
        _refuse_what_is_no_file(file)
    _refuse_mixed_splits(place, files)
    return files


def _refuse_what_is_no_file(file: Path) -> None:
    """A link to nothing would drop its rows in silence; a pipe has its rows only once."""
    if file.is_file():
        return
    if file.exists():
        problem = "is a pipe or a device; data is read more than once. Write it to a file first."
    else:
        problem = f"is a link to {os.readlink(file)}, which isn't there. Mend or remove it."
    raise DataError(f"{file}: {problem}", path=str(file))


def _refuse_mixed_splits(place: str, files: list[Path]) -> None:
    """Files to train on and files to test on must not be read as one heap."""
    if len(files) < 2:
        return
    above = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(above) for file in files]
    held_out = [name for name in names if _is_held_out(name)]
    if held_out and len(held_out) < len(names):
        more = ", ..." if len(held_out) > _NAMED_AT_MOST else ""
        choice = "a split (split: train), a file or a glob" if os.path.isdir(place) else "the files"
        raise DataError(
            f"{place} holds {', '.join(map(str, held_out[:_NAMED_AT_MOST]))}{more} beside other "
            f"files. Name {choice}, so that no row is trained on that is meant for testing.",
            path=place,
        )


def _is_held_out(name: Path) -> bool:
    """Whether a path says so: the outermost part of it that holds the word of a split decides."""
    for part in name.parts:
        words = set(re.split(r"[^a-z0-9]+", part.lower()))
        if words & _HELD_OUT:
            return not words & _TRAIN
        if words & _TRAIN:
            return False
    return False


def _read_files(
    files: list[Path], past: Skip, beside: Sequence[Path]
) -> Generator[Row | BadRow, None, None]:
    names = _short_names([*files, *beside])
    for file in files:
        name = names[file]
        for row in read_file(file, name, past):
            if past.left:
                past.take()
            else:
                yield row
