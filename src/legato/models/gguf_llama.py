"""A plain Llama folder as a GGUF file, by the ``gguf`` package, a tensor at a time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from legato.errors import ModelError, UnsupportedModelError
from legato.hf_folder import FolderReader
from legato.models.folder import read_config, read_object
from legato.models.load import load_meta_model, load_tokenizer
from legato.storage import LocalStorage
from legato.words import counted

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""llama.cpp's names of what weights may be written as."""

# What splits a text before BPE, as tokenizers writes it -> llama.cpp's name of the same.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTERS: tuple[tuple[str, list[dict[str, Any]]], ...] = (
    ("gpt-2", [_BYTE_LEVEL]),
    ("smollm", [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]),
    (
        "llama-bpe",
        [
            {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    ),
)

_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_llama_gguf(folder: Path, file: Path, *, dtype: str) -> None:
    """Write the weights, the tokenizer, the chat template and the stop tokens of a Llama folder.

    Args:
        folder: A Hugging Face folder.
        file: The file to write.
        dtype: A key of ``DTYPES``, for matrices; vectors are fp32, as llama.cpp wants them.

    Raises:
        UnsupportedModelError: Not a plain Llama, or a tokenizer that isn't byte-level BPE;
            ``.path``.
        ModelError: Tensors that a Llama hasn't, or lacks, or of another shape; ``.path``.
    """
    import gguf

    config = read_config(folder)
    _check_family(config, folder)
    tokenizer = load_tokenizer(folder)
    writer = gguf.GGUFWriter(file, "llama")
    try:
        _add_facts(writer, config, name=folder.name, dtype=dtype)
        _add_tokenizer(writer, tokenizer, config, folder=folder)
        # Built without memory: what the files hold is what config.json says of them.
        load_meta_model(folder, dtype=torch.float32)
        tensors = _named_tensors(FolderReader(LocalStorage(), str(folder)), config)
        _write_tensors(writer, tensors, dtype=dtype)
    except OSError as error:
        if error.errno is not None:
            raise
        # numpy tells how many bytes went to the disk, and not what the system said.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    finally:
        writer.close()


def _check_family(config: dict[str, Any], folder: Path) -> None:
    family = str(config.get("model_type"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if family != "llama":
        why = f"{family} models"
    elif scaling != "default":
        why = f"Llama models whose positions are scaled ({scaling})"
    elif config.get("attention_bias") or config.get("mlp_bias"):
        why = "Llama models with biases"
    else:
        return
    _needs_converter(folder, why, family=family)


def _needs_converter(folder: Path, why: str, **facts: Any) -> NoReturn:
    raise UnsupportedModelError(
        f"{folder}: Legato writes GGUF of plain Llama models by itself; {why} need llama.cpp's "
        f"converter: --converter PATH/convert_hf_to_gguf.py",
        path=str(folder),
        **facts,
    )


def _add_facts(writer: Any, config: dict[str, Any], *, name: str, dtype: str) -> None:
    import gguf

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_width = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_file_type(
        {
            "f32": gguf.LlamaFileType.ALL_F32,
            "f16": gguf.LlamaFileType.MOSTLY_F16,
            "bf16": gguf.LlamaFileType.MOSTLY_BF16,
        }[dtype]
    )
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, tokenizer: Any, config: dict[str, Any], *, folder: Path) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    splitter = _splitter(backend)
    if splitter is None:
        _needs_converter(folder, "models with such a tokenizer (no byte-level BPE that it knows)")
    tokens, types = _vocabulary(tokenizer, num_rows=config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = backend["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for add, token in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token is not None:
            add(token)
    # llama.cpp stops at each of these: at the end of a text, of a turn, of a message.
    stops = sorted(stop_ids(folder, config) - {tokenizer.eos_token_id})
    for add, stop in zip((writer.add_eot_token_id, writer.add_eom_token_id), stops, strict=False):
        add(stop)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.get_chat_template())


def _splitter(backend: dict[str, Any]) -> str | None:
    """llama.cpp's name of a tokenizer's splitting; None where this module knows none."""
    model = backend.get("model", {})
    plain = model.get("type") == "BPE" and not model.get("byte_fallback") and model.get("merges")
    if not plain or backend.get("normalizer") is not None:
        return None
    found = backend.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", []) if found.get("type") == "Sequence" else [found]
    for name, expected in _SPLITTERS:
        if len(steps) == len(expected) and all(
            wanted.items() <= step.items() for wanted, step in zip(expected, steps, strict=True)
        ):
            return name
    return None


def _vocabulary(tokenizer: Any, *, num_rows: int) -> tuple[list[str], list[int]]:
    """Every row of the embedding as a token and its type; rows without a token are unused."""
    from gguf import TokenType

    added = tokenizer.added_tokens_decoder
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for row in range(max(num_rows, max(by_id) + 1)):
        tokens.append(by_id.get(row, f"[PAD{row}]"))
        if row not in by_id:
            types.append(int(TokenType.UNUSED))
        elif row in added:
            special = added[row].special
            types.append(int(TokenType.CONTROL if special else TokenType.USER_DEFINED))
        else:
            types.append(int(TokenType.NORMAL))
    return tokens, types


def stop_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    """Tokens that end an answer, by a folder's ``generation_config.json`` or its config."""
    file = folder / "generation_config.json"
    settings = read_object(file) if file.is_file() else {}
    stops = settings.get("eos_token_id", config.get("eos_token_id"))
    listed = stops if isinstance(stops, list) else [stops]
    return {stop for stop in listed if stop is not None}


def _named_tensors(
    reader: FolderReader, config: dict[str, Any]
) -> list[tuple[str, FolderReader, str, int | None]]:
    """GGUF's name, and where the tensor comes from; the heads of those whose rows GGUF permutes."""
    heads = config["num_attention_heads"]
    num_heads = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    wanted: list[tuple[str, str, int | None]] = [
        (theirs, ours, None)
        for ours, theirs in _OUTER.items()
        if ours in reader.specs or ours != "lm_head.weight"
    ]
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in _TENSORS.items():
            key = f"model.layers.{layer}.{ours}.weight"
            wanted.append((f"blk.{layer}.{theirs}.weight", key, num_heads.get(theirs)))
    keys = {key for _, key, _ in wanted}
    if keys != reader.specs.keys():
        odd = sorted(keys ^ reader.specs.keys())
        raise ModelError(
            f"{reader.folder}: {counted(len(odd), 'name')} of tensors missing or unknown, such as "
            f"{', '.join(odd[:3])}.",
            path=reader.folder,
        )
    return [(name, reader, key, count) for name, key, count in wanted]


def _write_tensors(
    writer: Any, tensors: list[tuple[str, FolderReader, str, int | None]], *, dtype: str
) -> None:
    """One tensor in memory at a time: sizes first, then the bytes in the same order."""
    import gguf

    kinds = {
        torch.float32: (gguf.GGMLQuantizationType.F32, 4),
        torch.float16: (gguf.GGMLQuantizationType.F16, 2),
        torch.bfloat16: (gguf.GGMLQuantizationType.BF16, 2),
    }

    def target(shape: tuple[int, ...]) -> torch.dtype:
        return DTYPES[dtype] if len(shape) > 1 else torch.float32

    for name, reader, key, _ in tensors:
        spec = reader.specs[key]
        kind, width = kinds[target(spec.shape)]
        num_bytes = width * int(torch.Size(spec.shape).numel())
        # The element type is told by raw_dtype; numpy has no bf16.
        writer.add_tensor_info(name, spec.shape, np.dtype(np.float32), num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, reader, key, num_heads in tensors:
        tensor = reader.read(key)
        if num_heads is not None:
            tensor = _permuted(tensor, num_heads)
        writer.write_tensor_data(_numpy(tensor.to(target(tuple(tensor.shape)))))


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head from halves to pairs: GGUF's Llama rotates neighbours."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return split.transpose(1, 2).reshape(weight.shape)


def _numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
