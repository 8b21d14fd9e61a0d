"""What several processes of one run must have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.errors import ConfigError
from legato.parallel.world import World
from legato.recipes.ranks import check_shared_storage
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
