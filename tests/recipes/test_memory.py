"""What a run will keep in memory, said before it is loaded, is what it keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from legato.checkpoint import ModelPart, OptimizerPart
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.plan import plan_save
from legato.checkpoint.staging import Stager
from legato.checkpoint.tensors import packed_pieces, state_tensors
from legato.errors import ConfigError
from legato.models.names import named_weights
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.memory import (
    Memory,
    MemoryNeeds,
    check_memory,
    estimate_memory,
    free_memory,
)
from legato.recipes.model import DTYPES, build_model
from tests.helpers.runs import RECIPES, legato, write_config
from tests.helpers.sharded import build_config, take_step

GB = 1_000_000_000
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full fp32": ("full", {}),
    "full bf16": ("full", {"dtype": "bf16"}),
    "full bf16 alone": ("full", {"dtype": "bf16", "master_weights": "none"}),
    "sgd": ("full", {"optimizer": {"name": "sgd", "lr": 1}}),
    "8 bit": ("full", {"dtype": "bf16", "optimizer": {"name": "adamw_8bit", "lr": 1}}),
    "lora": ("lora", {"dtype": "bf16", "use_dora": True}),
    "embedding": ("lora", {"dtype": "bf16", "lora_modules_to_save": ["embed_tokens"]}),
}


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_a_run_keeps_after_a_step(case: str, tiny_model_dir: Path) -> None:
    method, changes = CASES[case]
    config = build_config(tiny_model_dir, method, num_ranks=1, **changes)
    world = World.single("cpu")
    needs = estimate_memory(config, world=world)

    loaded = build_model(config, world=world)
    rounds = config.dtype == "bf16" and config.master_weights == "none"
    optimizer = build_optimizer(
        loaded.parameters, name=config.optimizer.name, lr=1e-3, stochastic_rounding=rounds
    )
    take_step(loaded, optimizer, world)
    states = [optimizer.state[parameter] for parameter in loaded.parameters.values()]
    moments = [t for state in states for n, t in state_tensors(state) if n != "step"]
    module, trained = loaded.trained.module, loaded.trained
    assert needs.weights == num_bytes(named_weights(module).values())
    assert needs.gradients == num_bytes(loaded.parameters.values())
    assert needs.masters == num_bytes(loaded.masters.copies.values() if loaded.masters else ())
    assert needs.moments == num_bytes(moments)

    part = ModelPart(
        tensors=named_weights(module, trainable_only=trained.kind == "adapter"),
        kind=trained.kind,
        keys=trained.keys,
        twins=trained.twins,
        file_dtype=DTYPES[config.dtype],
        masters=loaded.stored_masters,
    )
    saved = {"model": part, "optimizer": OptimizerPart(optimizer, names=loaded.parameters)}
    staged = Stager(plan_save(sort_parts(saved)).sources).staged_bytes
    # The optimizer's counters, four bytes each, aren't counted.
    assert 0 <= staged - needs.staging <= 4 * len(loaded.parameters)


def test_a_base_in_4_bits_is_counted_as_such(tiny_model_dir: Path) -> None:
    config = build_config(
        tiny_model_dir, "lora", num_ranks=1, quantize_base="nf4", lora_modules_to_save=["norm"]
    )
    world = World.single("cpu")
    needs = estimate_memory(config, world=world)
    module = build_model(config, world=world).trained.module
    kept = 0
    for parameter in named_weights(module).values():
        pieces = packed_pieces(parameter)
        kept += num_bytes(pieces.values() if pieces else [parameter])
    # The table of 16 values and a few scalars of each weight aren't counted.
    assert 0 <= kept - needs.weights < 14 * 100


def test_ranks_share_it_and_updates_in_backward_need_one_gradient(tiny_model_dir: Path) -> None:
    world = replace(World.single("cpu"), world_size=2)
    bf16 = {"dtype": "bf16"}
    alone = estimate_memory(
        build_config(tiny_model_dir, "full", num_ranks=1, **bf16), world=World.single("cpu")
    )
    needs = estimate_memory(build_config(tiny_model_dir, "full", num_ranks=2, **bf16), world=world)
    assert (needs.masters, needs.moments) == (0, alone.moments // 2)
    assert needs.gradients == alone.gradients // 2
    # Half of the fp32 weights, and in bf16 the embedding, the norm and one of two blocks.
    gathered = needs.weights - alone.masters // 2
    assert alone.weights // 2 < gathered < alone.weights
    options = {"optimizer_in_backward": True, "clip_grad_norm": None}
    during = estimate_memory(
        build_config(tiny_model_dir, "full", num_ranks=1, **options), world=World.single("cpu")
    )
    assert during.gradients == 272 * 32 * 4  # the embedding's


def test_what_cannot_fit_is_refused_where_it_would_lie() -> None:
    needs = MemoryNeeds(
        weights=2 * GB, gradients=4 * GB, masters=4 * GB, moments=8 * GB, staging=12 * GB
    )
    with pytest.raises(ConfigError) as caught:
        check_memory(needs, Memory(host=17 * GB))
    told = str(caught.value)
    assert (
        "memory: training keeps 18.0 GB (weights 2.00 GB, gradients 4.00 GB, master weights" in told
    )
    assert "17.0 GB of host memory are free" in told
    with pytest.raises(ConfigError, match=r"17\.0 GB of device memory are free"):
        check_memory(needs, Memory(host=100 * GB, device=17 * GB))
    check_memory(needs, Memory(host=100 * GB, device=18 * GB))
    with pytest.raises(ConfigError, match=r"17\.0 GB of host memory are free"):
        check_memory(needs, Memory(host=17 * GB, device=100 * GB), cpu_offload=True)


@pytest.mark.parametrize(
    ("free", "left"), [(Memory(29 * GB), "11.0 GB"), (Memory(11 * GB, 80 * GB), "11.0 GB")]
)
def test_a_staged_copy_that_does_not_fit_is_told(
    free: Memory, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    needs = MemoryNeeds(
        weights=2 * GB, gradients=4 * GB, masters=4 * GB, moments=8 * GB, staging=12 * GB
    )
    check_memory(needs, free)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert f"takes 12.0 GB of host memory, {left} are left" in record.getMessage()


def test_validate_full_tells_it_before_the_model_is_loaded(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    assert legato("validate", config, "--full") == 0
    assert "activations come on top" in " ".join(capsys.readouterr().err.split())

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    monkeypatch.setattr("legato.recipes.rehearsal.build_parts", None)  # not reached
    assert legato("validate", config, "--full") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "memory: training keeps 4" in told
    assert "100 kB of host memory are free" in told
    assert free_memory(torch.device("cpu"), num_sharing=4) == Memory(host=25_000)
