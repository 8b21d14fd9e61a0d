"""Whether the files that someone is about to read from a step folder are those that were saved."""

from __future__ import annotations

import json
from pathlib import Path

from legato.checkpoint.inspection import damage_of
from legato.checkpoint.manifest import MANIFEST_NAME, STATE_FOLDER, parse_manifest
from legato.errors import CheckpointTornError
from legato.storage import LocalStorage


def check_adapter(folder: Path) -> None:
    """Read an adapter's files in a step folder and compare their digests with the manifest's.

    Weights of whole models aren't read, which takes long: see `check_step`.

    Args:
        folder: Any folder. One without a manifest, or of a whole model, is let through.

    Raises:
        FolderFormatError: The manifest is damaged, or of a newer format; ``.path``.
        CheckpointTornError: A file is absent, or isn't what was saved; ``.path``, ``.problems``.
    """
    if (folder / "adapter_config.json").is_file():
        check_step(folder)


def check_step(folder: Path) -> None:
    """Read the files of a step folder that make a model or an adapter, and compare their digests.

    Args:
        folder: Any folder. One without a manifest of ours is let through.

    Raises:
        FolderFormatError: The manifest is damaged, or of a newer format; ``.path``.
        CheckpointTornError: A file is absent, or isn't what was saved; ``.path``, ``.problems``.
    """
    manifest_file = folder / MANIFEST_NAME
    if not manifest_file.is_file():
        return
    data = manifest_file.read_bytes()
    if _is_somebody_elses(data):
        return
    manifest = parse_manifest(data, path=str(manifest_file))
    own = {
        name: entry
        for name, entry in manifest.files.items()
        if not name.startswith(f"{STATE_FOLDER}/")  # a run's own, not the model's
    }
    problems = damage_of(LocalStorage(), str(folder), own)
    if problems:
        raise CheckpointTornError(
            f"{'; '.join(problems)}: not what was saved. Use another step. If you changed it on "
            f"purpose, copy the folder without {MANIFEST_NAME}.",
            path=str(folder),
            problems=problems,
        )


def _is_somebody_elses(manifest: bytes) -> bool:
    """Other tools write files of that name, too; a damaged one of ours isn't taken for theirs."""
    try:
        content = json.loads(manifest)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys().isdisjoint(("format", "run_id", "digest"))
