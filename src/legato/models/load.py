"""A model and its tokenizer from a Hugging Face folder, strict both ways."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from legato.errors import (
    ConfigError,
    FolderFormatError,
    MissingDependencyError,
    ModelError,
    UnsupportedModelError,
)
from legato.hf_folder import FolderReader
from legato.models.facts import model_facts
from legato.models.folder import (
    ModelFolder,
    find_model,
    read_config,
    read_object,
    weight_files,
)
from legato.models.head import split_head
from legato.models.meta import MetaModel, parameters_on_meta, report_differences
from legato.models.quiet import silence_known_noise, without_weight_bars
from legato.storage import LocalStorage

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

__all__ = [
    "build_empty_model",
    "find_model",
    "load_meta_model",
    "load_model",
    "load_tokenizer",
    "model_facts",
    "split_head",
]

logger = logging.getLogger(__name__)

# Less is read in a second or two.
_LARGE_BYTES = 1_000_000_000


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model for training.

    Everything that can be known without the weights is checked before they are read.

    Args:
        name_or_path: A Hugging Face folder, or a hub id.
        dtype: Dtype of the parameters, whatever the files hold.
        device: Where the parameters go.
        attention: ``auto`` (sdpa where the family has it), ``sdpa``, ``eager``, ``flex``,
            ``flash``, or ``varlen`` (as auto, until ``settle_packing``).
        trust_remote_code: Run code that lies in the model's folder.

    Returns:
        The model in training mode, with its cache switched off.

    Raises:
        ModelNotFoundError: No such folder or hub model, or no weights; ``.path``.
        UnsupportedModelError: The family's file keys aren't the model's, or its weights are
            quantized.
        FolderFormatError: A broken header or index; ``.path``.
        ModelError: Keys or shapes in the files aren't the model's; ``.missing``, ``.unexpected``,
            ``.mismatched``.
        ConfigError: An attention that can't be had here.
    """
    from transformers import AutoModelForCausalLM

    silence_known_noise()
    folder = find_model(str(name_or_path))
    config = _load_config(folder, trust_remote_code=trust_remote_code)
    _say_if_large(weight_files(folder.path), path=folder.path)
    _check_file_keys(config, path=folder.path, trust_remote_code=trust_remote_code)
    with without_weight_bars():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=config,
            dtype=dtype,
            attn_implementation=_attention(attention, device=torch.device(device)),
            trust_remote_code=trust_remote_code,
            # Other shapes are reported, then refused below with all the rest in one message.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
    _check_report(report, path=folder.path)
    model.config.use_cache = False
    model.to(torch.device(device))
    model.train()
    return model


def load_meta_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    trust_remote_code: bool = False,
) -> MetaModel:
    """The model that :func:`load_model` loads, without its weights: each rank reads its part later.

    Args:
        name_or_path: A Hugging Face folder, or a hub id.
        dtype: Dtype of the parameters, whatever the files hold.
        device: Where it is going to compute.
        attention: As in :func:`load_model`.
        trust_remote_code: Run code that lies in the model's folder.

    Returns:
        The model in training mode, with its cache switched off, and its open files.

    Raises:
        LegatoError: As :func:`load_model`.
    """
    from transformers import AutoModelForCausalLM

    silence_known_noise()
    folder = find_model(str(name_or_path))
    config = _load_config(folder, trust_remote_code=trust_remote_code)
    _say_if_large(weight_files(folder.path), path=folder.path)
    _check_file_keys(config, path=folder.path, trust_remote_code=trust_remote_code)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=_attention(attention, device=torch.device(device)),
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    if model.can_generate():
        model.generation_config = _generation_config(folder.path)
    model.config.use_cache = False
    model.train()
    return MetaModel(model, FolderReader(LocalStorage(), str(folder.path)), dtype)


def load_tokenizer(
    name_or_path: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a model.

    Args:
        name_or_path: A Hugging Face folder, or a hub id.
        trust_remote_code: Run code that lies in the folder.

    Returns:
        The tokenizer, padding on the right.

    Raises:
        ModelNotFoundError: No such folder or hub model; ``.path``.
        ModelError: The folder holds no tokenizer that can be read; ``.path``.
    """
    from transformers import AutoTokenizer

    silence_known_noise()
    folder = find_model(str(name_or_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever its backends raise
        raise ModelError(
            f"{folder.path}: its tokenizer can't be loaded ({_one_line(error)}). "
            "Expected tokenizer.json and tokenizer_config.json beside the weights.",
            path=str(folder.path),
        ) from error
    tokenizer.padding_side = "right"
    return tokenizer


def build_empty_model(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """The model of a config on the meta device: names, shapes and modules, no memory.

    Args:
        config: transformers' config.
        trust_remote_code: Allow code that lies in the model's folder.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: transformers has no causal language model for this config.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type}: transformers has no causal language model of this family.",
            family=config.model_type,
        ) from error


