"""What a run keeps in memory, by its config and the model's headers: before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from legato.checkpoint import OptimizerPart
from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.models.blocks import decoder_blocks
from legato.models.load import load_meta_model
from legato.models.names import named_weights
from legato.models.quantize import saved_bytes
from legato.optim.build import build_optimizer
from legato.parallel.host_memory import free_host_bytes
from legato.parallel.world import World
from legato.recipes.methods import METHODS
from legato.recipes.model import DTYPES
from legato.recipes.ranks import check_mesh
from legato.report.start import human_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryNeeds:
    """What one process keeps in memory from step to step, in bytes; activations come on top.

    Attributes:
        weights: Parameters and buffers, and those that ranks gather while they compute.
        gradients: Of everything that trains; with updates in backward only the largest one.
        masters: fp32 copies of what trains, beside the weights.
        moments: The optimizer's state.
        staging: The copy that a checkpoint is written from; always in host memory.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    staging: int

    @property
    def training(self) -> int:
        """All but the staged copy."""
        return self.weights + self.gradients + self.masters + self.moments

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "master weights": self.masters,
            "optimizer": self.moments,
        }
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)


@dataclass(frozen=True)
class Memory:
    """Bytes that one process may take; ``device``: None where it computes in host memory."""

    host: int
    device: int | None = None


def estimate_memory(config: RunConfig, *, world: World) -> MemoryNeeds:
    """Add up what the config's training keeps in memory, without loading a weight.

    Args:
        config: The run.
        world: Its ranks.

    Returns:
        The needs of one of them.

    Raises:
        LegatoError: A model that can't be used, or a mesh that doesn't fit the world.
    """
    mesh = check_mesh(config, world=world)
    dtype = DTYPES[config.dtype]
    base = load_meta_model(
        config.model,
        dtype=dtype,
        device=world.device,
        attention=config.attention,
        trust_remote_code=config.trust_remote_code,
    )
    trained = METHODS[config.recipe](base.model, config)
    weights = named_weights(trained.module)
    trainable = named_weights(trained.module, trainable_only=True)
    keeps_masters = config.master_weights == "fp32" and dtype != torch.float32
    held = {
        name: nn.Parameter(torch.empty_like(t, device="meta", dtype=torch.float32))
        if keeps_masters
        else nn.Parameter(torch.empty_like(t, device="meta"))
        for name, t in trainable.items()
    }
    moments = _moment_bytes(config, held, rounds=not keeps_masters and dtype != torch.float32)
    is_sharded = mesh.world_size > 1 or config.cpu_offload
    saved = []
    if config.quantize_base != "none":
        saved = [saved_bytes(block) for block in decoder_blocks(trained.module).values()]
    frozen_bytes = _bytes(weights) - _bytes(trainable) - sum(saved)
    gathered = 0
    if is_sharded:  # parts in fp32 are their own masters
        gathered = _gathered_bytes(trained.module, keeps_all=not config.reshard_after_forward)
        # Weights in NF4 are gathered in NF4.
        gathered -= max(saved, default=0) if config.reshard_after_forward else sum(saved)
    gradients = [_bytes({name: t}) for name, t in held.items()]
    share = mesh.dp_shard if is_sharded else 1
    masters = _bytes(held) if keeps_masters and not is_sharded else 0
    live = _bytes(held) if is_sharded else _bytes(trainable)
    return MemoryNeeds(
        weights=(frozen_bytes + live) // share + gathered,
        gradients=(max(gradients) if config.optimizer_in_backward else sum(gradients)) // share,
        masters=masters,
        moments=moments // share,
        staging=_bytes(trainable) // share
        if config.save_only_model
        else (_bytes(held) + moments) // share,
    )


def free_memory(device: torch.device, *, num_sharing: int = 1) -> Memory:
    """What this machine can still give a process, by its kernel's estimate and the driver's.

    Args:
        device: Where the process computes; no other one of the run does.
        num_sharing: Processes of the run on this host: each gets its part of the host's memory.

    Returns:
        The free bytes.
    """
    host = free_host_bytes(num_sharing=num_sharing)
    if device.type != "cuda":
        return Memory(host)
    return Memory(host, torch.cuda.mem_get_info(device)[0])


def check_memory(needs: MemoryNeeds, free: Memory, *, cpu_offload: bool = False) -> None:
    """Hold what a run keeps in memory against what is free.

    Args:
        needs: What it keeps.
        free: What there is.
        cpu_offload: The parts of the model stay in host memory.

    Raises:
        ConfigError: Training can't fit, whatever its activations take. A staged copy that doesn't
            fit is a warning: checkpoints are then written while training stands still.
    """
    in_host = free.device is None or cpu_offload
    available = free.host if in_host or free.device is None else free.device
    where = "host" if in_host else "device"
    logger.info(
        "memory: %s; activations come on top. %s of %s memory are free",
        needs, human_bytes(available), where,
    )  # fmt: skip
    if needs.training > available:
        raise ConfigError(
            f"memory: training keeps {human_bytes(needs.training)} ({needs}) beside its "
            f"activations, and {human_bytes(available)} of {where} memory are free. Train LoRA "
            "instead of all weights, its base with quantize_base: nf4, choose a smaller model, or "
            "see optimizer: {name: adamw_8bit}, optimizer_in_backward, master_weights: none and "
            "the _distributed recipes."
        )
    left = free.host - (needs.training if in_host else 0)
    if needs.staging > left:
        logger.warning(
            "the copy that a checkpoint is written from takes %s of host memory, %s are left: "
            "checkpoints will be written while training stands still",
            human_bytes(needs.staging), human_bytes(max(left, 0)),
        )  # fmt: skip


def _moment_bytes(config: RunConfig, held: Mapping[str, nn.Parameter], *, rounds: bool) -> int:
    optimizer = build_optimizer(
        held, name=config.optimizer.name, lr=config.optimizer.lr, stochastic_rounding=rounds
    )
    return OptimizerPart(optimizer, names=held).expected_state_bytes()


def _gathered_bytes(module: nn.Module, *, keeps_all: bool) -> int:
    """Whole weights that are there at a time: all outside of the blocks, and one block or all."""
    total = sum(_bytes({n: p}) for n, p in module.named_parameters())
    blocks = [_bytes(dict(block.named_parameters())) for block in decoder_blocks(module).values()]
    return total if keeps_all else total - sum(blocks) + max(blocks)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
