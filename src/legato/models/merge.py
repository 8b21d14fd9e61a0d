"""Fold an adapter into its base: a new model folder, proved before it gets its name."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.errors import ModelError
from legato.hf_folder import FolderReader
from legato.models.adapter import ADAPTER_CONFIG, file_dtype, is_adapter, load_adapter
from legato.models.folder import TEMPLATE_FILES, TOKENIZER_FILES, find_model, read_config
from legato.models.gguf import check_target, new_folder
from legato.models.load import load_tokenizer
from legato.models.names import named_weights
from legato.models.quiet import without_weight_bars
from legato.storage import LocalStorage

logger = logging.getLogger(__name__)

OTHER_DTYPE = "Merge with bf16 or fp32."

_PROBE_ROWS, _PROBE_TOKENS = 4, 32


@dataclass(frozen=True)
class Merged:
    """A merged model, and how far it is from base + adapter.

    Attributes:
        path: The new folder.
        base: What the adapter was merged into.
        num_parameters: Of the merged model.
        adapter_effect: How much the adapter changes the logits (root mean square).
        rounding_error: How far the written model's logits are from base + adapter's, because its
            weights are rounded to the files' dtype (root mean square).
        quantize_base: What the base was while the adapter trained: ``none`` or ``nf4``. What it
            was merged into has its files' precision.
    """

    path: Path
    base: Path
    num_parameters: int
    adapter_effect: float
    rounding_error: float
    quantize_base: str = "none"


def merge_adapter(
    adapter: str | Path,
    *,
    output_dir: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Merged:
    """Write base + adapter as one model folder that needs neither.

    The base is loaded in fp32, 4 bytes a parameter, from the files that the adapter names, also
    where training used a quantized copy of it; each weight is rounded once, when it is written.
    Neither the adapter's folder nor the base's is changed. The new folder gets its name only after

    - the merged model's logits are those of base + adapter, and
    - every tensor was read back from the files, equal bit for bit.

    Args:
        adapter: A step folder of LoRA training, or an adapter folder of PEFT.
        output_dir: The folder to make. Must be absent or empty.
        dtype: Dtype of the files; None keeps each tensor's in the base's files.
        device: Where the model is put together.
        trust_remote_code: Run code that lies in the base's folder.

    Returns:
        The new folder, and what was measured.

    Raises:
        ModelError: Not an adapter, another base than it was trained on, ``output_dir`` isn't
            empty, or the merged model isn't base + adapter; ``.path``.
    """
    source, output_dir = find_model(str(adapter)).path, Path(output_dir)
    check_target(output_dir)
    _check_adapter(source)
    _check_outside(output_dir, source)
    loaded = load_adapter(
        source, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code
    )
    base = loaded.base.path
    _check_outside(output_dir, base)
    adapted = loaded.model.eval()
    rows = _probe_rows(adapted)
    expected = _logits(adapted, rows)
    with adapted.disable_adapter():
        effect = _rms(expected - _logits(adapted, rows))
    model = _folded(adapted, source=source)
    _check_merged(_logits(model, rows), expected, effect=effect, source=source)
    _round_weights(model, base=base, dtype=dtype, source=source)
    with new_folder(output_dir) as folder:
        _write(model, folder, tokenizer_of=source, base=base, with_code=trust_remote_code)
        _check_files(model, folder)
        load_tokenizer(folder, trust_remote_code=trust_remote_code)
        rounding = _rounding_error(model, rows, expected, effect=effect, source=source)
    return Merged(
        path=output_dir,
        base=base,
        num_parameters=model.num_parameters(),
        adapter_effect=effect,
        rounding_error=rounding,
        quantize_base=loaded.quantize_base,
    )


def _check_adapter(folder: Path) -> None:
    if is_adapter(folder):
        return
    if (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: is a whole model already, no adapter: there is nothing to merge. "
            "It loads as it is.",
            path=str(folder),
        )
    try:
        read_config(folder)  # says what the folder is instead
    except ModelError as error:
        told = str(error).replace("has no config.json", f"has no {ADAPTER_CONFIG}")
        raise ModelError(told, path=str(folder)) from error


def _check_outside(output_dir: Path, folder: Path) -> None:
    """What is read stays as it is; what lies in a step goes when the step is pruned."""
    if output_dir.resolve().is_relative_to(folder.resolve()):
        raise ModelError(
            f"{output_dir}: lies inside of {folder}, which is read and stays as it is. Choose an "
            "output_dir outside of it.",
            path=str(output_dir),
        )


def _folded(adapted: Any, *, source: Path) -> Any:
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"{source}: PEFT can't fold this form of adapter into its base: {error}",
            path=str(source),
        ) from error


def _probe_rows(model: Any) -> torch.Tensor:
    """Token ids of any kind: what is compared is arithmetic."""
    embedding = model.get_input_embeddings().weight
    random = torch.Generator().manual_seed(0)
    shape = (_PROBE_ROWS, _PROBE_TOKENS)
    return torch.randint(embedding.shape[0], shape, generator=random).to(embedding.device)


def _logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=rows).logits
    return logits.float()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _check_merged(
    found: torch.Tensor, expected: torch.Tensor, *, effect: float, source: Path
) -> None:
    """Both in fp32, so that only the order of additions differs."""
    difference = _rms(found - expected)
    # 1e-3 of the adapter's effect is less than any one layer's share of it.
    limit = 2e-5 * _rms(expected) + 1e-3 * effect
    if difference <= limit:  # also False for NaN
        return
    raise ModelError(
        f"{source}: the merged model isn't base + adapter: its logits differ by {difference:.2g} "
        f"(root mean square; the adapter changes them by {effect:.2g}, {limit:.2g} is allowed). "
        "That happens where an adapted weight is shared with another layer, as an embedding that "
        "is tied to the head. Keep the adapter apart.",
        path=str(source),
        difference=difference,
        limit=limit,
    )


def _rounding_error(
    model: Any, rows: torch.Tensor, expected: torch.Tensor, *, effect: float, source: Path
) -> float:
    """How far the rounded weights move the logits; a warning where that hides the adapter."""
    rounding = _rms(_logits(model.to(torch.float32), rows) - expected)
    if not math.isfinite(rounding):
        raise ModelError(
            f"{source}: the logits of the rounded model aren't numbers. {OTHER_DTYPE}",
            path=str(source),
        )
    if rounding > effect / 2:
        logger.warning(
            "rounding the merged weights moves the logits by %.2g, the adapter by %.2g: much of "
            "the adapter is lost in this dtype. Merge with fp32, or keep the adapter apart.",
            rounding,
            effect,
        )
    return rounding


def _round_weights(model: Any, *, base: Path, dtype: torch.dtype | None, source: Path) -> None:
    """Give each tensor the dtype that it has in the base's files, or ``dtype``, in place."""
    specs = FolderReader(LocalStorage(), str(base)).specs
    default = file_dtype(base)
    with torch.no_grad():
        for name, tensor in named_weights(model).items():
            own = specs[name].dtype if name in specs else default
            target = own if dtype is None or not own.is_floating_point else dtype
            tensor.data = tensor.data.to(target)
            if not bool(torch.isfinite(tensor.data.float()).all()):  # fp8 has no isfinite
                word = str(target).removeprefix("torch.")
                raise ModelError(
                    f"{source}: {name} has values that {word} can't hold. {OTHER_DTYPE}",
                    path=str(source),
                    names=[name],
                )


