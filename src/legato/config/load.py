"""A config file or hub name, and what the command line changes -> a checked :class:`RunConfig`.

Every mistake is found in one go. Each is told with its place (``my.yaml:12`` or ``command line``),
the key as it was spelled, what was expected and what was found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from legato.config import catalog, rules
from legato.config.aliases import (
    ADVICE,
    ALIASES,
    COMPONENT,
    COMPONENT_ADVICE,
    OWN_KEYS_INSIDE,
    resolve_file,
    resolve_overrides,
    spelled,
)
from legato.config.explain import problems_of, unknown_key_advice
from legato.config.problems import KeyPath, Problem, dotted
from legato.config.schema import RunConfig
from legato.config.source import Layer, Override, index_or_name, read_override, read_yaml
from legato.errors import ConfigError, first_line

COMMAND_LINE = "command line"
NO_IMPORTS = "a config can't name Python code to import"

# For the keys that a config can't do without, so that the others can be checked by themselves.
_STAND_INS: dict[str, Any] = {
    "recipe": "full_finetune_single_device",
    "model": "stand-in",
    "output_dir": "stand-in",
    "datasets": [{"path": "stand-in"}],
    "optimizer": {"lr": 1.0},
}


@dataclass
class Origins:
    """Where each key was set, and how it was spelled there."""

    file_name: str
    places: dict[KeyPath, str] = field(default_factory=dict)
    spellings: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """``my.yaml:12``, ``command line``, or the file where the key is absent."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.file_name

    def overridden(self, path: KeyPath) -> None:
        """Note that the command line set ``path`` and everything below."""
        for old in [p for p in self.places if p[: len(path)] == path]:
            del self.places[old]
        self.places[path] = COMMAND_LINE

    def line_of(self, told: str) -> int:
        """Sorts what was told by line; what has none, such as the command line, comes last."""
        found = re.match(r":(\d+):", told.removeprefix(self.file_name))
        return int(found[1]) if found else sys.maxsize

    def tell(self, problem: Problem) -> str:
        """The problem as one line."""
        if not problem.path:
            return f"{self.file_name}: {problem.message}"
        key = spelled(problem.path, self.spellings)
        return f"{self.place(problem.path)}: {key}: {problem.message}"


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, the name it was given by, and its resolved form as a file."""

    config: RunConfig
    name: str
    """Last part of the path or hub name, without ``.yaml``; names ``out/<name>``."""
    yaml: str
    """Every key that means something in this run, defaults included; loads to the same config."""
    origins: Origins


def load_config(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    look: Callable[[RunConfig], Iterable[Problem]] | None = None,
) -> LoadedConfig:
    """Read a config and check it.

    Args:
        name_or_path: A YAML file, or a hub config's name as ``legato ls`` shows it.
        overrides: ``key=value`` and ``~key`` arguments; later ones win.
        recipe: A recipe that was typed as well: the config's own must agree, or be absent.
        look: What else is wrong with a config that is right in itself, such as paths that lead
            nowhere. Asked here only when something is wrong: about the keys that aren't.

    Returns:
        The checked config.

    Raises:
        ConfigError: There is no such file, or something in it is wrong; ``.problems`` lists each.
    """
    entry = catalog.find_config(str(name_or_path))
    layer = read_yaml(entry.text, name=entry.label)
    if layer.problems and not layer.data:
        raise ConfigError([f"{layer.name}: {problem}" for problem in layer.problems])
    origins = Origins(entry.label)
    told, unreadable = _prepare_file(layer, origins)
    values, malformed = _with_references(layer.data)
    told += _apply(values, overrides, origins)
    if recipe is not None:
        told += _agree_on_recipe(values, recipe, origins)
    if "output_dir" not in values:
        values["output_dir"] = entry.output_dir
    resolved, unresolved = _resolve(values)
    unresolved += malformed
    unreadable |= {str(problem.path[0]) for problem in unresolved}
    config, found = validate(resolved, skip=frozenset(unreadable))
    if look is not None and (told or unresolved or found):
        wrong = unreadable | {str(problem.path[0]) for problem in found if problem.path}
        found += _look_at_rest(resolved, wrong, look)
    told += [origins.tell(problem) for problem in unresolved + found]
    if told or config is None:
        raise ConfigError(sorted(told, key=origins.line_of))
    return LoadedConfig(config, entry.name, dump_yaml(config), origins)


def validate(
    values: dict[str, Any], *, skip: frozenset[str] = frozenset()
) -> tuple[RunConfig | None, list[Problem]]:
    """Check values against the schema; combinations are checked among what is right by itself.

    Args:
        values: Our keys only (aliases resolved); scalars may be text.
        skip: Top-level keys that are known to be wrong already.

    Returns:
        The config, None if anything is wrong; and what is.
    """
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        found = problems_of(error)
    problems = [p for p in found if not p.path or p.path[0] not in skip]
    wrong = {str(p.path[0]) for p in found if p.path} | skip
    try:
        _with_stand_ins(values, wrong)
    except ValidationError as error:
        told = {(p.path, p.message) for p in problems}
        problems += [p for p in problems_of(error) if (p.path, p.message) not in told]
    return None, problems


def _look_at_rest(
    values: dict[str, Any], wrong: set[str], look: Callable[[RunConfig], Iterable[Problem]]
) -> list[Problem]:
    """What ``look`` says of the keys that nothing else is wrong with."""
    try:
        config = _with_stand_ins(values, wrong)
    except ValidationError:  # a combination is wrong that can't be told apart by its keys
        return []
    right = values.keys() - wrong
    return [problem for problem in look(config) if problem.path and problem.path[0] in right]


def _with_stand_ins(values: dict[str, Any], wrong: Collection[str]) -> RunConfig:
    """A config of the values that are right by themselves, with stand-ins for what it needs."""
    kept = {name: value for name, value in values.items() if name not in wrong}
    missing = {name: value for name, value in _STAND_INS.items() if name not in kept}
    unreadable = frozenset(missing).union(wrong)
    return RunConfig.model_validate(missing | kept, context={"unreadable": unreadable})


def dump_yaml(config: RunConfig) -> str:
    """The config as YAML, defaults included, without the keys that mean nothing in it."""
    values = config.model_dump(mode="json")
    if "max_seq_len" not in config.model_fields_set:
        # The model may take less than the default; written down, the default would be asked for.
        del values["max_seq_len"]
    for key in rules.inapplicable(config):
        *parents, name = key.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section.pop(name, None)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def _prepare_file(layer: Layer, origins: Origins) -> tuple[list[str], set[str]]:
    """Take out import paths, resolve aliases: what is wrong so far, and in which keys."""
    problems = layer.problems + _take_components(layer.data)
    layer.problems = []
    names = {str(problem.path[0]) for problem in problems if problem.path}
    unreadable = {str(ALIASES.get(name, (name,))[0]) for name in names}
    told = [f"{layer.place(problem.path)}: {problem}" for problem in problems]
    resolve_file(layer, origins.spellings)
    told += [f"{layer.place(problem.path)}: {problem}" for problem in layer.problems]
    origins.places = {path: f"{layer.name}:{line}" for path, line in layer.lines.items()}
    return told, unreadable


def _take_components(data: dict[str, Any]) -> list[Problem]:
    """Remove top-level keys that hold torchtune's ``_component_`` anywhere below."""
    problems = []
    for name in list(data):
        path = _component_below(data[name], (name,))
        if path is not None:
            section = data.pop(name)
            advice = COMPONENT_ADVICE.get(name)
            say = f"write {advice}" if advice else ADVICE.get(name, "leave it out")
            problems.append(Problem(path, f"{NO_IMPORTS}; {say}"))
            if name in OWN_KEYS_INSIDE:
                problems += _own_keys_inside(section, (name,))
    return problems


