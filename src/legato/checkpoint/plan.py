"""The kept plan of a save: which bytes of which file this rank writes, from which tensor.

Names, shapes and placements are known to every rank, so planning needs no communication, and it is
done once: planning anew at every save costs more than writing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.checkpoint.manifest import (
    RESERVED_NAMES,
    STATE_FOLDER,
    TRAINER_FILE,
    digest_of,
)
from legato.checkpoint.parts import PacksMoments, Parts, encode_json
from legato.checkpoint.tensors import is_plain, state_tensors
from legato.errors import CheckpointError
from legato.hf_folder import (
    Box,
    ByteRange,
    PlannedFile,
    TensorSpec,
    index_json,
    own_box,
    plan_files,
    plan_ranges,
)

MAX_FILE_BYTES = 5_000_000_000
MODEL_STEMS = {"model": "model", "adapter": "adapter_model"}
OPTIMIZER_STEM = f"{STATE_FOLDER}/optimizer"
RNG_STEM = f"{STATE_FOLDER}/rng"

# PEFT reads one file and no index.
_UNLIMITED_BYTES = 2**62


@dataclass(frozen=True)
class Runs:
    """Equal runs of bytes at equal distances in a file, one after the other in the source."""

    offset: int
    run_bytes: int
    num_runs: int
    distance_bytes: int
    source_offset: int


@dataclass(frozen=True)
class Write:
    """A part of one tensor that this rank writes.

    Attributes:
        source: Which tensor it comes from; see `SavePlan.sources`.
        dtype: What it is cast to.
        runs: Where its bytes go.
    """

    source: str
    dtype: torch.dtype
    runs: tuple[Runs, ...]

    @property
    def offset(self) -> int:
        """Where its first byte goes."""
        return self.runs[0].offset


@dataclass(frozen=True)
class SavePlan:
    """The whole folder, and this rank's share of it.

    Attributes:
        files: Every safetensors file of the folder; names are relative to it.
        writes: File name -> what this rank writes into it, in ascending order; every file is a key.
        sources: Name -> live tensor, of what this rank reads: what must be staged.
        small_files: Name -> bytes of files that follow from the plan (the index).
        layout_digest: Equal on ranks that plan the same folder.
    """

    files: tuple[PlannedFile, ...]
    writes: Mapping[str, tuple[Write, ...]]
    sources: Mapping[str, Tensor]
    small_files: Mapping[str, bytes]
    layout_digest: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class _Entry:
    """One tensor of one file: ``source`` is the live one, ``owner`` the only rank that has it."""

    key: str
    source: str
    tensor: Tensor
    dtype: torch.dtype
    owner: int | None = None

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.key, self.dtype, tuple(self.tensor.shape))


def plan_save(
    parts: Parts,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_ranks: int = 1,
    with_state: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SavePlan:
    """Lay out a step folder, and find this rank's share.

    Args:
        parts: What is saved; live tensors.
        rank: This process's number.
        world_size: Number of processes.
        local_ranks: Processes on one host: at least so many optimizer files are cut, so that
            they don't wait for each other on one file.
        with_state: Whether what only a resumed run needs is saved too.
        max_file_bytes: Bytes of tensors per file; an adapter is always one file.

    Returns:
        The plan; the same files on every rank.

    Raises:
        CheckpointError: A tensor of a kind that can't be stored; ``.name``.
        FolderFormatError: A dtype that safetensors can't name, or a key twice; ``.key``.
    """
    weights = list(_model_entries(parts, with_state=with_state))
    state = list(_state_entries(parts)) if with_state else []
    rng = list(_rng_entries(parts, world_size)) if with_state else []
    model_stem = MODEL_STEMS[parts.model.kind]
    model_files = plan_files(
        [entry.spec for entry in weights],
        stem=model_stem,
        max_file_bytes=max_file_bytes if parts.model.kind == "model" else _UNLIMITED_BYTES,
    )
    state_files = plan_files(
        [entry.spec for entry in state],
        stem=OPTIMIZER_STEM,
        max_file_bytes=max_file_bytes,
        min_files=local_ranks,
        always_numbered=True,
    )
    rng_files = plan_files([entry.spec for entry in rng], stem=RNG_STEM)

    writes: dict[str, tuple[Write, ...]] = {}
    sources: dict[str, Tensor] = {}
    for files, entries in ((model_files, weights), (state_files, state), (rng_files, rng)):
        shares = _plan_shares(files, entries, rank=rank, world_size=world_size)
        for file in files:
            writes[file.name] = tuple(
                sorted((write for write, _ in shares[file.name]), key=lambda write: write.offset)
            )
            sources |= {write.source: tensor for write, tensor in shares[file.name]}
    all_files = (*model_files, *state_files, *rng_files)
    index = {}
    if len(model_files) > 1:
        index = {f"{model_stem}.safetensors.index.json": index_json(model_files)}
    return SavePlan(
        files=all_files,
        writes=writes,
        sources=sources,
        small_files=index,
        layout_digest=digest_of(b"".join(f.name.encode() + f.header for f in all_files)),
    )


def small_files(
    parts: Parts, plan: SavePlan, *, config: Mapping[str, bytes], with_state: bool
) -> dict[str, bytes]:
    """The files of a step folder that are written whole: configs, tokenizer, index, JSON state.

    Args:
        parts: What is saved, read now.
        plan: The safetensors files beside them.
        config: The run's config by file name.
        with_state: Whether what only a resumed run needs is saved too.

    Returns:
        Name -> bytes.

    Raises:
        CheckpointError: A name isn't a plain file name, or is taken; ``.name``. Or a part's state
            isn't JSON; ``.where``.
    """
    reserved = {*RESERVED_NAMES, *plan.small_files, *(file.name for file in plan.files)}
    for name in [*parts.model.files, *config]:
        if name in reserved or "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"a checkpoint can't hold a further file {name!r}", name=name)
    files = {**parts.model.files, **config, **plan.small_files}
    if with_state:
        files[TRAINER_FILE] = encode_json(parts.trainer_json())
    return files


def _plan_shares(
    files: Sequence[PlannedFile], entries: Sequence[_Entry], *, rank: int, world_size: int
) -> dict[str, list[tuple[Write, Tensor]]]:
    """File name -> what this rank writes into it, and the live tensors it comes from."""
    file_of = {key: file for file in files for key in file.specs}
    shares: dict[str, list[tuple[Write, Tensor]]] = {file.name: [] for file in files}
    for entry in entries:
        box = _share(entry, rank=rank, world_size=world_size)
        if box is not None and box.num_elements > 0:
            file = file_of[entry.key]
            runs = tuple(_group(plan_ranges(file, entry.key, box)))
            shares[file.name].append((Write(entry.source, entry.dtype, runs), entry.tensor))
    return shares


def _model_entries(parts: Parts, *, with_state: bool) -> Iterator[_Entry]:
    model = parts.model
    for key, name in model.names_by_key().items():
        tensor = model.tensors[name]
        _check_storable(name, tensor)
        dtype = model.stored_dtype(name)
        # The master is staged anyway and rounds to the live value; without state, the live
        # tensor is the smaller one to stage.
        if name in model.masters and (with_state or dtype != tensor.dtype):
            source, tensor = f"master/{name}", model.masters[name]
        else:
            source = f"model/{name}"
        yield _Entry(key, source, tensor, dtype)


def _state_entries(parts: Parts) -> Iterator[_Entry]:
    for name, tensor in parts.model.masters.items():
        yield _Entry(f"master/{name}", f"master/{name}", tensor, tensor.dtype)
    if parts.optimizer is None:
        return
    state = parts.optimizer.optimizer.state
    for name, parameter in parts.optimizer.names.items():
        if not isinstance(parts.optimizer.optimizer, PacksMoments):
            # Nobody could make such a tensor anew to restore it.
            for moment, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    _check_storable(f"{moment}/{name}", value)
        for moment, value in state_tensors(state.get(parameter, {})):
            key = f"{moment}/{name}"
            _check_storable(key, value)
            yield _Entry(key, f"optimizer/{key}", value, value.dtype)


def _rng_entries(parts: Parts, world_size: int) -> Iterator[_Entry]:
    if parts.rng is None:
        return
    # Shapes are the same on every rank, so each rank knows the others' keys.
    for name, value in parts.rng.read().items():
        for owner in range(world_size):
            key = f"rank_{owner}/{name}"
            yield _Entry(key, f"rng/{name}", value, value.dtype, owner)


def _share(entry: _Entry, *, rank: int, world_size: int) -> Box | None:
    """The part of a tensor that this rank writes."""
    owner = entry.owner
    if owner is None and is_plain(entry.tensor):
        # Every rank has the same: spread by name, so that no rank writes all of them.
        owner = zlib.crc32(entry.key.encode()) % world_size
    if owner is not None:
        return Box.whole(entry.tensor.shape) if owner == rank else None
    return own_box(entry.tensor)


def _check_storable(name: str, tensor: Tensor) -> None:
    if is_plain(tensor):
        return
    # Imported here: it costs half a second, and a single process never meets a DTensor.
    from torch.distributed.tensor import DTensor

    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not is_plain(inner):
        raise CheckpointError(
            f"{name} is a {type(inner).__name__}: only plain tensors, sharded or not, are stored",
            name=name,
        )


def _group(ranges: list[ByteRange]) -> Iterator[Runs]:
    """Ranges as few `Runs`: a column shard of a matrix is one, with a run per row."""
    first = 0
    while first < len(ranges):
        start, last = ranges[first], first
        distance = ranges[first + 1].file_offset - start.file_offset if ranges[first + 1 :] else 0
        while (
            last + 1 < len(ranges)
            and ranges[last + 1].length_bytes == start.length_bytes
            and ranges[last + 1].file_offset - ranges[last].file_offset == distance
        ):
            last += 1
        count = last - first + 1
        yield Runs(
            offset=start.file_offset,
            run_bytes=start.length_bytes,
            num_runs=count,
            distance_bytes=distance if count > 1 else 0,
            source_offset=start.source_offset_bytes,
        )
        first = last + 1
