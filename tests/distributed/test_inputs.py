"""All ranks go on over the same things, or none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.errors import ConfigError
from legato.parallel.world import World
from legato.recipes.inputs import read_same
from tests.helpers import spawn
from tests.helpers.launches import Launched
from tests.helpers.runs import legato, steps_in, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def stands_on(rank: int, digests: list[str]) -> str:
    """A rank whose host may have a tokenizer of its own; the rest is alike."""
    alike = {"base_weights": {"path": "org/base", "bytes": 2048, "digest": "xxh3_128:00aa"}}
    inputs = {**alike, "tokenizer": {"path": "org/base", "digest": digests[rank]}}
    with World.join("cpu", distributed=True, environment={}) as world:
        assert read_same(lambda: rank, inputs=lambda _: alike, world=world) == rank
        with pytest.raises(ConfigError) as caught:
            read_same(lambda: rank, inputs=lambda _: inputs, world=world)
    return str(caught.value)


def test_ranks_whose_hosts_have_other_files_are_told_apart() -> None:
    said = spawn.run(stands_on, 3, ["xxh3_128:01bb", "xxh3_128:01bb", "xxh3_128:02cc"])
    assert (
        said
        == [
            "the ranks have different files; give them the same ones\n"
            "tokenizer (org/base): xxh3_128:01bb on rank 0, xxh3_128:02cc on rank 2"
        ]
        * 3
    )


def test_several_ranks_refuse_together_what_was_swapped(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe="lora_finetune_single_device")
    assert legato("run", "--config", config, "stop_after_step=1") == 0
    data = tmp_path / "orders.jsonl"
    data.write_text(data.read_text().replace("Kyoto", "Tokyo", 1))
    code, output = Launched(config, "recipe=lora_finetune_distributed").end()
    assert code == 2
    assert output.count("holds a run that was trained on other things") == 1
    assert f"datasets.0 ({data}): was 10 rows, 10 samples, xxh3_128:" in output
    assert steps_in(tmp_path / "out") == [1]
