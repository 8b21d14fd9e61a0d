"""The models that the hub configs name, at their real sizes and without memory.

Shapes are those of each model's config.json on the Hugging Face hub, and names those of its
safetensors files there; numbers of parameters are what each model's card says, to the last one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

from legato.config.load import load_config
from legato.models.load import build_empty_model
from legato.models.lora import attach_lora
from legato.models.names import named_weights

PROJECTIONS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
NORMS = ["input_layernorm", "post_attention_layernorm"]
HEAD_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]


class Shape(NamedTuple):
    hub_id: str
    model_type: str
    config: str  # vocabulary, width, inner width, layers, heads, key-value heads, head width
    is_tied: bool
    num_parameters: int
    num_adapter_parameters: int  # of rank 16 on every projection
    norms: list[str]


SHAPES = {
    "smollm2/135M": Shape(
        *("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", "49152 576 1536 30 9 3 64"),
        *(True, 134_515_008, 4_884_480, NORMS),
    ),
    "llama2/7B": Shape(
        *("meta-llama/Llama-2-7b-hf", "llama", "32000 4096 11008 32 32 32 128"),
        *(False, 6_738_415_616, 39_976_960, NORMS),
    ),
    "llama3/8B": Shape(
        *("meta-llama/Meta-Llama-3-8B-Instruct", "llama", "128256 4096 14336 32 32 8 128"),
        *(False, 8_030_261_248, 41_943_040, NORMS),
    ),
    "llama3_2/1B": Shape(
        *("meta-llama/Llama-3.2-1B-Instruct", "llama", "128256 2048 8192 16 32 8 64"),
        *(True, 1_235_814_400, 11_272_192, NORMS),
    ),
    "mistral/7B": Shape(
        *("mistralai/Mistral-7B-Instruct-v0.3", "mistral", "32768 4096 14336 32 32 8 128"),
        *(False, 7_248_023_552, 41_943_040, NORMS),
    ),
    "qwen3/0.6B": Shape(
        *("Qwen/Qwen3-0.6B", "qwen3", "151936 1024 3072 28 16 8 128"),
        *(True, 596_049_920, 10_092_544, [*NORMS, *HEAD_NORMS]),
    ),
    "gemma3/1B": Shape(
        *("google/gemma-3-1b-it", "gemma3_text", "262144 1152 6912 26 4 1 256"),
        *(True, 999_885_952, 13_045_760),
        [*NORMS, *HEAD_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"],
    ),
}


def build(shape: Shape) -> Any:
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    )
    values = dict(zip(names, map(int, shape.config.split()), strict=True))
    config = AutoConfig.for_model(
        shape.model_type, **values, tie_word_embeddings=shape.is_tied, dtype="bfloat16"
    )
    return build_empty_model(config)


@pytest.mark.parametrize("name", SHAPES)
def test_a_hub_configs_model_has_the_parameters_file_keys_and_adapter_of_its_family(
    name: str,
) -> None:
    shape = SHAPES[name]
    config = load_config(f"{name}_lora_single_device").config
    assert config.model == load_config(f"{name}_full_single_device").config.model == shape.hub_id

    model = build(shape)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    layers = [f"model.layers.{i}" for i in range(int(shape.config.split()[3]))]
    around = ["model.embed_tokens", "model.norm", *([] if shape.is_tied else ["lm_head"])]
    inside = [f"{layer}.{part}" for layer in layers for part in (*PROJECTIONS, *shape.norms)]
    assert named_weights(model).keys() == {f"{each}.weight" for each in (*around, *inside)}

    adapter = attach_lora(
        model,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_target_modules=config.lora_target_modules,
        base_name=config.model,
    )
    assert set(adapter.keys.values()) == {
        f"base_model.model.{layer}.{part}.lora_{which}.weight"
        for layer in layers
        for part in PROJECTIONS
        for which in "AB"
    }
    trained = named_weights(adapter.model, trainable_only=True)
    assert sum(tensor.numel() for tensor in trained.values()) == shape.num_adapter_parameters
