"""Hand a model over to other tools: one GGUF file for llama.cpp, read back before it gets its name.

Two ways lead there: llama.cpp's own converter, where it is installed, for every family it knows;
else the ``gguf`` package, for Llama models with a byte-level BPE tokenizer.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.errors import ModelError, UsageError
from legato.models.adapter import file_dtype, is_adapter
from legato.models.folder import find_model, read_config, weight_files
from legato.models.gguf import partial_path, plain_weights, remove_leftovers
from legato.models.gguf_llama import DTYPES, stop_ids, write_llama_gguf
from legato.models.load import load_model, load_tokenizer
from legato.models.quiet import silence_known_noise, without_weight_bars

logger = logging.getLogger(__name__)

CONVERTER = "convert_hf_to_gguf.py"

_SPACE = "\u2581"
"""How SentencePiece writes a space."""


@dataclass(frozen=True)
class Exported:
    """A GGUF file, and what was found when it was read back.

    Attributes:
        path: The file.
        written_by: ``legato``, or the converter's path.
        difference: Root mean square of the logits' difference to the folder's model, relative to
            the logits; None where transformers can't read this family from GGUF.
    """

    path: Path
    written_by: str
    difference: float | None


def export_gguf(
    name_or_path: str | Path,
    *,
    output: str | Path,
    dtype: str | None = None,
    converter: str | Path | None = None,
) -> Exported:
    """Write a model folder as one GGUF file, with chat template and stop tokens inside.

    The file is read back, and must hold the folder's tokens, stop tokens and template and give its
    logits before it gets its name. Takes 8 bytes a parameter of memory, for the comparison.

    Args:
        name_or_path: A step folder of full training, a merged folder, any Hugging Face folder.
        output: The file to make. Must not exist.
        dtype: ``bf16``, ``f16`` or ``f32``; None keeps the folder's. Vectors are fp32 always, as
            llama.cpp wants them. Quantize the file with llama.cpp's ``llama-quantize``.
        converter: llama.cpp's ``convert_hf_to_gguf.py``; None looks for it on the PATH.

    Returns:
        The file and what was measured.

    Raises:
        UsageError: ``output`` is there, or no such dtype or converter.
        ModelError: An adapter, a broken folder, or a file that doesn't give the model back.
        UnsupportedModelError: A family or a tokenizer that needs llama.cpp's converter.
    """
    silence_known_noise()
    folder, output = find_model(str(name_or_path)).path, Path(output)
    if output.exists():
        raise UsageError(f"{output}: is already there. Remove it, or choose another name")
    if is_adapter(folder):
        raise ModelError(
            f"{folder}: is an adapter. Merge it first: "
            f"legato merge {name_or_path} --output-dir DIR, then legato export gguf DIR",
            path=str(folder),
        )
    read_config(folder)
    weight_files(folder)
    dtype = _checked_dtype(dtype, folder)
    script = _find_converter(converter)
    remove_leftovers(output)
    partial = partial_path(output)
    partial.mkdir(parents=True)
    try:
        file = partial / "model.gguf"
        if script is None:
            write_llama_gguf(folder, file, dtype=dtype)
        else:
            _run_converter(script, folder, file, dtype=dtype)
        _check_contents(folder, file)
        difference = _check_logits(folder, file, exact=DTYPES[dtype] == file_dtype(folder))
        os.replace(file, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(output, "legato" if script is None else str(script), difference)


def _checked_dtype(dtype: str | None, folder: Path) -> str:
    if dtype is None:
        own = file_dtype(folder)
        return next((name for name, known in DTYPES.items() if known == own), "f32")
    if dtype not in DTYPES:
        raise UsageError(
            f"--dtype {dtype}: expected {', '.join(DTYPES)}. For 8 bits and fewer: llama-quantize "
            "of llama.cpp, on the exported file"
        )
    return dtype


def _find_converter(converter: str | Path | None) -> Path | None:
    if converter is None:
        found = shutil.which(CONVERTER)
        return None if found is None else Path(found)
    path = Path(converter).expanduser()
    path = path / CONVERTER if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"--converter {converter}: there is no {CONVERTER}")
    return path


def _run_converter(script: Path, folder: Path, file: Path, *, dtype: str) -> None:
    command = [sys.executable, str(script), str(folder), "--outfile", str(file)]
    done = subprocess.run(
        [*command, "--outtype", dtype], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not file.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-3:]
        raise ModelError(
            f"{folder}: {script} ended with {done.returncode} and wrote no usable file. "
            f"It said: {' '.join(said)}",
            path=str(folder),
        )


def _check_contents(folder: Path, file: Path) -> None:
    """Hold what the file says of tokens, stops and template against the folder's tokenizer."""
    import gguf

    try:
        fields = gguf.GGUFReader(file).fields
    except Exception as error:  # it raises whatever its parser meets
        raise _unreadable(folder, error) from error

    def field(name: str) -> Any:
        return fields[name].contents() if name in fields else None

    tokenizer = load_tokenizer(folder)
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    facts = {
        "tokens": ([], _wrong_tokens(tokenizer, field("tokenizer.ggml.tokens") or [])),
        "stop token": (tokenizer.eos_token_id, field("tokenizer.ggml.eos_token_id")),
        "chat template": (template, field("tokenizer.chat_template")),
    }
    for what, (wanted, there) in facts.items():
        if wanted != there:
            raise ModelError(
                f"{folder}: the written file has another {what}: expected {wanted!r:.80}, "
                f"found {there!r:.80}.",
                path=str(folder),
            )
    written = {field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    if left_out := stop_ids(folder, read_config(folder)) - written:
        names = [tokenizer.convert_ids_to_tokens(stop) or str(stop) for stop in sorted(left_out)]
        logger.warning(
            "the file doesn't say that %s end an answer: GGUF has room for three such tokens. "
            "llama.cpp knows the usual ones by their text; others are given where it is called",
            ", ".join(names),
        )


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder}: the written file can't be read ({type(error).__name__}: {error}).",
        path=str(folder),
    )


