"""A tiny GGUF file of a random Llama with a byte-level tokenizer, by the gguf package's writer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """Write ``file``; returns its fp32 tensors by GGUF's names."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ a"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    tensors = _tensors(len(tokens))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _tensors(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv_width, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv_width, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    return {
        name: random.normal(scale=0.1, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
