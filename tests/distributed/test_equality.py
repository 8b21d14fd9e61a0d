"""Loss, gradients and the update on several ranks are those of one device with the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legato.config.schema import RunConfig
from legato.parallel.world import World
from tests.helpers import spawn, tiny
from tests.helpers.sharded import Arrays, Outcome, build_config, load_and_step, outcomes_on_rank

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# The same fp32 addends in another order: a few units in the last place of the largest.
FP32_TOLERANCE = 2e-6
# Each micro-batch's gradient is rounded to 8 bits, and other ranks have other micro-batches: half
# a unit in the last place of each of three of them, of the largest value of the tensor.
BF16_TOLERANCE = 3 * 2.0**-8

# Names -> (method, changes to the model's config, changes to the run's config).
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "full": ("full", {}, {}),
    "tied": ("full", {"tie_word_embeddings": True}, {}),
    "uneven vocabulary": ("full", {"vocab_size": 271, "tie_word_embeddings": True}, {}),
    "fewer rows than ranks": ("full", {"num_key_value_heads": 1, "head_dim": 2}, {}),
    "checkpointed": ("full", {}, {"enable_activation_checkpointing": True}),
    "kept gathered": ("full", {"tie_word_embeddings": True}, {"reshard_after_forward": False}),
    "lora": ("lora", {"tie_word_embeddings": True}, {}),
    "lora checkpointed": ("lora", {}, {"enable_activation_checkpointing": 2}),
    "dora": ("lora", {}, {"use_dora": True}),
    "tied embedding and norms beside lora": (
        "lora",
        {"tie_word_embeddings": True},
        {"lora_modules_to_save": ["embed_tokens", "input_layernorm"]},
    ),
    "bf16": ("full", {"tie_word_embeddings": True}, {"dtype": "bf16"}),
    "lora bf16": ("lora", {}, {"dtype": "bf16"}),
    "dora bf16": ("lora", {}, {"dtype": "bf16", "use_dora": True}),
    "nf4": ("lora", {}, {"quantize_base": "nf4"}),
    "nf4 kept gathered": ("lora", {}, {"quantize_base": "nf4", "reshard_after_forward": False}),
    "nf4 bf16 checkpointed": (
        "lora",
        {},
        {"quantize_base": "nf4", "dtype": "bf16", "enable_activation_checkpointing": True},
    ),
    "nf4 beside whole modules": (
        "lora",
        {"tie_word_embeddings": True},
        {"quantize_base": "nf4", "lora_modules_to_save": ["embed_tokens", "input_layernorm"]},
    ),
}
# Which keys a single device doesn't have.
MESH_KEYS = ("dp_replicate", "reshard_after_forward")


def compare(
    num_ranks: int, cases: dict[str, Case], folder: Path, *, others: Sequence[RunConfig] = ()
) -> list[list[Outcome]]:
    """Hold each case's step against that of one device; what ``others`` gave, by rank."""
    configs, expected = [], []
    for number, (method, shape, changes) in enumerate(cases.values()):
        shape = {"tie_word_embeddings": False} | shape
        model = tiny.write_model(folder / f"{number}", **shape)
        config = build_config(model, method, num_ranks=num_ranks, **changes)
        configs.append(config.model_dump(mode="json", exclude_unset=True))
        alone = {key: value for key, value in changes.items() if key not in MESH_KEYS}
        one = build_config(model, method, num_ranks=1, **alone)
        expected.append(load_and_step(one, World.single("cpu")))
    configs += [config.model_dump(mode="json", exclude_unset=True) for config in others]
    by_rank: list[list[Outcome]] = spawn.run(
        outcomes_on_rank, num_ranks, configs, timeout_seconds=280.0
    )
    for number, name in enumerate(cases):
        is_bf16 = cases[name][2].get("dtype") == "bf16"
        for rank, outcomes in enumerate(by_rank):
            where = f"{name}, rank {rank} of {num_ranks}"
            assert_same_step(outcomes[number], expected[number], is_bf16=is_bf16, where=where)
    return [outcomes[len(cases) :] for outcomes in by_rank]


def assert_same_step(found: Outcome, expected: Outcome, *, is_bf16: bool, where: str) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-3 if is_bf16 else 1e-6), where
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=4e-3 if is_bf16 else 1e-6), (
        where
    )
    assert_close(found.before, expected.before, tolerance=0.0, where=where)
    tolerance = BF16_TOLERANCE if is_bf16 else FP32_TOLERANCE
    assert_close(found.gradients, expected.gradients, tolerance=tolerance, where=where)
    moved = [
        name for name in found.after if not np.array_equal(found.after[name], found.before[name])
    ]
    assert moved, where


def assert_close(found: Arrays, expected: Arrays, *, tolerance: float, where: str) -> None:
    """``tolerance`` is a share of the largest value of each tensor."""
    assert list(found) == list(expected), where
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{where}: {name}"
        limit = tolerance * np.abs(value).max()
        difference = np.abs(found[name] - value).max()
        assert difference <= limit, f"{where}: {name} differs by {difference}, {limit} is allowed"


def test_two_ranks_take_the_step_of_one_device_also_in_backward(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", tie_word_embeddings=True)
    options = {"dtype": "bf16", "enable_activation_checkpointing": True}
    options |= {"batch_size": 3, "clip_grad_norm": None}
    after = build_config(model, "full", num_ranks=2, **options)
    during = build_config(model, "full", num_ranks=2, **options, optimizer_in_backward=True)
    # What no other test here puts together.
    mixed = [
        build_config(model, "lora", num_ranks=2, **options, optimizer_in_backward=True, **more)
        for more in (
            {"quantize_base": "nf4", "use_rslora": True, "lora_modules_to_save": ["norm"]},
            {"use_dora": True, "lora_modules_to_save": ["embed_tokens"]},
        )
    ]
    for expected, found, *others in compare(2, CASES, tmp_path, others=[after, during, *mixed]):
        for other in others:
            assert other.loss == pytest.approx(expected.loss, rel=1e-2)
            moved = [n for n, t in other.before.items() if not np.array_equal(t, other.after[n])]
            assert {n for n in other.before if ".lora_A." not in n} == set(moved)
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        assert len(expected.gradients) == len(expected.after)
        assert not found.gradients  # before backward there are none, and after it none are left
        for name, value in expected.after.items():
            assert np.array_equal(found.after[name], value), name
            assert not np.array_equal(value, expected.before[name]), name


def test_three_ranks_take_the_step_of_one_device(tmp_path: Path) -> None:
    names = ("uneven vocabulary", "fewer rows than ranks", "lora", "dora bf16", "nf4")
    compare(3, {name: CASES[name] for name in names}, tmp_path)


def test_four_ranks_take_the_step_of_one_device_also_as_copies(tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in ("uneven vocabulary", "fewer rows than ranks")}
    for name, copies in (("tied", 2), ("lora bf16", 2), ("tied", 4), ("nf4", 2), ("nf4", 4)):
        method, shape, changes = CASES[name]
        cases[f"{name}, {copies} copies"] = (method, shape, changes | {"dp_replicate": copies})
    compare(4, cases, tmp_path)
