"""What the verbs of ``legato ckpt`` are given: a run's folder, or a step's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from legato.checkpoint.lifecycle import RunFolder
    from legato.checkpoint.records import StepInfo

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's output_dir.")]
StepArgument = Annotated[
    Path, typer.Argument(metavar="STEP", help="A step folder, or its link latest or best.")
]
StepsArgument = Annotated[
    list[Path], typer.Argument(metavar="STEP", help="Step folders, or the links latest and best.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_STEP = re.compile(r"step_[0-9]+")


def is_step(path: Path) -> bool:
    """Whether ``path`` is a step's folder, by its name or by what is in it."""
    # Not resolve(): it raises at a link in a circle.
    name = os.path.basename(os.path.realpath(path))
    return bool(_STEP.fullmatch(name)) or (path / "manifest.json").is_file()


def _why_none(path: Path) -> str:
    found = "a file" if path.exists() else "nothing"
    beside = [p for p in path.parent.glob("step_*") if _STEP.fullmatch(p.name) and p.is_dir()]
    steps = sorted(int(p.name[5:]) for p in beside)
    newest = f". The newest step there is step_{steps[-1]}" if steps else ""
    return f"{path}: expected a folder, found {found}{newest}"


def open_run(path: Path) -> RunFolder:
    """Open a run's folder.

    Args:
        path: Its output_dir.

    Returns:
        The folder.

    Raises:
        CheckpointNotFoundError: There is none; ``.path``.
        UsageError: It is a step's.
    """
    from legato.checkpoint.lifecycle import RunFolder
    from legato.errors import CheckpointNotFoundError, UsageError
    from legato.storage.local import LocalStorage

    if not path.is_dir():
        raise CheckpointNotFoundError(_why_none(path), path=str(path))
    if is_step(path):
        raise UsageError(
            f"{path} is one step; expected a run's output_dir, {path.resolve().parent}"
        )
    return RunFolder(LocalStorage(), str(path.resolve()))


def open_step(path: Path) -> tuple[RunFolder, StepInfo]:
    """Open a step's folder.

    Args:
        path: The folder, or a link to it.

    Returns:
        The run's folder, and what the step's holds.

    Raises:
        CheckpointNotFoundError: There is none; ``.path``.
        UsageError: It isn't a step's.
    """
    from legato.checkpoint.inspection import inspect
    from legato.checkpoint.lifecycle import RunFolder
    from legato.errors import CheckpointNotFoundError, UsageError
    from legato.storage.local import LocalStorage

    if not path.is_dir():
        raise CheckpointNotFoundError(_why_none(path), path=str(path))
    if not is_step(path):
        raise UsageError(f"{path}: expected a step folder such as {path / 'latest'}")
    place = path.resolve()
    storage = LocalStorage()
    return RunFolder(storage, str(place.parent)), inspect(storage, str(place))
