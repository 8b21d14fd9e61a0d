"""output_dir: nobody else's files in a run's way, and nothing left of one that never began."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from legato.config.schema import RunConfig
from legato.errors import ConfigError
from legato.parallel.world import World
from legato.recipes.ranks import check_shared_storage
from legato.report.metrics import Logger, MetricsLog
from legato.storage.writing import writing_to

METRICS_NAME = "metrics.jsonl"


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
        ConfigError: Folders lie where the run's own files go, or not all hosts see output_dir.
        PeerLostError: Rank 0 has refused it.
    """
    folder = Path(config.output_dir)
    names = [METRICS_NAME, f"{config_name}.yaml"]
    world.on_every_rank(lambda: _refuse_folders(folder, names) if world.is_main else None)
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
    """Write the resolved config into output_dir; `CheckpointWriteError` where that can't be."""
    with writing_to(config.output_dir):
        Path(config.output_dir, f"{config_name}.yaml").write_text(config_yaml, encoding="utf-8")


def open_metrics(
    config: RunConfig, *, loggers: Sequence[Logger], is_ours: Callable[[], bool]
) -> MetricsLog:
    """The run's ``metrics.jsonl``; `CheckpointWriteError` where it can't be written."""
    with writing_to(config.output_dir):
        path = Path(config.output_dir, METRICS_NAME)
        return MetricsLog(path, loggers=loggers, is_ours=is_ours)


def _refuse_folders(folder: Path, names: Sequence[str]) -> None:
    if taken := [str(folder / name) for name in names if (folder / name).is_dir()]:
        raise ConfigError(
            [f"output_dir: {path} is a folder, a run writes a file there" for path in taken]
        )
