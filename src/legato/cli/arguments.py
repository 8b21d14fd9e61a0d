"""The words after a verb that takes a config: ``[<recipe>] [key=value ...] ['~key' ...]``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from legato.errors import UsageError

if TYPE_CHECKING:
    from legato.config.load import LoadedConfig


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a recipe (or a script) from overrides.

    Args:
        words: What was typed after the verb, options excepted.

    Returns:
        The recipe, None where none was typed, and the overrides in their order.

    Raises:
        UsageError: More than one word is neither ``key=value`` nor ``~key``; an unknown option.
    """
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
