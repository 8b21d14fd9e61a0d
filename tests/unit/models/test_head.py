from __future__ import annotations

from typing import Any

import pytest
import torch

from legato.errors import UnsupportedModelError
from legato.models.head import split_head
from legato.models.lora import attach_lora
from tests.helpers import families


@pytest.mark.parametrize("family", families.DENSE)
def test_decoder_and_head_give_the_logits_of_the_whole_model(family: str) -> None:
    model = families.build_family(family)
    decode, head = split_head(model)
    input_ids = torch.randint(3, 96, (3, 7))
    with torch.no_grad():
        expected = model(input_ids=input_ids, use_cache=False).logits
        hidden = decode(input_ids)
        assert hidden.shape == (3, 7, 32)
        logits = head(hidden.flatten(0, 1)).view(3, 7, 96)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.5  # else neither capping nor scaling would show


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "cohere"])
def test_a_head_without_the_familys_scaling_is_caught(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.models.head._scaling", lambda config: (1.0, None))
    with pytest.raises(UnsupportedModelError, match="differ by") as caught:
        split_head(families.build_family(family))
    assert caught.value.facts["difference"] > 1e-2


def test_a_model_that_changes_its_logits_in_its_own_way_is_refused() -> None:
    model = families.build_family("llama")
    forward = model.forward

    def shifted(**kwargs: Any) -> Any:
        output = forward(**kwargs)
        output.logits = output.logits + 1.0
        return output

    model.forward = shifted
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        split_head(model)


def test_weights_that_arent_finite_are_refused() -> None:
    model = families.build_family("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="nan"):
        split_head(model)


def test_the_probe_leaves_training_mode_and_random_state_alone() -> None:
    model = families.build_family("llama").train()
    before = torch.random.get_rng_state()
    split_head(model)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_with_dropout_passes_the_probe_while_it_trains() -> None:
    model = families.build_family("mistral")
    attach_lora(model, lora_rank=2, lora_alpha=4, lora_dropout=0.9, base_name="none")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
    split_head(model.train())


def test_a_bf16_model_passes_the_probe() -> None:
    split_head(families.build_family("gemma2", dtype=torch.bfloat16))


def test_gradients_are_those_of_the_whole_model() -> None:
    model = families.build_family("gemma2")
    decode, head = split_head(model)
    input_ids = torch.randint(3, 96, (2, 5))
    model(input_ids=input_ids, use_cache=False).logits.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    head(decode(input_ids)).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_an_adapter_on_the_head_trains_through_the_split() -> None:
    model = families.build_family("mistral")
    adapter = attach_lora(
        model,
        lora_rank=2,
        lora_alpha=4,
        lora_target_modules=["q_proj", "lm_head"],
        base_name="none",
    )
    decode, head = split_head(adapter.model)
    head(decode(torch.arange(3, 9).view(1, 6))).square().sum().backward()
    trained = [n for n, p in adapter.model.named_parameters() if p.grad is not None]
    assert any("lm_head.lora_B" in name for name in trained)
    assert any("q_proj.lora_B" in name for name in trained)
    assert all("lora_" in name for name in trained)


def test_position_ids_reach_the_decoder() -> None:
    decode, _ = split_head(families.build_family("llama"))
    input_ids = torch.arange(3, 9).view(1, 6)
    plain = decode(input_ids)
    torch.testing.assert_close(decode(input_ids, torch.arange(6).view(1, 6)), plain)
    assert not torch.allclose(decode(input_ids, torch.arange(6).view(1, 6) * 3), plain)
