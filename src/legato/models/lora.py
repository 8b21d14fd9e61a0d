"""Attach a LoRA adapter by PEFT, and know the name of each of its tensors in PEFT's file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from psutil import virtual_memory
from torch import nn

from legato.errors import ConfigError, ModelError, ModelNotFoundError
from legato.models.folder import find_model, weight_files, weights_digest
from legato.models.meta import weights_stand_in
from legato.models.names import canonical_name, named_weights
from legato.models.quiet import silence_known_noise

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"

# Which base an adapter belongs to. Not in adapter_config.json: PEFT warns of keys it doesn't know.
BASE_FILE = "legato_base.json"


@dataclass(frozen=True)
class Adapter:
    """A model with an adapter attached, and what its checkpoint needs.

    Attributes:
        model: PEFT's model around the base, which was changed in place. Only the adapter trains.
        keys: Canonical name of each trainable tensor -> its key in ``adapter_model.safetensors``.
        twins: Second key in that file -> the trainable tensor it repeats: a tied head that trains.
        files: Further files of an adapter folder: ``adapter_config.json`` and ``legato_base.json``.
    """

    model: PeftModel
    keys: Mapping[str, str]
    twins: Mapping[str, str]
    files: Mapping[str, bytes]


def attach_lora(
    model: nn.Module,
    *,
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float = 0.0,
    lora_target_modules: str | Sequence[str] = ALL_LINEAR,
    lora_modules_to_save: Sequence[str] = (),
    use_dora: bool = False,
    use_rslora: bool = False,
    base_name: str | Path,
    base_revision: str | None = None,
    quantize_base: str = "none",
    seed: int = 0,
) -> Adapter:
    """Attach a fresh LoRA adapter; the base is frozen and taken over, not copied.

    ``B`` starts at zero, so a newly attached adapter changes nothing. Call it before anything wraps
    or compiles the model.

    Args:
        model: A causal language model of transformers; its weights may still be on the meta device.
        lora_rank: Width of the update, in features; >= 1.
        lora_alpha: Unitless strength: the update is scaled by ``lora_alpha / lora_rank``, or by
            ``lora_alpha / sqrt(lora_rank)`` with ``use_rslora``.
        lora_dropout: Probability in ``[0, 1)``, applied to the update's input only.
        lora_target_modules: ``all-linear`` (every linear layer but the head), or module names as
            they end, such as ``q_proj`` or ``self_attn.q_proj``.
        lora_modules_to_save: Modules that train as a whole beside the adapter and go into its file,
            named alike: ``embed_tokens``, ``lm_head``, ``input_layernorm``. PEFT keeps the frozen
            original beside the copy that trains. Where head and embedding are tied, either one
            means both, and they stay tied.
        use_dora: Train direction and magnitude apart (DoRA).
        use_rslora: Scale by the square root of the rank.
        base_name: The base as the config names it, a folder or hub id: goes into
            ``adapter_config.json``, a folder as its absolute path.
        base_revision: The base's hub revision.
        quantize_base: What the base's weights are going to be while the adapter trains; goes into
            ``legato_base.json``.
        seed: Seed of the adapter's first values. The global random state is left as it was.

    Returns:
        The adapter, in the dtype and on the device of the base; on the CPU when that is the meta
        device, with the values that it has beside real weights.

    Raises:
        ConfigError: A name that matches no layer (the message lists what there is), or one that
            is to get an update and to train as a whole; a rank whose adapter can't fit into memory;
            dropout where only embeddings get an update.
        ModelError: A trainable tensor that PEFT wouldn't save; ``.names``.
    """
    silence_known_noise()
    from peft import LoraConfig, get_peft_model

    targets = _checked_targets(model, lora_target_modules)
    _check_room(model, targets, lora_rank=lora_rank)
    _check_dropout(model, targets, lora_dropout=lora_dropout)
    whole = _modules_to_save(model, lora_modules_to_save, targets=targets)
    config = LoraConfig(
        r=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=targets,
        modules_to_save=list(whole) or None,
        # Said only where it means something: PEFT warns elsewhere.
        ensure_weight_tying=bool(whole) and not set(whole).isdisjoint(_tied_modules(model)),
        use_dora=use_dora,
        use_rslora=use_rslora,
        # GPT-2's linear layers keep their weight transposed.
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with _own_random_state(model, seed), weights_stand_in(model):
        # The adapter stays in the base's dtype; fp32 masters are the trainer's.
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    _drop_stand_ins(peft_model)
    # PEFT takes the tied ones off its list, and then knows a tied embedding by a few names only.
    config.modules_to_save = whole or None
    base = _describe_base(str(base_name), base_revision) | {"quantize_base": quantize_base}
    keys, twins = adapter_file_keys(peft_model)
    return Adapter(model=peft_model, keys=keys, twins=twins, files=_config_files(config, base))


def _config_files(config: LoraConfig, base: dict[str, Any]) -> dict[str, bytes]:
    """What an adapter folder says of its form and of its base, by file name."""
    config.base_model_name_or_path = base["base"]
    # Beside a path a revision would mean nothing; beside a hub id it is what makes it exact.
    config.revision = None if Path(base["base"]).is_absolute() else base["revision"]
    return {"adapter_config.json": adapter_config_bytes(config), BASE_FILE: _json_bytes(base)}


@torch.no_grad()
def fill_from_base(model: nn.Module) -> None:
    """Give a fresh adapter the first values that it takes from its base.

    Those are the copies that train as a whole, and DoRA's magnitudes, the norms of weights. For a
    base whose weights came after its adapter. Collective if the model is sharded.

    Args:
        model: PEFT's model; ``B`` is still zero.
    """
    from peft.tuners.lora import LoraLayer
    from torch.distributed.tensor import DTensor

    for copy, original in _trained_copies(model):
        for name, parameter in original.named_parameters():
            copy.get_parameter(name).copy_(parameter)
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for magnitude in layer.lora_magnitude_vector.values():
            weight = layer.get_base_layer().weight
            # The norm of each row; PEFT's own layout for weights that are kept transposed.
            norms = torch.linalg.norm(weight.T if magnitude.fan_in_fan_out else weight, dim=1)
            if isinstance(norms, DTensor):
                target = magnitude.weight
                norms = norms.redistribute(target.device_mesh, target.placements)
            magnitude.weight.copy_(norms.view_as(magnitude.weight))


def _trained_copies(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module that trains as a whole, and the frozen original that PEFT keeps beside it."""
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield module.modules_to_save[module.active_adapters[0]], module.original_module