def _own_keys_inside(section: Any, path: KeyPath) -> list[Problem]:
    """Settings of a component that are keys of ours at the top: nobody should lose them with it."""
    if not isinstance(section, dict):
        return []
    problems = []
    for key in section:
        if key in RunConfig.model_fields:
            problems.append(Problem((*path, key), f"Legato's key is `{key}`, at the top level"))
        elif key in ADVICE:
            problems.append(Problem((*path, key), ADVICE[key]))
    return problems


def _component_below(value: Any, path: KeyPath) -> KeyPath | None:
    if isinstance(value, dict):
        if COMPONENT in value:
            return (*path, COMPONENT)
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return None
    found = (_component_below(item, (*path, name)) for name, item in items)
    return next((p for p in found if p is not None), None)


def _apply(values: DictConfig, arguments: Sequence[str], origins: Origins) -> list[str]:
    """Apply a command line to the file's values, one override after another."""
    layer = Layer(COMMAND_LINE)
    overrides: list[Override] = []
    for argument in arguments:
        override = read_override(argument)
        if isinstance(override, Problem):
            layer.problems.append(override)
        elif COMPONENT in override.path:
            layer.problems.append(Problem((), f"{argument}: {NO_IMPORTS}"))
        else:
            overrides.append(override)
    spellings: dict[KeyPath, str] = {}
    for override in resolve_overrides(overrides, layer, spellings):
        try:
            problem = (
                _remove(values, override) if override.remove else _set(values, override, origins)
            )
        except OmegaConfBaseException as error:
            problem = Problem((), f"{override.argument}: {first_line(error)}")
        if problem is not None:
            layer.problems.append(problem)
        origins.overridden(override.path)
    origins.spellings = {
        path: word for path, word in origins.spellings.items() if path not in spellings
    } | spellings
    return [f"{COMMAND_LINE}: {problem}" for problem in layer.problems]


