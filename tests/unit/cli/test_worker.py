"""One of several processes of a run: what it leaves behind."""

from __future__ import annotations

import logging
from pathlib import Path

from legato.cli.worker import as_rank
from legato.parallel.placement import Placement


def test_a_rank_that_has_ended_says_nothing_to_its_closed_log(tmp_path: Path) -> None:
    before = list(logging.getLogger("legato").handlers)
    with as_rank(Placement(rank=0, world_size=2), output_dir=str(tmp_path)):
        assert len(logging.getLogger("legato").handlers) == len(before) + 1
    assert logging.getLogger("legato").handlers == before
