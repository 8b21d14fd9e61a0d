from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from legato.models.lora import attach_lora
from legato.models.names import canonical_name, named_weights
from tests.helpers import families


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("module.module.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._checkpoint_wrapped_module._orig_mod.w", "model.layers.0.w"),
        ("_fsdp_wrapped_module.model.norm.weight", "model.norm.weight"),
        ("vision.module.weight", "vision.module.weight"),
    ],
)
def test_wrappers_leave_no_trace_in_a_name(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


@pytest.mark.parametrize("family", families.DENSE)
def test_names_are_the_keys_that_transformers_writes(family: str, tmp_path: Path) -> None:
    model = families.build_family(family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    weights = named_weights(model)
    assert weights.keys() == written.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, written[name]), name


def test_wrapped_blocks_have_the_names_of_bare_ones() -> None:
    model = families.build_family("llama")
    bare = named_weights(model)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    wrapped = named_weights(nn.DataParallel(model))
    assert list(wrapped) == list(bare)
    assert all(wrapped[name] is bare[name] for name in bare)


def test_a_frozen_tied_head_isnt_part_of_an_adapter() -> None:
    model = families.build_family("llama")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    adapter = attach_lora(model, lora_rank=2, lora_alpha=4, base_name="none", seed=0)
    names = named_weights(adapter.model, trainable_only=True)
    assert len(names) == 2 * 7 * 2  # A and B, seven linear layers, two blocks
    assert all(".lora_" in name for name in names)


def test_the_name_that_the_model_keeps_in_files_wins_whatever_the_order() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all_tied_weights_keys = {"head.weight": "body.weight"}
            self.head = nn.Linear(2, 3, bias=False)
            self.body = nn.Embedding(3, 2)
            self.head.weight = self.body.weight

    assert list(named_weights(HeadFirst())) == ["body.weight"]


def test_persistent_buffers_are_weights_and_others_arent() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("computed", torch.zeros(1), persistent=False)
    module.inner = nn.BatchNorm1d(2)
    assert list(named_weights(module)) == [
        "inner.weight",
        "inner.bias",
        "kept",
        "inner.running_mean",
        "inner.running_var",
        "inner.num_batches_tracked",
    ]
    assert list(named_weights(module, trainable_only=True)) == ["inner.weight", "inner.bias"]


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})
    model["module"] = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})
    with pytest.raises(ValueError, match=r"two tensors are called 'a\.weight'"):
        named_weights(model)