def _agree_on_recipe(values: DictConfig, typed: str, origins: Origins) -> list[str]:
    configured = values.setdefault("recipe", typed)
    if configured == typed:
        return []
    say = (
        f"the config says {configured}, the command line {typed}. Leave one of them out, or give "
        f"recipe={typed}, which takes the place of the config's"
    )
    problem = Problem(("recipe",), say)
    return [origins.tell(problem)]


def _set(values: DictConfig, override: Override, origins: Origins) -> Problem | None:
    node: Any = values
    for depth, part in enumerate(override.path):
        is_last = depth == len(override.path) - 1
        if OmegaConf.is_list(node):
            if not isinstance(part, int) or part > len(node):
                have = f"{len(node)} entries, numbered from 0"
                where = dotted(override.path[:depth])
                return Problem((), f"{override.argument}: {where} has {have}")
            if part == len(node):
                node.append({})
        name = part if OmegaConf.is_list(node) else str(part)
        if is_last:
            OmegaConf.update(
                values, dotted(override.path), override.value, merge=False, force_add=True
            )
            return None
        if not OmegaConf.is_config(OmegaConf.select(node, str(name))):
            node[name] = {}
            origins.overridden(override.path[: depth + 1])
        node = node[name]
    return None


def _remove(values: DictConfig, override: Override) -> Problem | None:
    node: Any = (
        OmegaConf.select(values, dotted(override.path[:-1])) if override.path[1:] else values
    )
    last = override.path[-1]
    if OmegaConf.is_list(node) and isinstance(last, int) and last < len(node):
        del node[last]
    elif OmegaConf.is_dict(node) and str(last) in node:
        del node[str(last)]
    else:
        return Problem(
            (),
            f"{override.argument}: the config has no such key{unknown_key_advice(override.path)}",
        )
    return None


def _with_references(data: dict[str, Any]) -> tuple[DictConfig, list[Problem]]:
    """Parse ``${...}``; keys with a malformed one are left out and told."""
    problems: list[Problem] = []
    while True:
        try:
            return OmegaConf.create(data), problems
        except OmegaConfBaseException as error:
            path = _path_of(str(error.full_key))
            problems.append(Problem(path, f"not a reference to a key: {first_line(error)}"))
            data = {name: value for name, value in data.items() if name != str(path[0])}


def _resolve(values: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Fill in ``${...}``; keys whose reference can't be followed are left out and told."""
    problems: list[Problem] = []
    while True:
        try:
            resolved: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
            return resolved, problems
        except OmegaConfBaseException as error:
            path = _path_of(str(error.full_key))
            problems.append(Problem(path, first_line(error)))
            del values[str(path[0])]


def _path_of(full_key: str) -> KeyPath:
    parts = full_key.replace("[", ".").replace("]", "").split(".")
    return tuple(index_or_name(part) for part in parts if part)
