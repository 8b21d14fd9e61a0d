"""Fine-tune language models in native PyTorch, with checkpoints by step that never pause training.

The names below are the public ones, with those of :mod:`legato.checkpoint`, which is usable without
the rest. They are imported when they are first used: ``import legato`` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.checkpoint import Checkpointer
    from legato.config.load import load_config
    from legato.config.schema import RunConfig
    from legato.errors import LegatoError
    from legato.recipes import RunResult, run
    from legato.train.trainer import Trainer

_HOMES = {
    "Checkpointer": "legato.checkpoint",
    "LegatoError": "legato.errors",
    "RunConfig": "legato.config.schema",
    "RunResult": "legato.recipes",
    "Trainer": "legato.train.trainer",
    "load_config": "legato.config.load",
    "run": "legato.recipes",
}

__all__ = [
    "Checkpointer",
    "LegatoError",
    "RunConfig",
    "RunResult",
    "Trainer",
    "load_config",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'legato' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
