"""``legato run``: train, or go on where the same command was stopped."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

# torchrun's options that people type from habit; each needs a world of several processes.
_TORCHRUN = ("--nproc", "--nnodes", "--node", "--rdzv", "--max-restarts", "--max_restarts")


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE | SCRIPT.py] [KEY=VALUE | ~KEY]...",
            help="The recipe, where the config doesn't name it; changes to the config.",
        ),
    ] = None,
    config: Annotated[
        str, typer.Option(help="A name as `legato ls` shows it, or a file.", show_default=False)
    ] = "",
    start_over: Annotated[
        bool,
        typer.Option("--start-over", help="Move steps that are in the way aside; delete nothing."),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Resume although a field changed that a run can't change."
        ),
    ] = False,
) -> None:
    """Train; the same command again goes on from the newest checkpoint."""
    from legato.cli.logs import show_log
    from legato.errors import UsageError

    words = list(words or [])
    if script := next((w for w in words if w.endswith(".py") and "=" not in w), None):
        _run_script(script, config=config, words=[w for w in words if w != script])
        return
    if not config:
        raise UsageError("--config is missing. `legato ls` shows what there is")
    _refuse_torchrun(words)

    from legato.cli.arguments import read_config
    from legato.cli.validate import local_problems
    from legato.errors import ConfigError

    loaded = read_config(config, words)
    if problems := [loaded.origins.tell(problem) for problem in local_problems(loaded)]:
        raise ConfigError(problems)
    show_log()

    from legato import recipes

    recipes.run(
        loaded.config,
        config_name=loaded.name,
        config_yaml=loaded.yaml,
        start_over=start_over,
        accept_changes=accept_changes,
    )


def _refuse_torchrun(words: list[str]) -> None:
    from legato.errors import UsageError

    for word in words:
        if word.startswith(_TORCHRUN):
            raise UsageError(
                f"{word}: several processes need a *_distributed recipe, which isn't in this "
                "version. Leave torchrun's options out to train on one device."
            )


def _run_script(script: str, *, config: str, words: list[str]) -> None:
    """Run somebody's own script on the public API, with the rest of the command line as its own."""
    from legato.cli.logs import show_log
    from legato.errors import UsageError

    path = Path(script)
    if not path.is_file():
        raise UsageError(f"{script}: no such file")
    show_log()
    arguments = [*(["--config", config] if config else []), *words]
    before = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
