"""The configs that ship with the package, by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from legato.config.names import COMPRESSIONS, FILE_KINDS
from legato.errors import ConfigError

HUB = Path(__file__).parent / "hub"
_DATA_FILES = (*FILE_KINDS, *COMPRESSIONS)
_BLANKS = b"\xef\xbb\xbf \t\r\n"  # a byte order mark among them
SCHEMA_FILE = Path(__file__).parent / "run_config.schema.json"


@dataclass(frozen=True)
class ConfigFile:
    """A config's text, and how to call it."""

    name: str
    """Last part of its path, without the ending."""
    output_dir: str
    """Where its run goes if nothing else is said."""
    label: str
    """How errors call it."""
    text: str


def hub_names() -> list[str]:
    """Names such as ``llama2/7B_full_single_device``, sorted."""
    return sorted(str(p.relative_to(HUB).with_suffix("").as_posix()) for p in HUB.glob("*/*.yaml"))


def hub_path(name: str) -> Path | None:
    """The packaged file of a hub name, None if there is none."""
    return HUB / f"{name}.yaml" if name in hub_names() else None


def recipe_of(name: str) -> str:
    """The recipe of a hub config, read without a YAML parser: ``ls`` is quick."""
    lines = (HUB / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("recipe:"))


def find_config(name_or_path: str) -> ConfigFile:
    """Read a file, or a packaged config of that name.

    Args:
        name_or_path: A file; where there is none, a name as ``legato ls`` shows it.

    Returns:
        The config's text and names.

    Raises:
        ConfigError: Neither exists, the file holds rows, or it isn't UTF-8 text.
    """
    path = Path(name_or_path)
    if path.is_file() and _holds_rows(path):
        raise ConfigError(
            f"{name_or_path}: expected a config, found a data file. Name a config and give it the "
            f"file: smollm2/135M_lora_single_device dataset={name_or_path}, with model=FOLDER for "
            "a model of your own. `legato ls` lists the configs."
        )
    output_dir = f"out/{path.stem}"
    if not path.is_file():
        packaged = hub_path(name_or_path)
        if packaged is None:
            raise ConfigError(_not_found(name_or_path))
        # With the family: two of them have a 7B.
        path, output_dir = packaged, f"out/{name_or_path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name_or_path}: expected UTF-8 text, found byte {error.object[error.start]:#04x} at "
            f"offset {error.start}. Save the file as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{name_or_path}: can't be read: {error.strerror}") from error
    return ConfigFile(path.stem, output_dir, name_or_path, text)


def _holds_rows(path: Path) -> bool:
    """Told by the name; a .json may be a config as well, and isn't if it begins as a list does."""
    if not path.name.lower().endswith(_DATA_FILES):
        return False
    return path.suffix.lower() != ".json" or path.read_bytes()[:100].lstrip(_BLANKS).startswith(
        b"["
    )


def _not_found(name_or_path: str) -> str:
    if Path(name_or_path).is_dir():
        return f"{name_or_path}: expected a config file, found a folder"
    names = hub_names()
    of_recipe = [name for name in names if recipe_of(name) == name_or_path]
    if of_recipe:
        listed = "".join(f"\n  {name}" for name in of_recipe)
        return (
            f"{name_or_path}: is a recipe, expected a config. Its configs:{listed}\n"
            f"`legato cp {name_or_path} my.py` makes a script of the recipe itself."
        )
    near = [name for name in names if name.startswith(f"{name_or_path}_")]
    near = near or difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{name_or_path}: no such file and no such hub config.{hint} `legato ls` lists them."
