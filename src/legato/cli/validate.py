"""``legato validate``: everything that can be known before a run, in less than a second."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.arguments import ConfigOption, ConfigWords
from legato.config.names import (
    COMPRESSIONS,
    FILE_KINDS,
    HUB_NAME,
    NO_URL,
    PACKAGED_TEMPLATES,
    URL,
    kind_of_file,
)

CHECKED = (
    "checked: keys, values, combinations, and that paths are there. Data and model weren't read: "
    "--full does all that a run does before step 1"
)
CHECKED_ALL = "checked: all that a run does before its first step, resuming included"

if TYPE_CHECKING:
    from legato.config.load import LoadedConfig
    from legato.config.problems import Problem
    from legato.config.schema import RunConfig


def validate(
    words: ConfigWords = None,
    config: ConfigOption = "",
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Do all that a run does before its first step, and write nothing: model, data, "
            "memory, disk, and what output_dir holds to resume from.",
        ),
    ] = False,
) -> None:
    """Check a config, and tell every mistake in it at once.

    Keys, values, combinations, and whether paths are there: in less than a second. With --full
    also how `legato run` would begin: from which step, and what has changed since.
    """
    from legato.cli.arguments import read_config, take_config
    from legato.errors import ConfigError

    config, words = take_config(config, words or [], verb="validate")
    loaded = read_config(config, words)
    if problems := told_problems(loaded):
        raise ConfigError(problems)
    if full:
        from legato.cli.logs import show_log
        from legato.recipes import preflight

        show_log()
        preflight(loaded.config, config_name=loaded.name)
    run = loaded.config
    sources = ", ".join(dataset.path for dataset in run.datasets)
    typer.echo(f"{config} is valid: {run.recipe} of {run.model} on {sources} into {run.output_dir}")
    typer.echo(CHECKED_ALL if full else CHECKED)
    for line in () if full else taken_for_hub_names(run):
        typer.echo(line)


def taken_for_hub_names(config: RunConfig) -> Iterator[str]:
    """What isn't on this machine and may be on the hub, or a slip of the pen: nobody has looked."""
    places = {"model": (config.model, _is_on_this_machine(config.model), "folder")}
    for key in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(config, key)):
            is_here = glob.has_magic(dataset.path) or Path(dataset.path).expanduser().exists()
            places[f"{key}.{index}.path"] = (dataset.path, is_here, "file or folder")
    for key, (name, is_here, what) in places.items():
        if not is_here:
            yield (
                f"{key}: {name} is no {what} here, so it is taken for a name on the hub; nobody "
                "has looked there, --full does"
            )


def told_problems(loaded: LoadedConfig) -> list[str]:
    """What this machine's files say against a config, each with its place in it."""
    return [loaded.origins.tell(problem) for problem in local_problems(loaded.config)]


def local_problems(config: RunConfig) -> Iterator[Problem]:
    """What this machine's files say against a config that is right in itself."""
    yield from _model_problems(config)
    yield from _data_problems(config)
    yield from _path_problems(config)


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    from legato.config.problems import Problem
    from legato.errors import ModelError
    from legato.models.facts import model_facts

    if not _is_on_this_machine(config.model):
        return
    try:
        facts = model_facts(config.model)
    except ModelError as error:
        yield Problem(("model",), error.message)
        return
    if facts is None:
        return
    if facts.unsupported is not None:
        yield Problem(("model",), facts.unsupported)
    limit, is_set = facts.max_positions, "max_seq_len" in config.model_fields_set
    if is_set and limit is not None and config.max_seq_len > limit:
        message = f"{config.max_seq_len} is over the limit of {config.model}, {limit} tokens"
        yield Problem(("max_seq_len",), f"{message}. Leave it out or set at most {limit}")


def _is_on_this_machine(model: str) -> bool:
    """False for a hub model that isn't cached: nothing to read, and the hub's client takes long."""
    if HUB_NAME.fullmatch(model) is None or ":" in model or Path(model).exists():
        return True
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return (cache / f"models--{model.replace('/', '--')}").is_dir()


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    from legato.config.problems import Problem

    for key in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(config, key)):
            place = os.path.expanduser(dataset.path)
            if os.path.isfile(place) and kind_of_file(Path(place)) is None:
                message = f"{dataset.path} is no file of data. Known: {', '.join(FILE_KINDS)}"
                yield Problem((key, index, "path"), f"{message}, also with .gz or .zst")
            if os.path.exists(place):
                continue
            if URL.match(place):
                yield Problem((key, index, "path"), f"{dataset.path}: {NO_URL}")
            elif glob.has_magic(place):
                if not glob.glob(place, recursive=True):
                    message = f"no file matches {dataset.path}"
                    yield Problem((key, index, "path"), message + _looked_for(place))
            elif place.endswith(FILE_KINDS + COMPRESSIONS) or not HUB_NAME.fullmatch(place):
                message = f"{dataset.path}: no such file or folder"
                yield Problem((key, index, "path"), message + _looked_for(place))


def _looked_for(place: str) -> str:
    """Where a relative path led to."""
    if os.path.isabs(place):
        return ""
    return f"; looked for {os.path.abspath(place)}, as relative paths start at the current folder"


def _path_problems(config: RunConfig) -> Iterator[Problem]:
    from legato.config.problems import Problem

    template = Path(config.chat_template).expanduser()
    names = ("auto", *PACKAGED_TEMPLATES)
    if config.chat_template not in names and not template.is_file():
        yield Problem(
            ("chat_template",),
            f"{config.chat_template}: expected {', '.join(names)} or a file",
        )
    source = config.resume_from_checkpoint
    # Without a shared disk it lies on rank 0's host, and this may be another one.
    is_path = isinstance(source, str) and source != "auto" and config.shared_storage
    if is_path and not Path(str(source)).expanduser().is_dir():
        yield Problem(("resume_from_checkpoint",), f"{source}: no such folder")
    folder = Path(config.output_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Problem(("output_dir",), f"{folder} is a file")
    elif not os.access(folder, os.W_OK):
        yield Problem(("output_dir",), f"{folder} can't be written to")