def _drop_stand_ins(model: nn.Module) -> None:
    """Put copies of weights that are on the meta device there too; tied ones stay tied."""
    empty: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for copy, original in _trained_copies(model):
        for name, parameter in original.named_parameters():
            if parameter.is_meta:
                stand_in = copy.get_parameter(name)
                made = nn.Parameter(torch.empty_like(parameter))
                # The stand-in is kept as well: a freed one's id would be given away again.
                _, made = empty.setdefault(id(stand_in), (stand_in, made))
                copy.register_parameter(name, made)


def _checked_targets(model: nn.Module, targets: str | Sequence[str]) -> str | list[str]:
    """The targets as PEFT takes them; one that matches nothing is an error, PEFT lets it pass."""
    if targets == ALL_LINEAR:
        return ALL_LINEAR
    wanted = [targets] if isinstance(targets, str) else list(targets)
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"
    ]
    _check_names(
        model, wanted, layers, key="lora_target_modules",
        or_else=f"; or {ALL_LINEAR} for every linear layer but the head",
    )  # fmt: skip
    return wanted


def _check_room(model: nn.Module, targets: str | Sequence[str], *, lora_rank: int) -> None:
    """Refuse a rank that no memory holds: PEFT would be ended by the kernel, without a word."""
    head = cast("PreTrainedModel", model).get_output_embeddings()
    shapes = [
        module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"
        if _is_named(name, targets)
        or (targets == ALL_LINEAR and not isinstance(module, nn.Embedding) and module is not head)
    ]
    count = lora_rank * sum(sum(shape) for shape in shapes)
    weight = next(model.parameters())
    is_cuda = weight.device.type == "cuda"
    free = torch.cuda.mem_get_info(weight.device)[0] if is_cuda else virtual_memory().available
    if count * weight.element_size() > free:
        raise ConfigError(
            f"lora_rank: {lora_rank:,} makes an adapter of {count:,} parameters, "
            f"{count * weight.element_size() / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory "
            "are free. Set a smaller rank, such as 16."
        )


def _check_dropout(model: nn.Module, targets: str | Sequence[str], *, lora_dropout: float) -> None:
    """Refuse a dropout that nothing would apply: to an embedding PEFT gives none."""
    if not lora_dropout or targets == ALL_LINEAR:
        return
    chosen = [(name, m) for name, m in model.named_modules() if _is_named(name, targets)]
    if all(isinstance(module, nn.Embedding) for _, module in chosen):
        raise ConfigError(
            f"lora_dropout: {', '.join(name for name, _ in chosen)} has token ids for its input, "
            "of which none can be dropped, and no other layer gets an update. Leave it out, or "
            "add a linear layer to lora_target_modules."
        )


