"""The rows of bench/checkpoint.py: every way to save the same state, each as a context manager.

Entering one makes ready what lives as long as a run (buffers, groups). It yields ``save()``, which
returns when training may change its tensors again, and returns a function that returns when every
byte is durable, with the number of bytes that were staged, or None.

The peers are given their best case: they get their state dicts ready made, so no walk over modules
is counted; the gather is one all-gather per tensor, freed at once but on rank 0; LoRA's peers save
trainable tensors only (torch's own helper would add a frozen tied head).
"""

# ruff: noqa: TID251 -- torch.save is what is measured here, nothing is read back from it

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from legato.checkpoint import Checkpointer, KeepLast, ModelPart, OptimizerPart
from legato.models.lora import attach_lora
from legato.models.names import named_weights
from legato.models.quiet import silence_known_noise

Finish = Callable[[], int | None]
Save = Callable[[], Finish]

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TINY = SMOLLM2_135M | {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
LORA_RANK = 16


@dataclass(frozen=True, eq=False)
class Training:
    """What a training process holds.

    Attributes:
        model: Sharded when there are several ranks.
        optimizer: AdamW over the trainable tensors, with its moments.
        weights: Canonical name -> live tensor that a checkpoint holds.
        part: The same with the keys and the small files of the folder.
        method: ``full`` or ``lora``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    weights: dict[str, Tensor]
    part: ModelPart
    method: str

    @property
    def moments(self) -> dict[str, Tensor]:
        """``<moment>/<name>`` -> live tensor."""
        state = self.optimizer.state
        return {f"{key}/{n}": v for n, p in self.weights.items() for key, v in state[p].items()}

    @property
    def for_legato(self) -> dict[str, Any]:
        optimizer = OptimizerPart(self.optimizer, names=self.weights)
        return {"model": self.part, "optimizer": optimizer, "trainer": {"step": 1}}

    @property
    def for_peers(self) -> dict[str, Any]:
        return {"model": dict(self.weights), "optimizer": self.moments}


def build_model(method: str, *, tiny: bool) -> tuple[nn.Module, Any]:
    """A model of seeded random values, equal in every process; for LoRA with its adapter."""
    silence_known_noise()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else SMOLLM2_135M)))
    if method == "full":
        return model, None
    adapter = attach_lora(model, lora_rank=LORA_RANK, lora_alpha=32, base_name="bench/base")
    with torch.no_grad():
        for tensor in named_weights(adapter.model, trainable_only=True).values():
            tensor.normal_()
    return adapter.model, adapter


def config_json(*, tiny: bool) -> bytes:
    from transformers import LlamaConfig

    config = LlamaConfig(**(TINY if tiny else SMOLLM2_135M), architectures=["LlamaForCausalLM"])
    return config.to_json_string().encode()


def build_training(method: str, *, tiny: bool, world_size: int) -> Training:
    """Collective: the model, sharded over all ranks, and an optimizer as after its first update."""
    model, adapter = build_model(method, tiny=tiny)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    weights = named_weights(model, trainable_only=adapter is not None)
    optimizer = torch.optim.AdamW(weights.values())
    for parameter in weights.values():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),  # a plain tensor beside sharded ones, as AdamW has it
            "exp_avg": parameter.detach().clone(),
            "exp_avg_sq": parameter.detach().square(),
        }
    if adapter is None:
        part = ModelPart(weights, files={"config.json": config_json(tiny=tiny)})
    else:
        part = ModelPart(weights, kind="adapter", keys=adapter.keys, files=adapter.files)
    return Training(model, optimizer, weights, part, method)


def shards(training: Training) -> list[Tensor]:
    """This rank's part of everything that is saved."""
    tensors = [*training.weights.values(), *training.moments.values()]
    return [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]


def sync_tree(folder: Path) -> None:
    """Make durable what a peer has written; rank 0 does it for all."""
    if dist.get_rank() == 0:
        for path in (p for p in folder.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())


# -- peers


@contextmanager
def gather_torch_helper(training: Training, folder: Path) -> Iterator[Save]:
    """The full state dict gathered on rank 0 by torch's documented helper, then torch.save."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save() -> Finish:
        model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, folder / "checkpoint.pt")
        dist.barrier()  # the others wait for rank 0, as at their next step
        return lambda: sync_tree(folder)

    yield save


@contextmanager
def gather_loop(training: Training, folder: Path) -> Iterator[Save]:
    """The same, gathered by the plainest loop."""

    def save() -> Finish:
        full = {part: gathered(tensors) for part, tensors in training.for_peers.items()}
        if dist.get_rank() == 0:
            torch.save(full, folder / "checkpoint.pt")
        dist.barrier()
        return lambda: sync_tree(folder)

    yield save


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            found[name] = full
    return found


@contextmanager
def torch_save(training: Training, folder: Path) -> Iterator[Save]:
    """torch.save alone, of a state that rank 0 has gathered before the clock starts."""
    full = {part: gathered(tensors) for part, tensors in training.for_peers.items()}

    def save() -> Finish:
        if dist.get_rank() == 0:
            torch.save(full, folder / "checkpoint.pt")
        return lambda: sync_tree(folder)

    yield save


@contextmanager
def dcp_save(training: Training, folder: Path) -> Iterator[Save]:
    def save() -> Finish:
        dcp.save(training.for_peers, checkpoint_id=folder / "dcp")
        return lambda: sync_tree(folder)

    yield save


@contextmanager
def dcp_async_save(training: Training, folder: Path) -> Iterator[Save]:
    """With its defaults, but for the group of its own that a training loop needs."""
    group = dist.new_group(backend="gloo")

    def save() -> Finish:
        future: Any = dcp.async_save(
            training.for_peers, checkpoint_id=folder / "dcp", process_group=group
        )

        def finish() -> None:
            future.result()
            sync_tree(folder)

        return finish

    yield save
    dist.destroy_process_group(group)


@contextmanager
def dcp_hf(training: Training, folder: Path) -> Iterator[Save]:
    """DCP's Hugging Face writer, consolidated, for the weights; plain DCP for the moments."""

    def save() -> Finish:
        writer = dcp.HuggingFaceStorageWriter(
            str(folder), save_distributed=True, enable_consolidation=True
        )
        weights = {training.part.key(name): t for name, t in training.weights.items()}
        dcp.save(weights, storage_writer=writer)
        dcp.save(training.moments, checkpoint_id=folder / "optimizer")
        return lambda: sync_tree(folder)

    yield save


# -- Legato


@contextmanager
def legato(training: Training, folder: Path, *, asynchronous: bool) -> Iterator[Save]:
    with open_checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        checkpointer.prepare(training.for_legato)

        def save() -> Finish:
            pending = checkpointer.save(training.for_legato, step=1)

            def finish() -> int:
                pending.result()
                return pending.staged_bytes

            return finish

        yield save


def open_checkpointer(folder: Path, *, asynchronous: bool = True) -> Checkpointer:
    """Collective: as a run would; an error ends the bench."""
    return Checkpointer(
        folder,
        keep=KeepLast(1),
        asynchronous=asynchronous,
        on_save_error="raise",
        process_group=dist.group.WORLD if dist.get_world_size() > 1 else None,
    )


@contextmanager
def legato_sync(training: Training, folder: Path) -> Iterator[Save]:
    with legato(training, folder, asynchronous=False) as save:
        yield save


@contextmanager
def legato_async(training: Training, folder: Path) -> Iterator[Save]:
    with legato(training, folder, asynchronous=True) as save:
        yield save


# -- limits


@contextmanager
def memcpy_limit(training: Training, folder: Path) -> Iterator[Save]:
    """One copy of as many bytes as this rank's shard has, between two warm buffers."""
    num_bytes = sum(t.numel() * t.element_size() for t in shards(training))
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))

    def save() -> Finish:
        target.copy_(source)
        return lambda: None

    yield save


