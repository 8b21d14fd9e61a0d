"""What a run's steps depend on besides its config: found at a start, compared at a resume.

A config names files, and files change under their names. So each step records what tells them from
others, in ``facts.inputs`` of ``state/trainer.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from legato.config.resume import Change
from legato.config.schema import DatasetConfig, RunConfig
from legato.data.samples import DataReport
from legato.data.sources import local_files
from legato.data.stream import StreamLoader
from legato.errors import ConfigError, ResumeError
from legato.models.folder import (
    config_digest,
    find_model,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from legato.parallel.world import World
from legato.storage.fingerprint import PREFIX, fingerprint
from legato.train.state import TrainState

if TYPE_CHECKING:
    from legato.recipes.data import RunData

logger = logging.getLogger(__name__)

T = TypeVar("T")

Inputs = Mapping[str, Mapping[str, Any]]
"""Name -> ``path`` and, as far as they are known, ``digest`` and counts. JSON values."""

_COUNTS = ("files", "bytes", "rows", "samples")
_SHOWN_DIGEST = len(PREFIX) + 8

STREAM = "datasets.0"
"""The name of a stream, of which a run has one."""

_EFFECTS = {
    "base_weights": "the adapter goes on upon weights that it wasn't trained on",
    "named_weights": "the run goes on from the weights of its last step, not from the model that "
    "is named now",
    "model_config": "the weights go on in a model that computes otherwise",
    "tokenizer": "rows are other tokens from here on",
    "chat_template": "rows are other tokens from here on",
    "datasets": "the place in the data is a number of an epoch's rows, and the order of an epoch "
    "depends on how many rows there are, so some rows of this epoch come twice and others not at "
    "all",
    "stream": "the place in the data is a number of rows in a shuffled block, so what was put into "
    "or taken out of the block, or before it, makes rows come twice or not at all",
}
"""What ``--accept-changes`` means, by the first word of an input's name."""


def find_inputs(
    config: RunConfig, *, chat_template: str, data: DataReport, held_out: DataReport | None
) -> Inputs:
    """What lies under the names of the config now.

    Args:
        config: The run.
        chat_template: The template that samples are made with.
        data: What was read to train on; of a stream, so far.
        held_out: What was read to evaluate on; None: nothing.

    Returns:
        Each thing that a step depends on. A stream is told by its files' sizes alone: where it
        stands, :class:`StreamLoader` knows it by its samples.

    Raises:
        ModelError: The model's folder isn't whole.
    """
    folder = find_model(config.model, local_only=True).path
    weights = weight_files(folder)
    inputs: dict[str, dict[str, Any]] = {
        "base_weights": {
            "path": config.model,
            "bytes": sum(file.stat().st_size for file in weights),
            "digest": weights_digest(weights),
        },
        "model_config": {"path": config.model, "digest": config_digest(folder)},
        "tokenizer": {"path": config.model, "digest": tokenizer_digest(folder)},
        "chat_template": {
            "path": config.chat_template,
            "digest": fingerprint([chat_template.encode()]),
        },
    }
    if config.streaming:
        inputs[STREAM] = _file_sizes(config.datasets[0])
    else:
        inputs |= _samples_of("datasets", data)
    if config.eval_datasets and held_out is not None:
        inputs |= _samples_of("eval_datasets", held_out)
    return inputs


def _samples_of(key: str, report: DataReport) -> dict[str, dict[str, Any]]:
    return {
        f"{key}.{number}": {
            "path": each.path,
            "rows": each.num_rows,
            "samples": each.num_samples,
            "digest": each.digest,
        }
        for number, each in enumerate(report.datasets)
    }


def _file_sizes(dataset: DatasetConfig) -> dict[str, Any]:
    files = local_files(dataset.path, split=dataset.split)
    if files is None:  # on the hub
        return {"path": dataset.path}
    sizes = [file.stat().st_size for file in files]
    return {"path": dataset.path, "files": len(sizes), "bytes": sum(sizes)}


def read_same(read: Callable[[], T], *, inputs: Callable[[T], Inputs], world: World) -> T:
    """Collective: read on every rank; refuse ranks that find different things, as on other hosts.

    Args:
        read: Reads on this rank, and talks to no other one.
        inputs: What it read, as :func:`find_inputs` tells it.
        world: The ranks.

    Returns:
        What this rank read.

    Raises:
        ConfigError: Two ranks differ; names what in, on every rank.
        PeerLostError: Another rank couldn't read; ``.rank``. A rank's own error is raised as it is.
    """
    data, by_rank = world.on_every_rank_alike(read, fact=inputs)
    problems = [
        f"{change.key}: {change.old} on rank 0, {change.new} on rank {rank}"
        for rank, other in enumerate(by_rank)
        for change in _changes(by_rank[0], other).values()
    ]
    if problems:
        raise ConfigError(["the ranks have different files; give them the same ones", *problems])
    return data


