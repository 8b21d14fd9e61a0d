"""What changed between a run's config and the one it is resumed with."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from legato.config.explain import key_at
from legato.config.problems import KeyPath, dotted
from legato.config.schema import RunConfig
from legato.config.types import OnResume

_BATCH_KEYS = ("batch_size", "gradient_accumulation_steps")
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """Something that is otherwise than in the run that is resumed.

    Attributes:
        key: The config's key, or what else it is.
        old: What it was.
        new: What it is now.
        is_fixed: Checkpoints would have to hold other tensors, so that nobody can accept it.
    """

    key: str
    old: Any
    new: Any
    is_fixed: bool = False

    def __str__(self) -> str:
        return f"{self.key}: was {_shown(self.old)}, now {_shown(self.new)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """Every key that has another value in ``new`` than in ``old``, both as JSON."""
    return tuple(
        Change(dotted(path), was, value) for path, was, value in _differences((), old, new)
    )


def diff_on_resume(
    old: Mapping[str, Any],
    new: RunConfig,
    *,
    global_batch_size: int | None = None,
    world_size: int = 1,
    by_contents: Container[str] = (),
) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """Compare the config that a run was started with to the one it is resumed with.

    Args:
        old: The stored config: its YAML read back, or ``RunConfig.model_dump(mode="json")``. A key
            that it lacks had its default; a key that this version doesn't know is passed over.
        new: The config of this start.
        global_batch_size: Rows of a step of the resumed run, over all its ranks; None: its config
            says it.
        world_size: Number of processes of this start.
        by_contents: Paths such as ``datasets.0.path`` that are to be judged by what lies there, not
            here: those that the run recorded it of.

    Returns:
        Changes that a run can't follow, and changes that it follows but that should be said. Keys
        that may change freely are in neither. ``batch_size`` and ``gradient_accumulation_steps``
        are refused only if their product changed and doesn't give the run's global batch on this
        many ranks. A recipe that trains the same weights on another number of devices is the same.
    """
    before, now = _with_defaults(old), new.model_dump(mode="json")
    refused: list[Change] = []
    warned: list[Change] = []
    rows_per_rank = _rows_per_rank(now)
    is_same_batch = (
        rows_per_rank == _rows_per_rank(before) or rows_per_rank * world_size == global_batch_size
    )
    for name in now:
        if name in _BATCH_KEYS and is_same_batch:
            continue
        if name == "recipe" and _method(before[name]) == _method(now[name]):
            continue
        for path, was, value in _differences((name,), before[name], now[name]):
            on_resume = _on_resume(path)
            change = Change(dotted(path), was, value, is_fixed=on_resume == "fixed")
            if change.key in by_contents:
                continue
            if on_resume in ("fixed", "refuse", "contents"):
                refused.append(change)
            elif on_resume == "warn":
                warned.append(change)
    return tuple(refused), tuple(warned)


def _with_defaults(old: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, field in RunConfig.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        values[name] = old.get(name, _plain(default))
    return values


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _rows_per_rank(values: Mapping[str, Any]) -> int:
    batch_size, accumulation = (values[name] for name in _BATCH_KEYS)
    return cast("int", batch_size) * cast("int", accumulation)


def _method(recipe: str) -> str:
    return recipe.removesuffix("_single_device").removesuffix("_distributed")


def _differences(path: KeyPath, old: Any, new: Any) -> Iterator[tuple[KeyPath, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*new, *(n for n in old if n not in new)]:
            was, value = old.get(name, _MISSING), new.get(name, _MISSING)
            if was is _MISSING and key_at((*path, name)) is not None:
                was = _plain(_default((*path, name)))
            yield from _differences((*path, name), was, value)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, value) in enumerate(zip(old, new, strict=True)):
            yield from _differences((*path, index), was, value)
    elif old != new:
        yield path, old, new


def _default(path: KeyPath) -> Any:
    key = key_at(path)
    return key.field.get_default() if key and not key.field.is_required() else None


def _on_resume(path: KeyPath) -> OnResume:
    for length in range(len(path), 0, -1):
        key = key_at(path[:length])
        if key is not None:
            return cast("OnResume", key.on_resume)
    return "free"


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "absent"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
