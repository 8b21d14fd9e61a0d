"""``legato ls``, ``cat`` and ``cp``: the configs that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.errors import write_whole
from legato.cli.show import show_json, show_table

_MODELINE = "# yaml-language-server: $schema="


def list_configs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes, and the configs for each."""
    from legato.config import catalog

    by_recipe: dict[str, list[str]] = {}
    for name in catalog.hub_names():
        by_recipe.setdefault(catalog.recipe_of(name), []).append(name)
    if as_json:
        show_json(by_recipe)
        return
    rows = [
        (recipe if i == 0 else "", name)
        for recipe, names in by_recipe.items()
        for i, name in enumerate(names)
    ]
    show_table(("recipe", "config"), rows)


def show_config(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A name as `legato ls` shows it, or a file.")
    ],
) -> None:
    """Print a config."""
    from legato.config import catalog

    typer.echo(catalog.find_config(config).text, nl=False)


def copy_config(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RECIPE", help="A config or recipe as `legato ls` shows it, or a file."
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="The new file, or a folder to put it in.")
    ],
    no_clobber: Annotated[
        bool, typer.Option("-n", "--no-clobber", help="Leave a file that is there, say so, exit 0.")
    ] = False,
    force: Annotated[
        bool, typer.Option("-f", "--force", help="Replace a file that is there.")
    ] = False,
    make_parents: Annotated[
        bool, typer.Option("--make-parents", help="Make the destination's folders.")
    ] = False,
) -> None:
    """Copy a config to change it, or a recipe as a script."""
    from legato.config.schema import RECIPES
    from legato.errors import UsageError

    name, suffixes, text = _script(config) if config in RECIPES else _config(config)
    target = destination / f"{name}{suffixes[0]}" if destination.is_dir() else destination
    if target.suffix not in suffixes:
        raise UsageError(f"{target}: expected a name that ends in {suffixes[0]}")
    if target.exists() and not force:
        if no_clobber:
            typer.echo(f"{target} is there already; nothing copied")
            return
        raise UsageError(f"{target} is there already. Choose another name, or -f to replace it")
    if make_parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    elif not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder. --make-parents makes it")
    write_whole(target, text)
    typer.echo(f"copied to {target}")


def _config(name: str) -> tuple[str, tuple[str, ...], str]:
    from legato.config import catalog

    source = catalog.find_config(name)
    # Editors find the schema of a packaged config beside it; a copy needs to be told where that is.
    lines = [
        f"{_MODELINE}{catalog.SCHEMA_FILE}\n" if line.startswith(_MODELINE) else line
        for line in source.text.splitlines(keepends=True)
    ]
    return source.name, (".yaml", ".yml"), "".join(lines)


def _script(recipe: str) -> tuple[str, tuple[str, ...], str]:
    from importlib.resources import files

    return recipe, (".py",), files("legato.recipes").joinpath("loop_script.py").read_text("utf-8")
