"""How large a checkpoint is, and whether there is room for what a run plans."""

from __future__ import annotations

import logging

from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.parts import Parts
from legato.checkpoint.plan import plan_save
from legato.errors import CheckpointWriteError

logger = logging.getLogger(__name__)


def checkpoint_bytes(parts: Parts, *, with_state: bool) -> int:
    """Bytes of one checkpoint, on all ranks together.

    Args:
        parts: What is saved. Before the first update the optimizer's state is estimated.
        with_state: Whether what only a resumed run needs is saved too.

    Returns:
        The bytes.
    """
    size = plan_save(parts, with_state=with_state).size_bytes
    size += sum(len(data) for data in parts.model.files.values())
    if with_state and parts.optimizer is not None and not parts.optimizer.optimizer.state:
        size += parts.optimizer.expected_state_bytes()
    return size


def check_space(
    folder: RunFolder, *, each_bytes: int, planned_saves: int, max_kept: int | None
) -> int | None:
    """Hold what a run will write against the free space.

    Args:
        folder: The run's output_dir.
        each_bytes: Bytes of one checkpoint.
        planned_saves: How many saves are still to come.
        max_kept: How many take space at the same time; None: all.

    Returns:
        The free bytes; None where they can't be known.

    Raises:
        CheckpointWriteError: Not even one fits; ``.path``, ``.needed_bytes``, ``.free_bytes``.
    """
    path = folder.path
    free = folder.storage.free_bytes(path)
    if free is None or planned_saves == 0:
        return free
    kept = planned_saves if max_kept is None else min(planned_saves, max_kept)
    # One more: the oldest goes only when the newest is complete.
    needed = each_bytes * (kept + 1 if kept < planned_saves else kept)
    refuse_full_disk(path, each_bytes=each_bytes, free_bytes=free)
    if free < needed:
        logger.warning(
            "%s has %s free; the %d checkpoints that stay on this disk will take %s: later saves "
            "will fail unless room is made, or fewer stay",
            path, _human(free), kept, _human(needed),
        )  # fmt: skip
    return free


def refuse_full_disk(path: str, *, each_bytes: int, free_bytes: int | None) -> None:
    """Refuse an output_dir where not even one checkpoint finds space.

    Args:
        path: The output_dir, for the message.
        each_bytes: Bytes of one checkpoint.
        free_bytes: What is free there; None: nobody knows.

    Raises:
        CheckpointWriteError: It doesn't fit; ``.path``, ``.needed_bytes``, ``.free_bytes``.
    """
    if free_bytes is not None and free_bytes < each_bytes:
        raise CheckpointWriteError(
            f"{path} has {_human(free_bytes)} free, one checkpoint takes {_human(each_bytes)}: "
            "make room, or choose another output_dir",
            path=path,
            needed_bytes=each_bytes,
            free_bytes=free_bytes,
        )


def _human(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
