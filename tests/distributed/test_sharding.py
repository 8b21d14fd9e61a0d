"""What each rank holds of a sharded model, what travels when, and what it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.generate import continue_rows
from legato.models.load import load_meta_model, load_tokenizer, split_head
from legato.models.names import named_weights
from legato.models.shard import Sharding, free_gathered, sharded_decode
from legato.models.wrap import wrap_model
from legato.optim.build import build_optimizer
from legato.parallel.mesh import MeshPlan, build_mesh
from legato.parallel.world import World
from legato.recipes.model import LoadedModel, build_model
from legato.train.step import batch_loss, loss_positions, train_step
from tests.helpers import rows, spawn, tiny
from tests.helpers.launches import Launched
from tests.helpers.runs import steps_in, write_config
from tests.helpers.sharded import DATA, build_config, take_step, whole

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_RANKS = 2


def loss_of(loaded: LoadedModel) -> torch.Tensor:
    batch = rows.as_batch(DATA[:2])
    return batch_loss(
        batch,
        loss_positions(batch.trained),
        decode=loaded.decode,
        head=loaded.head,
        device=torch.device("cpu"),
    )


def facts_of_rank(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    facts = []
    with World.join("cpu", distributed=True) as world:
        for values in configs:
            loaded = build_model(RunConfig.model_validate(values), world=world)
            weights = named_weights(loaded.trained.module)
            parts = {n: t for n, t in weights.items() if isinstance(t, DTensor)}
            facts.append(
                {
                    "whole": sorted(weights.keys() - parts.keys()),
                    "rows": {n: (t.to_local().shape[0], t.shape[0]) for n, t in parts.items()},
                    "dtypes": {
                        (str(t.dtype), t.requires_grad, name in loaded.stored_masters)
                        for name, t in parts.items()
                    },
                    "sync": gradients_by_sync(loaded),
                    "stale": losses_around_a_change(loaded),
                }
            )
    return facts


def gradients_by_sync(loaded: LoadedModel) -> list[bool]:
    """Whether the parts have gradients after a micro-batch, and after the last one."""
    assert loaded.set_gradient_sync is not None
    there = []
    for is_last in (False, True):
        loaded.set_gradient_sync(is_last)
        loss_of(loaded).backward()
        there.append(all(p.grad is not None for p in loaded.parameters.values()))
    for parameter in loaded.parameters.values():
        parameter.grad = None
    return there


@torch.no_grad()
def losses_around_a_change(loaded: LoadedModel) -> list[float]:
    """Losses without backward: as loaded, with other weights in the parts, and after freeing."""
    losses = [loss_of(loaded).item()]
    for parameter in loaded.parameters.values():
        parameter.add_(0.25)
    free_gathered(loaded.trained.module)
    losses.append(loss_of(loaded).item())
    return losses


def test_each_rank_holds_its_rows_and_trains_on_what_it_is_told(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    configs = [
        build_config(model, method, num_ranks=NUM_RANKS, dtype=dtype).model_dump(
            mode="json", exclude_unset=True
        )
        for method, dtype in (("full", "bf16"), ("lora", "bf16"), ("full", "fp32"))
    ]
    by_rank = spawn.run(facts_of_rank, NUM_RANKS, configs, timeout_seconds=280.0)
    for full, lora, fp32 in by_rank:
        for facts in (full, lora, fp32):
            assert facts["whole"] == []
            shares = {name: (-(-n // 2), n // 2) for name, (_, n) in facts["rows"].items()}
            assert all(mine in shares[name] for name, (mine, _) in facts["rows"].items())
            before, after = facts["stale"]
            assert abs(after - before) > 1e-2
        # fp32 parts are their own masters; frozen ones stay in bf16; fp32 needs none.
        assert full["dtypes"] == {("torch.float32", True, True)}
        assert lora["dtypes"] == {("torch.bfloat16", False, False), ("torch.float32", True, True)}
        assert fp32["dtypes"] == {("torch.float32", True, False)}
        # Full: each rank keeps its part between micro-batches, not the whole gradient.
        assert full["sync"] == [True, True]
        # LoRA: nothing travels before the last one.
        assert lora["sync"] == [False, True]


def update_on_rank(rank: int, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Weights before and after an update without masters, and the gradients between."""
    config = RunConfig.model_validate(values)
    with World.join("cpu", distributed=True) as world:
        loaded = build_model(config, world=world)
        before = whole(loaded.parameters)
        gradients: dict[str, Any] = {}
        train_step(
            rows.as_batches(DATA, 2),
            model=loaded.trainable(),
            optimizer=build_optimizer(loaded.parameters, lr=1e-3, stochastic_rounding=True),
            world=world,
            lr=1e-3,
            step=1,
            seed=0,
            before_update=lambda: gradients.update(
                whole({n: p.grad for n, p in loaded.parameters.items() if p.grad is not None})
            ),
        )
        return [before, gradients, whole(loaded.parameters)]


