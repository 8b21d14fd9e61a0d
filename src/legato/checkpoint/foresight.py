"""What a run would go on from, found without a trace: nothing is written, moved or locked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import look_at_lock
from legato.checkpoint.opening import decide_opening, locate
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.records import Committed
from legato.checkpoint.restore import read_trainer_json, restore_parts
from legato.storage import LocalStorage, Storage


@dataclass(frozen=True)
class Foresight:
    """What a `Checkpointer` that is opened now would begin with.

    Attributes:
        source: The step to resume from; None: a fresh start.
        storage: Where it is.
    """

    source: Committed | None
    storage: Storage

    def read_trainer_state(self, committed: Committed) -> dict[str, Any]:
        """As `Checkpointer.read_trainer_state`."""
        content = read_trainer_json(committed, storage=self.storage)
        return dict(content.get("parts", {}).get("trainer", {}))

    def restore(self, state: Mapping[str, Any], *, allow_missing: Collection[str]) -> None:
        """Fill ``state`` in place from `source`, if there is one, as `Checkpointer.restore`.

        Args:
            state: As for `Checkpointer.save`.
            allow_missing: Parts that the step may lack.

        Raises:
            CheckpointMismatchError: Something doesn't fit; ``.path``, ``.key``.
        """
        if self.source is not None:
            restore_parts(
                sort_parts(state), self.source, storage=self.storage, allow_missing=allow_missing
            )


def foresee(output_dir: str, *, resume: Literal["auto", False] | str, verify: bool) -> Foresight:
    """Decide as a `Checkpointer` does that is opened without ``start_over``.

    Args:
        output_dir: Folder of the run, or a URL; may be absent.
        resume: ``auto``, False, or the path of a step.
        verify: Read every byte of the step to go on from.

    Returns:
        The step, if there is one.

    Raises:
        CheckpointError: What would keep the run from beginning, as `Checkpointer` lists it.
    """
    storage, path = locate(output_dir)
    folder = RunFolder(storage, path)
    folder.refuse_files()
    holder = look_at_lock(path) if isinstance(storage, LocalStorage) else {}
    opening = decide_opening(
        folder,
        folder.steps(),
        resume=resume if resume is False or resume == "auto" else locate(resume)[1],
        start_over=False,
        last_run_id=holder.get("run_id"),
        now=0.0,
        verify=verify,
    )
    return Foresight(opening.source, storage)
