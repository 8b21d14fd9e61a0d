"""The background half of a save: open, write, close, commit. All ranks do it together.

Two small exchanges hold it together: at *open* every rank says what it is about to write, so that
ranks that disagree fail here, all of them; at *close* every rank says what it has written, and rank
0 commits only what covers every byte.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.lock import OutputDirLock
from legato.checkpoint.manifest import (
    STATE_FOLDER,
    FileEntry,
    Kind,
    Manifest,
    Slice,
    check_coverage,
    digest_of,
    parse_manifest,
)
from legato.checkpoint.plan import Runs, SavePlan
from legato.checkpoint.records import Committed, PendingSave
from legato.checkpoint.relay import Relay
from legato.checkpoint.staging import Snapshot
from legato.errors import CheckpointError, CheckpointWriteError, RankDisagreementError
from legato.hf_folder import tensor_bytes
from legato.parallel.peers import Peers
from legato.storage import Storage

# So much is cast, digested and written before more is read from memory; a multiple of every
# dtype's size.
_PIECE_BYTES = 4 * 1024**2


@dataclass(frozen=True, eq=False)
class SaveJob:
    """One save, staged; everything that writing it takes.

    Attributes:
        pending: The caller's handle.
        plan: What this rank writes.
        snapshot: The staged values.
        small_files: Name -> bytes of the files that rank 0 writes whole.
        kind: Model or adapter.
        metrics: Metrics at this step.
        run_id: This run.
        branch: This branch of it.
        saved_at: Seconds since 1970.
    """

    pending: PendingSave
    plan: SavePlan
    snapshot: Snapshot
    small_files: Mapping[str, bytes]
    kind: Kind
    metrics: Mapping[str, float]
    run_id: str
    branch: int
    saved_at: float

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.pending.step


def write_checkpoint(
    job: SaveJob,
    *,
    folder: RunFolder,
    peers: Peers,
    work_off: Callable[[Iterator[None]], None],
    num_owners: int | None = None,
    lock: OutputDirLock | None = None,
) -> Committed:
    """Collective: write a staged save and commit it.

    Args:
        job: What to write.
        folder: Where to.
        peers: All ranks; their group is used by one thread at a time.
        work_off: Takes the steps of writing, as `BackgroundThreads.work_off` does.
        num_owners: None: all ranks write into all files. Else each file has one owner, among the
            first so many ranks, which the others send their slices to.
        lock: On output_dir; held by rank 0 where there is one.

    Returns:
        The committed step, on every rank.

    Raises:
        RankDisagreementError: Ranks are about to write different things; ``.values``.
        CheckpointWriteError: A rank failed; ``.failures`` maps rank to text. Nothing is left.
    """
    _agree(job, peers)
    temporary = peers.on_main(
        lambda: _create_files(job, folder, in_place=num_owners is None, lock=lock),
        fallback=CheckpointWriteError,
    )
    written: dict[str, list[Slice]] = {}
    error: Exception | None = None
    try:
        if num_owners is None:
            work_off(_write(job, folder, temporary, peers, written))
        else:
            work_off(_relay(job, folder, temporary, peers, written, num_owners=num_owners))
    except Exception as caught:
        written, error = {}, caught
    job.pending.times.written_seconds = job.pending.times.since_start()
    try:
        reports = _gather_reports(job, peers=peers, written=written, error=error)
        committed = _commit(job, reports, folder=folder, temporary=temporary, peers=peers)
    except BaseException:
        if peers.is_main:
            folder.discard(temporary)
        raise
    job.pending.times.committed_seconds = job.pending.times.since_start()
    return committed


def _agree(job: SaveJob, peers: Peers) -> None:
    """Collective: an error on every rank unless all are about to write the same."""
    mine = {
        "step": job.step,
        "run": f"{job.run_id}/{job.branch}",
        "layout": job.plan.layout_digest,
    }
    theirs = peers.gather(mine)
    for what in mine:
        values = {rank: said[what] for rank, said in enumerate(theirs)}
        if len(set(values.values())) > 1:
            raise RankDisagreementError(
                f"step {job.step} isn't saved: the ranks differ in {what}: {values}", values=values
            )


def _create_files(
    job: SaveJob, folder: RunFolder, *, in_place: bool, lock: OutputDirLock | None
) -> str:
    """Rank 0: the temporary folder, every file at its full size with its header, small files."""
    storage = folder.storage
    if lock is not None:
        lock.keep()
    temporary = folder.reserve(
        job.step, run_id=job.run_id, branch=job.branch, saved_at=job.saved_at
    )
    try:
        names = [*(file.name for file in job.plan.files), *job.small_files]
        if any(name.startswith(f"{STATE_FOLDER}/") for name in names):
            storage.make_folder(posixpath.join(temporary, STATE_FOLDER))
        for file in job.plan.files if in_place else ():
            path = posixpath.join(temporary, file.name)
            storage.create_file(path, file.size_bytes)
            storage.write_at(path, 0, file.header)
        for name, data in job.small_files.items():
            path = posixpath.join(temporary, name)
            storage.write_bytes(path, data)
            storage.sync_file(path)
    except BaseException:
        folder.discard(temporary)
        raise
    return temporary


def _write(
    job: SaveJob,
    folder: RunFolder,
    temporary: str,
    peers: Peers,
    written: dict[str, list[Slice]],
) -> Iterator[None]:
    """This rank's slices, at their final offsets, digested and durable; a step is a tensor."""
    job.snapshot.wait()
    job.pending.times.staged_seconds = job.pending.times.since_start()
    names = [file.name for file in job.plan.files]
    # Each rank starts with another file: several writers on one file wait for each other.
    start = peers.rank % len(names) if names else 0
    for name in names[start:] + names[:start]:
        path = posixpath.join(temporary, name)
        written[name] = []
        for write in job.plan.writes[name]:
            value = job.snapshot.value(write.source).reshape(-1)
            for runs in write.runs:
                written[name].append(_write_runs(folder.storage, path, runs, value, write.dtype))
                job.pending.times.written_bytes += runs.num_runs * runs.run_bytes
            yield
        if written[name] or peers.is_main:
            folder.storage.sync_file(path)