def check_inputs(state: TrainState, config: RunConfig, data: RunData, *, accept: bool) -> None:
    """Hold what lies under the config's names against what the resumed run was trained on.

    Args:
        state: As the checkpoint has it.
        config: The config that is to go on.
        data: What was read for it.
        accept: Only warn of what a run can't change.

    Raises:
        ResumeError: Something else is there now; ``.changes``.
    """
    before, now, refused = state.facts["inputs"], data.inputs, dict[str, Change]()
    changes = _changes(before, now)
    for name, change in changes.items():
        is_moved = _is_moved(before[name], now[name])
        if name == "base_weights" and config.recipe.startswith("full"):
            # The step holds every weight: what they began as doesn't matter any more. But whoever
            # names another model may expect it to be trained.
            if is_moved:
                refused["named_weights"] = change
        elif name == STREAM and config.streaming and is_moved:
            refused["stream.files"] = change
        elif name.startswith("eval_datasets") or (name == STREAM and config.streaming):
            # A stream may grow, or be mended, ahead of where training stands.
            logger.warning("changed since the checkpoint: %s", change)
        else:
            refused[name] = change
    block = _other_block(state.data_place, data, config, before=before)
    if block is not None:
        refused["stream.block"] = changes[STREAM] = block
    if accept:
        for change in refused.values():
            logger.warning("changed since the checkpoint, accepted: %s", change)
    elif refused:
        raise ResumeError(
            _refusal(config, refused, grown=block is not None and _has_grown(before, now)),
            changes=[str(change) for change in refused.values()],
        )
    _say_moved(before, now, but={_key(name) for name in changes})


def judged_by_contents(state: TrainState) -> frozenset[str]:
    """Paths of the config that may be others, as :func:`check_inputs` compares what lies there.

    Args:
        state: As the checkpoint has it.

    Returns:
        Dotted keys.
    """
    block = (state.data_place or {}).get("digest")
    return frozenset(
        _key(name)
        for name, entry in state.facts["inputs"].items()
        if entry.get("digest") or (name == STREAM and block)
    )


def _key(name: str) -> str:
    """The config's key that says where an input is."""
    if "." in name:
        return f"{name}.path"
    return name if name == "chat_template" else "model"


def _other_block(
    place: Mapping[str, Any] | None, data: RunData, config: RunConfig, *, before: Inputs
) -> Change | None:
    """Whether the rows where training stands in a stream are others now."""
    if place is None or not isinstance(data.loader, StreamLoader):
        return None
    was, now = place.get("digest"), data.loader.digest
    if was is None or was == now:
        return None
    path, old_path = config.datasets[0].path, before.get(STREAM, {}).get("path")
    rows = f"the block of {config.shuffle_buffer_size:,} rows from {place['first_row'] + 1:,} on"
    came_from = "" if old_path in (path, None) else f", before: {old_path}"
    return Change(
        f"{STREAM} ({path}{came_from}), {rows}", _shown({"digest": was}), _shown({"digest": now})
    )


def _has_grown(before: Inputs, now: Inputs) -> bool:
    was, is_now = (inputs.get(STREAM, {}).get("bytes") for inputs in (before, now))
    return was is not None and is_now is not None and is_now > was


def _say_moved(before: Inputs, now: Inputs, *, but: Container[str]) -> None:
    """Say which paths are others, with the same things in them."""
    names = {
        _key(name): name for name in now if name in before and _is_moved(before[name], now[name])
    }
    for key, name in names.items():
        if key in but:
            continue
        was, entry = before[name], now[name]
        line = f"{key}: was {was['path']}, now {entry['path']}: "
        if entry.get("digest"):
            logger.info("%sthe same contents", line)
            continue
        sizes = " and the files' sizes are" if "bytes" in was and "bytes" in entry else " is"
        logger.warning(
            "%sthe block where training stands%s the same; no more of a stream is compared",
            line,
            sizes,
        )


def _changes(before: Inputs, now: Inputs) -> dict[str, Change]:
    """What differs, by name, where both have it; another path alone isn't a difference."""
    return {
        name: _change(name, before[name], now[name])
        for name in now
        if name in before and _differ(before[name], now[name])
    }


def _differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if was.get("digest") or now.get("digest"):
        return bool(was.get("digest") != now.get("digest"))
    if _is_moved(was, now):  # of a stream on the hub there are no sizes
        return any(was[name] != now[name] for name in _COUNTS if name in was and name in now)
    return any(was.get(name) != now.get(name) for name in _COUNTS)


def _is_moved(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(was["path"] != now["path"])


def _change(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Change:
    if _is_moved(was, now):
        old, new = (f"{entry['path']} ({_shown(entry)})" for entry in (was, now))
        return Change(name, old, new)
    return Change(f"{name} ({now['path']})", _shown(was), _shown(now))


def _shown(entry: Mapping[str, Any]) -> str:
    counts = [
        f"{entry[name]:,} {name if entry[name] != 1 else name[:-1]}"
        for name in _COUNTS
        if name in entry
    ]
    digest = [entry["digest"][:_SHOWN_DIGEST]] if entry.get("digest") else []
    return ", ".join([*counts, *digest])


def _refusal(config: RunConfig, refused: Mapping[str, Change], *, grown: bool) -> str:
    effects = dict.fromkeys(_EFFECTS[name.partition(".")[0]] for name in refused)
    hint = (
        "\nThe stream has more bytes than before, as when rows were added inside the block of "
        f"{config.shuffle_buffer_size:,} rows where training stands, or before it. A block is "
        "shuffled as a whole: a stream can grow only behind it."
    )
    return (
        f"{config.output_dir} holds a run that was trained on other things than are there now:\n  "
        + "\n  ".join(str(change) for change in refused.values())
        + (hint if grown else "")
        + "\nPut these back, or train anew with another output_dir (or "
        "resume_from_checkpoint=false and --start-over). --accept-changes goes on all the same: "
        + "; ".join(effects)
        + "."
    )
