"""From a config to a run."""

from legato.recipes.methods import METHODS, Trained, full, lora
from legato.recipes.runs import RunResult, preflight, run

__all__ = ["METHODS", "RunResult", "Trained", "full", "lora", "preflight", "run"]
