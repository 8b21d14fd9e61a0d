from __future__ import annotations

import pytest
import torch
from torch import nn

from legato.optim.stochastic import StochasticAdamW, round_stochastically


def test_rounding_keeps_the_mean_and_takes_only_the_two_neighbours() -> None:
    # bf16 has steps of 2**-7 at 1; a quarter of one is lost by rounding to nearest.
    values = torch.full((200_000,), 1 + 2**-9)
    rounded = round_stochastically(values)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    share_up = (rounded > 1).float().mean().item()
    assert share_up == pytest.approx(0.25, abs=0.005)  # five standard deviations


def test_negative_numbers_round_away_from_zero_as_often_as_positive_ones() -> None:
    rounded = round_stochastically(torch.full((200_000,), -(1 + 2**-9)))
    assert set(rounded.tolist()) == {-1.0, -(1 + 2**-7)}
    assert (rounded < -1).float().mean().item() == pytest.approx(0.25, abs=0.005)


def test_what_bf16_can_hold_stays_as_it_is() -> None:
    exact = torch.randn(1000).bfloat16()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 2.0**-133]).bfloat16()
    for values in (exact, special):
        assert torch.equal(round_stochastically(values.float()), values)
    assert round_stochastically(torch.tensor([torch.nan])).isnan().all()


def test_the_same_seed_rounds_alike() -> None:
    values = torch.randn(1000)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(round_stochastically(values))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[float]) -> None:
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()


def test_small_updates_move_the_mean_of_the_weights_as_fp32_would() -> None:
    """200 updates of 2e-5 on weights of 1, whose bf16 neighbours are 2**-8 and 2**-7 away."""
    rounding = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    train(StochasticAdamW([rounding], lr=2e-5), rounding, [1.0] * 200)
    train(torch.optim.AdamW([plain], lr=2e-5, weight_decay=0.0), plain, [1.0] * 200)
    assert plain.float().mean().item() == 1.0
    assert rounding.float().mean().item() == pytest.approx(1 - 200 * 2e-5, abs=2e-4)


def test_the_second_moment_follows_gradients_that_become_small() -> None:
    """Rounded to nearest it would stay where it is: a thousandth of it is less than half a step."""
    weight = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-5)
    train(optimizer, weight, [1.0] * 50 + [0.1] * 1000)
    exact = (1 - 0.999**50) * 0.999**1000 + 0.01 * (1 - 0.999**1000)
    second = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert second == pytest.approx(exact, rel=0.02)


def test_state_is_plain_tensors_of_the_parameters_dtype() -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-3)
    train(optimizer, weight, [1.0])
    state = optimizer.state[weight]
    assert {name: (type(t), t.dtype, tuple(t.shape)) for name, t in state.items()} == {
        "step": (torch.Tensor, torch.float32, ()),
        "exp_avg": (torch.Tensor, torch.bfloat16, (3, 4)),
        "exp_avg_sq": (torch.Tensor, torch.bfloat16, (3, 4)),
    }


def test_parameters_without_a_gradient_are_left_alone() -> None:
    used, unused = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = StochasticAdamW([used, unused], lr=0.5, weight_decay=0.5)
    train(optimizer, used, [1.0])
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected bf16 or fp32 parameters, found torch\.float16"):
        StochasticAdamW([nn.Parameter(torch.ones(2).half())], lr=0.1)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = StochasticAdamW([weight], lr=0.1)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert weight.tolist() == pytest.approx([0.9, 0.9], abs=1e-6)
