"""One checkpoint in words: what it holds, and how its save went."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legato.words import counted

if TYPE_CHECKING:
    from legato.checkpoint.manifest import Manifest
    from legato.checkpoint.records import StepInfo

_KINDS = {"model": "a whole model", "adapter": "a PEFT adapter"}
_REASONS = {
    "interval": "its interval of steps",
    "schedule": "its schedule of steps",
    "time": "its interval of seconds",
    "epoch": "the end of an epoch",
    "best": "a new best metric",
    "signal": "somebody asked for it",
    "final": "the end of the run",
    "error": "an error ended the run",
    "asked": "a callback asked for it",
}
"""What a policy, or a loop, calls a reason to save."""

_TIMES = {
    "training waited": "blocked_seconds",
    "in memory after": "staged_seconds",
    "on disk after": "committed_seconds",
}
"""Label -> field of a save's event in metrics.jsonl."""


def describe(
    info: StepInfo, *, marks: Sequence[str], save: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """A step as labels and what they say.

    Args:
        info: The step.
        marks: What is special about it, such as ``latest``.
        save: Its event in metrics.jsonl; None: there is none.

    Yields:
        tuple[str, str]: Label and text.
    """
    yield "step", ", ".join([str(info.step), info.status, *marks])
    yield "folder", info.path
    if info.problem is not None:
        yield "problem", info.problem
    if info.manifest is not None:
        yield from _what_it_is(info.manifest)
    yield from _how_it_was_saved(save)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """``eval_loss 1.25, train_loss 1.5``."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
    )


def _what_it_is(manifest: Manifest) -> Iterator[tuple[str, str]]:
    from legato.report.start import human_bytes

    state = "with all that a resumed run needs" if manifest.has_state else "nothing resumes from it"
    yield "holds", f"{_KINDS.get(manifest.kind, manifest.kind)}, {state}"
    at = dt.datetime.fromtimestamp(manifest.saved_at).isoformat(sep=" ", timespec="seconds")
    yield "saved", f"{at}, reason: {_REASONS.get(manifest.reason, manifest.reason)}"
    ranks = counted(manifest.world_size, "process", "processes")
    yield "run", f"{manifest.run_id}, branch {manifest.branch}, {ranks}"
    if manifest.metrics:
        yield "metrics", metrics_text(manifest.metrics)
    yield "size", f"{human_bytes(manifest.size_bytes)} in {counted(len(manifest.files), 'file')}"


def _how_it_was_saved(save: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    from legato.report.start import human_bytes, human_seconds

    if save is None:
        yield "save", "how it went isn't recorded"
        return
    for label, name in _TIMES.items():
        if name in save:
            yield label, human_seconds(save[name])
    if "staged_bytes" in save:
        yield "copied", f"{human_bytes(save['staged_bytes'])} of memory, by rank 0"


def list_files(info: StepInfo) -> Iterator[tuple[str, str]]:
    """Name and size of each file of a step."""
    from legato.report.start import human_bytes

    for name, entry in info.manifest.files.items() if info.manifest else ():
        yield name, human_bytes(entry.size_bytes)
