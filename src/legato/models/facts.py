"""What config.json tells of a model, without torch: for checks that must be fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legato.errors import ModelNotFoundError
from legato.models.folder import find_model, read_config, refuse_embedded_adapter

# Families whose experts are one tensor in memory and many in files (transformers 5 converts).
# Only for an early word: load_model asks transformers itself. A test holds this against it.
_SPLIT_EXPERTS = frozenset(
    {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3"}
)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model.

    Attributes:
        model_type: transformers' family name, e.g. ``llama``.
        max_positions: Longest sequence in tokens that the model was made for, where it says so.
        vocab_size: Rows of the embedding.
        dtype: The files' dtype as the config names it, e.g. ``bfloat16``.
        unsupported: Why Legato can't train this family; None where nothing speaks against it.
    """

    model_type: str
    max_positions: int | None
    vocab_size: int | None
    dtype: str | None
    unsupported: str | None


def model_facts(name_or_path: str) -> ModelFacts | None:
    """Read config.json of a local or cached model; imports no torch, downloads nothing.

    Args:
        name_or_path: A folder or a hub id.

    Returns:
        The facts, or None for a hub id that isn't on this machine yet.

    Raises:
        ModelNotFoundError: A path that isn't there, or a folder without config.json; ``.path``.
        ModelError: A broken config.json, an adapter folder, or a model and an adapter in one.
    """
    try:
        folder = find_model(name_or_path, local_only=True)
    except ModelNotFoundError as error:
        # A hub id may still be downloaded by the run; a path that isn't there is an error now.
        if error.__cause__ is not None:
            return None
        raise
    config = read_config(folder.path)
    refuse_embedded_adapter(folder.path)
    # Vision-language configs keep the language model's facts one level down.
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, dict) else {})}
    return ModelFacts(
        model_type=str(config.get("model_type", "unknown")),
        max_positions=_first_int(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        vocab_size=_first_int(text, "vocab_size"),
        dtype=text.get("dtype") or text.get("torch_dtype"),
        unsupported=_unsupported(config),
    )


def _first_int(config: dict[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _unsupported(config: dict[str, Any]) -> str | None:
    family = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return f"{family} is an encoder-decoder; Legato trains causal language models"
    if quantization := config.get("quantization_config"):
        is_known = isinstance(quantization, dict)
        method = quantization.get("quant_method", "quantized") if is_known else "quantized"
        return f"its weights are quantized ({method}); take the model they were made from"
    if "vision_config" in config or "audio_config" in config:
        return f"{family} also reads images or sound; its file keys aren't the model's"
    if family in _SPLIT_EXPERTS:
        return f"{family} is a mixture of experts whose file keys aren't the model's"
    return None
