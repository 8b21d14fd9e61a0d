"""A training loop of a few lines for tests of the checkpointer: tiny, seeded, no transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Counter:
    """The JSON part of a state."""

    step: int = 0
    notes: list[str] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "notes": list(self.notes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.notes = state["step"], list(state["notes"])


def build_model(seed: int = 0, width: int = 8) -> nn.Module:
    """Vectors, matrices, buffers that a forward pass changes, an integer scalar buffer."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    torch.random.set_rng_state(state)
    return model


class Loop:
    """A model, an optimizer and a counter; `step` trains on data that depends on the step only."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> None:
        self.model = build_model()
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.01, **options})
        self.counter = Counter()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.counter}

    def step(self) -> int:
        self.counter.step += 1
        generator = torch.Generator().manual_seed(self.counter.step)
        inputs = torch.randn(6, 4, generator=generator)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        return self.counter.step

    def run_to(self, step: int) -> Loop:
        while self.counter.step < step:
            self.step()
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of everything: the independent record that a restored loop is compared with."""
        found = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{key}/{names[id(parameter)]}"] = torch.as_tensor(value)
        return {key: value.detach().clone() for key, value in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, keys, dtypes and shapes included."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key], value), key
