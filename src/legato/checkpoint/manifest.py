"""manifest.json: what a step folder holds, byte by byte. A folder without a valid one is torn.

Format 1::

    {
      "format": 1,
      "run_id": "6f1c...", "branch": 0, "step": 500,
      "kind": "model",                      or "adapter"
      "reason": "interval",
      "metrics": {"eval_loss": 1.25},       finite numbers only
      "saved_at": 1767225600.0,             seconds since 1970
      "world_size": 2,
      "files": {
        "model.safetensors": {
          "size_bytes": 538090408,
          "header_digest": "9f...",         of the bytes before the first slice; null: no header
          "slices": [[offset, length, digest], ...]
        }
      },
      "digest": "c0..."                     of all the rest, as compact JSON with sorted keys
    }

Digests are xxh3_128 in hex: against bit rot, not against people. A slice that lies in the file as
equal runs at equal distances (a column shard) is ``[offset, run length, digest, number of runs,
distance]``; its digest is that of the runs one after the other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash

from legato.errors import FolderFormatError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
PIN_NAME = ".pinned"
"""A step that holds it is never pruned."""
BEGUN_NAME = ".begun"
"""In a step folder that is written in place: what isn't complete there is the run's to replace
whose id it holds."""
AMENDED_NAME = f"{MANIFEST_NAME}.new"
"""A manifest that is about to replace the other one."""
RESERVED_NAMES = frozenset({MANIFEST_NAME, PIN_NAME, BEGUN_NAME, AMENDED_NAME})
"""Files of a step folder that mean something to whoever looks for steps."""
STATE_FOLDER = "state"
TRAINER_FILE = f"{STATE_FOLDER}/trainer.json"

Kind = Literal["model", "adapter"]

# A plain name, or one in a plain folder: nothing that could leave the step folder.
_SAFE_NAME = re.compile(r"(?!\.\.?(/|$))[^/\\\0]+(/(?!\.\.?$)[^/\\\0]+)?")


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of ``data``, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class Slice:
    """A part of a file that one rank wrote, and its digest.

    Attributes:
        offset: Of the first byte in the file.
        run_bytes: Bytes in a row.
        digest: xxh3_128 of all its bytes, in hex.
        num_runs: How many such runs there are.
        distance_bytes: From the start of one run to that of the next; 0 when there is one run.
    """

    offset: int
    run_bytes: int
    digest: str
    num_runs: int = 1
    distance_bytes: int = 0

    def to_json(self) -> list[int | str]:
        """As it stands in the manifest."""
        short: list[int | str] = [self.offset, self.run_bytes, self.digest]
        return short if self.num_runs == 1 else [*short, self.num_runs, self.distance_bytes]

    @classmethod
    def from_json(cls, value: Any) -> Slice:
        """The inverse of :meth:`to_json`; ``ValueError`` when it isn't one."""
        if not isinstance(value, list) or len(value) not in (3, 5):
            raise ValueError(f"a slice is {value!r}, not [offset, length, digest]")
        numbers = [value[0], value[1], *value[3:]]
        if not all(_is_count(number) for number in numbers) or not isinstance(value[2], str):
            raise ValueError(f"a slice is {value!r}, not [offset, length, digest]")
        if len(value) == 5 and (value[1] == 0 or value[3] < 2):
            raise ValueError(f"a slice is {value!r}: its runs are none, or empty")
        return cls(*value)

    @property
    def end(self) -> int:
        """Where its last run ends in the file."""
        return self.offset + (self.num_runs - 1) * self.distance_bytes + self.run_bytes


@dataclass(frozen=True)
class FileEntry:
    """One file of a step folder.

    Attributes:
        size_bytes: Its size.
        slices: Every byte after the header, each in one slice.
        header_digest: xxh3_128 of the bytes before the first slice; None: there are none.
    """

    size_bytes: int
    slices: tuple[Slice, ...]
    header_digest: str | None = None

    @property
    def header_bytes(self) -> int:
        """Bytes before the first slice."""
        return self.size_bytes - sum(part.run_bytes * part.num_runs for part in self.slices)

    @classmethod
    def of_bytes(cls, data: bytes) -> FileEntry:
        """The entry of a small file that was written whole."""
        return cls(size_bytes=len(data), slices=(Slice(0, len(data), digest_of(data)),))


