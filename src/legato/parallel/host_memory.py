"""How much memory this host, or the container that we are in, can still give a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# Version 2 and version 1 of cgroups: limit, usage, and what the kernel drops when it needs room.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_host_bytes(*, num_sharing: int = 1) -> int:
    """What a process may still take, by the kernel's estimate and the limits of its cgroups.

    Args:
        num_sharing: Processes of the run on this host: each gets its part.

    Returns:
        The bytes.
    """
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes()
    return (available if limited is None else min(available, limited)) // num_sharing


def cgroup_free_bytes(
    *, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the cgroups of this process leave of their limits; None: none limits it.

    Args:
        membership: The kernel's list of the cgroups that the process is in.
        root: Where cgroups are mounted. In a container it may be the process's own.

    Returns:
        The least of what its cgroup and those above it leave, in bytes.
    """
    try:
        lines = membership.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [left for line in lines for left in _left_by_line(line, root)]
    return min(found, default=None)


def _left_by_line(line: str, root: Path) -> Iterator[int]:
    """``hierarchy:controllers:path``: version 2 has no controllers, version 1 names ``memory``."""
    _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "other", "")
    if controllers == "":
        names = _V2
    elif "memory" in controllers.split(","):
        names, root = _V1, root / "memory"
    else:
        return
    folder = root / path.lstrip("/")
    for place in (folder, *(p for p in folder.parents if p.is_relative_to(root))):
        left = _left_in(place, *names)
        if left is not None:
            yield left


def _left_in(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        most = int((folder / limit).read_text())  # "max" where there is none
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    facts = dict(fact.split(" ", 1) for fact in stat if " " in fact)
    return max(0, most - used + int(facts.get(droppable, "0")))