@contextmanager
def raw_write_limit(training: Training, folder: Path) -> Iterator[Save]:
    """As many bytes as this rank's shard has, into a file of its own, and fsync."""
    num_bytes = sum(t.numel() * t.element_size() for t in shards(training))
    data = memoryview(torch.ones(num_bytes, dtype=torch.uint8).numpy())
    descriptor = os.open(folder / f"raw-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)

    def save() -> Finish:
        written = 0
        while written < num_bytes:
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
        return lambda: None

    yield save
    os.close(descriptor)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        title: As it stands there.
        open: The context manager that gives ``save``.
        methods: What it is run for.
        model_folder: Where it leaves something that transformers or PEFT might load; None: nowhere.
    """

    title: str
    open: Any
    methods: tuple[str, ...] = ("full", "lora")
    model_folder: str | None = "."


ROWS = {
    "gather": Row("gather on rank 0 (torch's helper) + torch.save", gather_torch_helper, ("full",)),
    "gather_loop": Row("gather on rank 0 (plain loop) + torch.save", gather_loop),
    "torch_save": Row("torch.save on rank 0 of what is gathered already", torch_save, ("lora",)),
    "dcp_save": Row("dcp.save", dcp_save, model_folder="dcp"),
    "dcp_async_save": Row("dcp.async_save, defaults", dcp_async_save, model_folder="dcp"),
    "dcp_hf": Row("DCP Hugging Face writer + consolidation", dcp_hf),
    "legato_sync": Row("Legato, synchronous", legato_sync, model_folder="step_1"),
    "legato_async": Row("Legato, asynchronous", legato_async, model_folder="step_1"),
    "memcpy": Row("limit: memcpy of the shard", memcpy_limit, model_folder=None),
    "raw_write": Row("limit: raw write + fsync", raw_write_limit, model_folder=None),
}
