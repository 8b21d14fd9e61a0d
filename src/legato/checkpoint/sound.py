"""Whether the files that someone is about to read from a step folder are those that were saved."""

from __future__ import annotations

from pathlib import Path

from legato.checkpoint.digests import wrong_digest, wrong_size
from legato.checkpoint.manifest import MANIFEST_NAME, STATE_FOLDER, parse_manifest
from legato.errors import CheckpointTornError
from legato.storage import LocalStorage


def check_adapter(folder: Path) -> None:
    """Read an adapter's files in a step folder and compare their digests with the manifest's.

    Weights of whole models aren't read, which takes long; ``legato ckpt verify`` does that.

    Args:
        folder: Any folder. One without a manifest has nothing to compare with.

    Raises:
        FolderFormatError: The manifest is damaged, or of a newer format; ``.path``.
        CheckpointTornError: A file is absent, or isn't what was saved; ``.path``, ``.problems``.
    """
    file, storage = folder / MANIFEST_NAME, LocalStorage()
    if not file.is_file():
        return
    manifest = parse_manifest(file.read_bytes(), path=str(file))
    if manifest.kind != "adapter":
        return
    problems = []
    for name, entry in manifest.files.items():
        if name.startswith(f"{STATE_FOLDER}/"):  # a run's own, not the adapter's
            continue
        path = str(folder / name)
        problem = wrong_size(storage, path, entry) or wrong_digest(storage, path, entry)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise CheckpointTornError(
            f"{'; '.join(problems)}: not what was saved. Use another step. If you changed it on "
            f"purpose, copy the folder without {MANIFEST_NAME}.",
            path=str(folder),
            problems=problems,
        )
