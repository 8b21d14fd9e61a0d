"""What a run's steps depend on besides its config: found at a start, compared at a resume.

A config names files, and files change under their names. So each step records what tells them from
others, in ``facts.inputs`` of ``state/trainer.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

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
from legato.train.state import TrainState

if TYPE_CHECKING:
    from legato.recipes.data import RunData

logger = logging.getLogger(__name__)

Inputs = Mapping[str, Mapping[str, Any]]
"""Name -> ``path`` and, as far as they are known, ``digest`` and counts. JSON values."""

_COUNTS = ("files", "bytes", "rows", "samples")
_SHOWN_DIGEST = len("xxh3_128:") + 8

STREAM = "datasets.0"
"""The name of a stream, of which a run has one."""

_EFFECTS = {
    "base_weights": "the adapter goes on upon weights that it wasn't trained on",
    "model_config": "the weights go on in a model that computes otherwise",
    "tokenizer": "rows are other tokens from here on",
    "chat_template": "rows are other tokens from here on",
    "datasets": "the place in the data is a number of steps, and the order of an epoch depends on "
    "how many rows there are, so some rows of this epoch come twice and others not at all",
    "stream": "the place in the data is a number of rows, so what was put in or taken out before "
    "it makes rows come twice or not at all",
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
            "digest": f"xxh3_128:{xxh3_128_hexdigest(chat_template.encode())}",
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


def check_same_inputs(inputs: Inputs, *, world: World) -> None:
    """Collective: refuse ranks that train on different things, such as copies on their hosts.

    Args:
        inputs: This rank's.
        world: The ranks.

    Raises:
        ConfigError: Two ranks differ; names what in, on every rank.
    """
    main, *others = world.gather(inputs)
    problems = [
        f"{change.key}: {change.old} on rank 0, {change.new} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for change in _changes(main, other).values()
    ]
    if problems:
        raise ConfigError(["the ranks have different files; give them the same ones", *problems])


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
    before = state.facts.get("inputs")
    if before is None:
        logger.warning(
            "the checkpoint doesn't say what its run was trained on, as older versions' don't: "
            "whether model and data are the same now isn't checked"
        )
        return
    refused: dict[str, Change] = {}
    for name, change in _changes(before, data.inputs).items():
        if name == "base_weights" and config.recipe.startswith("full"):
            continue  # the step holds every weight: what they began as doesn't matter any more
        # A stream may grow, or be mended, ahead of where training stands.
        if name.startswith("eval_datasets") or (name == STREAM and config.streaming):
            logger.warning("changed since the checkpoint: %s", change)
        else:
            refused[name] = change
    refused |= _moved_block(state.data_place, data, path=config.datasets[0].path)
    if accept:
        for change in refused.values():
            logger.warning("changed since the checkpoint, accepted: %s", change)
    elif refused:
        raise ResumeError(
            _refusal(config.output_dir, refused),
            changes=[str(change) for change in refused.values()],
        )


def _moved_block(place: Mapping[str, Any] | None, data: RunData, *, path: str) -> dict[str, Change]:
    """Whether the rows where training stands in a stream are others now."""
    if place is None or not isinstance(data.loader, StreamLoader):
        return {}
    was, now = place.get("digest"), data.loader.digest
    if was is None or was == now:
        return {}
    rows = f"{STREAM} ({path}), the rows from {place['first_row'] + 1} on"
    return {"stream": Change(rows, _shown({"digest": was}), _shown({"digest": now}))}


def _changes(before: Inputs, now: Inputs) -> dict[str, Change]:
    """What differs, by name, where both have it; another path alone is the config's business."""
    return {
        name: Change(f"{name} ({now[name]['path']})", _shown(before[name]), _shown(now[name]))
        for name in now
        if name in before and _identity(before[name]) != _identity(now[name])
    }


def _identity(entry: Mapping[str, Any]) -> Any:
    return entry.get("digest") or [entry.get(name) for name in _COUNTS]


def _shown(entry: Mapping[str, Any]) -> str:
    counts = [
        f"{entry[name]:,} {name if entry[name] != 1 else name[:-1]}"
        for name in _COUNTS
        if name in entry
    ]
    digest = [entry["digest"][:_SHOWN_DIGEST]] if entry.get("digest") else []
    return ", ".join([*counts, *digest])


def _refusal(output_dir: str, refused: Mapping[str, Change]) -> str:
    effects = dict.fromkeys(_EFFECTS[name.partition(".")[0]] for name in refused)
    return (
        f"{output_dir} holds a run that was trained on other things than are there now:\n  "
        + "\n  ".join(str(change) for change in refused.values())
        + "\nPut these back, or train anew with another output_dir (or "
        "resume_from_checkpoint=false and --start-over). --accept-changes goes on all the same: "
        + "; ".join(effects)
        + "."
    )