def smallest_layer(model: nn.Module) -> tuple[str, int] | None:
    """The layer whose update can have the lowest rank, and that rank; None: no layer has one.

    Args:
        model: PEFT's model.

    Returns:
        The layer's name in the base, and the smaller one of its widths in features.
    """
    from peft.tuners.lora import LoraLayer

    widths = {
        name.removeprefix("base_model.model."): min(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    return min(widths.items(), key=lambda item: item[1], default=None)


def _modules_to_save(
    model: nn.Module, wanted: Sequence[str], *, targets: str | Sequence[str]
) -> list[str]:
    """Full names of the modules that train as a whole; of tied ones all or none.

    Full, because PEFT takes ``norm`` for every module whose name ends so, ``input_layernorm`` too.
    """
    if not wanted:
        return []
    modules = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    _check_names(model, wanted, modules, key="lora_modules_to_save", or_else="")
    chosen = [name for name in modules if _is_named(name, wanted)]
    if tied := [name for name in _tied_modules(model) if name in chosen]:
        chosen += [name for name in _tied_modules(model) if name not in tied]
    both = [name for name in chosen if targets != ALL_LINEAR and _is_named(name, targets)]
    if both:
        raise ConfigError(
            f"lora_modules_to_save: {both[0]} is also one of lora_target_modules. It either trains "
            "as a whole or gets an update: take it out of one of the two."
        )
    return chosen


def _tied_modules(model: nn.Module) -> list[str]:
    """Names of the modules that share the embedding's weight, its own among them; else none."""
    causal = cast("PreTrainedModel", model)
    weight = causal.get_input_embeddings().weight
    names = [n for n, m in model.named_modules() if getattr(m, "weight", None) is weight]
    return names if len(names) > 1 else []


def _check_names(
    model: nn.Module, wanted: Sequence[str], names: Sequence[str], *, key: str, or_else: str
) -> None:
    unknown = [each for each in wanted if not any(_is_named(name, [each]) for name in names)]
    if wanted and not unknown:
        return
    there = sorted({re.sub(r".*\.", "", name) for name in names})
    what = f"no layer is called {', '.join(unknown)}" if unknown else "the list is empty"
    raise ConfigError(
        f"{key}: {what} in {type(model).__name__}. There are: {', '.join(there)}{or_else}."
    )


def _is_named(name: str, wanted: str | Sequence[str]) -> bool:
    """Whether a module's full name is one of the names, or ends like one after a dot."""
    wanted = [wanted] if isinstance(wanted, str) else wanted
    return any(name == each or name.endswith(f".{each}") for each in wanted)


@contextmanager
def _own_random_state(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch for the adapter's first values; everything as before afterwards."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def adapter_file_keys(model: PeftModel) -> tuple[dict[str, str], dict[str, str]]:
    """PEFT's keys of what trains, found by identity while nothing wraps the model yet.

    Later PEFT itself would write the names of wrappers, or nothing at all, without an error.

    Args:
        model: PEFT's model.

    Returns:
        Canonical name -> key, and second key -> canonical name of the tensor that it repeats.

    Raises:
        ModelError: A trainable tensor that PEFT wouldn't save; ``.names``.
    """
    from peft import get_peft_model_state_dict

    # Tied tensors under each of their names: PEFT looks for them under all, and reads them so.
    trainable = {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    # Explicit: by default PEFT may ask the hub whether the vocabulary was changed.
    saved = get_peft_model_state_dict(model, state_dict=trainable, save_embedding_layers=False)
    keys_of: dict[int, list[str]] = {}
    for key, tensor in saved.items():
        keys_of.setdefault(id(tensor), []).append(key)
    names = named_weights(model, trainable_only=True)
    lost = [name for name, tensor in names.items() if id(tensor) not in keys_of]
    if lost:
        raise ModelError(
            f"{len(lost)} trainable tensors have no place in PEFT's adapter file, such as "
            f"{', '.join(lost[:3])}. They would be trained and then lost: take what they belong to "
            "out of lora_target_modules and lora_modules_to_save.",
            names=lost,
        )
    keys = {name: keys_of[id(tensor)][0] for name, tensor in names.items()}
    twins = {key: name for name, t in names.items() for key in keys_of[id(t)][1:]}
    return keys, twins


def _describe_base(base_name: str, base_revision: str | None) -> dict[str, Any]:
    """What the adapter belongs to: its name for others, and a digest that tells it from others."""
    try:
        folder = find_model(base_name, revision=base_revision, local_only=True)
        digest = weights_digest(weight_files(folder.path))
    except ModelNotFoundError:  # a model that was built in memory
        return {"base": base_name, "hub_id": None, "revision": base_revision, "digest": None}
    return {
        "base": folder.name,
        "hub_id": folder.hub_id,
        "revision": folder.revision or base_revision,
        "digest": digest,
    }


def adapter_config_bytes(config: LoraConfig) -> bytes:
    """adapter_config.json as PEFT writes it, the same bytes for the same adapter."""
    import peft

    content = dict(config.to_dict(), inference_mode=True, peft_version=peft.__version__)
    return _json_bytes(
        {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
    )


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
