"""What is wrong in a config, told by the key that it is wrong with."""

from __future__ import annotations

from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""A key of a config by the names, and places in lists, that lead to it."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, and what to do about it."""

    path: KeyPath
    """Empty: no single key is."""
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


def dotted(path: KeyPath) -> str:
    """``("datasets", 0, "path")`` -> ``"datasets.0.path"``."""
    return ".".join(str(part) for part in path)
