"""An adapter folder back onto the base that it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.errors import FolderFormatError, ModelError, ModelNotFoundError
from legato.models.facts import model_facts
from legato.models.folder import ModelFolder, find_model, weight_files, weights_digest
from legato.models.load import load_model
from legato.models.lora import BASE_FILE
from legato.models.quiet import silence_known_noise

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LoadedAdapter:
    """A base with an adapter on it.

    Attributes:
        model: PEFT's model around the base.
        base: The folder that the base came from.
        quantize_base: What the base was while the adapter trained: ``none`` or ``nf4``. Here it
            is as its files have it.
    """

    model: Any
    base: ModelFolder
    quantize_base: str = "none"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def find_base(folder: Path) -> ModelFolder:
    """The base that an adapter folder was trained on.

    Args:
        folder: The adapter's folder.

    Returns:
        The base's folder; its weights are those that the adapter remembers, where it does.

    Raises:
        ModelNotFoundError: The base isn't there; ``.path``, ``.base``.
        ModelError: The adapter doesn't name a base, or another one lies in its place; ``.path``.
    """
    config = _read_object(folder / ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not name:
        raise ModelError(
            f"{folder}: its {ADAPTER_CONFIG} doesn't say which base it is for.", path=str(folder)
        )
    try:
        base = find_model(name, revision=revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{folder}: is an adapter whose base {name} can't be found: {error}. Put the base "
            f"there, or change base_model_name_or_path in {ADAPTER_CONFIG}.",
            path=str(folder),
            base=name,
        ) from error
    expected = _read_note(folder).get("digest")
    if expected is not None and expected != (found := weights_digest(weight_files(base.path))):
        raise ModelError(
            f"{folder}: was trained on another base than the one that is at {base.path} now "
            f"(weights {expected}, found {found}).",
            path=str(folder),
            base=str(base.path),
        )
    return base


def load_adapter(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedAdapter:
    """Load the base that an adapter names, and put the adapter on it.

    Args:
        folder: The adapter's folder.
        dtype: Dtype of the base's parameters; None takes its files'.
        device: Where the parameters go.
        trust_remote_code: Run code that lies in the base's folder.

    Returns:
        The two together, in training mode as ``load_model`` leaves it.

    Raises:
        ModelError: As :func:`find_base`, and as ``load_model`` for the base.
    """
    silence_known_noise()
    from peft import PeftModel

    base = find_base(folder)
    model = load_model(
        base.path,
        dtype=dtype or file_dtype(base.path),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    adapted = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    return LoadedAdapter(adapted, base, _read_note(folder).get("quantize_base", "none"))


def file_dtype(folder: Path) -> torch.dtype:
    """The dtype that a model folder's config names; fp32 where it names none."""
    facts = model_facts(str(folder))
    dtype = getattr(torch, str(facts.dtype if facts is not None else None), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _read_note(folder: Path) -> dict[str, Any]:
    """What Legato wrote of the base; nothing in an adapter that comes from elsewhere."""
    return _read_object(folder / BASE_FILE) if (folder / BASE_FILE).is_file() else {}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FolderFormatError(
            f"{file}: can't be read as JSON ({error}).", path=str(file)
        ) from error
    if not isinstance(content, dict):
        raise FolderFormatError(f"{file}: isn't a JSON object.", path=str(file))
    return content
