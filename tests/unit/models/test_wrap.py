from __future__ import annotations

import pytest
import torch
from torch import nn

from legato.errors import ConfigError, UnsupportedModelError
from legato.models.blocks import decoder_blocks
from legato.models.lora import attach_lora
from legato.models.names import named_weights
from legato.models.wrap import apply_activation_checkpointing
from tests.helpers import families

INPUT_IDS = torch.arange(3, 15).view(2, 6)


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    loss = model(input_ids=INPUT_IDS, labels=INPUT_IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def count_forwards(model: nn.Module) -> list[int]:
    """How often each block's MLP ran in one forward and backward."""
    counts = [0, 0]
    for i, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    loss_and_gradients(model)
    return counts


@pytest.mark.parametrize("family", families.DENSE)
def test_every_family_has_two_blocks(family: str) -> None:
    assert len(decoder_blocks(families.build_family(family))) == 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_checkpointed_blocks_train_as_plain_ones(family: str) -> None:
    expected = loss_and_gradients(families.build_family(family))
    model = families.build_family(family)
    names = list(named_weights(model))
    assert apply_activation_checkpointing(model) == 2
    assert list(named_weights(model)) == names
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, expected[0])
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-5, atol=1e-7)


def test_checkpointed_blocks_are_computed_again_in_backward() -> None:
    model = families.build_family("llama")
    apply_activation_checkpointing(model)
    assert count_forwards(model) == [2, 2]


def test_every_second_block_is_checkpointed() -> None:
    model = families.build_family("llama")
    assert apply_activation_checkpointing(model, every=2) == 1
    assert count_forwards(model) == [2, 1]


def test_dropout_masks_are_the_same_in_the_second_forward() -> None:
    losses, grads = [], []
    for checkpointed in (False, True):
        model = families.build_family("llama")
        attach_lora(model, lora_rank=2, lora_alpha=4, lora_dropout=0.5, base_name="none")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        if checkpointed:
            apply_activation_checkpointing(model)
        torch.manual_seed(5)
        loss, gradients = loss_and_gradients(model)
        losses.append(loss)
        grads.append(gradients)
    assert torch.equal(losses[0], losses[1])
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], rtol=1e-5, atol=1e-7)


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 0"):
        apply_activation_checkpointing(families.build_family("llama"), every=0)


def test_a_model_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="Sequential"):
        decoder_blocks(nn.Sequential(nn.Linear(2, 2)))
