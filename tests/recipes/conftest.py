"""What a run has in memory, for tests that compare it with what it wrote."""

from __future__ import annotations

from typing import Any

import pytest

from legato.recipes import training
from legato.recipes.parts import RunParts


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[RunParts]:
    """The parts of each run of a test, as they are when it has ended."""
    seen: list[RunParts] = []
    build = training.build_parts

    def remember(*words: Any, **options: Any) -> RunParts:
        seen.append(build(*words, **options))
        return seen[-1]

    monkeypatch.setattr(training, "build_parts", remember)
    return seen
