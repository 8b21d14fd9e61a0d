"""From a config to a run. Names are imported when they are first used: policies need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.recipes.methods import METHODS, Trained, full, lora
    from legato.recipes.rehearsal import preflight
    from legato.recipes.training import RunResult, run

__all__ = ["METHODS", "RunResult", "Trained", "full", "lora", "preflight", "run"]

_HOMES = {"RunResult": "training", "preflight": "rehearsal", "run": "training"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'legato.recipes' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'methods')}"), name)
