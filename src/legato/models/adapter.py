"""An adapter folder back onto the base that it was trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.errors import FolderFormatError, ModelError, ModelNotFoundError
from legato.hf_folder import FolderReader
from legato.models.facts import model_facts
from legato.models.folder import (
    ModelFolder,
    find_model,
    read_object,
    weight_files,
    weights_digest,
)
from legato.models.load import load_model
from legato.models.lora import BASE_FILE
from legato.models.quiet import silence_known_noise
from legato.storage import LocalStorage

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# With rsLoRA and DoRA, which PEFT counts as it. Its other types keep weights in other places, which
# what knows LoRA alone would leave out without a word.
PEFT_TYPE = "LORA"

MAX_ALPHA = 1_000_000
"""More than any adapter is trained with, and little enough for no dtype to overflow by itself."""

_FIRST_FACTOR = re.compile(r"\.lora_(embedding_)?A(\.|$)")  # its rows are the rank


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
        ModelError: The adapter doesn't name a base; or the one there isn't the one that it was
            trained on: ``.base``, ``.trained_on``. ``.path`` is the adapter's in both.
    """
    config = read_object(folder / ADAPTER_CONFIG, error=FolderFormatError)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not name or not isinstance(name, str):
        raise ModelError(
            f"{folder}: its {ADAPTER_CONFIG} doesn't say which base it is for. Name it there: "
            "base_model_name_or_path.",
            path=str(folder),
        )
    try:
        base = find_model(name, revision=revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{folder}: is an adapter whose base {name} can't be found: "
            f"{str(error).rstrip('.')}. Put the base there, or change "
            f"base_model_name_or_path in the {ADAPTER_CONFIG} of a copy of the "
            "folder without manifest.json.",
            path=str(folder),
            base=name,
        ) from error
    note = _read_note(folder)
    expected, trained_on = note.get("digest"), note.get("base", name)
    if expected is not None and expected != (found := weights_digest(weight_files(base.path))):
        raise ModelError(
            f"{folder}: was trained on another base than the one that is at {base.name} now: on "
            f"{trained_on} with weights {expected}, found {found}. Put that base back, or train "
            "an adapter for this one.",
            path=str(folder),
            base=base.name,
            trained_on=trained_on,
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
        ModelError: As :func:`find_base`, and as ``load_model`` for the base; an adapter that isn't
            LoRA (``.peft_type``), whose config doesn't fit its tensors, or whose tensors aren't
            those that the base needs (``.names``).
        FolderFormatError: A file of the adapter can't be read; ``.path``.
    """
    silence_known_noise()
    config = read_object(folder / ADAPTER_CONFIG, error=FolderFormatError)
    _check_type(config, folder=folder)
    _check_scale(config, folder=folder)
    base = find_base(folder)
    tensors = _read_tensors(folder)
    _check_rank(config, tensors, folder=folder)
    model = load_model(
        base.path,
        dtype=dtype or file_dtype(base.path),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    adapted = _attach(model, tensors, folder=folder)
    return LoadedAdapter(adapted, base, _read_note(folder).get("quantize_base", "none"))


def _check_type(config: Mapping[str, Any], *, folder: Path) -> None:
    peft_type = config.get("peft_type")
    if peft_type != PEFT_TYPE:
        raise ModelError(
            f"{folder}: {ADAPTER_CONFIG} says peft_type {peft_type}; Legato reads {PEFT_TYPE} "
            "(LoRA, rsLoRA, DoRA) and would leave the weights of other types out. Use PEFT itself "
            "for this one.",
            path=str(folder),
            peft_type=peft_type,
        )


def _check_scale(config: Mapping[str, Any], *, folder: Path) -> None:
    """With a factor that isn't a number, or is far from any that trains, answers are noise."""
    for key, value in _numbers(config, key="lora_alpha", pattern="alpha_pattern"):
        if not abs(value) <= MAX_ALPHA:  # also for NaN
            raise ModelError(
                f"{folder}: {ADAPTER_CONFIG} has {key} {value}; expected a number of at most "
                f"{MAX_ALPHA:,}. Was the config edited?",
                path=str(folder),
            )


def _check_rank(config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, folder: Path) -> None:
    """Before PEFT takes memory for the rank that the config names."""
    shapes = [tensor.shape for key, tensor in tensors.items() if _FIRST_FACTOR.search(key)]
    largest = max((shape[0] for shape in shapes if shape), default=0)
    for key, value in _numbers(config, key="r", pattern="rank_pattern"):
        if largest and value > largest:
            raise ModelError(
                f"{folder}: {ADAPTER_CONFIG} has {key} {value}, and no tensor in "
                f"{ADAPTER_WEIGHTS} has a rank above {largest}. Was the config edited?",
                path=str(folder),
            )


def _numbers(
    config: Mapping[str, Any], *, key: str, pattern: str
) -> Iterator[tuple[str, int | float]]:
    """A number and what a pattern has instead of it for some layers; PEFT tells what is none."""
    patterns = config.get(pattern)
    named = {key: config.get(key)} | {
        f"{pattern} {name}": value
        for name, value in (patterns.items() if isinstance(patterns, dict) else ())
    }
    return ((name, value) for name, value in named.items() if isinstance(value, int | float))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Key in the adapter's file -> tensor; each is finite."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = sorted(entry.name for entry in folder.glob("*.bin"))
        found = f"{pickled[0]} is a pickle, which Legato doesn't open. " if pickled else ""
        raise ModelNotFoundError(
            f"{folder}: has no {ADAPTER_WEIGHTS}. {found}Save it with PEFT's "
            "save_pretrained(..., safe_serialization=True).",
            path=str(folder),
        )
    reader = FolderReader(LocalStorage(), str(folder), files=[ADAPTER_WEIGHTS])
    tensors = {key: reader.read(key) for key in reader.specs}
    if whole := [key for key, tensor in tensors.items() if not tensor.is_floating_point()]:
        word = str(tensors[whole[0]].dtype).removeprefix("torch.")
        raise ModelError(
            f"{folder / ADAPTER_WEIGHTS}: {whole[0]} is {word}; expected floating-point weights "
            f"({len(whole)} such tensors). Save it again as it was trained.",
            path=str(folder),
            names=whole,
        )
    broken = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ModelError(
            f"{folder / ADAPTER_WEIGHTS}: {len(broken)} of {len(tensors)} tensors hold NaN or "
            f"infinity, such as {broken[0]}: training went wrong before it was saved. Use an "
            "earlier step.",
            path=str(folder),
            names=broken,
        )
    return tensors


def _attach(model: Any, tensors: dict[str, Tensor], *, folder: Path) -> Any:
    """PEFT's model around ``model``, with every tensor of the adapter in its place."""
    from peft import (
        LoraConfig,
        PeftModel,
        PeftModelForCausalLM,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )

    try:
        config = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        kind = PeftModelForCausalLM if config.task_type == "CAUSAL_LM" else PeftModel
        adapted = kind(model, config, autocast_adapter_dtype=False)
    except re.error as error:
        raise ModelError(
            f"{folder}: {ADAPTER_CONFIG} names layers by {error.pattern!r}, which isn't a regular "
            f"expression: {error}",
            path=str(folder),
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"{folder}: PEFT can't put it on the base by its {ADAPTER_CONFIG}: {error}",
            path=str(folder),
        ) from error
    # Explicit: by default PEFT may ask the hub whether the vocabulary was changed.
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    _check_tensors(
        {key: tuple(tensor.shape) for key, tensor in tensors.items()},
        {key: tuple(tensor.shape) for key, tensor in expected.items()},
        folder=folder,
    )
    _check_base_weights(
        {key: tensor for key, tensor in tensors.items() if key not in expected},
        adapted.state_dict(),
        folder=folder,
    )
    try:
        unknown = set_peft_model_state_dict(adapted, tensors).unexpected_keys
    except RuntimeError as error:  # a layer of the base that PEFT saved beside the adapter
        told = " ".join(str(error).split())  # PEFT says it over several lines
        raise ModelError(f"{folder}: doesn't fit its base: {told}", path=str(folder)) from error
    if unknown:
        raise ModelError(
            f"{folder}: the base has no place for {len(unknown)} of the adapter's {len(tensors)} "
            f"tensors, such as {unknown[0]}. Was it trained on another model?",
            path=str(folder),
            names=list(unknown),
        )
    return adapted


def _check_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    folder: Path,
) -> None:
    missing = [key for key in expected if key not in found]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of the {len(expected)} tensors that its {ADAPTER_CONFIG} "
            f"and its base ask for aren't in {ADAPTER_WEIGHTS}, such as {missing[0]}. Was the "
            "config edited, or the adapter trained on another model?",
            path=str(folder),
            names=missing,
        )
    wrong = [key for key, shape in expected.items() if found[key] != shape]
    if wrong:
        raise ModelError(
            f"{folder}: {wrong[0]} is {found[wrong[0]]} in {ADAPTER_WEIGHTS}, and its "
            f"{ADAPTER_CONFIG} and its base ask for {expected[wrong[0]]} ({len(wrong)} such "
            "tensors). Was the config edited, or the adapter trained on another model?",
            path=str(folder),
            names=wrong,
        )


def _check_base_weights(
    found: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, folder: Path
) -> None:
    """PEFT keeps embeddings beside an adapter on them; what isn't the base's would replace it."""
    other = [
        key
        for key, tensor in found.items()
        if key in weights
        and tensor.shape == weights[key].shape  # else PEFT says so
        and not torch.equal(tensor.to(weights[key]), weights[key])
    ]
    if other:
        raise ModelError(
            f"{folder}: {ADAPTER_WEIGHTS} holds {other[0]} with other values than its base's "
            f"({len(other)} such tensors), and the modules_to_save of its {ADAPTER_CONFIG} doesn't "
            "name it. Name it there if it was trained.",
            path=str(folder),
            names=other,
        )


def file_dtype(folder: Path) -> torch.dtype:
    """The dtype that a model folder's config names; fp32 where it names none."""
    facts = model_facts(str(folder))
    dtype = getattr(torch, str(facts.dtype if facts is not None else None), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _read_note(folder: Path) -> dict[str, Any]:
    """What Legato wrote of the base; nothing in an adapter that comes from elsewhere."""
    note = folder / BASE_FILE
    return read_object(note, error=FolderFormatError) if note.is_file() else {}
