from __future__ import annotations

import pytest
import torch
from torch import nn

from legato.train.masters import Masters


def build_net(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def micro_batches(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(4, 8, generator=draw).bfloat16() for _ in range(2)]


def train_with_masters(num_steps: int, *, lr: float) -> tuple[nn.Sequential, Masters]:
    net = build_net()
    masters = Masters(dict(net.named_parameters()))
    optimizer = torch.optim.AdamW(masters.tensors.values(), lr=lr)
    for step in range(num_steps):
        for batch in micro_batches(step):
            net(batch).float().square().mean().backward()
        optimizer.step()
        masters.publish()
        optimizer.zero_grad(set_to_none=True)
    return net, masters


def train_an_fp32_model_that_computes_in_bf16(num_steps: int, *, lr: float) -> nn.Sequential:
    """The same formula without the class: weights in fp32, cast for each forward by autograd."""
    net = build_net().float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(num_steps):
        for batch in micro_batches(step):
            cast = {name: weight.bfloat16() for name, weight in net.named_parameters()}
            output = torch.func.functional_call(net, cast, batch)
            output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net


def test_masters_equal_an_fp32_model_that_computes_in_bf16_bit_for_bit() -> None:
    net, masters = train_with_masters(20, lr=1e-3)
    reference = train_an_fp32_model_that_computes_in_bf16(20, lr=1e-3)
    for name, weight in reference.named_parameters():
        assert torch.equal(masters.tensors[name], weight), name
        assert torch.equal(net.get_parameter(name), weight.bfloat16()), name


def test_small_updates_add_up_where_plain_bf16_loses_them() -> None:
    before = build_net().get_parameter("0.weight").clone()

    plain = build_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-5, weight_decay=0.0)
    for step in range(60):
        for batch in micro_batches(step):
            plain(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    net, _ = train_with_masters(60, lr=2e-5)

    moved_plain = (plain.get_parameter("0.weight") != before).float().mean().item()
    moved = (net.get_parameter("0.weight") != before).float().mean().item()
    assert moved_plain < 0.2
    assert moved > 0.6


def test_gradients_lie_on_the_masters_only_and_in_fp32() -> None:
    net = build_net()
    masters = Masters(dict(net.named_parameters()))
    net(torch.ones(2, 8).bfloat16()).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(
        master.grad is not None and master.grad.dtype is torch.float32
        for master in masters.tensors.values()
    )


def test_gradients_of_micro_batches_add_up_without_rounding() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters({"weight": weight})
    (weight * 256).sum().backward()
    for _ in range(3):
        weight.sum().backward()  # 256 + 1 is 256 in bf16
    gradient = masters.tensors["weight"].grad
    assert gradient is not None
    assert gradient.item() == 259


def test_a_tied_parameter_gets_both_parts_of_its_gradient() -> None:
    weight = nn.Parameter(torch.full((3, 3), 2.0, dtype=torch.bfloat16))
    masters = Masters({"weight": weight})
    nn.functional.linear(weight[torch.tensor([0])], weight).sum().backward()
    exact = torch.full((3, 3), 2.0, requires_grad=True)
    nn.functional.linear(exact[torch.tensor([0])], exact).sum().backward()
    gradient = masters.tensors["weight"].grad
    assert gradient is not None
    assert exact.grad is not None
    assert torch.equal(gradient, exact.grad)


def test_fp32_parameters_are_their_own_masters() -> None:
    net = build_net(torch.float32)
    masters = Masters(dict(net.named_parameters()))
    assert masters.copies == {}
    assert all(masters.tensors[name] is weight for name, weight in net.named_parameters())
    net(torch.ones(2, 8)).sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())
    masters.publish()


def test_closing_gives_the_parameters_their_gradients_back() -> None:
    net = build_net()
    masters = Masters(dict(net.named_parameters()))
    masters.close()
    net(torch.ones(2, 8).bfloat16()).sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_begin_as_the_exact_values_of_the_parameters(dtype: torch.dtype) -> None:
    net = build_net(dtype)
    masters = Masters(dict(net.named_parameters()))
    for name, weight in net.named_parameters():
        assert masters.tensors[name].dtype is torch.float32
        assert torch.equal(masters.tensors[name], weight.float())
