"""Checkpoints by step that never pause training. Usable in any loop: see `Checkpointer`.

What needs torch is imported when it is first used: to list steps takes none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from legato.checkpoint.policy import (
    EpochEnd,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSchedule,
    LogSchedule,
    NewBest,
    OnSignal,
    Pinned,
)
from legato.checkpoint.records import Committed, PendingSave, SaveRecord, StepInfo

if TYPE_CHECKING:
    from legato.checkpoint.checkpointer import Checkpointer
    from legato.checkpoint.parts import ModelPart, OptimizerPart, RngPart, Stateful, as_part

__all__ = [
    "Checkpointer",
    # what is saved
    "ModelPart",
    "OptimizerPart",
    "RngPart",
    "Stateful",
    "as_part",
    # when to save
    "EpochEnd",
    "EverySeconds",
    "EverySteps",
    "LogSchedule",
    "NewBest",
    "OnSignal",
    # what to keep
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepSchedule",
    "Pinned",
    # what comes back
    "Committed",
    "PendingSave",
    "SaveRecord",
    "StepInfo",
]

_OF_PARTS = ("ModelPart", "OptimizerPart", "RngPart", "Stateful", "as_part")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'legato.checkpoint' has no attribute {name!r}")
    home = "parts" if name in _OF_PARTS else "checkpointer"
    return getattr(import_module(f"{__name__}.{home}"), name)
