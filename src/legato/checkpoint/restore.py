"""Fill live parts from a committed step, strictly, reading only what this rank holds."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from legato.checkpoint.manifest import TRAINER_FILE
from legato.checkpoint.parts import (
    ModelPart,
    OptimizerPart,
    PacksMoments,
    Parts,
    RngPart,
)
from legato.checkpoint.plan import MODEL_STEMS, OPTIMIZER_STEM, RNG_STEM
from legato.checkpoint.reading import ReadProgress, StepTensors, unseen
from legato.checkpoint.records import Committed
from legato.checkpoint.tensors import local, packed_pieces
from legato.errors import CheckpointMismatchError, CheckpointTornError
from legato.hf_folder import TensorSpec
from legato.storage import Storage

logger = logging.getLogger(__name__)


def restore_parts(
    parts: Parts,
    committed: Committed,
    *,
    storage: Storage,
    rank: int = 0,
    allow_missing: Collection[str] = (),
    progress: ReadProgress | None = None,
) -> dict[str, Any]:
    """Fill ``parts`` in place from a committed step.

    Args:
        parts: Live parts; names, shapes and dtypes must be those of the step, both ways.
        committed: The step.
        storage: Where it is.
        rank: This process's number, for its random states.
        allow_missing: ``optimizer``, ``rng`` or names of other parts that the step, or the run,
            may lack.
        progress: Shows how far it is; None: nobody.

    Returns:
        The ``trainer`` part's state; empty if the step holds none.

    Raises:
        CheckpointMismatchError: Keys, shapes or dtypes differ, or a part is absent; ``.path``,
            ``.key``. Tensors that were filled before stay so: don't train on.
    """
    content = read_trainer_json(committed, storage=storage)
    has_state = committed.manifest.has_state
    if not has_state:
        _refuse_unless_allowed(parts, committed.path, allow_missing)
    weights = StepTensors.open(storage, committed, MODEL_STEMS[parts.model.kind])
    state = StepTensors.open(storage, committed, OPTIMIZER_STEM)
    total_bytes = _bytes_to_read(parts.model, weights, state)
    with torch.no_grad(), (progress or unseen)(total_bytes=total_bytes) as on_read:
        for tensors in (weights, state):
            if tensors is not None:
                tensors.on_read = on_read
        _restore_model(parts.model, committed, weights=weights, state=state)
        if parts.optimizer is None and "optimizer" in content and "optimizer" not in allow_missing:
            _refuse(committed.path, "it holds optimizer state, the run has no optimizer", key=None)
        if parts.optimizer is not None and has_state:
            _restore_optimizer(
                parts.optimizer, state, content=content, path=committed.path,
                masters=parts.model.masters, allow_missing=allow_missing,
            )  # fmt: skip
    if parts.rng is not None:
        _restore_rng(parts.rng, committed, storage=storage, rank=rank, allowed=allow_missing)
    stored: dict[str, Any] = content.get("parts", {})
    if has_state:
        _restore_others(parts.others, stored, path=committed.path, allowed=allow_missing)
    return dict(stored.get("trainer", {}))


def read_trainer_json(committed: Committed, *, storage: Storage) -> dict[str, Any]:
    """The JSON half of a step's state; empty where it was saved without state.

    Args:
        committed: The step.
        storage: Where it is.

    Returns:
        ``{"format": 1, "parts": {name: state}, "optimizer": {...}}``.

    Raises:
        CheckpointTornError: The file is damaged; ``.path``.
    """
    if TRAINER_FILE not in committed.manifest.files:
        return {}
    path = posixpath.join(committed.path, TRAINER_FILE)
    try:
        content = json.loads(storage.read_bytes(path))
        if not isinstance(content, dict) or not isinstance(content.get("parts"), dict):
            raise ValueError("it isn't a Legato training state")
    except ValueError as error:
        raise CheckpointTornError(f"{path}: {error}", path=path) from error
    return content


def _refuse_unless_allowed(parts: Parts, path: str, allow_missing: Collection[str]) -> None:
    """Of a step without ``state/``: every part that begins anew is to be allowed by name."""
    anew = ["optimizer", *(["rng"] if parts.rng is not None else [])]
    anew += [name for name in parts.others if name != "trainer"]
    if not set(anew) <= set(allow_missing):
        _refuse(
            path,
            "it was saved without what a resumed run needs (save_only_model, or "
            "keep_last_n_states took it). Resume from an older step, or set allow_missing: "
            f"[{', '.join(anew)}] to go on from its weights",
            key="state",
        )
    logger.warning("%s holds weights alone: %s begin anew, as allowed", path, ", ".join(anew))


def _bytes_to_read(model: ModelPart, weights: StepTensors | None, state: StepTensors | None) -> int:
    """Bytes of the tensors to restore; of a weight whose master is stored, the master's."""
    read = {model.key(name) for name in model.tensors if state is None or name not in model.masters}
    specs = list(state.specs.values()) if state is not None else []
    if weights is not None:
        specs += [spec for key, spec in weights.specs.items() if key in read]
    return sum(spec.size_bytes for spec in specs)


