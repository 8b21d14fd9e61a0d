"""Canonical parameter names: transformers' own, whatever wraps the module."""

from __future__ import annotations

import torch
from torch import nn

COMPILE_PREFIX = "_orig_mod."
"""What torch.compile(module) puts before the names of the module."""

# What torch.compile, checkpoint_wrapper and FSDP1 put into names, and DistributedDataParallel
# before them: "module".
_WRAPPERS = frozenset(
    {COMPILE_PREFIX.removesuffix("."), "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
)


def canonical_name(name: str) -> str:
    """The name without what wrappers put into it.

    Args:
        name: A name from ``named_parameters()`` or ``named_buffers()``.

    Returns:
        ``name`` without ``_orig_mod.``, ``_checkpoint_wrapped_module.``, ``_fsdp_wrapped_module.``
        anywhere and without leading ``module.``.

    Example:
        >>> canonical_name("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight")
        'model.layers.0.mlp.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    # Only at the front: a submodule of a model may be called "module".
    while parts[:1] == ["module"]:
        parts = parts[1:]
    return ".".join(parts)


def named_weights(model: nn.Module, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint of ``model`` holds, by canonical name.

    Not ``state_dict()``: that lists tied weights twice, and torch's
    ``get_model_state_dict(ignore_frozen_params=True)`` keeps a frozen tied head.

    Args:
        model: The model, wrapped or not.
        trainable_only: Leave out frozen parameters and all buffers (an adapter's checkpoint).

    Returns:
        The live tensors (no copies) in the order of the modules: parameters, tied ones once, then
        persistent buffers.

    Raises:
        ValueError: Two different tensors have the same canonical name.
    """
    named = [
        (name, parameter)
        for name, parameter in _parameters_once(model)
        if parameter.requires_grad or not trainable_only
    ]
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in named if trainable_only else [*named, *_persistent_buffers(model)]:
        if name in weights:
            raise ValueError(f"two tensors are called {name!r}: is the model wrapped twice?")
        weights[name] = tensor
    return weights


def _parameters_once(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Each parameter under the one name that transformers writes it by."""
    # transformers: {tied name: the name that is kept in files}, where the model declares it.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, str] = {}
    parameters: dict[int, nn.Parameter] = {}
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_name(raw_name)
        known = names.get(id(parameter))
        if known is None or (known in tied and name not in tied):
            names[id(parameter)] = name
        parameters[id(parameter)] = parameter
    return [(names[key], parameter) for key, parameter in parameters.items()]


def _persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf in module._non_persistent_buffers_set:
                continue
            name = canonical_name(f"{prefix}.{leaf}" if prefix else leaf)
            buffers.setdefault(id(buffer), (name, buffer))
    return list(buffers.values())
