"""A copy of what is saved that training can no longer change. Always a copy, on a CPU too.

What happens on the training thread is constant: one ``_foreach_copy_`` over kept lists into kept
buffers. On CUDA the copy runs on a side stream behind an event of the compute stream, so it takes
place while the next step computes; `Stager.wait_staged` stands before the update that would change
what is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from legato.checkpoint.tensors import local
from legato.errors import CheckpointError

# What is at most cloned on the device before it is copied out: adapters, buffers, scalars.
DEVICE_CLONE_BYTES = 256 * 1024**2

_ALIGNMENT_BYTES = 64


class Snapshot:
    """The staged values of one save.

    Args:
        values: Source -> its staged value.
        staged_bytes: Bytes that were copied.
        done: A CUDA event that ends the copy; None: it is complete.

    Attributes:
        staged_bytes: Bytes that were copied.
        is_copy: Training may go on, and a failed save may be tried again.
    """

    is_copy = True

    def __init__(
        self, values: Mapping[str, Tensor], *, staged_bytes: int, done: Any = None
    ) -> None:
        self.staged_bytes = staged_bytes
        self._values = values
        self._done = done
        self._reference: dict[str, Tensor] | None = None

    def wait(self) -> None:
        """Wait until every value is there: called by the background thread before it reads."""
        if self._done is not None:
            self._done.synchronize()
        if self._reference is not None:
            self._compare(self._reference)

    def value(self, source: str) -> Tensor:
        """The staged value, a contiguous CPU tensor; of a sharded tensor this rank's shard."""
        return _to_host(self._values[source])

    def check_against(self, live: Mapping[str, Tensor]) -> None:
        """Take a slow, synchronous copy now; `wait` compares with it. For debugging."""
        shards = {name: local(tensor) for name, tensor in live.items()}
        self._reference = {name: shard.detach().cpu().clone() for name, shard in shards.items()}

    def _compare(self, reference: Mapping[str, Tensor]) -> None:
        for name, expected in reference.items():
            found = self.value(name)
            if not torch.equal(_bits(found), _bits(expected)):
                raise CheckpointError(
                    f"the snapshot of {name} differs from the value at the time of save()",
                    name=name,
                )