def _restore_model(
    model: ModelPart,
    committed: Committed,
    *,
    weights: StepTensors | None,
    state: StepTensors | None,
) -> None:
    path = committed.path
    if committed.manifest.kind != model.kind:
        _refuse(path, f"it holds {_a(committed.manifest.kind)}, the run trains {_a(model.kind)}")
    specs = weights.specs if weights is not None else {}
    name_of = model.names_by_key()
    _compare_keys(path, expected=name_of, found=specs, what="the model")
    _compare(
        path,
        {key: (model.tensors[name], model.stored_dtype(name)) for key, name in name_of.items()},
        specs,
    )
    for name in model.tensors:
        assert weights is not None
        key = model.key(name)
        live, master = model.tensors[name], model.masters.get(name)
        if master is None:
            weights.fill(key, live)
        elif state is None:
            # Saved without state: the rounded value is all there is.
            weights.fill(key, master)
            local(live).copy_(local(master))
        else:
            _fill_master(state, name, master, path=path)
            local(live).copy_(local(master))


def _fill_master(state: StepTensors, name: str, master: Tensor, *, path: str) -> None:
    key = f"master/{name}"
    if key not in state.specs:
        _refuse(path, f"it holds no {key}: was master_weights changed?", key=key)
    _compare(path, {key: (master, master.dtype)}, state.specs)
    state.fill(key, master)


def _restore_optimizer(
    part: OptimizerPart,
    state: StepTensors | None,
    *,
    content: Mapping[str, Any],
    path: str,
    masters: Mapping[str, Tensor],
    allow_missing: Collection[str],
) -> None:
    """Set ``optimizer.state`` directly.

    Not by ``load_state_dict``, which casts fp32 moments of a bf16 parameter to bf16, and not after
    an ``optimizer.step()`` with zero gradients. What has no state in the file stays without.
    """
    if "optimizer" not in content:
        if "optimizer" not in allow_missing:
            _refuse(
                path,
                "it holds no optimizer state. Resume from another step, or set allow_missing: "
                "[optimizer] to go on with a fresh optimizer",
                key="optimizer",
            )
        logger.warning("%s holds no optimizer state: it begins anew, as allowed", path)
        return
    keys = list(state.specs) if state is not None else []
    stored = {key.split("/", 1)[1] for key in keys} | content["optimizer"]["values"].keys()
    if strangers := sorted(stored - part.names.keys()):
        _refuse_keys(path, strangers, "are in its optimizer state, but not in the optimizer")
    if unused := [k for k in keys if k.startswith("master/") and k[7:] not in masters]:
        _refuse_keys(path, unused, "are in its state, but the run keeps no masters of them")
    keys = [key for key in keys if not key.startswith("master/")]
    values = content["optimizer"]["values"]
    if part.keeps_no_moments():
        # Kept, they would be stored as they are, and a later optimizer would take them for new.
        keys, values = [], {}
    packs = isinstance(part.optimizer, PacksMoments)
    # A step from before there were packed moments doesn't say.
    if keys and packs != content["optimizer"].get("packs_moments", False):
        held = "plain moments" if packs else "moments packed in 8 bits"
        _refuse(
            path,
            f"it holds {held}, this run's optimizer keeps them otherwise: was optimizer.name "
            "changed? Put it back, or begin a new run from the step's weights",
            key=keys[0],
        )
    group_of = {id(p): group for group in part.optimizer.param_groups for p in group["params"]}
    for parameter in part.names.values():
        part.optimizer.state.pop(parameter, None)
    for key in keys:
        moment, name = key.split("/", 1)
        assert state is not None
        parameter = part.names[name]
        if packs and "." in moment:
            _fill_packed(state, key, part=part, path=path)
            continue
        value = _new_state(
            state.specs[key], parameter, moment=moment, group=group_of[id(parameter)]
        )
        state.fill(key, value)
        part.optimizer.state[parameter][moment] = value
    for name, scalars in values.items():
        part.optimizer.state[part.names[name]].update(scalars)
    if part.restore_groups:
        _restore_groups(part, content["optimizer"]["groups"], path=path)


