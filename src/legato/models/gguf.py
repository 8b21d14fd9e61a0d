"""A GGUF file -> a normal Hugging Face folder, whole or not at all."""

from __future__ import annotations

import glob
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from legato.errors import (
    FolderFormatError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    first_line,
)
from legato.models.folder import SOURCE_FILE
from legato.models.quiet import silence_known_noise, without_weight_bars

logger = logging.getLogger(__name__)


def import_gguf(
    file: str | Path, *, output_dir: str | Path, source: dict[str, Any] | None = None
) -> Path:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder in bf16.

    Quantized weights are dequantized; what quantizing lost stays lost. Before the folder gets its
    name, the model must answer one short prompt with finite logits.

    Args:
        file: The GGUF file.
        output_dir: The folder to make. Must be absent or empty.
        source: What to note in ``legato_source.json``; by default the file's name.

    Returns:
        ``output_dir``.

    Raises:
        ModelNotFoundError: No such file.
        FolderFormatError: Not a GGUF file, or a broken one.
        UnsupportedModelError: transformers can't read this family from GGUF.
        ModelError: ``output_dir`` isn't empty, or the model answers nonsense.
    """
    file, output_dir = Path(file), Path(output_dir)
    _check_gguf(file)
    with new_folder(output_dir) as folder:
        model, tokenizer = _read_gguf(file)
        _check_answers(model, tokenizer, file=file)
        with without_weight_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_source(folder, source or {"gguf": file.name})
    logger.info("%s: a Hugging Face folder, %d parameters", output_dir, model.num_parameters())
    return output_dir


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that gets its name when the block ends well, else is removed.

    What processes that were killed meanwhile have left behind goes first.

    Args:
        target: Final path. Must be absent or an empty folder.

    Yields:
        Path: The temporary folder.

    Raises:
        ModelError: ``target`` exists and isn't empty, or its files can't be written; ``.path``.
    """
    check_target(target)
    remove_leftovers(target)
    folder = partial_path(target)
    try:
        folder.mkdir(parents=True)
        yield folder
        publish(folder, target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # transformers' own of a bad model
            raise
        raise ModelError(
            f"{target}: can't be written: {first_line(error)}. Nothing is left of it. Make room, "
            "or choose another output_dir.",
            path=str(target),
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def partial_path(target: Path) -> Path:
    """Where this process puts ``target`` together before it gets its name."""
    return target.parent / f".{target.name}.partial-{os.getpid()}"


def remove_leftovers(target: Path) -> None:
    """Remove what ended processes of this host had begun to write beside ``target``.

    Args:
        target: What they were to make.
    """
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        number = path.name.rpartition("-")[2]
        # In a container this process may have the number of the one that was killed.
        is_dead = number.isdecimal() and (
            int(number) == os.getpid() or not psutil.pid_exists(int(number))
        )
        if is_dead:
            logger.info("%s: left by a process that was killed; removed", path)
            shutil.rmtree(path, ignore_errors=True)


def check_target(target: Path) -> None:
    """Refuse a target that holds something already.

    Args:
        target: The folder to make.

    Raises:
        ModelError: It exists and isn't an empty folder; ``.path``.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(
            f"{target}: is already there and isn't empty. Remove it, or choose another output_dir.",
            path=str(target),
        )


def publish(folder: Path, target: Path) -> None:
    """Give a finished folder its name, once its bytes are on disk.

    Args:
        folder: The finished folder.
        target: Its name: absent, or an empty folder.
    """
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.replace(folder, target)  # also over an empty folder


def write_source(folder: Path, source: dict[str, Any]) -> None:
    """Note where a model came from, so that an adapter can name its base.

    Args:
        folder: The model folder.
        source: JSON facts: ``hub_id`` and ``revision``, or what else is known.
    """
    text = json.dumps(source, indent=2, sort_keys=True) + "\n"
    (folder / SOURCE_FILE).write_text(text, encoding="utf-8")


def _check_gguf(file: Path) -> None:
    if not file.is_file():
        raise ModelNotFoundError(f"{file}: there is no such file.", path=str(file))
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise FolderFormatError(
            f"{file}: isn't a GGUF file: it starts with {magic!r}, expected b'GGUF'.",
            path=str(file),
        )


def _read_gguf(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_known_noise()
    logger.info("reading %s (about 20 seconds for 135M parameters)", file.name)
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with without_weight_bars():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.bfloat16, **where, **plain_weights()
            )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except Exception as error:  # gguf and transformers raise whatever their parsers meet
        if "not supported" in str(error):
            raise UnsupportedModelError(
                f"{file}: transformers can't read this family from GGUF ({error}).", path=str(file)
            ) from error
        raise FolderFormatError(
            f"{file}: can't be read as GGUF ({type(error).__name__}: {error}). "
            "Was the download interrupted?",
            path=str(file),
        ) from error
    # The weights are plain tensors now, but releases of transformers without GgufConfig still take
    # the model for quantized and refuse to write it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


def plain_weights() -> dict[str, Any]:
    """Options that ask transformers for plain tensors where it would keep GGUF's packed blocks."""
    import transformers

    if hasattr(transformers, "GgufConfig"):
        return {"quantization_config": transformers.GgufConfig(dequantize=True)}
    return {}  # earlier releases know nothing else


def _check_answers(model: Any, tokenizer: Any, *, file: Path) -> None:
    """The model must have finite logits and answer a short prompt with at least one token."""
    import torch

    prompt = "The capital of France is"
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        finite = bool(model(**inputs).logits.isfinite().all())
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    answer = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if not finite or len(tokens) <= inputs["input_ids"].shape[1]:
        raise ModelError(
            f"{file}: the model that it gave doesn't generate (finite logits: {finite}).",
            path=str(file),
        )
    logger.info("it generates: %s%s", prompt, answer)
