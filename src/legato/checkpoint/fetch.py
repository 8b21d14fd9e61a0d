"""Where hosts don't share a disk: the step to resume from travels from rank 0's to the others'."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from legato.checkpoint.inspection import find_damage, inspect
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.manifest import MANIFEST_NAME, digest_of
from legato.errors import CheckpointError, CheckpointNotFoundError
from legato.hf_folder import tensor_bytes
from legato.parallel.peers import Peers

SOURCE_FOLDER = ".source"
"""In the output_dir of a host that isn't rank 0's: the step that the run was resumed from."""

MESSAGE_BYTES = 64 * 1024**2

T = TypeVar("T")


def fetch_step(
    path: str | None, *, folder: RunFolder, host: str, peers: Peers, verify: bool = False
) -> str | None:
    """Collective: have the step at ``path`` of rank 0's disk on every rank's own.

    A host that has it already, or sees rank 0's disk, is sent nothing. Of the ranks of another
    host one receives it, into ``output_dir/.source/step_N``; an older one there goes first.

    Args:
        path: Absolute path of a complete step; rank 0's counts. None: there is none.
        folder: This rank's output_dir.
        host: This rank's host.
        peers: All ranks.
        verify: Read every byte of what a host has already; rank 0's were read before.

    Returns:
        The step's absolute path for this rank; None if there is none.

    Raises:
        CheckpointError: Rank 0 can't read it.
        PeerLostError: Another rank can't read or write it; ``.rank``.
    """
    told = peers.on_main(
        lambda: None if path is None else _describe(folder, path), fallback=CheckpointError
    )
    if told is None:
        return None
    mine = posixpath.join(folder.path, SOURCE_FOLDER, posixpath.basename(told["path"]))
    verify = verify and not peers.is_main
    places = (p for p in (told["path"], mine) if _holds(folder, p, told["digest"], verify=verify))
    place = next(places, None)
    said = peers.gather([host, folder.path, place is not None])
    receivers: dict[tuple[str, str], int] = {}
    for rank, (where, output_dir, has_it) in enumerate(said):
        if not has_it:
            receivers.setdefault((where, output_dir), rank)
    transfer = _Transfer(folder, told, target=mine, peers=peers)
    for rank in receivers.values():
        transfer.to(rank)
    peers.on_every_rank(transfer.finish)
    return place or mine


def check_first_host(*, folder: RunFolder, host: str, peers: Peers) -> None:
    """Collective: refuse to begin anew on rank 0's host where another one holds steps.

    Args:
        folder: This rank's output_dir.
        host: This rank's host.
        peers: All ranks.

    Raises:
        CheckpointNotFoundError: Rank 0 has no step, another host has; ``.rank``.
    """
    infos = folder.steps()
    if not peers.is_main:  # what was brought here once shows that rank 0 was elsewhere
        brought = RunFolder(folder.storage, posixpath.join(folder.path, SOURCE_FOLDER))
        infos += brought.steps()
    newest = max((info.step for info in infos if info.is_complete), default=None)
    said = peers.gather([host, newest])
    main_host, on_main = said[0]
    for rank, (where, step) in enumerate(said):
        if on_main is None and step is not None:
            raise CheckpointNotFoundError(
                f"host {where} (rank {rank}) holds step_{step}, and host {main_host} (rank 0), "
                "which all steps are read from, holds none. Start rank 0 on the host that it was "
                "on, or begin anew with resume_from_checkpoint: false.",
                path=folder.path,
                rank=rank,
            )


def _describe(folder: RunFolder, path: str) -> dict[str, Any]:
    """Rank 0: the step's files with their sizes, and the digest of its manifest."""
    manifest = folder.storage.read_bytes(posixpath.join(path, MANIFEST_NAME))
    entries = inspect(folder.storage, path).committed().manifest.files
    files = [[name, entry.size_bytes] for name, entry in entries.items()]
    return {
        "path": path,
        "digest": digest_of(manifest),
        "files": [*files, [MANIFEST_NAME, len(manifest)]],
    }


def _holds(folder: RunFolder, path: str, digest: str, *, verify: bool) -> bool:
    info = inspect(folder.storage, path)
    if not info.is_complete:
        return False
    if digest_of(folder.storage.read_bytes(posixpath.join(path, MANIFEST_NAME))) != digest:
        return False
    return not (verify and find_damage(folder.storage, info.committed()))


class _Transfer:
    """Sends a step's files, in one order that both sides know.

    A side that fails goes on sending (zeros) and receiving, so that nobody waits for it, and
    raises at the end.
    """

    def __init__(
        self, folder: RunFolder, told: dict[str, Any], *, target: str, peers: Peers
    ) -> None:
        self._storage = folder.storage
        self._source: str = told["path"]
        self._files: Sequence[tuple[str, int]] = told["files"]
        self._target = target
        self._peers = peers
        self._failure: Exception | None = None

    def to(self, receiver: int) -> None:
        """Between rank 0 and ``receiver``; the others have nothing to do."""
        if self._peers.rank not in (0, receiver):
            return
        is_sender = self._peers.is_main
        if not is_sender:
            self._try(self._make_room)
        for name, size in self._files:
            path = posixpath.join(self._source if is_sender else self._target, name)
            if not is_sender:
                self._try(lambda path=path, size=size: self._begin(path, size))  # type: ignore[misc]
            for offset in range(0, size, MESSAGE_BYTES):
                length = min(MESSAGE_BYTES, size - offset)
                if is_sender:
                    self._peers.send(self._read(path, offset, length), to=receiver)
                else:
                    self._write(path, offset, self._peers.receive(length, sender=0))
            if not is_sender:
                self._try(lambda path=path: self._storage.sync_file(path))  # type: ignore[misc]

    def finish(self) -> None:
        """Raise what went wrong."""
        if isinstance(self._failure, OSError):
            raise CheckpointError(
                f"{self._source} can't be brought to every host: {self._failure}",
                path=self._source,
            ) from self._failure
        if self._failure is not None:
            raise self._failure

    def _make_room(self) -> None:
        self._storage.remove_tree(posixpath.dirname(self._target))
        self._storage.make_folder(self._target)

    def _begin(self, path: str, size: int) -> None:
        self._storage.make_folder(posixpath.dirname(path))
        self._storage.create_file(path, size)

    def _read(self, path: str, offset: int, length: int) -> Tensor:
        data = torch.zeros(length, dtype=torch.uint8)
        self._try(lambda: self._storage.read_into(path, offset, tensor_bytes(data)))
        return data

    def _write(self, path: str, offset: int, data: Tensor) -> None:
        self._try(lambda: self._storage.write_at(path, offset, tensor_bytes(data)))

    def _try(self, action: Callable[[], T]) -> None:
        """Do it, unless something has failed before."""
        if self._failure is None:
            try:
                action()
            except Exception as error:
                self._failure = error
