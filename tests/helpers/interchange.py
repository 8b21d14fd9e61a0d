"""One training state in many forms: how it is compiled, checkpointed, sharded, trained.

Each form is built as the recipes build it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from legato.checkpoint import Checkpointer
from legato.config.schema import RunConfig
from legato.models.compile import wrap_compile
from legato.models.head import Decoder
from legato.models.names import named_weights
from legato.models.shard import sharded_decode
from legato.parallel.world import World
from legato.train.state import TrainState
from legato.train.trainer import TrainableModel
from tests.helpers.sharded import Arrays, build_config, build_run, whole

COMPILE: dict[str, Any] = {
    "eager": False,
    "block": True,
    "model": {"scope": "model"},
    # By hand, as somebody does who calls torch.compile: see wrap_decoder.
    "wrap_compile": False,
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"lora_dropout": 0.1}),
    "qlora": ("lora", {"lora_dropout": 0.1, "quantize_base": "nf4"}),
}
# bf16 with fp32 masters: the weight file holds their rounded values, state/ the masters.
ROUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "full_bf16": ("full", {"dtype": "bf16"}),
    "lora_bf16": ("lora", {"dtype": "bf16"}),
    "qlora_bf16": ("lora", {"dtype": "bf16", "quantize_base": "nf4"}),
}
ALL_METHODS = METHODS | ROUNDED


@dataclass(frozen=True)
class Form:
    """One way to train; ``num_ranks`` 1 is a single device, more are FSDP2."""

    how: str
    checkpointed: bool
    num_ranks: int
    method: str
    device: str = "cpu"

    def __str__(self) -> str:
        words = (self.how, "ac" * self.checkpointed, f"x{self.num_ranks}", self.method)
        return "-".join(word for word in words if word)

    def config(self, model: Path) -> RunConfig:
        method, changes = ALL_METHODS[self.method]
        return build_config(
            model,
            method,
            num_ranks=self.num_ranks,
            compile=COMPILE[self.how],
            enable_activation_checkpointing=self.checkpointed,
            device=self.device,
            **changes,
        )


def all_forms(num_ranks: int, *, device: str = "cpu") -> list[Form]:
    return [
        *(
            Form(how, checkpointed, num_ranks, method, device)
            for how, checkpointed, method in itertools.product(COMPILE, (False, True), METHODS)
        ),
        *(Form("eager", False, num_ranks, method, device) for method in ROUNDED),
        *(Form("block", True, num_ranks, method, device) for method in ROUNDED),
    ]


class Run:
    """What trains in a form, and what a checkpoint holds of it. Collective on several ranks."""

    def __init__(self, form: Form, model: Path, world: World) -> None:
        torch._dynamo.reset()
        config = form.config(model)
        self.world = world
        self.counter = TrainState()
        parts = build_run(config, world, state=self.counter)
        self.model, self.optimizer, self.state = parts.model, parts.optimizer, dict(parts.saved)
        if form.how == "wrap_compile":
            self.model = wrap_decoder(self.model, is_sharded=form.num_ranks > 1)
            part = self.state["model"]
            named = named_weights(self.model.module, trainable_only=part.kind == "adapter")
            self.state["model"] = replace(part, tensors=named)

    def restore(self, output_dir: Path) -> None:
        with Checkpointer(str(output_dir), process_group=self.world.group) as checkpointer:
            checkpointer.restore(self.state)

    def save(self, output_dir: Path, *, step: int, start_over: bool = False) -> None:
        self.counter.step = step
        with Checkpointer(
            str(output_dir), process_group=self.world.group, start_over=start_over
        ) as checkpointer:
            checkpointer.save(self.state, step=step).result()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state, named as a step folder names it."""
        for name, tensor in self.state["model"].tensors.items():
            yield f"model/{self.state['model'].key(name)}", tensor
        for name, master in self.state["model"].masters.items():
            yield f"master/{name}", master
        for name, parameter in self.model.parameters.items():
            for moment, value in self.optimizer.state[parameter].items():
                yield f"{moment}/{name}", value

    def arrays(self) -> Arrays:
        """Collective: the state's values, whole, as a step folder holds them."""
        part = self.state["model"]
        # Ranks have no rounded copy of a master.
        weights = {
            f"model/{part.key(name)}": tensor.to(part.stored_dtype(name))
            for name, tensor in part.tensors.items()
        }
        return whole(dict(self.tensors()) | weights)

    @torch.no_grad()
    def fill(self) -> None:
        """Give every tensor, moments included, values that only its name decides."""
        for parameter in self.model.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }
        for name, tensor in self.tensors():
            if not name.startswith("step/"):
                tensor.copy_(known(name, tensor))
        for name, master in self.state["model"].masters.items():
            self.state["model"].tensors[name].copy_(master)


def known(name: str, like: Tensor) -> Tensor:
    """The values of a tensor of this name and shape."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(like.shape, generator=draw) * 0.02
    return values.abs() if name.startswith("exp_avg_sq") else values


def wrap_decoder(model: TrainableModel, *, is_sharded: bool) -> TrainableModel:
    """``model`` with its decoder in torch.compile's wrapper, whose name gets into every name."""
    module: Any = model.module
    causal = module.get_base_model() if hasattr(module, "get_base_model") else module
    name = next(name for name, child in causal.named_children() if child is causal.get_decoder())
    decoder = wrap_compile(causal.get_decoder(), dynamic=False)
    setattr(causal, name, decoder)
    assert any("._orig_mod." in each for each, _ in module.named_parameters())
    assert not any("_orig_mod" in each for each in module.state_dict())
    decode: Any = Decoder(decoder)
    if is_sharded:
        decode = sharded_decode(module, decode)
    return replace(model, decode=decode)


def is_cut(run: Run) -> bool:
    """Whether the ranks hold parts of the weights."""
    return all(isinstance(tensor, DTensor) for tensor in run.model.parameters.values())


def stored(step_folder: Path) -> Arrays:
    """Every tensor of a step folder, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(step_folder.rglob("*.safetensors")):
        prefix = "model/" if path.parent == step_folder else ""
        found |= {f"{prefix}{key}": tensor for key, tensor in load_file(path).items()}
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def assert_same(found: Arrays, expected: Arrays, what: object) -> None:
    assert found.keys() == expected.keys(), what
    different = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert different == [], what


def contents(step_folder: Path) -> dict[str, bytes]:
    """The files that hold tensors or describe them, but for those that name the writer."""
    return {
        str(path.relative_to(step_folder)): path.read_bytes()
        for path in sorted(step_folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "trainer.json")
    }


def read_and_write(rank: int, forms: Sequence[Form], model: Path, folder: Path) -> None:
    """In each form: restore the canonical folder, compare, save it again elsewhere."""
    num_ranks = forms[0].num_ranks
    with World.join(forms[0].device, distributed=num_ranks > 1) as world:
        for form in forms:
            run = Run(form, model, world)
            assert is_cut(run) == (num_ranks > 1)
            run.restore(folder / form.method)
            assert_same(run.arrays(), stored(folder / form.method / "step_1"), form)
            run.save(folder / str(form), step=1)


def write_canonical(folder: Path, model: Path) -> None:
    """One checkpoint of known values for each method, written on one CPU."""
    for method in ALL_METHODS:
        run = Run(Form("eager", False, 1, method), model, World.single("cpu"))
        run.fill()
        run.save(folder / method, step=1)
