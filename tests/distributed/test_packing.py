"""Packed rows on several ranks: the rows, losses and weights of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launches import Launched
from tests.helpers.runs import RECIPES, legato, losses, tensors, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_two_ranks_train_on_the_packs_of_one_device(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Over two epochs, so that packs change on every rank alike."""
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=RECIPES[0],
        packing=True,
        batch_size=2,
        gradient_accumulation_steps=1,
        epochs=2,
        val_set_size=2,
    )
    alone = tmp_path / "alone"
    assert legato("run", "--config", config, f"output_dir={alone}") == 0
    run = Launched(config, "recipe=full_finetune_distributed", "batch_size=1")
    run.succeed()
    both = losses(run.output_dir)
    assert len(both) > 3
    assert both == pytest.approx(losses(alone), rel=1e-5)
    last = f"step_{max(both)}"
    found, expected = tensors(run.output_dir / last), tensors(alone / last)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].sub(tensor).abs().max() <= 1e-4 * tensor.abs().max() + 1e-6, key
