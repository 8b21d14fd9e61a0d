"""What a checkpoint is made of: a model or an adapter, an optimizer, random states, and JSON.

The parts hold live tensors, never copies: saving reads them, restoring fills them in place.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from legato.checkpoint.manifest import Kind
from legato.checkpoint.tensors import state_tensors
from legato.errors import CheckpointError
from legato.models.names import named_weights


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state of JSON values; it is kept in ``state/trainer.json``."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: dicts with text keys, lists, texts, finite numbers, booleans, None."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over a state that :meth:`state_dict` gave."""
        ...


@runtime_checkable
class PacksMoments(Protocol):
    """An optimizer whose state holds tensors that are packed of several, such as 8-bit moments."""

    def empty_moment(self, parameter: Tensor, moment: str) -> Tensor:
        """A state tensor of ``parameter`` as the first step makes it, packed or not."""
        ...


@dataclass(frozen=True, eq=False)
class ModelPart:
    """The weights of a checkpoint, and the small files beside them.

    Attributes:
        tensors: Canonical name -> live tensor: for a model its parameters (tied ones once) and
            persistent buffers, for an adapter its trainable parameters.
        kind: ``model`` or ``adapter``; says what the weight files are called.
        keys: Canonical name -> key in the file; None: the names are the keys.
        twins: Further key in the file -> canonical name of the tensor that is written there as
            well, for readers that look for tied weights under both names.
        file_dtype: What a tensor with a master is rounded to in the weight file; None: the dtype
            of the live tensor. Tensors without a master are written as they are.
        masters: Canonical name -> fp32 tensor that the live one is a rounded copy of. It is kept
            in ``state/`` as ``master/<name>``, and the live tensor is restored from it.
        files: Name -> bytes of further files of the folder: config.json, tokenizer, ...
    """

    tensors: Mapping[str, Tensor]
    kind: Kind = "model"
    keys: Mapping[str, str] | None = None
    twins: Mapping[str, str] = field(default_factory=dict)
    file_dtype: torch.dtype | None = None
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.keys is not None and (absent := [n for n in self.tensors if n not in self.keys]):
            raise CheckpointError(
                f"{len(absent)} tensors have no key in the file, {absent[0]} first: "
                "is it trainable, but no part of the adapter?",
                names=absent,
            )
        if strangers := self.masters.keys() - self.tensors.keys():
            raise CheckpointError(
                f"{len(strangers)} masters belong to no tensor, {min(strangers)} first",
                names=sorted(strangers),
            )

    def key(self, name: str) -> str:
        """The key in the weight file of the tensor called ``name``."""
        return name if self.keys is None else self.keys[name]

    def names_by_key(self) -> dict[str, str]:
        """Every key of the weight file -> the canonical name of the tensor under it."""
        return {self.key(name): name for name in self.tensors} | dict(self.twins)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in the weight file of the tensor called ``name``."""
        live = self.tensors[name].dtype
        return (self.file_dtype or live) if name in self.masters else live


@dataclass(frozen=True, eq=False)
class OptimizerPart:
    """An optimizer and the names of what it updates.

    Attributes:
        optimizer: A torch optimizer whose state is tensors and plain numbers; with packed tensors
            if it is a `PacksMoments`.
        names: Canonical name -> the tensor that the optimizer holds (the master where there is
            one): exactly those of its parameter groups.
        restore_groups: Whether restoring also sets the groups' hyperparameters (learning rate,
            weight decay, ...) to the stored ones. Off where a config decides them anew.
    """

    optimizer: Optimizer
    names: Mapping[str, Tensor]
    restore_groups: bool = False

    def __post_init__(self) -> None:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = {id(tensor): name for name, tensor in self.names.items()}
        if missing := held - named.keys():
            raise CheckpointError(
                f"the optimizer holds {len(missing)} tensors without a name: is it built on other "
                "tensors than the model's?",
                num_tensors=len(missing),
            )
        if unheld := sorted(name for key, name in named.items() if key not in held):
            raise CheckpointError(
                f"the optimizer doesn't hold {len(unheld)} named tensors, {unheld[0]} first: they "
                "would never be updated",
                names=unheld,
            )

    def groups_json(self) -> list[dict[str, Any]]:
        """Hyperparameters of each group, with the names of its tensors."""
        name_of = {id(tensor): name for name, tensor in self.names.items()}
        return [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            | {"params": [name_of[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def keeps_no_moments(self) -> bool:
        """Whether its update is made of the gradient alone, whatever another optimizer left."""
        groups = self.optimizer.param_groups
        is_plain = isinstance(self.optimizer, SGD) and not any(g["momentum"] for g in groups)
        return is_plain and not self.restore_groups  # stored groups may have a momentum

    def expected_state_bytes(self) -> int:
        """Bytes of its state after a first step, on all ranks together; what there is counts."""
        state = self.optimizer.state
        found = sum(
            value.numel() * value.element_size()
            for tensor in self.names.values()
            for _, value in state_tensors(state.get(tensor, {}))
        )
        if found:
            return found
        moments = _num_moments(self.optimizer.defaults)
        return moments * sum(self._moment_bytes(tensor) for tensor in self.names.values())

    def _moment_bytes(self, tensor: Tensor) -> int:
        if not isinstance(self.optimizer, PacksMoments):
            return tensor.numel() * tensor.element_size()
        empty = self.optimizer.empty_moment(torch.empty_like(tensor, device="meta"), "exp_avg")
        return sum(t.numel() * t.element_size() for _, t in state_tensors({"exp_avg": empty}))


class RngPart:
    """The random states of this process: torch (CPU and current CUDA device), numpy, python.

    For loops that don't derive their randomness from the step. Kept as tensors in
    ``state/rng.safetensors``, under keys of each rank.
    """

    def read(self) -> dict[str, Tensor]:
        """The states as they are now, as tensors of fixed shapes."""
        _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        _, numbers, next_gauss = random.getstate()
        states = {
            "torch": torch.get_rng_state(),
            "numpy": torch.tensor([int(key) for key in keys] + [int(position)]),
            "numpy_gauss": torch.tensor([float(has_gauss), float(gauss)], dtype=torch.float64),
            "python": torch.tensor(list(numbers)),
            "python_gauss": torch.tensor(
                [float(next_gauss is not None), next_gauss or 0.0], dtype=torch.float64
            ),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def write(self, states: Mapping[str, Tensor]) -> None:
        """Set the random states to ``states``, as :meth:`read` gave them."""
        torch.set_rng_state(states["torch"])
        *keys, position = states["numpy"].tolist()
        has_gauss, gauss = states["numpy_gauss"].tolist()
        np.random.set_state(
            ("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss)
        )
        has_next, next_gauss = states["python_gauss"].tolist()
        random.setstate((3, tuple(states["python"].tolist()), next_gauss if has_next else None))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


@dataclass(frozen=True, eq=False)
class Parts:
    """A state, sorted by how each part is stored."""

    model: ModelPart
    optimizer: OptimizerPart | None
    rng: RngPart | None
    others: Mapping[str, Any]

    def live_tensors(self) -> list[Tensor]:
        """Every tensor that is saved, random states aside, in a fixed order."""
        tensors = [*self.model.tensors.values(), *self.model.masters.values()]
        if self.optimizer is not None:
            state = self.optimizer.optimizer.state
            for parameter in self.optimizer.names.values():
                if parameter in state:
                    tensors += [value for _, value in state_tensors(state[parameter])]
        return tensors

    def labels(self) -> tuple[object, ...]:
        """What besides the tensors decides where they are written: kind, names, keys, parts."""
        model, optimizer = self.model, self.optimizer
        return (
            model.kind,
            model.file_dtype,
            tuple(model.tensors),
            tuple(model.masters),
            None if model.keys is None else dict(model.keys),
            dict(model.twins),
            None if optimizer is None else tuple(optimizer.names),
            self.rng is not None,
        )

    def trainer_json(self) -> dict[str, Any]:
        """The JSON half of the state, as it is now."""
        content: dict[str, Any] = {"format": 1, "parts": {}}
        for name, part in self.others.items():
            content["parts"][name] = dict(part) if isinstance(part, Mapping) else part.state_dict()
        if self.optimizer is not None:
            values = {
                name: scalars
                for name, tensor in self.optimizer.names.items()
                if (scalars := _scalars(self.optimizer.optimizer.state.get(tensor, {}), name))
            }
            content["optimizer"] = {
                "groups": self.optimizer.groups_json(),
                "values": values,
                "packs_moments": isinstance(self.optimizer.optimizer, PacksMoments),
            }
        return content


def sort_parts(state: Mapping[str, Any]) -> Parts:
    """Sort what a caller wants saved by how it is stored.

    Args:
        state: ``model`` (a `ModelPart` or a plain module), optionally ``optimizer`` (an
            `OptimizerPart` or a plain torch optimizer) and ``rng`` (an `RngPart`), and any number
            of `Stateful` parts or plain mappings of JSON values under other names.

    Returns:
        The parts.

    Raises:
        CheckpointError: A part can't be stored; the message says why.
    """
    others = {name: part for name, part in state.items() if name not in _NAMED}
    if "model" not in state:
        raise CheckpointError(f"state has no 'model', only {sorted(state)}")
    for name, part in others.items():
        if isinstance(part, nn.Module | Optimizer | ModelPart | OptimizerPart | RngPart):
            raise CheckpointError(
                f"state[{name!r}] is a {type(part).__name__}: one model, one optimizer and one "
                "random state are stored, under 'model', 'optimizer' and 'rng'"
            )
        if not isinstance(part, Stateful | Mapping):
            raise CheckpointError(f"state[{name!r}] is a {type(part).__name__} without a state")
    model = as_part(state["model"])
    if not isinstance(model, ModelPart):
        raise CheckpointError(f"state['model'] is a {type(model).__name__}")
    optimizer = state.get("optimizer")
    if optimizer is not None:
        optimizer = as_part(optimizer, model=model)
        if not isinstance(optimizer, OptimizerPart):
            raise CheckpointError(f"state['optimizer'] is a {type(optimizer).__name__}")
    return Parts(model=model, optimizer=optimizer, rng=state.get("rng"), others=others)


_NAMED = ("model", "optimizer", "rng")


def as_part(
    thing: nn.Module | Optimizer | ModelPart | OptimizerPart, *, model: ModelPart | None = None
) -> ModelPart | OptimizerPart:
    """Wrap a plain module or optimizer as the part of a checkpoint that it is.

    Args:
        thing: A module, an optimizer, or a part (returned as it is).
        model: For an optimizer: where its tensors' names come from.

    Returns:
        The part.

    Raises:
        CheckpointError: It is something else, or an optimizer over tensors without a name.
    """
    if isinstance(thing, ModelPart | OptimizerPart):
        return thing
    if isinstance(thing, nn.Module):
        return ModelPart(tensors=named_weights(thing, trainable_only=False))
    if isinstance(thing, Optimizer) and model is not None:
        held = {id(p) for group in thing.param_groups for p in group["params"]}
        named = {**model.tensors, **model.masters}
        return OptimizerPart(
            optimizer=thing,
            names={name: tensor for name, tensor in named.items() if id(tensor) in held},
            restore_groups=True,
        )
    raise CheckpointError(f"{type(thing).__name__} is no part of a checkpoint")


def encode_json(content: Mapping[str, Any]) -> bytes:
    """JSON bytes; what isn't JSON is an error that says where it lies.

    Args:
        content: Dicts with text keys, lists, texts, finite numbers, booleans, None.

    Returns:
        Its bytes.

    Raises:
        CheckpointError: A value isn't one of these; ``.where``.
    """
    try:
        return json.dumps(content, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        where, value = next(_not_json(content, ""), ("", None))
        raise CheckpointError(
            f"trainer.json: {where.lstrip('.')} is {value!r:.80}, which isn't JSON: a state holds "
            "texts, finite numbers, booleans, None, lists and dicts with text keys",
            where=where.lstrip("."),
        ) from error


def _not_json(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str | int | float | bool | None):
                yield f"{where}.{key!r}", key
            yield from _not_json(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _not_json(inner, f"{where}[{i}]")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            yield where, value
    elif not isinstance(value, str | int | None):
        yield where, value


def _scalars(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The plain numbers in an optimizer's state of one tensor."""
    scalars = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in scalars.items():
        if not isinstance(value, int | float | bool | str | None):
            raise CheckpointError(
                f"the optimizer's state {key!r} of {name} is a {type(value).__name__}: only "
                "tensors and plain numbers can be stored",
                name=name,
            )
    return scalars


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _num_moments(defaults: Mapping[str, Any]) -> int:
    """State tensors of a parameter's size that an optimizer will make, by its hyperparameters."""
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return int(bool(defaults.get("momentum")))
