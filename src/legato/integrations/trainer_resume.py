"""Which step a Trainer resumes from. A callback isn't told the path: it has to be found again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerState, TrainingArguments

from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import LOCK_NAME
from legato.checkpoint.opening import decide_opening, find_step
from legato.errors import CheckpointNotFoundError, RankDisagreementError
from legato.integrations.trainer_parts import IDENTITY
from legato.storage import LocalStorage


def newest_step(output_dir: str | os.PathLike[str]) -> str | None:
    """The step that a run in this folder would go on from.

    Args:
        output_dir: Folder of the run; may be absent.

    Returns:
        Path of the newest complete step of the run that used the folder last; None: there is none.
    """
    path = os.path.realpath(output_dir)
    folder = RunFolder(LocalStorage(), path)
    opening = decide_opening(
        folder,
        folder.steps(),
        resume="auto",
        start_over=False,
        last_run_id=_last_run_id(path),
        now=0.0,
    )
    return opening.source.path if opening.source else None


def resumed_step(args: TrainingArguments, state: TrainerState) -> str | None:
    """The step that the Trainer has read weights and state of.

    Its trainer_state.json names run, branch and step, so no other step can be taken for it.

    Args:
        args: The Trainer's.
        state: As the Trainer has read it.

    Returns:
        Its path; None: a fresh start, or a checkpoint of the Trainer's own, which has restored
        all of it.

    Raises:
        CheckpointNotFoundError: It can't be found; ``.path``.
        CheckpointTornError: It isn't complete; ``.path``.
    """
    identity = (state.stateful_callbacks or {}).get(IDENTITY)
    # A Trainer without Legato hands the name on in its own checkpoints, with the old number.
    if not isinstance(identity, Mapping) or identity.get("step") != state.global_step:
        return None
    own = os.path.join(args.output_dir, f"step_{state.global_step}")
    for path in (own, args.resume_from_checkpoint):
        if path and os.path.isdir(path):
            found = find_step(LocalStorage(), os.path.realpath(path))
            if identity == {"run_id": found.run_id, "branch": found.branch, "step": found.step}:
                return found.path
    raise CheckpointNotFoundError(
        f"the Trainer resumed from step {state.global_step} of run {identity.get('run_id')}, which "
        f"isn't {own}. A callback isn't told the path: give it to TrainingArguments("
        "resume_from_checkpoint=..) as well.",
        path=own,
    )


def require_same_step(step: int, *, device: torch.device) -> None:
    """Collective: check that all ranks resume at one step.

    Args:
        step: This rank's; 0: a fresh start.
        device: Where the process group's tensors live.

    Raises:
        RankDisagreementError: They don't, on every rank; ``.values``.
    """
    found = torch.tensor([step, -step], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    newest, oldest = int(found[0]), -int(found[1])
    if newest != oldest:
        raise RankDisagreementError(
            f"this rank resumes at step {step}, others at {oldest} to {newest}. Give every rank "
            "the same path, on a disk that all of them see.",
            values={"this rank": step, "oldest": oldest, "newest": newest},
        )


def _last_run_id(output_dir: str) -> str | None:
    """The run that used the folder last, by what it wrote into its lock."""
    try:
        content = json.loads(Path(output_dir, LOCK_NAME).read_text(encoding="utf-8"))
        return str(content["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
