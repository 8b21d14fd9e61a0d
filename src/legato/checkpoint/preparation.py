"""What a save needs before training may go on: the kept plan, the copy, and every rank's word.

All that may fail on one rank alone happens here, locally; then one small message tells whether it
has failed anywhere. So every rank begins a save, or none does: a rank that left alone would keep
the others waiting for it in the background, where nothing but a long timeout ends them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from legato.checkpoint.parts import Parts
from legato.checkpoint.plan import SavePlan, plan_save
from legato.checkpoint.staging import LiveValues, Snapshot, Stager
from legato.errors import PeerLostError
from legato.parallel.host_memory import free_host_bytes
from legato.parallel.peers import Peers

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class _Kept:
    """A plan, and the live tensors that it was made for; no stager: there is no room for a copy."""

    plan: SavePlan
    stager: Stager | None
    signature: list[tuple[Tensor, torch.dtype, torch.Size]]
    labels: tuple[object, ...]

    def fits(self, tensors: list[Tensor], labels: tuple[object, ...]) -> bool:
        return (
            labels == self.labels
            and len(tensors) == len(self.signature)
            and all(
                tensor is known and tensor.dtype is dtype and tensor.shape == shape
                for tensor, (known, dtype, shape) in zip(tensors, self.signature, strict=True)
            )
        )


class Preparation:
    """Plans once, keeps the buffers, and has the ranks begin a save together.

    Args:
        control: All ranks, for this thread.
        local_ranks: Processes on this host.
        with_state: Whether a step holds what a resumed run needs.
        max_file_bytes: Bytes of tensors per file.
        blocking: Complete each copy before training goes on, on CUDA too.
        check: Compare every copy with a slow synchronous one.
    """

    def __init__(
        self,
        *,
        control: Peers,
        local_ranks: int,
        with_state: bool,
        max_file_bytes: int,
        blocking: bool,
        check: bool,
    ) -> None:
        self._control = control
        self._local_ranks = local_ranks
        self._with_state = with_state
        self._max_file_bytes = max_file_bytes
        self._blocking = blocking
        self._check = check
        self._kept: _Kept | None = None
        self._has_looked = False
        # What this rank's copy may take, looked up while no rank had one; the first plan's alone.
        self._share_bytes: int | None = None

    @property
    def makes_copies(self) -> bool:
        """Whether `stage` takes a copy, so that training may go on."""
        return self._kept is not None and self._kept.stager is not None

    def plan(self, parts: Parts) -> SavePlan:
        """The plan for ``parts``; made, with the buffers, unless there is one for these tensors."""
        tensors, labels = parts.live_tensors(), parts.labels()
        if self._kept is not None and self._kept.fits(tensors, labels):
            return self._kept.plan
        self.close()
        plan = plan_save(
            parts,
            rank=self._control.rank,
            world_size=self._control.size,
            local_ranks=self._local_ranks,
            with_state=self._with_state,
            max_file_bytes=self._max_file_bytes,
        )
        signature = [(tensor, tensor.dtype, tensor.shape) for tensor in tensors]
        self._kept = _Kept(plan, self._build_stager(plan), signature, labels)
        return plan

    def stage(self, parts: Parts) -> Snapshot:
        """The values of ``parts`` as they are now, for which a plan was made."""
        assert self._kept is not None
        rng = {} if parts.rng is None else {f"rng/{n}": t for n, t in parts.rng.read().items()}
        if self._kept.stager is None:
            return LiveValues(self._kept.plan.sources, rng)
        return self._kept.stager.stage(rng)

    def together(self, begin: Callable[[], T]) -> T:
        """Collective: call ``begin``, which plans; where it fails on one rank, all raise.

        After it either every rank has room for copies, or none takes any.

        Args:
            begin: Talks to no other rank.

        Returns:
            What this rank's ``begin`` returned.

        Raises:
            PeerLostError: It failed on another rank; ``.rank``. A rank's own error is raised as
                it is.
        """
        self._look_for_memory()
        try:
            value, said = self._control.on_every_rank_saying(
                begin, word=lambda _: float(self.makes_copies)
            )
        except PeerLostError as error:
            raise PeerLostError(f"no save is begun: {error}", **error.facts) from None
        if not all(said) and self._kept is not None and self._kept.stager is not None:
            self._kept.stager.close()
            self._kept.stager = None
            _warn_of_pauses("another rank")
        return value

    def wait_staged(self) -> None:
        """Order what is computed from now on behind the snapshot; see `Stager.wait_staged`."""
        if self._kept is not None and self._kept.stager is not None:
            self._kept.stager.wait_staged()

    def close(self) -> None:
        """Free the buffers, and forget the plan."""
        if self._kept is not None and self._kept.stager is not None:
            self._kept.stager.close()
        self._kept = None

    def _look_for_memory(self) -> None:
        """Collective, once: what each process of this host may take, before any of them does.

        A rank that looked while its neighbours' copies are there would hold the rest for all.
        """
        if self._has_looked:
            return
        self._has_looked = True
        self._control.all_true(True)  # all have what training itself keeps
        self._share_bytes = free_host_bytes(num_sharing=self._local_ranks)
        self._control.all_true(True)  # and nobody takes a copy until all have looked

    def _build_stager(self, plan: SavePlan) -> Stager | None:
        staged = {name: t for name, t in plan.sources.items() if not name.startswith("rng/")}
        share, self._share_bytes = self._share_bytes, None
        if share is None:  # planned anew: neighbours may have their copies, so this is cautious
            share = free_host_bytes(num_sharing=self._local_ranks)
        try:
            return Stager(staged, blocking=self._blocking, check=self._check, available_bytes=share)
        except MemoryError as error:
            _warn_of_pauses(str(error))
            return None


def _warn_of_pauses(problem: str) -> None:
    logger.warning(
        "not every rank has the memory for a copy of its share (%s): saves are written while "
        "training stands still", problem,
    )  # fmt: skip