def test_weights_without_masters_are_updated_by_stochastic_rounding(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    config = build_config(model, "full", num_ranks=2, dtype="bf16", master_weights="none")
    values = config.model_dump(mode="json", exclude_unset=True)
    first, second = spawn.run(update_on_rank, NUM_RANKS, values, timeout_seconds=280.0)
    before, gradients, after = first
    lost = []
    for name, weight in before.items():
        assert np.array_equal(after[name], second[2][name]), name
        # Adam's first update is the rate, whatever the gradient's size.
        wanted = weight - 1e-3 * np.sign(gradients[name])
        sure = np.abs(gradients[name]) > 1e-4  # far above Adam's eps
        step = 2.0**-7 * np.abs(wanted) + 2e-7
        assert np.all(np.abs(after[name] - wanted)[sure] <= step[sure]), name
        lost.append(((after[name] - wanted) / step)[sure].ravel())
    assert abs(np.concatenate(lost).mean()) < 0.01  # half a step the other way if it were rounded


def test_cpu_offload_of_what_is_on_the_cpu_is_refused() -> None:
    config = build_config(Path("nowhere"), "full", num_ranks=2, cpu_offload=True)
    with pytest.raises(ConfigError, match="cpu_offload: this run computes on the cpu"):
        build_model(config, world=World.single("cpu"))


def test_a_world_of_one_is_the_single_device(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    many = build_model(build_config(model, "full", num_ranks=2), world=World.single("cpu"))
    assert many.set_gradient_sync is None
    assert not any(isinstance(p, DTensor) for p in many.parameters.values())


def gradients_by_backend(rank: int, model: str) -> list[Any]:
    """Gradients of one micro-batch: plain blocks, then checkpointed and compiled ones."""
    found = []
    with World.join("cpu", distributed=True):
        mesh = build_mesh(MeshPlan(1, NUM_RANKS), device_type="cpu")
        for options in ({}, {"checkpoint_every": 1, "compile_options": {"backend": "aot_eager"}}):
            base = load_meta_model(model, dtype=torch.float32)
            decoder, head = split_head(base.model)
            wrap_model(base.model, sharding=Sharding(mesh, torch.float32), **options)
            base.fill(base.model, device=torch.device("cpu"))
            batch = rows.as_batch(DATA[:2])
            batch_loss(
                batch,
                loss_positions(batch.trained),
                decode=sharded_decode(base.model, decoder),
                head=head,
                device=torch.device("cpu"),
            ).backward()
            found.append(whole({n: p.grad for n, p in base.model.named_parameters()}))
    return found


def test_compiled_and_checkpointed_blocks_are_gathered_like_plain_ones(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    plain, compiled = spawn.run(gradients_by_backend, 2, str(model), timeout_seconds=280.0)[0]
    assert plain.keys() == compiled.keys()  # compilation put nothing into the names
    for name, gradient in plain.items():
        limit = 1e-5 * np.abs(gradient).max()
        assert np.abs(compiled[name] - gradient).max() <= limit, name


def test_a_mesh_that_does_not_fit_the_processes_is_refused_by_its_keys(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path, model=tiny_model_dir, recipe="full_finetune_distributed", dp_replicate=3
    )
    code, output = Launched(config).fail()
    assert code == 2
    assert "dp_replicate: 3 copies don't divide 2 processes. Choose one of 1, 2" in output
    assert not steps_in(tmp_path / "out")


PROMPTS = [[5, 9, 2], [7, 7, 1, 30, 4], [8]]


def answers_on_rank(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each config two steps without a word, and two with answers before and between them."""
    found = []
    with World.join("cpu", distributed=True) as world:
        for values in configs:
            runs = []
            for speaks in (False, True):
                config = RunConfig.model_validate(values)
                loaded = build_model(config, world=world)
                optimizer = build_optimizer(loaded.parameters, lr=config.optimizer.lr)
                answers = []
                for step in (1, 2):
                    if speaks:
                        answers.append(answers_of(loaded, Path(config.model)))
                    outcome = take_step(loaded, optimizer, world, step=step)
                runs.append((answers, outcome.after))
            (_, silent), (answers, spoken) = runs
            same = [name for name in silent if np.array_equal(silent[name], spoken[name])]
            found.append({"answers": answers, "same": same == list(silent)})
    return found


def answers_of(loaded: LoadedModel, folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    module = loaded.trained.module
    return continue_rows(module, tokenizer, PROMPTS, max_new_tokens=6, batch_size=2)


def test_a_sharded_model_answers_as_a_whole_one_and_trains_on_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    configs, expected = [], []
    for method, tied in (("full", True), ("lora", False)):
        folder = tiny.write_model(tmp_path / method, tie_word_embeddings=tied)
        fast = {"optimizer": {"name": "adamw", "lr": 0.1}}
        config = build_config(folder, method, num_ranks=NUM_RANKS, **fast)
        configs.append(config.model_dump(mode="json", exclude_unset=True))
        whole_model = build_model(
            build_config(folder, method, num_ranks=1), world=World.single("cpu")
        )
        expected.append(answers_of(whole_model, folder))
    first, second = spawn.run(answers_on_rank, NUM_RANKS, configs)
    assert first == second
    for found, answers in zip(first, expected, strict=True):
        assert found["same"]
        assert found["answers"][0] == answers
        assert found["answers"][1] != answers  # the step has changed what it says