def _fill_packed(state: StepTensors, key: str, *, part: OptimizerPart, path: str) -> None:
    """Read one piece of a packed moment; the first one of each makes it."""
    place, name = key.split("/", 1)
    moment, piece = place.split(".", 1)
    parameter = part.names[name]
    kept = part.optimizer.state[parameter]
    if moment not in kept:
        assert isinstance(part.optimizer, PacksMoments)
        kept[moment] = part.optimizer.empty_moment(parameter, moment)
    target = packed_pieces(kept[moment]).get(piece)
    if target is None:
        _refuse(path, f"{key} has no place in the optimizer's state: was torchao changed?", key=key)
    _compare(path, {key: (target, target.dtype)}, state.specs)
    state.fill(key, target)


def _new_state(
    spec: TensorSpec, parameter: Tensor, *, moment: str, group: Mapping[str, Any]
) -> Tensor:
    """A tensor to read a moment into: sharded like the parameter where it has its shape."""
    if spec.shape == tuple(parameter.shape) and spec.shape:
        return torch.empty_like(  # all of it is read
            parameter, dtype=spec.dtype, requires_grad=False, memory_format=torch.preserve_format
        )
    on_device = moment != "step" or group.get("fused") or group.get("capturable")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _restore_groups(part: OptimizerPart, stored: list[dict[str, Any]], *, path: str) -> None:
    groups = part.optimizer.param_groups
    now = [group["params"] for group in part.groups_json()]
    then = [group["params"] for group in stored]
    if now != then:
        _refuse(path, "its optimizer groups hold other parameters than the optimizer's", key=None)
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            if key == "params":
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value


def _restore_rng(
    rng: RngPart, committed: Committed, *, storage: Storage, rank: int, allowed: Collection[str]
) -> None:
    reader = StepTensors.open(storage, committed, RNG_STEM)
    prefix = f"rank_{rank}/"
    keys = [key for key in (reader.specs if reader else ()) if key.startswith(prefix)]
    if reader is not None and keys:
        rng.write({key.removeprefix(prefix): reader.read(key) for key in keys})
    elif reader is not None:
        logger.warning(
            "%s holds no random state of rank %d: it was saved by %d ranks; this rank goes on "
            "with its own", committed.path, rank, committed.manifest.world_size,
        )  # fmt: skip
    elif "rng" not in allowed:
        _refuse(committed.path, "it holds no random states", key="rng")


def _restore_others(
    others: Mapping[str, Any], stored: Mapping[str, Any], *, path: str, allowed: Collection[str]
) -> None:
    if missing := [name for name in others if name not in stored and name not in allowed]:
        _refuse_keys(path, missing, "are parts of the run, but not of the checkpoint")
    if extra := [n for n in stored if n not in others and n != "trainer" and n not in allowed]:
        _refuse_keys(path, extra, "are parts of the checkpoint, but not of the run")
    for name, part in others.items():
        if name in stored and hasattr(part, "load_state_dict"):
            part.load_state_dict(stored[name])


def _compare(
    path: str,
    expected: Mapping[str, tuple[Tensor, torch.dtype]],
    found: Mapping[str, TensorSpec],
) -> None:
    """Shapes and dtypes: an error with the first three that differ, and their number."""
    wrong = [
        f"{key} is {_short(found[key].shape, found[key].dtype)} on disk, "
        f"{_short(tuple(live.shape), dtype)} in the run"
        for key, (live, dtype) in expected.items()
        if (found[key].shape, found[key].dtype) != (tuple(live.shape), dtype)
    ]
    if wrong:
        _refuse(
            path,
            f"{len(wrong)} of its tensors don't fit: {'; '.join(wrong[:3])}. Was the model or its "
            "dtype changed?",
            key=wrong[0].split(" ", 1)[0],
        )


def _compare_keys(path: str, *, expected: Iterable[str], found: Iterable[str], what: str) -> None:
    expected, found = set(expected), set(found)
    if missing := sorted(expected - found):
        _refuse_keys(path, missing, f"are in {what}, but not on disk")
    if extra := sorted(found - expected):
        _refuse_keys(path, extra, f"are on disk, but not in {what}")


def _refuse_keys(path: str, keys: list[str], what: str) -> NoReturn:
    shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    _refuse(path, f"{len(keys)} of its keys don't fit: {shown} {what}", key=keys[0], keys=keys)


def _refuse(path: str, why: str, **facts: Any) -> NoReturn:
    raise CheckpointMismatchError(f"{path} can't be restored: {why}", path=path, **facts)


def _short(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _a(kind: str) -> str:
    return f"{'an' if kind == 'adapter' else 'a'} {kind}"
