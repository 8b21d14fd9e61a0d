"""Writing where a file may have one writer only: its owner writes it, the others send their slices.

For object stores, for mounts that lose what several processes write into one file, and for hosts
that share no disk. Names and bytes of the folder are the same as where all ranks write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from legato.checkpoint.manifest import Slice, digest_of
from legato.checkpoint.plan import SavePlan, Write
from legato.checkpoint.staging import Snapshot
from legato.hf_folder import PlannedFile, tensor_bytes
from legato.parallel.peers import Peers
from legato.storage import Storage

# One message between two ranks; so much of the others' bytes an owner holds at a time.
MESSAGE_BYTES = 64 * 1024**2

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Bytes of a file in one message.

    Attributes:
        offset: In the file.
        num_bytes: How many.
        rank: Who has them.
        write: In which of its tensors.
        source_offset: Where in that tensor's bytes.
    """

    offset: int
    num_bytes: int
    rank: int
    write: int
    source_offset: int


class Relay:
    """Carries one save's slices to the owners of its files.

    All ranks go through the files, and through the pieces of each file, in the same order, so
    every message meets its receiver. A rank that fails goes on sending (zeros) and receiving, so
    that nobody waits for it, and raises at the end.

    Args:
        plan: The files, and this rank's share of them.
        snapshot: This rank's staged values.
        storage: Where the files are written.
        peers: All ranks.
        num_owners: So many ranks, the first ones, share the files out among them.
    """

    def __init__(
        self,
        plan: SavePlan,
        snapshot: Snapshot,
        *,
        storage: Storage,
        peers: Peers,
        num_owners: int,
    ) -> None:
        self._plan = plan
        self._snapshot = snapshot
        self._storage = storage
        self._peers = peers
        self._num_owners = num_owners
        self._failure: Exception | None = None
        self._held: tuple[Write, Tensor] | None = None

    def run(self, paths: Mapping[str, str]) -> Iterator[tuple[str, list[Slice]]]:
        """Collective: write every file, one after the other.

        Args:
            paths: File name -> absolute path.

        Yields:
            tuple[str, list[Slice]]: Of each file its name, and the slices that this rank
                contributed.

        Raises:
            Exception: Whatever failed first on this rank, once all files are through: the others
                wait for what it sends.
        """
        self._try(self._snapshot.wait)
        rank = self._peers.rank
        mine = {name: _cut(self._plan.writes[name], rank) for name in paths}
        said = self._peers.gather({name: list(map(asdict, mine[name])) for name in paths})
        for number, file in enumerate(self._plan.files):
            everyones = [Piece(**piece) for theirs in said for piece in theirs[file.name]]
            everyones.sort(key=lambda piece: piece.offset)
            owner = number % self._num_owners
            if owner == rank:
                self._write(file, everyones, path=paths[file.name])
            else:
                for piece in mine[file.name]:
                    self._peers.send(self._data(piece, file.name), to=owner)
            yield file.name, self._try(partial(self._slices, file.name)) or []
        if self._failure is not None:
            raise self._failure

    def _write(self, file: PlannedFile, pieces: Sequence[Piece], *, path: str) -> None:
        """The owner's part: everything in ascending order, its own and what it is sent."""
        self._try(partial(self._storage.create_file, path, file.size_bytes))
        self._try(partial(self._storage.write_at, path, 0, file.header))
        for piece in pieces:
            if piece.rank == self._peers.rank:
                data = self._data(piece, file.name)
            else:
                data = self._peers.receive(piece.num_bytes, sender=piece.rank)
            self._try(partial(self._storage.write_at, path, piece.offset, tensor_bytes(data)))
        self._try(partial(self._storage.sync_file, path))

    def _data(self, piece: Piece, name: str) -> Tensor:
        """A piece of this rank's, as bytes; zeros once something has failed."""
        start = piece.source_offset
        write = self._plan.writes[name][piece.write]
        found = self._try(partial(self._bytes, write))
        if found is None:
            return torch.zeros(piece.num_bytes, dtype=torch.uint8)
        return found[start : start + piece.num_bytes]

    def _slices(self, name: str) -> list[Slice]:
        return [
            part
            for write in self._plan.writes[name]
            for part in _digest_runs(write, tensor_bytes(self._bytes(write)))
        ]

    def _bytes(self, write: Write) -> Tensor:
        """A tensor's bytes in the file's dtype; the last one is kept, for its next piece."""
        if self._held is None or self._held[0] is not write:
            value = self._snapshot.value(write.source).to(write.dtype)
            self._held = write, torch.frombuffer(tensor_bytes(value), dtype=torch.uint8)
        return self._held[1]

    def _try(self, action: Callable[[], T]) -> T | None:
        """Do it, unless something has failed before."""
        if self._failure is not None:
            return None
        try:
            return action()
        except Exception as error:
            self._failure = error
            return None


def _cut(writes: Sequence[Write], rank: int) -> list[Piece]:
    """This rank's share of a file, in messages, in ascending order."""
    pieces = []
    for number, write in enumerate(writes):
        for runs in write.runs:
            for i in range(runs.num_runs):
                offset = runs.offset + i * runs.distance_bytes
                source = runs.source_offset + i * runs.run_bytes
                for start in range(0, runs.run_bytes, MESSAGE_BYTES):
                    size = min(MESSAGE_BYTES, runs.run_bytes - start)
                    pieces.append(Piece(offset + start, size, rank, number, source + start))
    return sorted(pieces, key=lambda piece: piece.offset)


def _digest_runs(write: Write, data: memoryview) -> list[Slice]:
    """The slices of one `Write`, as the manifest lists them; ``data`` are all its bytes."""
    slices = []
    for runs in write.runs:
        end = runs.source_offset + runs.num_runs * runs.run_bytes
        digest = digest_of(data[runs.source_offset : end])
        slices.append(
            Slice(runs.offset, runs.run_bytes, digest, runs.num_runs, runs.distance_bytes)
        )
    return slices
