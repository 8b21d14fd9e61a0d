"""A model without memory, and how each rank fills its part of it from the files.

meta -> tie -> shard -> allocate -> own slices. Buffers that no file holds are computed when the
model is made, on the CPU, and never pass through the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from legato.errors import ModelError
from legato.hf_folder import FolderReader, local_box
from legato.models.names import named_weights


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside get parameters without memory, and real buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model whose weights are still in its files.

    Attributes:
        model: The model; parameters on the meta device, tied ones tied.
        reader: Its files.
        dtype: What the weights are rounded to, whatever the files hold.
        keys: Name of each weight -> its key in the files.
        twins: Name of a weight -> a second key that must hold the same values: a tied head.
    """

    model: Any
    reader: FolderReader
    dtype: torch.dtype
    keys: Mapping[str, str] = field(init=False)
    twins: Mapping[str, str] = field(init=False)
    _places: Mapping[str, tuple[nn.Module, str]] = field(init=False)
    _read_already: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        keys, twins = _match_keys(self.model, self.reader)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "twins", twins)
        # Where a weight is, not which tensor it is: sharding and adapters exchange tensors and
        # wrap modules, but the modules that hold weights stay.
        object.__setattr__(self, "_places", {name: _place(self.model, name) for name in keys})

    @torch.no_grad()
    def fill(self, root: nn.Module, *, device: torch.device, cpu_offload: bool = False) -> None:
        """Give ``root`` memory, and read this rank's part of each weight that wasn't read yet.

        Args:
            root: ``model`` itself, or what was put around it; sharded or not.
            device: Where it computes.
            cpu_offload: Its weights stay in host memory.

        Raises:
            ModelError: Weights that are tied by config.json differ in the files.
        """
        _allocate(root, torch.device("cpu") if cpu_offload else device)
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        for name, key in self.keys.items():
            if name in self._read_already:
                continue
            module, leaf = self._places[name]
            tensor = getattr(module, leaf)
            self._read(key, tensor)
            if name in self.twins:
                self._check_twin(self.twins[name], key, tensor)

    def read_whole(self, module: nn.Module, leaf: str) -> Tensor:
        """One weight for the caller to place; :meth:`fill` leaves it alone from now on.

        Args:
            module: The module of the model that holds it.
            leaf: Its name there.

        Returns:
            The whole weight on the CPU, in the model's dtype.
        """
        name = next(n for n, place in self._places.items() if place == (module, leaf))
        self._read_already.add(name)
        weight = torch.empty(self.reader.specs[self.keys[name]].shape, dtype=self.dtype)
        self.reader.read_into(self.keys[name], None, weight, cast=True)
        return weight

    def _read(self, key: str, tensor: Tensor) -> None:
        box, shard = local_box(tensor), _local(tensor)
        if box is None:
            return
        if not isinstance(tensor, nn.Parameter) or tensor.dtype == self.dtype:
            self.reader.read_into(key, box, shard, cast=True)
            return
        # A master weight begins as the rounded value, as it does on a single device.
        rounded = torch.empty(shard.shape, dtype=self.dtype)
        self.reader.read_into(key, box, rounded, cast=True)
        shard.copy_(rounded)

    def _check_twin(self, twin: str, key: str, tensor: Tensor) -> None:
        box = local_box(tensor)
        if box is None or torch.equal(self.reader.read(twin, box), self.reader.read(key, box)):
            return
        raise ModelError(
            f"{self.reader.folder}: config.json ties {twin} to {key}, but the files hold other "
            "values under each. Set tie_word_embeddings: false in its config.json.",
            path=self.reader.folder,
        )


@contextmanager
def weights_stand_in(model: nn.Module) -> Iterator[None]:
    """Give parameters on the meta device stand-ins on the CPU, of one element each, meanwhile.

    What is made beside them then gets memory and real first values; PEFT makes an adapter where
    its base is. The parameters are frozen afterwards if their stand-ins are.
    """
    originals: list[tuple[nn.Module, str, nn.Parameter]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in originals:
        zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module.register_parameter(name, nn.Parameter(zero, parameter.requires_grad))
    try:
        yield
    finally:
        for module, name, parameter in originals:
            stand_in = module._parameters[name]
            assert stand_in is not None
            parameter.requires_grad_(stand_in.requires_grad)
            module.register_parameter(name, parameter)


def _allocate(root: nn.Module, device: torch.device) -> None:
    """Memory for the parameters on the meta device; tied ones stay tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name))
    for holders in places.values():
        module, name = holders[0]
        old = module._parameters[name]
        assert old is not None
        new = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
        for module, name in holders:
            module._parameters[name] = new


def _match_keys(model: Any, reader: FolderReader) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> key in the files, and name -> second key; strict both ways."""
    weights = named_weights(model)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = _ignored_keys(model)
    keys: dict[str, str] = {}
    twins: dict[str, str] = {}
    unexpected = []
    for key in reader.specs:
        # Files of the bare decoder lack the prefix that it has inside of this model.
        names = [key, f"{model.base_model_prefix}.{key}"]
        name = next((n for n in names if n in weights or n in tied), None)
        if name is None:
            if not any(pattern.search(key) for pattern in ignored):
                unexpected.append(key)
        elif name in weights:
            keys[name] = key
        else:
            twins[tied[name]] = key
    for name in [name for name in twins if name not in keys]:
        keys[name] = twins.pop(name)
    report_differences(
        reader.folder,
        missing=sorted(weights.keys() - keys.keys()),
        unexpected=sorted(unexpected),
        mismatched=sorted(
            (name, reader.specs[key].shape, tuple(weights[name].shape))
            for name, key in keys.items()
            if reader.specs[key].shape != tuple(weights[name].shape)
        ),
    )
    return {name: keys[name] for name in weights}, twins


def _ignored_keys(model: Any) -> list[re.Pattern[str]]:
    """Keys that transformers knows to be in some files without being weights."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    # Old files hold these buffers in every layer: transformers' loader drops them by hand as well.
    patterns |= {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return [re.compile(pattern) for pattern in sorted(patterns)]


def report_differences(
    path: str, *, missing: list[str], unexpected: list[str], mismatched: list[tuple[Any, ...]]
) -> None:
    """Raise when files and model don't hold exactly the same tensors.

    Args:
        path: The model's folder.
        missing: Weights of the model that no file holds.
        unexpected: Keys of the files that aren't weights of the model.
        mismatched: Name, shape in the files, shape by config.json.

    Raises:
        ModelError: One of the lists isn't empty; they are its facts.
    """
    problems = []
    if missing:
        problems.append(f"{_first_three(missing)} of the model isn't in the files")
    if unexpected:
        problems.append(f"{_first_three(unexpected)} of the files isn't in the model")
    if mismatched:
        shapes = [f"{e[0]} {tuple(e[1])} in the files, {tuple(e[2])} by config" for e in mismatched]
        problems.append(f"other shape: {_first_three(shapes)}")
    if problems:
        raise ModelError(
            f"{path}: the weights don't fit config.json. "
            + "; ".join(problems)
            + ". Is it a checkpoint of another kind, or was a file replaced?",
            path=path,
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )


def _first_three(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, as a view."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
