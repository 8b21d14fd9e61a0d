"""What goes ahead all the same, and is said; and a rank that no memory holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.config.load import load_config
from legato.errors import ConfigError
from legato.models.load import load_model
from legato.recipes.advice import advise
from legato.recipes.methods import METHODS
from tests.helpers.runs import RECIPES, legato, write_config

FULL, LORA = RECIPES


def advice(folder: Path, model: Path, recipe: str, *changes: str) -> list[str]:
    config = load_config(str(write_config(folder, model=model, recipe=recipe)), changes).config
    module = METHODS[recipe](load_model(model, dtype=torch.float32), config).module
    return advise(config, module=module, total_steps=3)


def test_an_ordinary_run_is_told_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    assert advice(tmp_path, tiny_model_dir, FULL) == []
    assert advice(tmp_path, tiny_model_dir, LORA, "lora_rank=16") == []


def test_a_warm_up_longer_than_the_run_is_told_with_the_highest_rate(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = "lr_scheduler.num_warmup_steps=10"
    # Step 3, the last one, is after 2 of 10 steps of growth to 5e-3.
    [told] = advice(tmp_path, tiny_model_dir, FULL, change)
    assert told.startswith(
        "lr_scheduler.num_warmup_steps: the warm-up of 10 steps isn't over when the run ends, "
        "after 3 steps: the highest learning rate will be 0.001, not 0.005. Set fewer"
    )
    config = write_config(tmp_path, model=tiny_model_dir, recipe=FULL)
    assert legato("validate", config, change, "--full") == 0
    assert f"warning: {told}" in capsys.readouterr().err


def test_a_rank_above_a_layers_features_is_told_with_the_layer(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    [told] = advice(tmp_path, tiny_model_dir, LORA, "lora_rank=20")
    assert told.startswith(
        "lora_rank: 20 is more than the 16 features of model.layers.0.self_attn.k_proj: "
    )


def test_a_rank_that_no_memory_holds_is_refused_before_anything_is_made(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    # Of each block: q and o 64, k and v 48, gate, up and down 96 features; two blocks.
    with pytest.raises(
        ConfigError,
        match=r"lora_rank: 1,000,000,000 makes an adapter of 1,024,000,000,000 parameters, "
        r"4,096.0 GB, and .* GB of memory are free",
    ):
        advice(tmp_path, tiny_model_dir, LORA, "lora_rank=1000000000")
