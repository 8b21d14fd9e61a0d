"""Only algorithms that repeat their bits, where a run asks for them."""

from __future__ import annotations

import os

import pytest
import torch

from legato.errors import ConfigError
from legato.train.determinism import repeated_bits


def scatter() -> None:
    """An operation that torch has no such algorithm for, on any device."""
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_an_operation_that_cannot_repeat_its_bits_is_refused_with_the_key() -> None:
    refused = pytest.raises(ConfigError, match=r"^deterministic: put_ does not have")
    with refused as caught, repeated_bits(True):
        scatter()
    assert caught.value.message.endswith("Set deterministic: false, or another attention.")
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_it_nothing_changes_and_what_was_set_before_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with repeated_bits(False):
        scatter()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.use_deterministic_algorithms(True)
    try:
        with repeated_bits(True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="other"), repeated_bits(True):
        raise RuntimeError("other")
