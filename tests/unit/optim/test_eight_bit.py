from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from legato.checkpoint import Checkpointer, OptimizerPart
from legato.checkpoint.tensors import packed_pieces
from legato.errors import CheckpointError, CheckpointMismatchError, MissingDependencyError
from legato.optim.build import build_optimizer, set_learning_rate

SHAPES = {"large": (64, 128), "small": (16, 16), "uneven": (67, 71), "vector": (96,)}


def build_net(dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    torch.manual_seed(0)
    return nn.ParameterDict(
        {n: nn.Parameter(torch.randn(s, dtype=dtype)) for n, s in SHAPES.items()}
    )


def build(
    net: nn.ParameterDict, name: str = "adamw_8bit", **options: bool
) -> torch.optim.Optimizer:
    return build_optimizer(dict(net.named_parameters()), name=name, lr=0.01, **options)


def train(net: nn.ParameterDict, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for parameter in net.values():
            parameter.grad = torch.randn_like(parameter)
        set_learning_rate(optimizer, 0.01 / step)
        optimizer.step()
        optimizer.zero_grad()


def test_updates_are_those_of_torchs_adamw_within_the_rounding_of_8_bits() -> None:
    ours, theirs = build_net(), build_net()
    train(ours, build(ours), range(1, 9))
    train(theirs, build(theirs, "adamw"), range(1, 9))
    start = build_net()
    for name in SHAPES:
        moved = (theirs[name] - start[name]).norm()
        off = (ours[name] - theirs[name]).norm() / moved
        # A tensor of full blocks is packed; small and uneven ones are plain AdamW.
        assert (1e-4 < off < 0.05) if name == "large" else (off < 1e-5), name


def test_a_value_of_a_moment_takes_a_byte() -> None:
    net = build_net()
    optimizer = build(net)
    part = OptimizerPart(optimizer, names=dict(net.named_parameters()))
    expected = part.expected_state_bytes()
    train(net, optimizer, range(1, 2))
    state = optimizer.state[net["large"]]
    pieces = {n: (t.dtype, t.numel()) for n, t in packed_pieces(state["exp_avg"]).items()}
    assert pieces == {
        "codes": (torch.uint8, 64 * 128),
        "scale": (torch.float32, 64 * 128 // 256),
        "qmap": (torch.float32, 256),
    }
    assert not packed_pieces(optimizer.state[net["small"]]["exp_avg"])
    # Estimated before the first step; the counters of 4 bytes each aren't.
    assert part.expected_state_bytes() == expected + 4 * len(SHAPES)


def test_bf16_weights_without_masters_are_rounded_stochastically() -> None:
    net = build_net(torch.bfloat16)
    before = net["large"].detach().clone()
    optimizer = build(net, stochastic_rounding=True)
    for _ in range(20):
        net["large"].grad = torch.ones_like(before)
        set_learning_rate(optimizer, 1e-4)
        optimizer.step()
    # Each update is far below half a unit in the last place of most weights.
    mean = (net["large"].float() - before.float()).mean().item()
    assert mean == pytest.approx(-20 * 1e-4, rel=0.1)


def test_a_resumed_optimizer_takes_the_same_steps_bit_for_bit(tmp_path: Path) -> None:
    whole = build_net()
    optimizer = build(whole)
    train(whole, optimizer, range(1, 4))
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save({"model": whole, "optimizer": optimizer}, step=3).result()
    train(whole, optimizer, range(4, 7))

    resumed = build_net()
    other = build(resumed)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore({"model": resumed, "optimizer": other})
        train(resumed, other, range(4, 7))
    for name in SHAPES:
        assert torch.equal(resumed[name], whole[name]), name

    stored = {}
    for path in (tmp_path / "out" / "step_3" / "state").glob("optimizer-*.safetensors"):
        stored |= load_file(path)
    pieces = ("codes", "scale", "qmap")
    assert {key for key in stored if key.endswith("/large")} == {
        "step/large",
        *(f"exp_avg.{piece}/large" for piece in pieces),
        *(f"exp_avg_sq.{piece}/large" for piece in pieces),
    }
    assert stored["exp_avg.codes/large"].dtype is torch.uint8
    assert stored["exp_avg/small"].dtype is torch.float32


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("adamw_8bit", "adamw", "it holds moments packed in 8 bits, this run's optimizer keeps"),
        ("adamw", "adamw_8bit", "it holds plain moments, this run's optimizer keeps them otherw"),
    ],
)
def test_moments_of_another_kind_are_refused_by_name(
    tmp_path: Path, before: str, now: str, message: str
) -> None:
    net = build_net()
    optimizer = build(net, before)
    train(net, optimizer, range(1, 2))
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save({"model": net, "optimizer": optimizer}, step=1).result()
    with (
        Checkpointer(tmp_path / "out") as checkpointer,
        pytest.raises(CheckpointMismatchError, match=message),
    ):
        checkpointer.restore({"model": net, "optimizer": build(net, now)})


def test_an_optimizer_that_cannot_make_its_packed_moments_anew_is_refused(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    net = build_net()
    optimizer = AdamW8bit(net.parameters())
    net["large"].grad = torch.zeros_like(net["large"])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    with (
        Checkpointer(tmp_path / "out") as checkpointer,
        pytest.raises(CheckpointError, match="exp_avg/large is a OptimState8bit: only plain"),
    ):
        checkpointer.save({"model": net, "optimizer": optimizer}, step=1)


def test_a_torchao_that_is_absent_or_too_old_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "legato.optim.eight_bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", ModuleType("torchao.optim"))
    there = importlib.metadata.version("torchao")
    with pytest.raises(MissingDependencyError) as caught:
        build(build_net())
    message = str(caught.value)
    assert message.startswith("optimizer.name: adamw_8bit needs torchao 0.18 or newer; ")
    assert f"torchao {there} doesn't have it (cannot import name 'AdamW8bit'" in message
    assert message.endswith(': pip install "legato[quant]"')
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", _not_installed)
    with pytest.raises(MissingDependencyError, match=r"torchao isn't installed: pip install"):
        build(build_net())


def _not_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)
