"""A step folder doesn't tell how many ranks wrote it, and any number of them goes on from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from legato.checkpoint import Checkpointer, ModelPart, OptimizerPart
from legato.config.schema import RunConfig
from legato.models.names import named_weights
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.model import DTYPES, build_model
from tests.helpers import documents, spawn, tiny
from tests.helpers.loops import Counter
from tests.helpers.sharded import Arrays, build_config, take_step, whole

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# What a folder is called, and its config's changes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full_fp32": ("full", {}),
    "full_bf16": ("full", {"dtype": "bf16"}),
    "lora_fp32": ("lora", {}),
    "lora_bf16": (
        "lora",
        {"dtype": "bf16", "use_dora": True, "lora_modules_to_save": ["embed_tokens"]},
    ),
    "nf4_bf16": (
        "lora",
        {"dtype": "bf16", "quantize_base": "nf4", "lora_modules_to_save": ["embed_tokens"]},
    ),
}


# What JSON and numbers travel as.
WORDS = {torch.uint8, torch.int64, torch.float64}


def next_step(config: RunConfig, output_dir: Path, step: int, world: World) -> dict[str, Any]:
    """Restore what there is, take ``step`` and save it: the loss, and what was restored."""
    loaded = build_model(config, world=world)
    module, trained = loaded.trained.module, loaded.trained
    optimizer = build_optimizer(loaded.parameters, lr=config.optimizer.lr)
    state = {
        "model": ModelPart(
            tensors=named_weights(module, trainable_only=trained.kind == "adapter"),
            kind=trained.kind,
            keys=trained.keys,
            twins=trained.twins,
            file_dtype=DTYPES[config.dtype],
            masters=loaded.stored_masters,
            files=trained.files,
        ),
        "optimizer": OptimizerPart(optimizer, names=loaded.parameters),
        "trainer": Counter(step),
    }
    with Checkpointer(str(output_dir), process_group=world.group) as checkpointer:
        with no_gather():
            checkpointer.restore(state)
        part = state["model"]
        restored = {f"model/{key}": part.tensors[n] for key, n in part.names_by_key().items()}
        restored |= {f"master/{name}": t for name, t in loaded.stored_masters.items()}
        restored |= {
            f"{moment}/{name}": value
            for name, parameter in loaded.parameters.items()
            for moment, value in optimizer.state[parameter].items()
        }
        arrays = whole(restored)
        outcome = take_step(loaded, optimizer, world, step=step)
        with no_gather():
            pending = checkpointer.save(state, step=step)
            pending.result()
    return {"loss": outcome.loss, "restored": arrays, "staged_bytes": pending.staged_bytes}


@contextmanager
def no_gather() -> Iterator[None]:
    """Ranks exchange words, numbers and JSON, and nothing of a weight, frozen or not."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor travels between ranks")

    def of_words(send: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **options: Any) -> Any:
            flat = torch.utils._pytree.tree_leaves([args, options])
            dtypes = {each.dtype for each in flat if isinstance(each, torch.Tensor)}
            assert dtypes <= WORDS, f"tensors of {dtypes} travel between ranks"
            return send(*args, **options)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for name in ("full_tensor", "redistribute"):
            patch.setattr(DTensor, name, refuse)
        for name in ("all_gather_tensor", "all_reduce", "broadcast"):
            patch.setattr(funcol, name, refuse)
        for name in ("all_gather_into_tensor", "gather", "scatter", "send", "recv", "isend"):
            patch.setattr(dist, name, refuse)
        for name in ("all_gather", "all_reduce", "broadcast"):
            patch.setattr(dist, name, of_words(getattr(dist, name)))
        yield


