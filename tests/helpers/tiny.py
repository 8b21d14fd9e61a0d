"""A model, a tokenizer and data made in code: no downloads, no binaries, seconds on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(
    chat_template: str | None = CHATML, *, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """One token per byte and merge, and ``<|im_start|>``, ``<|im_end|>``, ``<|endoftext|>``.

    Like SmolLM2's, its pad token is its end-of-turn token: a mask made by pad id would be wrong.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.model_max_length = 512
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def build_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
    }
    return LlamaConfig(**(values | changes))


def write_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = CHATML,
    merges: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    **config_changes: Any,
) -> Path:
    """Write a Hugging Face folder of a random tiny Llama and its tokenizer; returns ``folder``."""
    tokenizer = build_tokenizer(chat_template, merges=merges)
    config = build_config(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **config_changes,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_orders(path: Path, *, num_rows: int = 24) -> Path:
    """A prompt/completion jsonl of ``num_rows`` short rows of different lengths; returns it."""
    items, cities = ["mugs", "ropes", "lamps"], ["Oslo", "Kyoto", "Lima", "Rome"]
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            item, city, quantity = items[i % 3], cities[i % 4], i % 7 + 1
            row = {
                "prompt": f"{quantity} {item} to {city}" + ", please" * (i % 2),
                "completion": json.dumps({"item": item, "quantity": quantity, "city": city}),
            }
            file.write(json.dumps(row) + "\n")
    return path
