"""What a config needs and this machine lacks is refused by key, before a weight is read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from legato.errors import CompileError, ConfigError, LegatoError, MissingDependencyError
from legato.parallel.world import World
from legato.recipes.model import build_model
from tests.helpers.sharded import build_config

CPU, CUDA, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
EIGHT_BIT: dict[str, Any] = {"optimizer": {"name": "adamw_8bit", "lr": 1e-3}}
NF4 = {"quantize_base": "nf4"}


def refusal(device: torch.device, method: str = "full", **changes: Any) -> str:
    """What stops the run; that there is no model is found last."""
    config = build_config(Path("/no/model"), method, num_ranks=1, **changes)
    with pytest.raises(LegatoError) as caught:
        build_model(config, world=World(rank=0, world_size=1, device=device))
    return f"{type(caught.value).__name__}: {caught.value}"


NO_MODEL = "ModelNotFoundError: /no/model"


def test_bf16_on_a_gpu_that_only_emulates_it_is_refused_with_the_gpus_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    said = refusal(CUDA, dtype="bf16")
    assert said == (
        f"{ConfigError.__name__}: dtype: bf16 isn't supported by Tesla T4 (compute capability 7.5, "
        "8.0 is needed). Set dtype: fp32."
    )
    assert refusal(CUDA, dtype="fp32").startswith(NO_MODEL)
    assert refusal(CPU, dtype="bf16").startswith(NO_MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert refusal(CUDA, dtype="bf16").startswith(NO_MODEL)


@pytest.mark.parametrize("is_new", [False, True])
def test_bf16_on_an_apple_gpu_needs_macos_14(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: is_new)
    said = refusal(MPS, dtype="bf16")
    assert said.startswith(
        NO_MODEL if is_new else "ConfigError: dtype: bf16 isn't supported by mps"
    )


@pytest.mark.parametrize(
    ("method", "changes", "module", "key"),
    [
        ("lora", NF4, "torchao.quantization", "quantize_base: nf4"),
        ("full", EIGHT_BIT, "torchao.optim", "optimizer.name: adamw_8bit"),
    ],
)
def test_a_torchao_that_is_absent_or_too_old_is_found_before_the_model_is(
    monkeypatch: pytest.MonkeyPatch, method: str, changes: dict[str, Any], module: str, key: str
) -> None:
    for stand_in in (None, ModuleType(module)):  # absent; without the class
        monkeypatch.setitem(sys.modules, module, stand_in)
        monkeypatch.delitem(sys.modules, "legato.optim.eight_bit", raising=False)
        said = refusal(CPU, method, **changes)
        assert said.startswith(f"{MissingDependencyError.__name__}: {key} needs torchao 0.18 or")


def test_eight_bit_updates_are_compiled_on_cuda_and_need_a_compiler_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    said = refusal(CUDA, **EIGHT_BIT)
    assert said.startswith(
        f"{CompileError.__name__}: optimizer.name: adamw_8bit: torch.compile needs a C compiler, "
    )
    assert said.endswith("or use adamw.")
    assert refusal(CPU, **EIGHT_BIT).startswith(NO_MODEL)
    assert refusal(CUDA).startswith(NO_MODEL)
