from __future__ import annotations

from typing import Literal

import pytest

from legato.errors import ConfigError
from legato.parallel.mesh import MeshPlan, plan_mesh


@pytest.mark.parametrize(
    ("dp_shard", "dp_replicate", "world_size", "expected"),
    [
        ("all", 1, 1, (1, 1)),
        ("all", 1, 3, (1, 3)),
        ("all", 2, 8, (2, 4)),
        ("all", 4, 4, (4, 1)),
        (4, 1, 4, (1, 4)),
        (2, 3, 6, (3, 2)),
    ],
)
def test_a_plan_has_every_rank_once(
    dp_shard: int | Literal["all"], dp_replicate: int, world_size: int, expected: tuple[int, int]
) -> None:
    plan = plan_mesh(dp_shard=dp_shard, dp_replicate=dp_replicate, world_size=world_size)
    assert plan == MeshPlan(*expected)
    assert plan.world_size == world_size


def test_copies_that_dont_divide_the_world_are_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_mesh(dp_shard="all", dp_replicate=4, world_size=6)
    assert str(caught.value) == (
        "dp_replicate: 4 copies don't divide 6 processes. "
        "Choose one of 1, 2, 3, 6, or start another number of processes."
    )


def test_sizes_that_dont_multiply_to_the_world_are_refused_by_both_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_mesh(dp_shard=2, dp_replicate=2, world_size=6)
    assert str(caught.value) == (
        "dp_shard, dp_replicate: 2 x 2 is 4, but there are 6 processes. Set dp_shard: all, choose "
        "numbers that multiply to 6, or start 4 processes."
    )
