"""Which of the kept tokenized rows go: those that weren't used for long, and what is too much."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MOST_DAYS_UNUSED = 30
MOST_BYTES = 20 * 10**9
# Longer than any build: what is left of one after that was left by a crash.
_MOST_SECONDS_UNFINISHED = 24 * 3600.0
_DAY_SECONDS = 24 * 3600.0
# An entry is named by its key; while it is made, by a dot, the key and a suffix. Other folders may
# stand here, where a person named the folder: they are none of ours to remove.
_ENTRY = re.compile(r"\.?[0-9a-f]{32}(-\w+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One kept build.

    Attributes:
        path: Its folder.
        used_at: When it was made or read last, seconds since 1970.
        num_bytes: Its size.
    """

    path: Path
    used_at: float
    num_bytes: int


def plan_pruning(
    entries: Iterable[Entry],
    *,
    now: float,
    most_days_unused: float = MOST_DAYS_UNUSED,
    most_bytes: int = MOST_BYTES,
) -> list[Path]:
    """Choose what to remove.

    Args:
        entries: All there is.
        now: Seconds since 1970.
        most_days_unused: Older ones go.
        most_bytes: Those used last stay up to this size, in bytes; the very last one always.

    Returns:
        Folders to remove.
    """
    removed: list[Path] = []
    total = 0
    newest_first = sorted(entries, key=lambda entry: -entry.used_at)
    for number, entry in enumerate(newest_first):
        total += entry.num_bytes
        is_old = now - entry.used_at > most_days_unused * _DAY_SECONDS
        if number > 0 and (is_old or total > most_bytes):
            removed.append(entry.path)
    return removed


def prune_rows(folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Remove entries that are too old or too many, and what crashed builds left; nothing else.

    Rows that a run has open stay readable for it, as any removed file does.

    Args:
        folder: Where entries are kept.
        most_bytes: As :func:`plan_pruning` takes it.
    """
    now = time.time()
    try:
        kept, unfinished = _look(folder)
    except OSError as error:  # another process is pruning too
        logger.debug("%s: not pruned: %s", folder, error)
        return
    chosen = plan_pruning(kept, now=now, most_bytes=most_bytes)
    chosen += [each.path for each in unfinished if now - each.used_at > _MOST_SECONDS_UNFINISHED]
    for path in chosen:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            logger.warning("tokenized rows: %s is too old or too much, and stays: %s", path, error)
        else:
            logger.info("tokenized rows: removed %s, not used for long or too much", path)


def mark_used(entry: Path) -> None:
    """Remember that an entry was read now; where it can't be, it only looks older than it is."""
    try:
        os.utime(entry)
    except OSError as error:
        logger.debug("%s: %s", entry, error)


def _look(folder: Path) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Whole entries, and those that are being made or never were finished."""
    kept: list[Entry] = []
    unfinished: list[Entry] = []
    for path in folder.iterdir():
        if path.is_dir() and _ENTRY.fullmatch(path.name):
            size = sum(file.stat().st_size for file in path.iterdir())
            entry = Entry(path, path.stat().st_mtime, size)
            (unfinished if path.name.startswith(".") else kept).append(entry)
    return kept, unfinished
