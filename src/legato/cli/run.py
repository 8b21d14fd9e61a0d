"""``legato run``: train, or go on where the same command was stopped."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.arguments import ConfigOption
from legato.parallel.handlers import saves_held

if TYPE_CHECKING:
    from legato.config.load import LoadedConfig
    from legato.recipes import RunResult


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE | SCRIPT.py | KEY=VALUE | ~KEY | TORCHRUN OPTION",
            help="The recipe, where the config names none, or a script of your own; keys of the "
            "config to set (epochs=5) or to take out ('~max_steps'). Options of torchrun "
            "(--nproc-per-node 8, --nnodes, --rdzv-endpoint, --max-restarts, ...) start several "
            "processes of a _distributed recipe: docs/distributed.md.",
        ),
    ] = None,
    config: ConfigOption = "",
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over",
            help="Move the steps that this run would meet into output_dir/.old-<time>/ and begin; "
            "nothing is deleted.",
        ),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on although the config, the model or the data isn't what it was.",
        ),
    ] = False,
) -> None:
    """Train, or go on where the same command was stopped.

    Every key of the config is in docs/config.md. Ctrl-C saves and stops; so does SIGTERM.
    """
    from legato.errors import UsageError
    from legato.parallel.launch import split_options
    from legato.parallel.terminal import outlive_readers

    outlive_readers()
    options, words = split_options(words or [])
    if script := next((w for w in words if w.endswith(".py") and "=" not in w), None):
        if options:
            raise UsageError(f"{options[0]}: start a script's processes with torchrun {script} ...")
        _run_script(script, config=config, words=[w for w in words if w != script])
        return
    if not config:
        if words and words[0].endswith((".yaml", ".yml")):
            raise UsageError(f"a config is given as: legato run --config {words[0]}")
        raise UsageError(
            "the config is missing. Say: legato run --config CONFIG [key=value ...]. `legato ls` "
            "shows what there is"
        )
    _run_recipe(config, words, options, start_over=start_over, accept_changes=accept_changes)


@saves_held()
def _run_recipe(
    config: str, words: list[str], options: list[str], *, start_over: bool, accept_changes: bool
) -> None:
    from legato.cli.arguments import read_config
    from legato.cli.logs import is_debugging, show_log
    from legato.cli.validate import told_problems
    from legato.errors import ConfigError
    from legato.parallel.launch import is_asked_for
    from legato.parallel.placement import find_placement

    loaded = read_config(config, words)
    problems = told_problems(loaded)
    show_log()
    placement = find_placement(os.environ)
    if placement is None and is_asked_for(options, os.environ):
        flags = {
            "--start-over": start_over,
            "--accept-changes": accept_changes,
            "--debug": is_debugging(),
        }
        given = [flag for flag, is_given in flags.items() if is_given]
        _launch(loaded, options, ["run", *words, "--config", config, *given], problems=problems)
        return
    with contextlib.ExitStack() as stack:
        if placement is not None:
            from legato.cli.worker import as_rank

            stack.enter_context(as_rank(placement, output_dir=loaded.config.output_dir))
        elif problems:
            raise ConfigError(problems)
        _train(loaded, problems, start_over=start_over, accept_changes=accept_changes)


def _train(
    loaded: LoadedConfig, problems: list[str], *, start_over: bool, accept_changes: bool
) -> None:
    from legato import recipes
    from legato.parallel.placement import find_placement

    result = recipes.run(
        loaded.config,
        config_name=loaded.name,
        config_yaml=loaded.yaml,
        start_over=start_over,
        accept_changes=accept_changes,
        local_problems=problems,
    )
    placement = find_placement(os.environ)
    if result.saves and (placement is None or placement.rank == 0):
        typer.echo(_next_step(result), err=True)


def _next_step(result: RunResult) -> str:
    """Where the last checkpoint is, and what may be done with it."""
    last = result.saves[-1]
    latest = result.output_dir / "latest"
    path = last.path or str(latest)
    # Not every file system has links, and what has that name may be somebody's own.
    if latest.exists() and latest.resolve() == Path(path).resolve():
        path = str(latest)
    return f"done: step {last.step} is in {path}. Try it: legato chat {shlex.quote(path)}"


def _launch(
    loaded: LoadedConfig, options: list[str], words: list[str], *, problems: list[str]
) -> None:
    """Start the processes that ``options`` ask for, each with ``words`` as its command line."""
    from legato.cli.worker import LOGS_FOLDER
    from legato.config.rules import check_processes
    from legato.errors import ConfigError
    from legato.parallel.launch import launch, plan_launch

    plan = plan_launch(options, words, patience_seconds=loaded.config.final_save_patience_seconds)
    if problems and plan.num_hosts == 1:  # of several hosts, the others would wait for this one
        raise ConfigError(problems)
    check_processes(loaded.config, plan.num_processes)
    launch(plan, logs=Path(loaded.config.output_dir, LOGS_FOLDER))


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
