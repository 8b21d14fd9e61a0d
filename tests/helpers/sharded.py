"""One optimizer step of a tiny model by a config, on one device or on this rank of several."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from legato.config.schema import RunConfig
from legato.data.loader import Loader
from legato.models.load import load_tokenizer
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.data import RunData
from legato.recipes.model import LoadedModel, build_model
from legato.recipes.parts import RunParts, build_parts
from legato.train.in_backward import InBackward
from legato.train.state import TrainState
from legato.train.step import train_step
from legato.train.trainer import TrainableModel
from tests.helpers import rows

Arrays = dict[str, np.ndarray[Any, Any]]

# Six rows in micro-batches of two: on four ranks two of them get one row and an empty micro-batch.
DATA = rows.random_rows([9, 14, 5, 11, 7, 13], vocab_size=256)


@dataclass(frozen=True)
class Outcome:
    """What a step saw, the same on every rank; tensors whole, as arrays (they travel)."""

    loss: float
    grad_norm: float
    gradients: Arrays
    before: Arrays
    after: Arrays
    bytes_read: int | None


def build_config(model: Path, method: str, *, num_ranks: int, **changes: Any) -> RunConfig:
    """A config of ``full`` or ``lora``: the distributed recipe where there are several ranks."""
    where = "distributed" if num_ranks > 1 else "single_device"
    values: dict[str, Any] = {
        "recipe": f"{method}_finetune_{where}",
        "model": str(model),
        "datasets": [{"path": "unused.jsonl", "type": "alpaca"}],
        "output_dir": "unused",
        "dtype": "fp32",
        "device": "cpu",
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    if method == "lora":
        values |= {"lora_rank": 3, "lora_alpha": 6}
    return RunConfig.model_validate(values | changes)


@functools.cache
def cached_tokenizer(folder: str) -> Any:
    return load_tokenizer(folder)


def build_run(
    config: RunConfig, world: World, *, batch_size: int = 2, state: TrainState | None = None
) -> RunParts:
    """A run's parts as the recipes build them, on ``DATA``. Collective on several ranks."""
    data = rows.as_data(DATA)
    loader = Loader(
        data,
        global_batch_size=len(DATA),
        batch_size=batch_size,
        seed=0,
        pad_id=rows.PAD_ID,
        rank=world.rank,
        world_size=world.world_size,
    )
    tokenizer = cached_tokenizer(config.model)
    run_data = RunData(
        train=data,
        held_out=None,
        loader=loader,
        eval_loader=None,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        max_seq_len=16,
        inputs={},
    )
    return build_parts(config, run_data, world=world, state=state or TrainState())


def load_and_step(config: RunConfig, world: World) -> Outcome:
    """Load the model and take one step with AdamW. Collective on several ranks."""
    loaded = build_model(config, world=world)
    optimizer = build_optimizer(loaded.parameters, lr=config.optimizer.lr)
    return take_step(
        loaded,
        optimizer,
        world,
        batch_size=max(2, config.batch_size),
        in_backward=config.optimizer_in_backward,
    )


def take_step(
    loaded: LoadedModel | TrainableModel,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    step: int = 1,
    batch_size: int = 2,
    in_backward: bool = False,
    one_form: bool = False,
) -> Outcome:
    """Take ``step``: all of ``DATA``, in that epoch's order. Collective on several ranks.

    ``one_form``: every micro-batch has the same shape, as in a run that is compiled.
    """
    lr = optimizer.param_groups[0]["lr"]
    loader = Loader(
        rows.as_data(DATA),
        global_batch_size=len(DATA),
        batch_size=batch_size,
        seed=0,
        pad_id=rows.PAD_ID,
        rank=world.rank,
        world_size=world.world_size,
        length_buckets=[16] if one_form else None,
        fill_rows=one_form,
    )
    parameters = loaded.parameters
    before = whole(parameters)
    gradients: Arrays = {}
    if isinstance(loaded, TrainableModel):
        model = loaded
    else:
        updates = None
        if in_backward:
            updates = InBackward(optimizer, parameters=parameters, masters=loaded.masters)
        model = loaded.trainable(in_backward=updates)

    def look() -> None:
        gradients.update(whole({n: p.grad for n, p in parameters.items() if p.grad is not None}))

    result = train_step(
        loader.micro_batches(step),
        model=model,
        optimizer=optimizer,
        world=world,
        lr=lr,
        step=step,
        seed=0,
        before_update=look,
    )
    return Outcome(
        loss=result.loss,
        grad_norm=result.grad_norm,
        gradients=gradients,
        before=before,
        after=whole(parameters),
        bytes_read=loaded.bytes_read if isinstance(loaded, LoadedModel) else None,
    )


def whole(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Collective: every tensor gathered by torch itself, in fp32."""
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: t.detach().float().cpu().numpy().copy() for name, t in found.items()}


def outcomes_on_rank(rank: int, configs: Sequence[dict[str, Any]]) -> list[Outcome]:
    """For ``spawn.run``: one outcome for each config, given as JSON."""
    with World.join("cpu", distributed=True) as world:
        return [load_and_step(RunConfig.model_validate(values), world) for values in configs]
