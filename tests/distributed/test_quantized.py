"""A base in NF4 over several ranks: their parts are torchao's whole weight, cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torchao.quantization import NF4Tensor, to_nf4
from transformers import AutoModelForCausalLM

from legato.models.load import load_meta_model, split_head
from legato.models.lora import attach_lora
from legato.models.quantize import Quantizer
from legato.models.shard import Sharding, sharded_decode
from legato.models.wrap import wrap_model
from legato.parallel.mesh import MeshPlan, build_mesh
from legato.parallel.world import World
from legato.train.step import batch_loss, loss_positions
from tests.helpers import rows, spawn, tiny
from tests.helpers.sharded import DATA, Arrays, whole

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {}
ALL_TOGETHER: dict[str, Any] = {
    "checkpoint_every": 1,
    "compile_options": {"backend": "aot_eager"},
}
WHOLE_MODEL: dict[str, Any] = {"compile_options": {"scope": "model", "backend": "aot_eager"}}


def parts_and_gradients(rank: int, model: str) -> list[dict[str, Any]]:
    """What this rank holds of the weights in NF4, and the adapter's gradients."""
    found = []
    with World.join("cpu", distributed=True):
        mesh = build_mesh(MeshPlan(1, 2), device_type="cpu")
        for options in (PLAIN, ALL_TOGETHER, WHOLE_MODEL):
            base = load_meta_model(model, dtype=torch.bfloat16)
            module = attach_lora(base.model, lora_rank=4, lora_alpha=8, base_name=model).model
            decoder, head = split_head(module)
            quantizer = Quantizer(base, device=CPU, num_shards=2)
            sharding = Sharding(mesh, torch.bfloat16)
            wrap_model(module, sharding=sharding, fill_block=quantizer.quantize, **options)
            base.fill(module, device=CPU)
            parts = own_parts(module)
            batch = rows.as_batch(DATA[:2])
            batch_loss(
                batch,
                loss_positions(batch.trained),
                decode=sharded_decode(module, decoder),
                head=head,
                device=CPU,
            ).backward()
            gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            found.append({**parts, "gradients": whole(gradients)})
    return found


def own_parts(module: torch.nn.Module) -> dict[str, Any]:
    parts: Arrays = {}
    in_whole = []
    for name, parameter in module.named_parameters():
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not isinstance(local, NF4Tensor):
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parts[name] = local.quantized_data.numpy().copy()
        if local is parameter:
            in_whole.append(name)
        else:
            assert local.shape[0] * 2 == parameter.shape[0]
    return {"parts": parts, "whole": in_whole}


def test_parts_are_of_the_whole_weight_and_compiled_blocks_have_the_gradients_of_plain_ones(
    tmp_path: Path,
) -> None:
    # Half of 34 rows of 32 weights isn't a number of blocks of 64: the MLP can't be cut.
    model = tiny.write_model(tmp_path / "model", head_dim=6, intermediate_size=34)
    first, second = spawn.run(parts_and_gradients, 2, str(model), timeout_seconds=280.0)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for mine, theirs in zip(first, second, strict=True):
        assert mine["parts"].keys() == theirs["parts"].keys()
        assert len(mine["parts"]) == 2 * 7
        assert mine["whole"] == theirs["whole"]
        assert sorted(mine["whole"]) == sorted(name for name in mine["parts"] if ".mlp." in name)
        for name, part in mine["parts"].items():
            weight = reference.get_parameter(name).detach()
            expected = to_nf4(weight, 64, 1).quantized_data.numpy()
            other = theirs["parts"][name]
            found = part if name in mine["whole"] else np.concatenate([part, other])
            assert np.array_equal(found, expected), name
    plain, *others = (facts["gradients"] for facts in first)
    for other in others:
        assert plain.keys() == other.keys() != set()
        for name, gradient in plain.items():
            limit = 2.0**-6 * np.abs(gradient).max()
            assert np.abs(other[name] - gradient).max() <= limit, name
