"""Checkpoints by step that never pause training. Usable in any loop: see `Checkpointer`."""

from __future__ import annotations

from legato.checkpoint.checkpointer import Checkpointer
from legato.checkpoint.parts import ModelPart, OptimizerPart, RngPart, Stateful, as_part
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
