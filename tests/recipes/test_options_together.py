"""Any two options of model, method and memory: the step they take, or the reason why not."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from legato.parallel.world import World
from tests.helpers import tiny
from tests.helpers.sharded import DATA, build_config, build_run, take_step

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bf16"},
    "rounded": {"dtype": "bf16", "master_weights": "none"},
    "checkpointed": {"enable_activation_checkpointing": True},
    "every second": {"enable_activation_checkpointing": 2},
    "8 bit": {"optimizer": {"name": "adamw_8bit", "lr": 1e-3}},
    "in backward": {
        "optimizer_in_backward": True,
        "clip_grad_norm": None,
        "batch_size": len(DATA),  # one micro-batch
    },
    "nf4": {"quantize_base": "nf4"},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "whole": {"lora_modules_to_save": ["embed_tokens", "norm"]},
}
OTHER_GRADIENTS = {"dora", "rslora", "whole"}  # what trains, or how strongly, is another thing
LORA_ONLY = {"nf4", *OTHER_GRADIENTS}


def reason(method: str, pair: set[str]) -> str | None:
    """Why two options don't go together; None: they do."""
    if method == "full" and pair & LORA_ONLY:
        return "lora_finetune_single_device"
    if method == "lora" and "rounded" in pair:
        return "an adapter's fp32 copy is small"
    if pair == {"dora", "nf4"}:
        return "DoRA reads the base's weights as numbers"
    return None


@pytest.mark.parametrize("method", ["full", "lora"])
def test_any_two_options_take_the_step_of_a_plain_run_or_are_refused_with_a_reason(
    method: str, tmp_path: Path
) -> None:
    # A vocabulary that is larger than the tokenizer's, and tied.
    model = tiny.write_model(tmp_path / "model", vocab_size=300)
    world = World.single("cpu")
    plain = None
    for pair in combinations(OPTIONS, 2):
        first, second = pair
        changes = OPTIONS[first] | OPTIONS[second]
        refusal = reason(method, set(pair))
        if refusal is not None:
            with pytest.raises(ValidationError, match=refusal):
                build_config(model, method, num_ranks=1, **changes)
            continue
        config = build_config(model, method, num_ranks=1, **changes)
        batch_size = max(2, config.batch_size)
        parts = build_run(config, world, batch_size=batch_size)
        outcome = take_step(parts.model, parts.optimizer, world, batch_size=batch_size)
        plain = plain or outcome
        # The loss before the update: what the options change of it is rounding.
        assert outcome.loss == pytest.approx(plain.loss, rel=1e-2), pair
        if OTHER_GRADIENTS.isdisjoint(pair):
            assert outcome.grad_norm == pytest.approx(plain.grad_norm, rel=0.1), pair
        moved = {
            name
            for name, before in outcome.before.items()
            if not np.array_equal(outcome.after[name], before)
        }
        at_rest = set(outcome.before) - moved
        # B is zero before its first update, and A gets no gradient until then.
        assert {name for name in at_rest if ".lora_A." not in name} == set(), pair