def _wrong_tokens(tokenizer: Any, found: list[str]) -> list[str]:
    """The first tokens that stand elsewhere in the file, or not at all."""
    wrong = [
        token
        for token, token_id in sorted(tokenizer.get_vocab().items())
        # A converter may write a user's own tokens with the spaces that they stand for.
        if token_id >= len(found)
        or found[token_id].replace(_SPACE, " ") != token.replace(_SPACE, " ")
    ]
    return wrong[:3]


def _check_logits(folder: Path, file: Path, *, exact: bool) -> float | None:
    """Read the file as transformers does, and hold its logits against the folder's."""
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with without_weight_bars():
            found_model = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, **where, **plain_weights()
            )
    except Exception as error:  # gguf and transformers raise whatever their parsers meet
        if "not supported" in str(error):
            logger.warning("its logits aren't compared: transformers can't read it (%s)", error)
            return None
        raise _unreadable(folder, error) from error
    vocabulary = len(load_tokenizer(folder))
    rows = torch.randint(vocabulary, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = _logits(load_model(folder, dtype=torch.float32), rows)
    if not bool(expected.isfinite().all()):
        raise ModelError(
            f"{folder}: its own logits aren't numbers: its weights are damaged, or were never "
            "sound. Export another step.",
            path=str(folder),
        )
    difference = _rms(_logits(found_model, rows) - expected) / _rms(expected)
    # Same dtype: only the order of additions differs. Fewer bits: what rounding does to a model.
    limit = 1e-4 if exact else 0.05
    if not difference <= limit:
        raise ModelError(
            f"{folder}: the written file gives other logits: they differ by {difference:.2g} of "
            f"their size, {limit:.2g} is allowed.",
            path=str(folder),
            difference=difference,
            limit=limit,
        )
    return difference


def _logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=rows).logits
    return logits.float()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
