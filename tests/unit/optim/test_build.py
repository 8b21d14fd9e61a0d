from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from legato.errors import ConfigError
from legato.optim.build import build_optimizer, set_learning_rate


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def named(net: nn.Module) -> dict[str, nn.Parameter]:
    return dict(net.named_parameters())


def test_matrices_decay_and_vectors_dont() -> None:
    net = build_net()
    optimizer = build_optimizer(named(net), lr=1e-3, weight_decay=0.1)
    found = [
        (group["weight_decay"], [id(p) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert found == [
        (0.1, [id(net[0].weight), id(net[2].weight)]),
        (0.0, [id(net[1].weight), id(net[1].bias), id(net[2].bias)]),
    ]


def test_a_kind_without_parameters_makes_no_group() -> None:
    only_matrix = build_optimizer({"w": nn.Parameter(torch.ones(2, 2))}, lr=1e-3, weight_decay=0.1)
    only_vector = build_optimizer({"b": nn.Parameter(torch.ones(2))}, lr=1e-3, weight_decay=0.1)
    assert [group["weight_decay"] for group in only_matrix.param_groups] == [0.1]
    assert [group["weight_decay"] for group in only_vector.param_groups] == [0.0]


def adamw(weight: Tensor, gradient: Tensor, *, decay: float, step: int) -> Tensor:
    """One AdamW update from zero moments with constant gradients, in float64, by the paper."""
    first = second = torch.zeros_like(weight, dtype=torch.float64)
    weight = weight.double()
    for t in range(1, step + 1):
        first = 0.8 * first + 0.2 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        spread = (second / (1 - 0.95**t)).sqrt() + 1e-8
        weight = weight * (1 - 0.1 * decay) - 0.1 * (first / (1 - 0.8**t)) / spread
    return weight


@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_adamw_is_the_papers_with_these_betas_and_this_decay(stochastic_rounding: bool) -> None:
    net = build_net()
    before = {name: weight.detach().clone() for name, weight in named(net).items()}
    gradients = {name: torch.randn_like(weight) for name, weight in named(net).items()}
    optimizer = build_optimizer(
        named(net),
        lr=0.1,
        weight_decay=0.3,
        betas=(0.8, 0.95),
        stochastic_rounding=stochastic_rounding,
    )
    for _ in range(3):
        for name, weight in named(net).items():
            weight.grad = gradients[name].clone()
        optimizer.step()
    for name, weight in named(net).items():
        decay = 0.3 if weight.dim() > 1 else 0.0
        expected = adamw(before[name], gradients[name].double(), decay=decay, step=3)
        torch.testing.assert_close(weight.double(), expected, atol=1e-5, rtol=1e-5)


def test_adam_and_sgd_are_torchs() -> None:
    for name, reference in (("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        ours, theirs = build_net(), build_net()
        matrices = [p for p in theirs.parameters() if p.dim() > 1]
        vectors = [p for p in theirs.parameters() if p.dim() == 1]
        pairs = [
            (ours, build_optimizer(named(ours), name=name, lr=0.1, weight_decay=0.3)),
            (
                theirs,
                reference([{"params": matrices, "weight_decay": 0.3}, {"params": vectors}], lr=0.1),
            ),
        ]
        for _ in range(3):
            for net, optimizer in pairs:
                net(torch.tensor([0, 1, 1])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for key, weight in named(ours).items():
            torch.testing.assert_close(weight, named(theirs)[key], atol=1e-5, rtol=1e-5)


def test_adam_runs_fused() -> None:
    for name in ("adamw", "adam"):
        optimizer = build_optimizer(named(build_net()), name=name, lr=0.1)
        assert all(group["fused"] for group in optimizer.param_groups)


def test_what_cant_be_built_is_refused_by_name() -> None:
    parameters = named(build_net())
    with pytest.raises(ConfigError, match="expected adamw, adamw_8bit, adam or sgd, found 'lion'"):
        build_optimizer(parameters, name="lion", lr=0.1)
    with pytest.raises(ConfigError, match=r"sgd can't round stochastically.*master_weights: fp32"):
        build_optimizer(parameters, name="sgd", lr=0.1, stochastic_rounding=True)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer({}, lr=0.1)


def test_a_rate_is_set_in_every_group_and_stays_a_tensor_where_it_was_one() -> None:
    optimizer = build_optimizer(named(build_net()), lr=0.1)
    rate = torch.tensor(0.1)
    optimizer.param_groups[1]["lr"] = rate
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate.item() == 0.25
