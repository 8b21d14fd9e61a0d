"""The model of a run, loaded, prepared by its method and spread over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from legato.config.names import CUDA_GRAPH_MODES
from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.models.attention import settle_packing
from legato.models.compile import begin_passes, check_compiler, keep_gradients
from legato.models.head import check_halves
from legato.models.load import load_meta_model, load_model, split_head
from legato.models.lora import fill_from_base
from legato.models.meta import MetaModel
from legato.models.names import named_weights
from legato.models.quantize import QuantizedBase, Quantizer, import_nf4, quantize_model
from legato.models.shard import Sharding, free_gathered, gradient_sync, sharded_decode
from legato.models.wrap import offload_activations, wrap_model
from legato.optim.build import import_packed_adamw
from legato.parallel.mesh import build_mesh
from legato.parallel.world import World
from legato.recipes.methods import METHODS, Trained
from legato.recipes.ranks import check_mesh
from legato.train.in_backward import InBackward
from legato.train.loss import ChunkLoss, compile_chunk_loss
from legato.train.masters import Masters
from legato.train.model import Decode, TrainableModel

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Of the first NVIDIA GPUs that compute in it: Ampere.
_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to train.

    Attributes:
        trained: The method's module, and what a step folder holds of it.
        decode: ``(input_ids [B, T]) -> hidden [B, T, D]``.
        head: ``hidden [N, D] -> logits [N, V]``.
        parameters: Canonical name -> what the optimizer updates: trainable parameters or masters.
        masters: Copies in fp32 beside the parameters; None when there are none.
        stored_masters: Canonical name -> fp32 tensor that the weight file's value is rounded from.
        set_gradient_sync: Told whether the next backward is to add gradients up over the ranks;
            None on a single device.
        bytes_read: Bytes of weights that this rank read; None: all of them.
        chunk_loss: Loss of a chunk of logits and its gradient, compiled; None: the plain one.
        quantized: What of the base is quantized; None: nothing is.
    """

    trained: Trained
    decode: Decode
    head: nn.Module
    parameters: Mapping[str, nn.Parameter]
    masters: Masters | None
    stored_masters: Mapping[str, Tensor]
    set_gradient_sync: Callable[[bool], object] | None = None
    bytes_read: int | None = None
    chunk_loss: ChunkLoss | None = None
    quantized: QuantizedBase | None = None

    def trainable(self, *, in_backward: InBackward | None = None) -> TrainableModel:
        """The model as a step takes it; ``in_backward``: what updates its parameters early."""
        return TrainableModel(
            module=self.trained.module,
            decode=self.decode,
            head=self.head,
            parameters=self.parameters,
            masters=self.masters,
            in_backward=in_backward,
            set_gradient_sync=self.set_gradient_sync,
            chunk_loss=self.chunk_loss,
        )


def build_model(config: RunConfig, *, world: World) -> LoadedModel:
    """Load the config's model and prepare it by its method; the weights are those of the base.

    Collective if the recipe is a distributed one.

    Args:
        config: The run.
        world: Where it computes.

    Returns:
        The model.

    Raises:
        LegatoError: A model that can't be used, a mesh that doesn't fit the world, or something
            that this machine lacks; see :func:`check_machine`.
    """
    world.on_every_rank(lambda: check_machine(config, device=world.device))
    sharding = plan_sharding(config, world)
    return _whole(config, world) if sharding is None else _sharded(config, world, sharding)


def check_machine(config: RunConfig, *, device: torch.device) -> None:
    """Refuse what the config needs and this machine lacks, before a weight is read.

    Args:
        config: The run.
        device: Where this process computes.

    Raises:
        ConfigError: The device doesn't compute in the config's dtype.
        MissingDependencyError: torchao is needed, and is absent or too old.
        CompileError: Something is to be compiled, and there is no compiler.
    """
    _check_dtype(config.dtype, device)
    if config.quantize_base != "none":
        import_nf4()
    if config.compile:
        check_compiler(device)
    if config.optimizer.name == "adamw_8bit":
        import_packed_adamw()
        if device.type == "cuda":  # elsewhere its step isn't compiled
            key, instead = "optimizer.name: adamw_8bit", "use adamw"
            check_compiler(device, key=key, instead=instead)


def _check_dtype(dtype: str, device: torch.device) -> None:
    """Refuse bf16 where it would be emulated, many times slower than fp32, or fail in a kernel."""
    if dtype != "bf16":
        return
    lacks = None
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _BF16_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            lacks = f"{name} (compute capability {'.'.join(map(str, capability))}, 8.0 is needed)"
    elif device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        lacks = "mps before macOS 14"
    if lacks is not None:
        raise ConfigError(f"dtype: bf16 isn't supported by {lacks}. Set dtype: fp32.")


def plan_sharding(config: RunConfig, world: World) -> Sharding | None:
    """How the config spreads the model over the ranks.

    Args:
        config: The run.
        world: The ranks.

    Returns:
        The mesh and what is gathered when; None: one rank has all of it, and nothing is offloaded.

    Raises:
        ConfigError: A mesh that doesn't fit the ranks, or an offload from where nothing is.
    """
    plan = check_mesh(config, world=world)
    if plan.world_size == 1 and not config.cpu_offload:
        return None
    return Sharding(
        mesh=build_mesh(plan, device_type=world.device.type),
        compute_dtype=DTYPES[config.dtype],
        reshard_after_forward=config.reshard_after_forward,
        cpu_offload=config.cpu_offload,
    )


