"""What several processes of one run must have in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from legato.data.samples import DataReport, Sample, SampleColumns
from legato.errors import ConfigError, DataError
from legato.parallel.world import World
from legato.recipes.ranks import check_shared_storage, read_same_data
from tests.helpers import spawn

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def looks_elsewhere(rank: int, folder: str, elsewhere: bool) -> str | None:
    """Rank 1 looks at another folder: what a second host sees where nothing is shared."""
    own = f"{folder}/host{rank if elsewhere else 0}/out"
    with World.join("cpu", distributed=True, environment={}) as world:
        try:
            check_shared_storage(own, world=world)
        except ConfigError as error:
            return str(error)
    return None


def test_hosts_that_do_not_share_output_dir_are_named_on_every_rank(tmp_path: Path) -> None:
    said = spawn.run(looks_elsewhere, 2, str(tmp_path), True)
    assert "(rank 1) isn't the folder that host" in said[0]
    assert "Choose a folder on a file system that all hosts mount" in said[1]
    assert spawn.run(looks_elsewhere, 2, str(tmp_path), False) == [None, None]
    assert list((tmp_path / "host0" / "out").iterdir()) == []


def reads(rank: int, lengths: list[tuple[int, ...]]) -> str | None:
    columns = SampleColumns()
    for row, length in enumerate(lengths[rank]):
        ids = np.arange(length, dtype=np.int32)
        columns.append(Sample(ids, ids > 0, f"file:{row}"), row=row, dataset=0)
    data = columns.finish(weights=(1.0,), report=DataReport(()))
    with World.join("cpu", distributed=True, environment={}) as world:
        try:
            read_same_data(lambda: data, samples=lambda read: read, world=world)
        except DataError as error:
            return str(error)
    return None


def test_ranks_that_read_different_rows_are_told_apart() -> None:
    said = spawn.run(reads, 3, [(4, 6), (4, 6), (6, 4)])
    assert said[0] == said[1] == said[2]
    assert said[0].endswith(
        "2 samples of 10 tokens, 8 of them trained, on rank 0; 2 of 10, 8 on rank 2. "
        "Give all hosts the same files and the same tokenizer."
    )
    assert spawn.run(reads, 2, [(4, 6), (4, 6)]) == [None, None]