def _write(model: Any, folder: Path, *, tokenizer_of: Path, base: Path, with_code: bool) -> None:
    with without_weight_bars():
        model.save_pretrained(folder)
    # load_model switched the cache off, for training; whoever loads the folder wants it.
    config = read_config(folder)
    config.pop("use_cache", None)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    has_own = (tokenizer_of / "tokenizer_config.json").is_file()
    patterns = {tokenizer_of if has_own else base: (*TOKENIZER_FILES, TEMPLATE_FILES)}
    if with_code:
        patterns = {**patterns, base: (*patterns.get(base, ()), "*.py")}
    for place, globs in patterns.items():
        for file in sorted({found for pattern in globs for found in place.glob(pattern)}):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _check_files(model: Any, folder: Path) -> None:
    """Read every tensor back; each must be the model's, bit for bit."""
    reader = FolderReader(LocalStorage(), str(folder))
    weights = named_weights(model)
    wrong = sorted(reader.specs.keys() ^ weights.keys())
    wrong += [
        name
        for name, tensor in weights.items()
        if name in reader.specs and not _same_bits(reader.read(name), tensor.cpu())
    ]
    if wrong:
        raise ModelError(
            f"{folder}: {len(wrong)} tensors aren't in the written files as they are in memory: "
            f"{', '.join(wrong[:3])}.",
            path=str(folder),
            names=wrong,
        )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
