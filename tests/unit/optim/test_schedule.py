from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from legato.optim.schedule import learning_rate


def transformers_rates(name: str, *, warmup: int, total: int) -> list[float]:
    """The rate of each update of a real optimizer under transformers' scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = {
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, warmup, total),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup, total),
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup),
    }[name]()
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 10), (10, 10), (1, 1)])
def test_rates_are_those_of_transformers(name: str, warmup: int, total: int) -> None:
    ours = [
        learning_rate(step, name=name, peak=3e-4, num_warmup_steps=warmup, total_steps=total)
        for step in range(1, total + 1)
    ]
    assert ours == pytest.approx(transformers_rates(name, warmup=warmup, total=total), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("cosine", [0.0, 0.5, 1.0, 0.75, 0.25, 0.0, 0.0]),
        ("linear", [0.0, 0.5, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_rates_as_written_down_and_zero_after_the_end(name: str, rates: list[float]) -> None:
    steps = range(1, 8)
    ours = [learning_rate(s, name=name, peak=1, num_warmup_steps=2, total_steps=5) for s in steps]
    assert ours == pytest.approx(rates, abs=1e-15)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(1, peak=2e-5, total_steps=100) == 2e-5


def test_an_unknown_schedule_and_step_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="expected cosine, linear or constant, found 'wave'"):
        learning_rate(1, name="wave", peak=1, total_steps=5)
    with pytest.raises(ValueError, match="step: expected 1 or more, found 0"):
        learning_rate(0, peak=1, total_steps=5)
