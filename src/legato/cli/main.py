"""The ``legato`` command: which verbs there are, and where each one lives.

Only the module of the verb that was typed is imported, so that a quick verb stays quick; help
imports them all, and they import nothing heavy at module level.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from legato.cli.errors import run_app
from legato.cli.examples import epilog
from legato.cli.logs import choose_level

VERBS: dict[str, str] = {
    "run": "legato.cli.run:run",
    "ls": "legato.cli.configs:list_configs",
    "cat": "legato.cli.configs:show_config",
    "cp": "legato.cli.configs:copy_config",
    "validate": "legato.cli.validate:validate",
    "download": "legato.cli.models:download",
    "import": "legato.cli.models:import_app",
    "data": "legato.cli.data:app",
    "ckpt": "legato.cli.ckpt:app",
    "chat": "legato.cli.chat:chat",
    "generate": "legato.cli.generate:generate",
    "eval": "legato.cli.evaluate:evaluate",
    "merge": "legato.cli.merge:merge",
    "export": "legato.cli.export:app",
    "push": "legato.cli.push:push",
    "demo": "legato.cli.demo:demo",
}
"""Verb -> the function or group of verbs behind it, in the order of ``--help``."""

# Words that aren't our options go to the verb: key=value, ~key, and the options of torchrun.
_TAKES_ANY_OPTION = frozenset({"run"})

_HELP_COLUMNS = 100


class _InOrder(TyperGroup):
    """Lists verbs as `VERBS` does; typer lists groups of them last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in VERBS if name in self.commands]


def build_app(verb: str | None = None) -> typer.Typer:
    """The app with one verb, or with all of them."""
    app = typer.Typer(
        cls=_InOrder,
        name="legato",
        epilog=epilog(""),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": _HELP_COLUMNS,
        },
    )
    app.callback()(_global_options)
    for name in [verb] if verb in VERBS else VERBS:
        module, _, attribute = VERBS[str(name)].partition(":")
        target: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            for inner in target.registered_commands:
                inner.epilog = epilog(f"{name} {inner.name}")
            app.add_typer(target, name=name)
        else:
            settings = {"ignore_unknown_options": name in _TAKES_ANY_OPTION}
            app.command(name, context_settings=settings, epilog=epilog(str(name)))(target)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    ``--debug`` is taken out wherever it stands: people add it at the end of what they just typed.
    """
    _write_any_character()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    choose_level(debug=debug)
    words = [word for word in words if word != "--debug"]
    verb = next((word for word in words if not word.startswith("-")), None)
    return run_app(lambda: build_app(verb), words, debug=debug)


def _write_any_character() -> None:
    """Data and answers hold what a terminal's encoding may lack: it is shown escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error does so by itself
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"legato {version('legato')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show where an error came from, and the log's debug lines."),
    ] = False,
) -> None:
    """Fine-tune language models; checkpoints by step that never pause training."""
