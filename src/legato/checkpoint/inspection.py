"""What a step folder is, by its manifest, its sizes and its bytes."""

from __future__ import annotations

import errno
import posixpath
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from legato.checkpoint.digests import OnRead, wrong_digest, wrong_header, wrong_size
from legato.checkpoint.manifest import (
    MANIFEST_NAME,
    PIN_NAME,
    TRAINER_FILE,
    FileEntry,
    parse_manifest,
)
from legato.checkpoint.records import Committed, StepInfo
from legato.errors import FolderFormatError
from legato.storage import Storage

STEP_NAME = re.compile(r"step_(0|[1-9][0-9]*)")

_Check = Callable[[Storage, str, FileEntry], str | None]

# What a disk says of bytes that are gone. Any other error (no rights, a network that hangs) may be
# over in a minute, and says nothing of the step.
_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


def inspect(storage: Storage, path: str) -> StepInfo:
    """What a step folder is: complete, torn or unknown.

    Sizes are checked, and the digests of the few kilobytes that everything else hangs on: the
    headers of the files of tensors, and what says where training goes on.

    Args:
        storage: Where it is.
        path: Absolute path; its last part may be any name for a folder given by path.

    Returns:
        The facts. The step number is the name's, or the manifest's where the name has none.

    Raises:
        OSError: A file is there and can't be read now; that is no damage.
    """
    name = posixpath.basename(path.rstrip("/"))
    matched = STEP_NAME.fullmatch(name)
    step = int(matched[1]) if matched else -1
    pinned = storage.stat(posixpath.join(path, PIN_NAME)) is not None
    manifest_path = posixpath.join(path, MANIFEST_NAME)
    try:
        manifest = parse_manifest(storage.read_bytes(manifest_path), path=manifest_path)
    except FolderFormatError as error:
        status: Literal["torn", "unknown"] = "unknown" if error.facts.get("newer") else "torn"
        return StepInfo(step, path, status, problem=str(error), pinned=pinned)
    except OSError as error:
        _refuse_passing(error)
        return StepInfo(step, path, "torn", problem=f"{path}: no manifest: {error}", pinned=pinned)
    if matched and manifest.step != step:
        problem = (
            f"{path}: its manifest says step {manifest.step}: was it renamed, or is it a link?"
        )
        return StepInfo(step, path, "unknown", problem=problem, pinned=pinned)
    for file_name, entry in manifest.files.items():
        check = wrong_digest if file_name == TRAINER_FILE else wrong_header
        wrong = _check_file(storage, posixpath.join(path, file_name), entry, check)
        if wrong is not None:
            return StepInfo(manifest.step, path, "torn", problem=wrong, pinned=pinned)
    return StepInfo(manifest.step, path, "complete", manifest=manifest, pinned=pinned)


def find_damage(
    storage: Storage, committed: Committed, *, on_read: OnRead | None = None
) -> list[str]:
    """Re-read every byte of a step and compare digests.

    Args:
        storage: Where it is.
        committed: The step.
        on_read: Told of each further so many bytes of slices that were read.

    Returns:
        What is wrong, one line each; empty: nothing is.

    Raises:
        OSError: As of `inspect`.
    """
    return damage_of(storage, committed.path, committed.manifest.files, on_read=on_read)


def damage_of(
    storage: Storage,
    path: str,
    files: Mapping[str, FileEntry],
    *,
    on_read: OnRead | None = None,
) -> list[str]:
    """`find_damage` of some files of the folder at ``path``."""
    check = partial(wrong_digest, on_read=on_read)
    found = (
        _check_file(storage, posixpath.join(path, name), entry, check)
        for name, entry in files.items()
    )
    return [problem for problem in found if problem is not None]


def _check_file(storage: Storage, path: str, entry: FileEntry, check: _Check) -> str | None:
    try:
        return wrong_size(storage, path, entry) or check(storage, path, entry)
    except (OSError, EOFError) as error:
        _refuse_passing(error)
        return f"{path} can't be read: {error}"


def _refuse_passing(error: OSError | EOFError) -> None:
    if isinstance(error, EOFError | FileNotFoundError) or error.errno in _LOST:
        return
    raise error