def _write_runs(
    storage: Storage, path: str, runs: Runs, value: Tensor, dtype: torch.dtype
) -> Slice:
    """Cast, digest and write a piece after the other, each while it is in the core's cache."""
    hasher = xxhash.xxh3_128()
    first, last = runs.source_offset, runs.source_offset + runs.num_runs * runs.run_bytes
    for start in range(first, last, _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, last)
        elements = slice(start // dtype.itemsize, end // dtype.itemsize)
        data = tensor_bytes(value[elements].to(dtype))
        hasher.update(data)
        done = start - first
        while data:
            run, inside = divmod(done, runs.run_bytes)
            part = data[: runs.run_bytes - inside]
            storage.write_at(path, runs.offset + run * runs.distance_bytes + inside, part)
            data, done = data[len(part) :], done + len(part)
    return Slice(
        runs.offset, runs.run_bytes, hasher.hexdigest(), runs.num_runs, runs.distance_bytes
    )


def _relay(
    job: SaveJob,
    folder: RunFolder,
    temporary: str,
    peers: Peers,
    written: dict[str, list[Slice]],
    *,
    num_owners: int,
) -> Iterator[None]:
    """Collective: the same where each file has one writer; a step is a file."""
    paths = {file.name: posixpath.join(temporary, file.name) for file in job.plan.files}
    relay = Relay(
        job.plan, job.snapshot, storage=folder.storage, peers=peers, num_owners=num_owners
    )
    job.pending.times.staged_seconds = job.pending.times.since_start()
    for name, slices in relay.run(paths):
        written[name] = slices
        yield
    job.pending.times.written_bytes = sum(
        part.run_bytes * part.num_runs for parts in written.values() for part in parts
    )


def _gather_reports(
    job: SaveJob,
    *,
    peers: Peers,
    written: Mapping[str, list[Slice]],
    error: Exception | None,
) -> list[Any]:
    """Collective: what each rank wrote; an error on every rank if any of them failed."""
    mine = {
        "error": f"{type(error).__name__}: {error}" if error else None,
        "slices": {n: [p.to_json() for p in parts] for n, parts in written.items()},
    }
    reports = peers.gather(mine)
    failures = {rank: said["error"] for rank, said in enumerate(reports) if said["error"]}
    if not failures:
        return reports
    if isinstance(error, CheckpointError):
        raise error
    first = min(failures)
    who = f"rank {first}: " if peers.size > 1 else ""
    raise CheckpointWriteError(
        f"step {job.step} could not be saved: {who}{failures[first]}",
        step=job.step,
        failures=failures,
    ) from error


def _commit(
    job: SaveJob, reports: list[Any], *, folder: RunFolder, temporary: str, peers: Peers
) -> Committed:
    """Collective: rank 0 commits, everyone hears how it went."""

    def commit() -> dict[str, str]:
        manifest = _build_manifest(job, reports, world_size=peers.size)
        committed = folder.commit(temporary, manifest, now=job.saved_at)
        return {"path": committed.path, "manifest": manifest.encode().decode()}

    told = peers.on_main(commit, fallback=CheckpointWriteError)
    return Committed(told["path"], parse_manifest(told["manifest"].encode(), path=told["path"]))


def _build_manifest(job: SaveJob, reports: list[Any], *, world_size: int) -> Manifest:
    """Rank 0: all ranks' slices in one manifest; an error unless they cover every file exactly."""
    entries = {name: FileEntry.of_bytes(data) for name, data in job.small_files.items()}
    for file in job.plan.files:
        slices = [Slice.from_json(p) for said in reports for p in said["slices"][file.name]]
        entries[file.name] = FileEntry(
            size_bytes=file.size_bytes,
            slices=tuple(sorted(slices, key=lambda part: part.offset)),
            header_digest=digest_of(file.header),
        )
        if entries[file.name].header_bytes != len(file.header):
            raise CheckpointError(
                f"{file.name}: the ranks wrote {file.size_bytes - entries[file.name].header_bytes} "
                f"bytes of tensors, {file.size_bytes - len(file.header)} are planned"
            )
        check_coverage(file.name, entries[file.name])
    return Manifest(
        run_id=job.run_id,
        branch=job.branch,
        step=job.step,
        kind=job.kind,
        saved_at=job.saved_at,
        files=entries,
        reason=job.pending.reason,
        metrics=dict(job.metrics),
        world_size=world_size,
    )