@dataclass(frozen=True)
class Manifest:
    """What a committed step folder is; see the top of this module."""

    run_id: str
    branch: int
    step: int
    kind: Kind
    saved_at: float
    files: Mapping[str, FileEntry]
    reason: str = "interval"
    metrics: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files, the manifest's own aside."""
        return sum(entry.size_bytes for entry in self.files.values())

    @property
    def has_state(self) -> bool:
        """Whether a run can be resumed from it."""
        return any(name.startswith(f"{STATE_FOLDER}/") for name in self.files)

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self.run_id,
            "branch": self.branch,
            "step": self.step,
            "kind": self.kind,
            "reason": self.reason,
            "metrics": dict(self.metrics),
            "saved_at": self.saved_at,
            "world_size": self.world_size,
            "files": {
                name: {
                    "size_bytes": entry.size_bytes,
                    "header_digest": entry.header_digest,
                    "slices": [part.to_json() for part in entry.slices],
                }
                for name, entry in sorted(self.files.items())
            },
        }
        content["digest"] = digest_of(_canonical(content))
        return json.dumps(content).encode()


def finite_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers among ``metrics`` that are finite: a NaN can't be compared and isn't JSON."""
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def parse_manifest(data: bytes, *, path: str) -> Manifest:
    """Read ``manifest.json`` and trust nothing in it.

    Args:
        data: Its bytes.
        path: Where they came from, for messages.

    Returns:
        The manifest.

    Raises:
        FolderFormatError: It isn't a manifest, was damaged, names a file outside its folder, or
            is of a newer format (then ``.newer`` is true).
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not an object")
        if content.get("format") != FORMAT:
            _refuse_format(content.get("format"), path)
        digest = content.pop("digest", None)
        if digest != digest_of(_canonical(content)):
            raise ValueError("its own digest doesn't fit: it was damaged or edited")
        return _parse_content(content)
    except FolderFormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FolderFormatError(
            f"{path}: not a valid manifest: {error}", path=path, newer=False
        ) from error


def check_coverage(name: str, entry: FileEntry) -> None:
    """Make sure that the slices of a file cover every byte after its header exactly once.

    Args:
        name: The file, for messages.
        entry: Its size and slices.

    Raises:
        FolderFormatError: A byte is covered twice or not at all; ``.path`` is ``name``.
    """
    runs = [_runs(part) for part in entry.slices]
    spans = np.concatenate(runs) if runs else np.zeros((0, 2), dtype=np.int64)
    spans = spans[spans[:, 1] > 0]
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.concatenate(([entry.header_bytes], spans[:, 0] + spans[:, 1]))
    starts = np.concatenate((spans[:, 0], [entry.size_bytes]))
    wrong = np.flatnonzero(ends != starts)
    if wrong.size:
        at, expected = int(starts[wrong[0]]), int(ends[wrong[0]])
        raise FolderFormatError(
            f"{name}: the slices {'leave a gap' if at > expected else 'overlap'} at byte "
            f"{min(at, expected)}",
            path=name,
        )


def _runs(part: Slice) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``[num_runs, 2]``: start and length of each run."""
    starts = part.offset + part.distance_bytes * np.arange(part.num_runs, dtype=np.int64)
    return np.stack((starts, np.full_like(starts, part.run_bytes)), axis=1)


def _refuse_format(found: object, path: str) -> None:
    newer = _is_count(found) and isinstance(found, int) and found > FORMAT
    remedy = "a newer Legato wrote it: upgrade to read it" if newer else "this isn't Legato's"
    raise FolderFormatError(
        f"{path}: format {found!r}, this version reads format {FORMAT}; {remedy}",
        path=path,
        newer=newer,
    )


def _parse_content(content: Mapping[str, Any]) -> Manifest:
    for name in ("branch", "step", "world_size"):
        if not _is_count(content[name]):
            raise ValueError(f"{name} is {content[name]!r}")
    if content["kind"] not in ("model", "adapter"):
        raise ValueError(f"kind is {content['kind']!r}")
    return Manifest(
        run_id=str(content["run_id"]),
        branch=content["branch"],
        step=content["step"],
        kind=content["kind"],
        saved_at=float(content["saved_at"]),
        reason=str(content["reason"]),
        metrics=finite_metrics(content["metrics"]),
        world_size=content["world_size"],
        files={name: _parse_file(name, value) for name, value in content["files"].items()},
    )


def _parse_file(name: str, value: Mapping[str, Any]) -> FileEntry:
    if not _SAFE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} isn't a name of a file in a step folder")
    header_digest = value["header_digest"]
    if not _is_count(value["size_bytes"]) or not isinstance(header_digest, str | None):
        raise ValueError(f"the entry of {name} is {value!r:.200}")
    entry = FileEntry(
        size_bytes=value["size_bytes"],
        slices=tuple(Slice.from_json(part) for part in value["slices"]),
        header_digest=header_digest,
    )
    if entry.header_bytes < 0 or any(part.end > entry.size_bytes for part in entry.slices):
        raise ValueError(f"the slices of {name} are longer than the file")
    return entry


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
