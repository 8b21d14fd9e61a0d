"""The words after a verb that takes a config: ``[<recipe>] [key=value ...] ['~key' ...]``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from legato.errors import UsageError

if TYPE_CHECKING:
    from legato.config.load import LoadedConfig

ConfigOption = Annotated[
    str, typer.Option(help="A name as `legato ls` shows it, or a file.", show_default=False)
]
ConfigWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [KEY=VALUE | ~KEY]",
        help="The config, if --config doesn't say it; changes to it.",
    ),
]


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a recipe (or a script) from overrides.

    Args:
        words: What was typed after the verb, options excepted.

    Returns:
        The recipe, None where none was typed, and the overrides in their order.

    Raises:
        UsageError: More than one word is neither ``key=value`` nor ``~key``; an unknown option.
    """
    _refuse_spaces(words)
    recipe: str | None = None
    overrides: list[str] = []
    for word in words:
        if word.startswith("--"):
            raise UsageError(f"{word}: no such option. Keys of a config are given as key=value")
        if "=" in word or word.startswith("~"):
            overrides.append(word)
        elif recipe is None:
            recipe = word
        else:
            raise UsageError(f"{word}: expected key=value or ~key; the recipe is {recipe} already")
    return recipe, overrides


def take_config(config: str, words: Sequence[str], *, verb: str) -> tuple[str, list[str]]:
    """Find the config among the words of a verb that takes it as ``run`` does, or first.

    Args:
        config: What ``--config`` says; empty where it wasn't typed.
        words: What was typed after the verb, options excepted.
        verb: For the message.

    Returns:
        The config, and the words without it.

    Raises:
        UsageError: There is none.
    """
    if config:
        return config, list(words)
    if words and "=" not in words[0] and not words[0].startswith("~"):
        return words[0], list(words[1:])
    raise UsageError(
        f"the config is missing. Say: legato {verb} CONFIG [key=value ...]. `legato ls` shows what "
        "there is"
    )


def _refuse_spaces(words: Sequence[str]) -> None:
    """``epochs = 5`` reaches us as three words."""
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word.startswith("="):
            meant = [before, word, after if word == "=" else ""]
        elif word.endswith("=") and after and "=" not in after and not after.startswith("~"):
            meant = [word, after]
        else:
            continue
        typed = " ".join(part for part in meant if part)
        raise UsageError(f"{typed}: write {''.join(meant)}, without spaces around =")


def read_config(config: str, words: Sequence[str]) -> LoadedConfig:
    """Load what ``--config CONFIG [<recipe>] [key=value ...]`` describes.

    Args:
        config: A hub config's name or a file.
        words: The recipe, if one was typed, and overrides.

    Returns:
        The checked config.

    Raises:
        UsageError: An unknown recipe, or words that fit nowhere.
        ConfigError: Everything that is wrong in the config.
    """
    from legato.config.load import load_config
    from legato.config.schema import RECIPES

    recipe, overrides = split_words(words)
    if recipe is not None and recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(RECIPES)}"
        raise UsageError(f"{recipe}: no such recipe.{hint}")
    return load_config(config, overrides, recipe=recipe)
