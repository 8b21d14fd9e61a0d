"""Tiny random models of many families, by transformers' own configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Family -> what its config needs beside the common sizes.
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "phi3": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 48,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "olmo2": {},
    "smollm3": {},
    "starcoder2": {},
    "glm4": {},
}

# Dense, and renamed in files.
RENAMED: dict[str, dict[str, Any]] = {"gpt_neox": {}}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": {"num_experts": 2, "moe_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": 2},
    "granitemoe": {"num_local_experts": 2},
    "glm4_moe": {"n_routed_experts": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
}


def build_family(
    family: str, *, dtype: torch.dtype = torch.float32, **config_changes: Any
) -> PreTrainedModel:
    """A random model whose logits are large enough for soft-capping and scaling to show."""
    changes = (DENSE | RENAMED | MIXTURES)[family] | config_changes
    config = AutoConfig.for_model(family, **(_SMALL | changes))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(std=1.0)
    return model.eval()


def write_family(folder: Path, family: str) -> Path:
    """The folder that transformers writes for the family; returns ``folder``."""
    build_family(family).save_pretrained(folder)
    return folder
