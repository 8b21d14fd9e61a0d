"""output_dir: nobody else's files in a run's way, and nothing left of one that never began."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.parallel.world import World
from legato.recipes.ranks import check_shared_storage
from legato.report.metrics import Logger, MetricsLog
from legato.storage.writing import writing_to

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
# The first line of a resolved config: by it a run knows that the file is its to replace.
_CONFIG_HEADER = "# Resolved by Legato. Each start of the run replaces this file: change a copy.\n"


@contextmanager
def output_folder(config: RunConfig, *, config_name: str, world: World) -> Iterator[None]:
    """Collective: see that output_dir can be used, and run the block, which fills it.

    Args:
        config: The run.
        config_name: What it is called.
        world: The ranks.

    Yields:
        None: the block is the run.

    Raises:
        ConfigError: A folder, or a config of the user's own, lies where the run writes a file; or
            not all hosts see output_dir.
        CheckpointWriteError: What lies there can't be read.
        PeerLostError: Rank 0 has refused it.
    """
    folder = Path(config.output_dir)
    world.on_rank_0(lambda: refuse_others_files(folder, config_name))
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if config.shared_storage:
            check_shared_storage(config.output_dir, world=world)
        yield
    except BaseException:
        for path in absent if world.is_main else ():
            with contextlib.suppress(OSError):  # it was used
                path.rmdir()
        raise


def write_config(config: RunConfig, *, config_name: str, config_yaml: str) -> None:
    """Write the resolved config into output_dir, and say where.

    Args:
        config: The run.
        config_name: What it is called.
        config_yaml: The resolved config as text.

    Raises:
        CheckpointWriteError: It can't be written.
    """
    with writing_to(config.output_dir):
        path = Path(config.output_dir, f"{config_name}.yaml")
        path.write_text(_CONFIG_HEADER + config_yaml, encoding="utf-8")
    logger.info("config: %s (resolved)", path)


def open_metrics(
    config: RunConfig, *, loggers: Sequence[Logger], is_ours: Callable[[], bool]
) -> MetricsLog:
    """Open the run's ``metrics.jsonl``, to add to it.

    Args:
        config: The run.
        loggers: What else hears of each event.
        is_ours: Whether this run still holds output_dir: else a file that has gone is left so.

    Returns:
        The log. Close it in the end.

    Raises:
        CheckpointWriteError: It can't be written.
    """
    with writing_to(config.output_dir):
        path = Path(config.output_dir, METRICS_NAME)
        return MetricsLog(path, loggers=loggers, is_ours=is_ours)


def _what_is_no_file(path: Path) -> str:
    """What lies where a file is to be written, or is waited for without end; empty: nothing."""
    if path.is_file() or not os.path.lexists(path):
        return ""
    if path.is_dir():
        return "a folder"
    return "a pipe or a device" if path.exists() else "a link to nothing"


def refuse_others_files(folder: Path, config_name: str) -> None:
    """See that nothing of somebody else's lies where a run writes a file.

    Args:
        folder: The run's output_dir; may be absent.
        config_name: What the run is called.

    Raises:
        ConfigError: A folder, or a config of the user's own, lies there.
        CheckpointWriteError: What lies there can't be read.
    """
    resolved = folder / f"{config_name}.yaml"
    ours = (folder / METRICS_NAME, resolved)
    problems = [
        f"output_dir: {path} is {found}, a run writes a file there: rename or remove it"
        for path in ours
        if (found := _what_is_no_file(path))
    ]
    with writing_to(folder):
        if resolved.is_file() and not _is_resolved_config(resolved):
            problems.append(
                f"output_dir: {resolved} is your own file, and a run writes its resolved config "
                "there: rename it, or choose another output_dir"
            )
    if problems:
        raise ConfigError(problems)


def _is_resolved_config(path: Path) -> bool:
    """Whether a run wrote the file; one that was killed may have left only its beginning."""
    header = _CONFIG_HEADER.encode()
    with path.open("rb") as file:
        return header.startswith(file.read(len(header)))