def _load_config(folder: ModelFolder, *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    content = read_config(folder.path)
    facts = model_facts(str(folder.path))
    if facts is not None and facts.unsupported is not None:
        raise UnsupportedModelError(
            f"{folder.path}: {facts.unsupported}.", path=str(folder.path), family=facts.model_type
        )
    if content.get("auto_map") and not trust_remote_code:
        logger.info("%s brings code of its own; it isn't run", folder.path)
    generation = folder.path / "generation_config.json"
    if generation.is_file():  # transformers goes on without the stop tokens of one it can't read
        read_object(generation, error=FolderFormatError)
    try:
        return AutoConfig.from_pretrained(
            folder.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # an unknown family is a ValueError, wrong fields are anything
        raise ModelError(
            f"{folder.path / 'config.json'}: transformers can't read it ({_one_line(error)}).",
            path=str(folder.path),
        ) from error


def _generation_config(path: Path) -> GenerationConfig:
    """The folder's own or, as transformers does it, what config.json says of generation."""
    from transformers import GenerationConfig

    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_pretrained(path, "config.json", _from_model_config=True)


def _attention(attention: str, *, device: torch.device) -> str | None:
    """What transformers calls an attention, or an error that says why it can't be had."""
    if attention in ("auto", "varlen"):
        # sdpa where the family supports it, else eager: transformers' own choice. For packed rows
        # settle_packing() switches to varlen once the model is there.
        return None
    if attention in ("sdpa", "eager"):
        return attention
    if attention in ("flex", "flash"):
        if device.type != "cuda":
            raise ConfigError(
                f"attention: {attention} needs a CUDA device, this run is on {device.type}. "
                "Use auto, sdpa or eager."
            )
        if attention == "flex":
            return "flex_attention"
        if find_spec("flash_attn") is None:
            raise MissingDependencyError(
                "attention: flash needs the package flash-attn: pip install flash-attn"
            )
        return "flash_attention_2"
    raise ConfigError(
        f"attention: {attention!r} is unknown. Expected auto, sdpa, eager, flex, flash or varlen."
    )


def _check_file_keys(config: PreTrainedConfig, *, path: Path, trust_remote_code: bool) -> None:
    """Refuse families whose tensors transformers renames or splits when it writes files.

    A step folder holds the model's own tensors under the model's own names; for these families
    that wouldn't be the format that everyone else reads. transformers is asked what it would
    write for a model without memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        model = build_empty_model(config, trust_remote_code=trust_remote_code)
    except (AssertionError, ArithmeticError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"{path / 'config.json'}: no model can be built by it ({_one_line(error)}). Was it "
            "edited? Get the model again.",
            path=str(path),
        ) from error
    _check_file_dtypes(model, path=path)
    ours = {name: tensor.shape for name, tensor in model.state_dict().items()}
    try:
        written = revert_weight_conversion(model, model.state_dict())
        theirs = {name: tensor.shape for name, tensor in written.items()}
    except NotImplementedError:  # an operation that can't run without memory: not the identity
        theirs = {}
    if ours == theirs:
        return
    example = next(name for name in ours if ours[name] != theirs.get(name))
    raise UnsupportedModelError(
        f"{path}: {type(model).__name__} ({config.model_type}) keeps its weights under other "
        f"names in files than in memory ({len(ours.keys() - theirs.keys())} differ, such as "
        f"{example}). Legato trains the families where the two are the same.",
        path=str(path),
        family=config.model_type,
        example=example,
    )


def _check_file_dtypes(model: Any, *, path: Path) -> None:
    """Integers would be taken for weights as they stand: what quantized them isn't told."""
    specs = FolderReader(LocalStorage(), str(path)).specs
    wrong = [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and name in specs and not specs[name].dtype.is_floating_point
    ]
    if wrong:
        word = str(specs[wrong[0]].dtype).removeprefix("torch.")
        raise ModelError(
            f"{path}: {wrong[0]} is {word} in the files; expected floating-point weights "
            f"({len(wrong)} such tensors). Use a copy that isn't quantized.",
            path=str(path),
            names=wrong,
        )


def _say_if_large(files: Sequence[Path], *, path: Path) -> None:
    """Say what takes a while: transformers' own bar counts tensors, and is hidden."""
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes >= _LARGE_BYTES:
        logger.info("reading %.1f GB of weights from %s", num_bytes / 1e9, path)


def _check_report(report: dict[str, Any], *, path: Path) -> None:
    """Raise when files and model don't hold exactly the same tensors."""
    report_differences(
        str(path),
        missing=sorted(report["missing_keys"]),
        unexpected=sorted(report["unexpected_keys"]),
        mismatched=sorted(tuple(entry) for entry in report["mismatched_keys"]),
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
