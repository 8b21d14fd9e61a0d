"""Memory that a process may take: of the host, of its container, and beside its neighbours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from legato.parallel import host_memory
from legato.parallel.host_memory import cgroup_free_bytes, free_host_bytes


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def read(root: Path, membership: str) -> int | None:
    (root / "membership").write_text(membership)
    return cgroup_free_bytes(membership=root / "membership", root=root)


def test_the_tightest_cgroup_above_a_process_counts_and_dropped_cache_is_free(
    tmp_path: Path,
) -> None:
    stat = "anon 5\ninactive_file 100\n"
    write(tmp_path / "a" / "b", memory__max="max\n", memory__current="700\n", memory__stat=stat)
    write(tmp_path / "a", memory__max="1000\n", memory__current="800\n", memory__stat=stat)
    assert read(tmp_path, "0::/a/b\n") == 300
    write(tmp_path, memory__max="900\n", memory__current="850\n", memory__stat="anon 1\n")
    assert read(tmp_path, "0::/a/b\n") == 50  # a container sees its own limit at the root
    assert read(tmp_path, "0::/../elsewhere\n") == 50
    write(tmp_path, memory__current="950\n")
    assert read(tmp_path, "0::/\n") == 0


def test_version_1_cgroups_are_read_and_no_limit_is_none(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="600\n",
        memory__stat="inactive_file 7\ntotal_inactive_file 50\n",
    )
    assert read(tmp_path, "3:cpu,cpuacct:/x\n2:memory:/docker/12\n1:name=systemd:/x\n") == 450
    assert read(tmp_path, "3:cpu,cpuacct:/x\nnonsense\n0::/x\n") is None
    assert cgroup_free_bytes(membership=tmp_path / "absent", root=tmp_path) is None


@pytest.mark.parametrize(("limited", "expected"), [(None, 2500), (4000, 1000), (20_000, 2500)])
def test_each_process_of_the_host_gets_its_part_of_the_least(
    monkeypatch: pytest.MonkeyPatch, limited: int | None, expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(host_memory, "cgroup_free_bytes", lambda: limited)
    assert free_host_bytes(num_sharing=4) == expected