class Stager:
    """Copies live tensors into buffers that it allocates once.

    Args:
        sources: Name -> live tensor, sharded or not; the lists are kept.
        blocking: Complete the copy before `stage` returns, on CUDA too.
        check: Compare every snapshot with a slow synchronous copy, and every tensor's address with
            that of the first save.
        available_bytes: Host memory that the buffers may take; None: that isn't looked at.

    Attributes:
        staged_bytes: Bytes of one snapshot.

    Raises:
        MemoryError: The buffers don't fit into ``available_bytes``.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        *,
        blocking: bool = False,
        check: bool = False,
        available_bytes: int | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._blocking = blocking
        self._check = check
        self._done: Any = None
        names = list(self._sources)
        shards = [local(tensor) for tensor in self._sources.values()]
        self.staged_bytes = sum(shard.numel() * shard.element_size() for shard in shards)
        self._device = next((s.device for s in shards if s.device.type == "cuda"), None)
        self._buffers = _Buffers(
            shards, pinned=self._device is not None, available_bytes=available_bytes
        )
        self._by_name = dict(zip(names, self._buffers.tensors, strict=True))
        self._addresses = [shard.data_ptr() for shard in shards]
        self._cloned = self._pick_cloned(shards)
        if self._device is not None:
            self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def _pick_cloned(self, shards: Sequence[Tensor]) -> list[bool]:
        """Which tensors are cloned on the device first, so that they may change at once.

        All of a small state; of a large one what may change before the update: buffers, which a
        forward pass changes, and scalars.
        """
        on_device = [s for s in shards if s.device.type == "cuda"]
        small = sum(s.numel() * s.element_size() for s in on_device) <= DEVICE_CLONE_BYTES
        return [
            shard.device.type == "cuda" and (small or shard.dim() == 0 or _is_buffer(name, tensor))
            for shard, (name, tensor) in zip(shards, self._sources.items(), strict=True)
        ]

    @torch.no_grad()
    def stage(self, extra: Mapping[str, Tensor] | None = None) -> Snapshot:
        """Begin a snapshot. The one before it must no longer be in use.

        Args:
            extra: Values that are copies already (random states): taken as they are.

        Returns:
            The snapshot. On a CPU it is complete; on CUDA what isn't cloned on the device must
            not change before `wait_staged`.
        """
        live = [local(tensor) for tensor in self._sources.values()]
        if self._check:
            self._check_addresses(live)
        if self._device is not None:
            self._stage_cuda(live)
        elif live:  # a rank may have no share at all
            torch._foreach_copy_(self._buffers.tensors, live)
        snapshot = Snapshot(
            {**self._by_name, **(extra or {})}, staged_bytes=self.staged_bytes, done=self._done
        )
        if self._check:
            snapshot.check_against(self._sources)
        return snapshot

    def _stage_cuda(self, live: list[Tensor]) -> None:
        live = [t.clone() if cloned else t for t, cloned in zip(live, self._cloned, strict=True)]
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        pairs = list(zip(self._buffers.tensors, live, strict=True))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(
                [buffer for buffer, tensor in pairs if tensor.is_cuda],
                [tensor for tensor in live if tensor.is_cuda],
                non_blocking=True,
            )
            for clone in itertools.compress(live, self._cloned):
                # Freed on the compute stream, read on this one.
                clone.record_stream(self._stream)
        for buffer, tensor in pairs:
            if not tensor.is_cuda:
                buffer.copy_(tensor)
        self._done = self._stream.record_event()
        if self._blocking:
            self._done.synchronize()

    def wait_staged(self) -> None:
        """Order whatever is computed from now on behind the snapshot; the host doesn't wait."""
        if self._done is not None and not all(self._cloned):
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _check_addresses(self, live: Sequence[Tensor]) -> None:
        for name, tensor, address in zip(self._sources, live, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                raise CheckpointError(
                    f"{name} has moved in memory since the first save: was it replaced between "
                    "forward and backward?",
                    name=name,
                )

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.close()


class LiveValues(Snapshot):
    """No snapshot at all: values are read from the live tensors while training stands still.

    For hosts without the memory for a copy.
    """

    is_copy = False

    def __init__(self, sources: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        values = {name: local(tensor) for name, tensor in sources.items()}
        super().__init__({**values, **extra}, staged_bytes=0)


class _Buffers:
    """Host tensors shaped like others, in one allocation; pinned for copies from CUDA."""

    def __init__(
        self, like: Sequence[Tensor], *, pinned: bool, available_bytes: int | None
    ) -> None:
        sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in like]
        total = sum(sizes)
        if available_bytes is not None and total > available_bytes:
            raise MemoryError(f"staging needs {total} bytes of memory, {available_bytes} are free")
        # zero_ touches every page now: the first touch is slow and shouldn't fall into a save.
        self._flat = torch.empty(total, dtype=torch.uint8).zero_()
        self._registered = pinned and total > 0
        if self._registered:
            # Pinned by registering: torch's own pinned allocations round up to a power of two.
            _check_cuda(_cudart().cudaHostRegister(self._flat.data_ptr(), total, 0))
        starts = itertools.accumulate(sizes, initial=0)
        self.tensors = [
            self._flat[start : start + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for start, tensor in zip(starts, like, strict=False)
        ]

    def close(self) -> None:
        """Give the memory back."""
        if self._registered:
            _check_cuda(_cudart().cudaHostUnregister(self._flat.data_ptr()))
            self._registered = False
        self.tensors = []
        self._flat = torch.empty(0, dtype=torch.uint8)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _is_buffer(name: str, tensor: Tensor) -> bool:
    return name.startswith("model/") and not tensor.requires_grad


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own


def _check_cuda(code: Any) -> None:
    if int(code) != 0:
        raise MemoryError(f"pinning memory failed with CUDA error {int(code)}")
