"""Each rank reads its part of the base and no more, and together they are the base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from legato.config.schema import RunConfig
from legato.errors import ModelError
from legato.models.names import named_weights
from legato.parallel.world import World
from legato.recipes.model import build_model
from tests.helpers import families, spawn, tiny
from tests.helpers.sharded import build_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

INPUT_IDS = torch.arange(3, 15).view(2, 6)

# Tied and soft-capped, a buffer beside the embedding; scaled; transposed weights, tied; untied.
FAMILIES = ("gemma3_text", "granite", "gpt2", "mistral")


def load_on_rank(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    with World.join("cpu", distributed=True) as world:
        for values in configs:
            loaded = build_model(RunConfig.model_validate(values), world=world)
            module = loaded.trained.module
            own = sum(
                t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes
                for t in named_weights(module).values()
            )
            with torch.no_grad():
                logits = module.eval()(input_ids=INPUT_IDS, use_cache=False).logits
                halves = loaded.head(loaded.decode(INPUT_IDS))
            found.append(
                {
                    "bytes_read": loaded.bytes_read,
                    "own_bytes": own,
                    "logits": logits.float().numpy(),
                    "halves": halves.float().numpy(),
                }
            )
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_read_their_parts_and_give_the_logits_of_from_pretrained(
    tmp_path: Path, num_ranks: int
) -> None:
    folders = [families.write_family(tmp_path / family, family) for family in FAMILIES]
    # 96 rows of embedding and more: several files and an index.
    model = AutoModelForCausalLM.from_pretrained(folders[-1])
    shutil.rmtree(folders[-1])
    model.save_pretrained(folders[-1], max_shard_size="20KB")
    configs = [build_config(folder, "full", num_ranks=num_ranks) for folder in folders]
    values = [config.model_dump(mode="json", exclude_unset=True) for config in configs]
    by_rank = spawn.run(load_on_rank, num_ranks, values, timeout_seconds=280.0)
    for number, folder in enumerate(folders):
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            expected = reference(input_ids=INPUT_IDS).logits.numpy()
        size = sum(t.nbytes for p in folder.glob("*.safetensors") for t in load_file(p).values())
        reads = [facts[number]["bytes_read"] for facts in by_rank]
        assert sum(reads) == size
        assert max(reads) <= size / num_ranks * 1.1  # uneven rows go to the first ranks
        for facts in by_rank:
            assert facts[number]["bytes_read"] == facts[number]["own_bytes"]
            assert np.array_equal(facts[number]["logits"], expected), folder.name
            # The head on all positions at once is another matrix shape, so not bit-equal.
            assert np.allclose(facts[number]["halves"], expected, atol=1e-5), folder.name


def fail_on_rank(rank: int, values: dict[str, Any]) -> str:
    with World.join("cpu", distributed=True) as world:
        with pytest.raises(ModelError) as caught:
            build_model(RunConfig.model_validate(values), world=world)
        return str(caught.value)


def test_weights_that_dont_fit_are_an_error_on_every_rank(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = build_config(model, "lora", num_ranks=2)
    values = config.model_dump(mode="json", exclude_unset=True)
    messages = spawn.run(fail_on_rank, 2, values, timeout_seconds=200.0)
    assert len(set(messages)) == 1
    assert "model.norm.weight of the model isn't in the files" in messages[0]
