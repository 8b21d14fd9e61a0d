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
    str,
    typer.Option(
        metavar="NAME|FILE", help="A name as `legato ls` shows it, or a file.", show_default=False
    ),
]
ConfigWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [KEY=VALUE | ~KEY]",
        help="The config, if --config doesn't say it; keys of it to set (epochs=5) or to take out "
        "('~max_steps').",
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
        if word.startswith("-"):
            raise UsageError(_no_such_option(word))
        if "=" in word or word.startswith("~"):
            overrides.append(word)
        elif recipe is None:
            recipe = word
        else:
            raise UsageError(f"{word}: expected key=value or ~key; the recipe is {recipe} already")
    return recipe, overrides


def _is_key(name: str) -> bool:
    from legato.config.aliases import ALIASES
    from legato.config.schema import RunConfig

    return name.partition(".")[0] in {*ALIASES, *RunConfig.model_fields}


def _no_such_option(word: str) -> str:
    from legato.config.explain import did_you_mean
    from legato.parallel.launch import OPTIONS

    name, _, value = word.partition("=")
    key = name.lstrip("-").replace("-", "_")
    if _is_key(key):
        return f"{word}: a key of the config is given without dashes: {key}={value or 'VALUE'}"
    options = ["--config", "--start-over", "--accept-changes", "--full", "--debug", *OPTIONS]
    near = did_you_mean(name.replace("_", "-"), options)
    return f"{word}: no such option{near or '. Keys of a config are given as key=value'}"


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
        if word.startswith("=") and not before:
            continue
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
        ConfigError: Everything that is wrong in the config, paths that lead nowhere included. Of
            a config that is right in itself nobody has looked at the paths: see
            `legato.cli.validate.told_problems`.
    """
    from legato.cli.validate import local_problems
    from legato.config.aliases import RECIPE_ADVICE
    from legato.config.load import load_config
    from legato.config.schema import RECIPES

    recipe, overrides = split_words(words)
    if recipe is not None and recipe not in RECIPES:
        if _is_key(recipe):
            raise UsageError(f"{recipe}: its value is missing: {recipe}=VALUE")
        if recipe in RECIPE_ADVICE:
            raise UsageError(f"{recipe}: no such recipe. {RECIPE_ADVICE[recipe]}")
        near = difflib.get_close_matches(recipe, RECIPES, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(RECIPES)}"
        raise UsageError(f"{recipe}: no such recipe.{hint}")
    return load_config(config, overrides, recipe=recipe, look=local_problems)