def assert_staged_in_shares(staged_bytes: list[int], step_folder: Path) -> None:
    """Of an adapter in fp32: each rank stages its rows of every tensor, and no byte comes twice."""
    tensors = {
        path.name + key: tensor
        for path in step_folder.rglob("*.safetensors")
        for key, tensor in load_file(path).items()
    }
    assert sum(staged_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    scalars = sum(tensor.nbytes for tensor in tensors.values() if not tensor.dim())
    for rank, staged in enumerate(staged_bytes):
        shares = [t.chunk(len(staged_bytes)) for t in tensors.values() if t.dim()]
        own = sum(share[rank].nbytes for share in shares if rank < len(share))
        assert own <= staged <= own + scalars


def steps_on_rank(rank: int, configs: list[dict[str, Any]], folder: str, step: int) -> list[Any]:
    with World.join("cpu", distributed=True) as world:
        return [
            next_step(RunConfig.model_validate(values), Path(folder) / name, step, world)
            for name, values in zip(CASES, configs, strict=True)
        ]


def on_ranks(num_ranks: int, model: Path, folder: Path, *, step: int) -> list[Any]:
    """Each case's step on so many ranks; rank 0's results, after every rank agreed with it."""
    configs = [
        build_config(model, method, num_ranks=num_ranks, **changes)
        for method, changes in CASES.values()
    ]
    if num_ranks == 1:
        cases = zip(CASES, configs, strict=True)
        return [next_step(c, folder / name, step, World.single("cpu")) for name, c in cases]
    values = [config.model_dump(mode="json", exclude_unset=True) for config in configs]
    first, *others = spawn.run(
        steps_on_rank, num_ranks, values, str(folder), step, timeout_seconds=600.0
    )
    number = list(CASES).index("lora_fp32")
    assert_staged_in_shares(
        [theirs[number]["staged_bytes"] for theirs in (first, *others)],
        folder / "lora_fp32" / f"step_{step}",
    )
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_same(theirs["restored"], mine["restored"])
            assert theirs["loss"] == mine["loss"]
    return list(first)


def stored(step_folder: Path) -> Arrays:
    """Every tensor of a step folder, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(step_folder.rglob("*.safetensors")):
        prefix = "model/" if path.parent == step_folder else ""
        found |= {f"{prefix}{key}": tensor for key, tensor in load_file(path).items()}
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert different == []


def rounded(arrays: Arrays, name: str) -> Arrays:
    """What a weight file holds of fp32 masters in memory."""
    if not name.endswith("bf16"):
        return arrays
    return {
        key: torch.from_numpy(value).bfloat16().float().numpy()
        if key.startswith("model/")
        else value
        for key, value in arrays.items()
    }


@pytest.mark.timeout(1800)
def test_two_ranks_hand_over_to_one_three_and_four_and_take_it_back(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", vocab_size=271)
    began = tmp_path / "ranks_2"
    on_ranks(2, model, began, step=1)
    losses: dict[int, list[float]] = {}
    for num_ranks in (2, 1, 3, 4):
        folder = tmp_path / f"ranks_2_{num_ranks}"
        shutil.copytree(began, folder, symlinks=True)
        results = on_ranks(num_ranks, model, folder, step=2)
        for name, result in zip(CASES, results, strict=True):
            assert_same(rounded(result["restored"], name), stored(began / name / "step_1"))
        losses[num_ranks] = [result["loss"] for result in results]
    for num_ranks in (1, 3, 4):
        for name, loss, expected in zip(CASES, losses[num_ranks], losses[2], strict=True):
            # bf16 activations of other micro-batches: padded to other lengths, rounded otherwise.
            assert loss == pytest.approx(expected, abs=1e-3 if "bf16" in name else 1e-5), name
    back = tmp_path / "ranks_2_3"
    for name, result in zip(CASES, on_ranks(2, model, back, step=3), strict=True):
        assert_same(rounded(result["restored"], name), stored(back / name / "step_2"))


@pytest.mark.timeout(900)
def test_a_step_folder_of_two_ranks_is_that_of_one_device_byte_for_byte(tmp_path: Path) -> None:
    """At equal weights: both save step 1, and one device saves step 2 of what two ranks saved."""
    model = tiny.write_model(tmp_path / "model")
    on_ranks(2, model, tmp_path / "two", step=1)
    on_ranks(1, model, tmp_path / "one", step=1)
    for name in CASES:
        one, two = (tmp_path / who / name / "step_1" for who in ("one", "two"))
        files = {p.relative_to(one) for p in one.rglob("*") if p.is_file()}
        extra = {p.relative_to(two) for p in two.rglob("*") if p.is_file()} - files
        assert all(path.name.startswith("optimizer-") for path in extra), name
        for path in files:
            if path.suffix == ".safetensors" and path.parts[0] != "state":
                # The values differ by the order of sums, the header and the size don't.
                assert header(one / path) == header(two / path), name
            elif path.suffix == ".json" and path.name not in ("manifest.json", "trainer.json"):
                assert (one / path).read_bytes() == (two / path).read_bytes(), path
        assert stored(one).keys() == stored(two).keys()
        for key, value in stored(one).items():
            assert stored(two)[key].shape == value.shape

        assert_read_by_the_docs_reader(two)


def assert_read_by_the_docs_reader(folder: Path) -> None:
    """What docs/checkpoints.md says is enough to read what two ranks wrote, every byte checked."""
    manifest, found = documents.format_reader().read_step(folder)
    assert manifest["world_size"] == 2
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}
    assert found.keys() == files
    assert sum(name.startswith("state/optimizer-") for name in files) >= 2
    # Of each rank's slices, in every file.
    assert min(len(manifest["files"][name]["slices"]) for name in files) > 2
    for name, arrays in found.items():
        expected = load_file(folder / name)
        assert arrays.keys() == expected.keys()
        for key, value in expected.items():
            bits = torch.from_numpy(arrays[key].copy()).view(value.dtype).reshape(value.shape)
            assert torch.equal(bits, value), key
    moments = {key for name in files if name.startswith("state/") for key in found[name]}
    told = json.loads((folder / "state" / "trainer.json").read_text())["optimizer"]
    names = [name for group in told["groups"] for name in group["params"]]
    assert {f"exp_avg/{name}" for name in names} == {k for k in moments if k.startswith("exp_avg/")}


def header(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]
