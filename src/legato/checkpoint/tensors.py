"""The kinds of tensors that are saved: torch's own, sharded over ranks, or packed of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own: neither sharded nor packed of others."""
    return type(tensor) in (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the tensor itself unless it is sharded; not a copy."""
    if is_plain(tensor):
        return tensor
    shard: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return shard


def packed_pieces(value: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor is packed of, by torch's protocol; empty: it isn't."""
    if is_plain(value) or not hasattr(value, "__tensor_flatten__"):
        return {}
    # A DTensor speaks the protocol as well, and is stored as it is.
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return {}
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor in an optimizer's state of one parameter; of a packed one its pieces.

    ``exp_avg``, or ``exp_avg.codes``, ``exp_avg.scale``, ...
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        pieces = packed_pieces(value)
        if not pieces:
            yield name, value
        for piece, tensor in pieces.items():
            yield f"{name}.{piece}", tensor