def _whole(config: RunConfig, world: World) -> LoadedModel:
    quantized = None
    if config.quantize_base == "none":
        model = load_model(config.model, **_loading(config, world))
        trained = METHODS[config.recipe](model, config)
    else:
        base = load_meta_model(config.model, **_loading(config, world))
        trained = METHODS[config.recipe](base.model, config)
        quantized = quantize_model(base, trained.module, device=world.device)
        for parameter in _trainable(trained.module).values():
            # Beside a base without memory it was made on the CPU.
            parameter.data = parameter.data.to(world.device)
        fill_from_base(trained.module)
    decode, head = split_head(trained.module)
    _settle_packing(config, trained.module, decode)
    wrap_model(trained.module, **_wrapping(config))
    parameters = _trainable(trained.module)
    masters = Masters(parameters) if config.master_weights == "fp32" else None
    held = masters.tensors if masters is not None else parameters
    passes: Callable[..., Tensor] = decode
    if getattr(config.compile, "mode", None) in CUDA_GRAPH_MODES:
        passes = begin_passes(decode)
        # A master's gradient is a copy already.
        keep_gradients(p for name, p in parameters.items() if held[name] is p)
    return LoadedModel(
        trained=trained,
        decode=_offloaded(config, passes, world),
        head=head,
        parameters=held,
        masters=masters,
        stored_masters=masters.copies if masters is not None else {},
        chunk_loss=compile_chunk_loss() if config.compile else None,
        quantized=quantized,
    )


def _sharded(config: RunConfig, world: World, sharding: Sharding) -> LoadedModel:
    base = world.on_every_rank(lambda: load_meta_model(config.model, **_loading(config, world)))
    trained = METHODS[config.recipe](base.model, config)
    module = trained.module
    decoder, head = split_head(module)
    stored: Mapping[str, Tensor] = {}
    is_rounded = config.master_weights == "fp32" and DTYPES[config.dtype] != torch.float32
    if is_rounded:
        # The parts are fp32 and the gathered weights bf16: no second copy is needed.
        for parameter in _trainable(module).values():
            parameter.data = parameter.data.float()
    quantized = world.on_every_rank(lambda: _shard_and_fill(config, world, sharding, base, module))
    if trained.kind == "adapter":
        fill_from_base(module)
    decode = sharded_decode(module, decoder)
    # Probes have shapes that training doesn't: they would be compiled for once, and never again.
    with torch.compiler.set_stance("force_eager"):
        check_halves(module, decode, head)
        _settle_packing(config, module, decode)
    free_gathered(module)
    parameters = _trainable(module)
    if is_rounded:
        stored = parameters
    logger.info("read %d bytes of weights", base.reader.bytes_read)
    return LoadedModel(
        trained=trained,
        decode=_offloaded(config, decode, world),
        head=head,
        parameters=parameters,
        masters=None,
        stored_masters=stored,
        set_gradient_sync=gradient_sync(
            module,
            # An embedding that trains as a whole is no small gradient.
            keeps_whole_gradients=trained.kind == "adapter" and not config.lora_modules_to_save,
        ),
        bytes_read=base.reader.bytes_read,
        chunk_loss=compile_chunk_loss() if config.compile else None,
        quantized=quantized,
    )


def _offloaded(config: RunConfig, decode: Decode, world: World) -> Decode:
    if not config.enable_activation_offloading:
        return decode
    return offload_activations(decode, device=world.device)


def _shard_and_fill(
    config: RunConfig, world: World, sharding: Sharding, base: MetaModel, module: nn.Module
) -> QuantizedBase | None:
    quantizer = None
    if config.quantize_base != "none":
        num_shards = sharding.mesh.shape[-1]
        quantizer = Quantizer(base, device=world.device, num_shards=num_shards)
    wrap_model(
        module,
        **_wrapping(config),
        sharding=sharding,
        fill_block=quantizer.quantize if quantizer is not None else None,
    )
    base.fill(module, device=world.device, cpu_offload=sharding.cpu_offload)
    return quantizer.summary() if quantizer is not None else None


def _loading(config: RunConfig, world: World) -> dict[str, Any]:
    return {
        "dtype": DTYPES[config.dtype],
        "device": world.device,
        "attention": config.attention,
        "trust_remote_code": config.trust_remote_code,
    }


def _settle_packing(config: RunConfig, module: nn.Module, decode: Callable[..., Tensor]) -> None:
    if config.packing:
        settle_packing(
            module,
            decode,
            attention=config.attention,
            max_seq_len=config.max_seq_len,
            is_compiled=bool(config.compile),
        )


def _wrapping(config: RunConfig) -> dict[str, Any]:
    options: dict[str, Any] | None = None
    if config.compile:
        options = {} if config.compile is True else config.compile.model_dump()
    return {
        "checkpoint_every": int(config.enable_activation_checkpointing),
        "compile_options": options,
    }


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    weights = named_weights(module, trainable_only=True)
    return {name: t for name, t in weights.items() if isinstance(t, nn.Parameter)}
