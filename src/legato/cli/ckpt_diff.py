"""What differs between two step folders."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch

from legato.checkpoint.manifest import Manifest
from legato.hf_folder.slices import FolderReader
from legato.storage import Storage

_NUM_SHOWN = 10


def compare_steps(storage: Storage, first: str, second: str) -> dict[str, Any]:
    """Compare the weights of two steps, one tensor at a time, and their configs.

    Args:
        storage: Where both are.
        first: Absolute path of a step folder.
        second: The other one's.

    Returns:
        ``num_equal``, ``num_changed``, ``only_first``, ``only_second`` (keys), ``largest`` (the
        tensors that moved most: key, relative change of the norm of the difference, largest
        absolute change) and ``config`` (lines of a unified diff).
    """
    before, after = FolderReader(storage, first), FolderReader(storage, second)
    shared = [key for key in before.specs if key in after.specs]
    changed = [row for key in shared if (row := _compare(key, before, after)) is not None]
    changed.sort(key=lambda row: row["relative"], reverse=True)
    return {
        "num_equal": len(shared) - len(changed),
        "num_changed": len(changed),
        "only_first": sorted(before.specs.keys() - after.specs.keys()),
        "only_second": sorted(after.specs.keys() - before.specs.keys()),
        "largest": changed[:_NUM_SHOWN],
        "config": _config_diff(Path(first), Path(second)),
    }


def compare_metrics(
    before: Manifest | None, after: Manifest | None
) -> dict[str, list[float | None]]:
    """The metrics that differ: name -> the first step's value and the second one's, if any."""
    old, new = (dict(manifest.metrics) if manifest else {} for manifest in (before, after))
    return {
        name: [old.get(name), new.get(name)]
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _compare(key: str, before: FolderReader, after: FolderReader) -> dict[str, Any] | None:
    """How far a tensor moved; None: not at all."""
    old, new = before.read(key), after.read(key)
    if old.shape != new.shape:
        return {"key": key, "relative": float("inf"), "largest": float("inf")}
    if old.dtype == new.dtype and torch.equal(_bytes(old), _bytes(new)):
        return None
    difference = new.double() - old.double()
    scale = float(old.double().norm()) or 1.0
    return {
        "key": key,
        "relative": float(difference.norm()) / scale,
        "largest": float(difference.abs().max()),
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Bits, not values: a NaN equals itself here, and -0.0 isn't 0.0.
    return tensor.reshape(-1).view(torch.uint8)


def _config_diff(first: Path, second: Path) -> list[str]:
    old, new = _config_lines(first), _config_lines(second)
    return list(difflib.unified_diff(old, new, str(first), str(second), lineterm="", n=0))


def _config_lines(folder: Path) -> list[str]:
    file = next(iter(sorted(folder.glob("*.yaml"))), None)
    return file.read_text(encoding="utf-8").splitlines() if file else []
