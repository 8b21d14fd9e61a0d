"""Find out whether several writers may share one file; some mounts lose such writes silently."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable

from legato.storage.base import Storage

_STRIPE_BYTES = 4096 + 1  # off the page grid: neighbours share pages, as slices of tensors do


def probe_positioned_writes(
    storage: Storage,
    folder: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] = lambda: None,
) -> bool:
    """Write one file together, a stripe per writer, and read it back whole.

    Collective where ``world_size`` is over 1: every rank calls it, with the same folder.

    Args:
        storage: Where the folder is.
        folder: An existing folder that all ranks share.
        rank: Which stripes are this process's: it writes two, the later one first.
        world_size: How many processes write.
        barrier: Returns when every rank has called it.

    Returns:
        Whether this rank found every byte in its place. Ranks may differ: shared writes are safe
        only where all say so.
    """
    if not storage.positioned_shared_writes:
        return False
    path = posixpath.join(folder, ".probe-writes")
    num_stripes = 2 * world_size
    if rank == 0:
        with contextlib.suppress(OSError):
            storage.create_file(path, num_stripes * _STRIPE_BYTES)
    barrier()
    with contextlib.suppress(OSError):
        for stripe in (rank + world_size, rank):
            storage.write_at(path, stripe * _STRIPE_BYTES, _stripe(stripe))
        storage.sync_file(path)
    barrier()
    found = b""
    with contextlib.suppress(OSError):
        found = storage.read_bytes(path)
    barrier()
    if rank == 0:
        with contextlib.suppress(OSError):
            storage.remove_file(path)
    return found == b"".join(map(_stripe, range(num_stripes)))


def _stripe(number: int) -> bytes:
    return bytes([number % 255 + 1]) * _STRIPE_BYTES
