"""A base in NF4: torchao's own values, whatever holds them, and the rest of the model as it was."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.quantization import NF4Tensor, to_nf4
from transformers import AutoModelForCausalLM

from legato.errors import MissingDependencyError, UnsupportedModelError
from legato.models.load import load_meta_model
from legato.models.lora import attach_lora
from legato.models.quantize import (
    Quantizer,
    block_sizes,
    import_nf4,
    quantize_model,
    quantize_weight,
    saved_bytes,
)
from legato.models.wrap import wrap_model
from tests.helpers import families

CPU = torch.device("cpu")
INPUT_IDS = torch.arange(3, 15).view(2, 6)
# torch reads .grad of activations while it compiles, and hides this warning in its own way.
HIDDEN_WARNING = "ignore:The .grad attribute of a Tensor"


def quantized(folder: Path, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """The folder's model as QLoRA trains it: an adapter on a base in NF4."""
    base = load_meta_model(folder, dtype=dtype)
    settings = {"lora_rank": 4, "lora_alpha": 8, "seed": 7, "base_name": folder} | lora
    model = attach_lora(base.model, **settings).model
    quantize_model(base, model, device=CPU)
    return model


def layers_of(model: Any) -> dict[str, torch.nn.Module]:
    """Module by its name in the base, whether an adapter is around it or not."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if not hasattr(module, "base_layer")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_the_blocks_linear_weights_are_torchaos_and_all_others_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = families.write_family(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = layers_of(quantized(folder, dtype))
    in_nf4 = 0
    for name, parameter in reference.named_parameters():
        module, _, leaf = name.rpartition(".")
        mine = getattr(found[module], leaf)
        assert mine.requires_grad is False
        assert mine.dtype == dtype
        if ".layers." in name and leaf == "weight" and parameter.dim() == 2:
            expected = to_nf4(parameter.detach(), mine.block_size, mine.scaler_block_size)
            for part in ("quantized_data", "quantized_scalers", "quantization_factor"):
                assert torch.equal(getattr(mine, part), getattr(expected, part)), name
            assert torch.equal(mine.get_original_weight(), expected.get_original_weight()), name
            in_nf4 += 1
        else:
            assert not isinstance(mine, NF4Tensor)
            assert torch.equal(mine, parameter), name
    assert in_nf4 == 2 * (4 if family == "phi3" else 7)


def test_the_model_computes_with_the_rounded_values(tmp_path: Path) -> None:
    folder = families.write_family(tmp_path, "qwen2")  # has biases
    reference = AutoModelForCausalLM.from_pretrained(folder)
    original = reference(input_ids=INPUT_IDS).logits
    model = quantized(folder)
    for name, module in layers_of(model).items():
        if isinstance(getattr(module, "weight", None), NF4Tensor):
            weight: Any = module.weight
            reference.get_submodule(name).weight.data = weight.get_original_weight()
    expected = reference(input_ids=INPUT_IDS).logits
    found = model(input_ids=INPUT_IDS).logits  # the adapter is fresh: it changes nothing
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, original, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_every": 1},
        {"checkpoint_every": 1, "compile_options": {"backend": "aot_eager"}},
        {"compile_options": {"scope": "model", "backend": "aot_eager"}},
    ],
    ids=["checkpointed", "checkpointed and compiled", "compiled as one"],
)
@pytest.mark.filterwarnings(HIDDEN_WARNING)
@pytest.mark.usefixtures("own_compiler_state")
def test_checkpointed_and_compiled_blocks_have_the_gradients_of_plain_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = families.write_family(tmp_path, "llama")

    def gradients(**wrapping: Any) -> dict[str, torch.Tensor | None]:
        model = quantized(folder)
        wrap_model(model, **wrapping)
        model.train()
        model(input_ids=INPUT_IDS, labels=INPUT_IDS, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected, found = gradients(), gradients(**options)
    assert expected.keys() == found.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert gradient is not None
        assert gradient.abs().sum() > 0 or "lora_A" in name  # B is zero at first


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((4096, 4096), (64, 256)),  # Llama 2 7B
        ((1024, 4096), (64, 256)),  # Llama 3 8B, key and value
        ((192, 576), (64, 8)),  # SmolLM2 135M, key and value
        ((1536, 576), (64, 64)),
        ((256, 1152), (64, 64)),  # Gemma 3 1B
        ((16, 32), (64, 1)),
        ((5, 7), None),
        ((24, 6), (16, 1)),
    ],
)
def test_block_sizes_are_those_of_qlora_where_they_divide(
    shape: tuple[int, int], sizes: tuple[int, int] | None
) -> None:
    assert block_sizes(shape[0] * shape[1]) == sizes


@given(rows=st.integers(1, 600), columns=st.integers(1, 600))
def test_blocks_always_divide_a_weight(rows: int, columns: int) -> None:
    sizes = block_sizes(rows * columns)
    if sizes is None:
        assert rows * columns % 16
        return
    block, scaler_block = sizes
    assert rows * columns % (block * scaler_block) == 0
    assert 16 <= block <= 64
    assert 1 <= scaler_block <= 256


def test_values_dont_depend_on_the_number_of_threads() -> None:
    # torch adds up more than 32768 numbers, such as scales of 64 weights each, with all threads;
    # for these ones the sums of 1 and of 4 threads differ.
    weight = torch.randn(3072, 1024, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    means = []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            weight_in_nf4: Any = quantize_weight(weight)
            means.append(weight_in_nf4.scaler_mean)
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*means)


def test_weights_are_read_one_block_at_a_time(tmp_path: Path) -> None:
    base = load_meta_model(families.write_family(tmp_path, "mistral"), dtype=torch.bfloat16)
    first, second = base.model.model.layers
    quantizer = Quantizer(base, device=CPU)
    for block in (first, second):
        for parameter in block.parameters():
            parameter.requires_grad_(False)
    quantizer.quantize(first)
    in_nf4 = [p for p in base.model.parameters() if not p.is_meta]
    assert len(in_nf4) == 7
    assert {id(p) for p in in_nf4} <= {id(p) for p in first.parameters()}
    # The files are fp32: what was read is these weights and no more.
    assert base.reader.bytes_read == 4 * sum(p.numel() for p in in_nf4)
    quantizer.quantize(second)
    summary = quantizer.summary()
    assert summary.num_weights == 14
    assert summary.full_bytes == base.reader.bytes_read // 2
    stored = [sum(getattr(p, n).nbytes for n in p.__tensor_flatten__()[0]) for p in in_nf4]
    assert summary.num_bytes == 2 * sum(stored)
    other = load_meta_model(tmp_path, dtype=torch.bfloat16).model.requires_grad_(False)
    saved = sum(saved_bytes(block) for block in other.model.layers)
    assert saved == summary.full_bytes - summary.num_bytes
    assert summary.num_bytes < 0.4 * summary.full_bytes  # 0.26 in large weights
    before = base.reader.bytes_read
    base.fill(base.model, device=CPU)
    size = sum(spec.size_bytes for spec in base.reader.specs.values())
    assert base.reader.bytes_read == size > before


def test_a_model_without_plain_linear_layers_is_refused_by_name(tmp_path: Path) -> None:
    folder = families.write_family(tmp_path, "gpt2")  # its layers keep weights transposed
    base = load_meta_model(folder, dtype=torch.float32)
    for parameter in base.model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no linear layers"):
        quantize_model(base, base.model, device=CPU)


def test_a_torchao_that_is_absent_or_too_old_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", ModuleType("torchao.quantization"))
    there = importlib.metadata.version("torchao")
    with pytest.raises(MissingDependencyError) as caught:
        import_nf4()
    assert f"needs torchao 0.18 or newer; torchao {there} doesn't have it" in str(caught.value)
    assert str(caught.value).endswith(': pip install "legato[quant]"')
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", _not_installed)
    with pytest.raises(MissingDependencyError, match=r"torchao isn't installed: pip install"):
        import_nf4()


def _not_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)
