"""Parts of a checkpoint: names, what is refused, and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from legato.checkpoint import ModelPart, OptimizerPart, as_part
from legato.checkpoint.parts import encode_json, sort_parts
from legato.errors import CheckpointError


def test_a_plain_module_is_its_parameters_and_persistent_buffers_tied_ones_once() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(3, 2)
    model.head = nn.Linear(2, 3, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("cache", torch.ones(1), persistent=False)
    part = as_part(model)
    assert isinstance(part, ModelPart)
    assert list(part.tensors) == ["embed.weight", "scale"]
    assert part.tensors["embed.weight"] is model.head.weight


def test_wrappers_leave_no_trace_in_the_names() -> None:
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1)))
    part = as_part(wrapped)
    assert list(part.tensors) == ["0.weight", "0.bias"]  # type: ignore[union-attr]


def test_every_trained_tensor_of_an_adapter_needs_a_key() -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(CheckpointError, match="1 tensors have no key in the file, b first"):
        ModelPart(tensors=tensors, kind="adapter", keys={"a": "x.a"})
    with pytest.raises(CheckpointError, match="1 masters belong to no tensor, c first"):
        ModelPart(tensors=tensors, masters={"c": torch.ones(1)})


def test_an_optimizer_part_names_exactly_what_the_optimizer_holds() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([first])
    OptimizerPart(optimizer, {"first": first})
    with pytest.raises(CheckpointError, match="holds 1 tensors without a name"):
        OptimizerPart(optimizer, {"second": second})
    with pytest.raises(CheckpointError, match="doesn't hold 1 named tensors, second first"):
        OptimizerPart(optimizer, {"first": first, "second": second})


def test_groups_and_plain_numbers_of_an_optimizer_are_json() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.5}],
        lr=torch.tensor(0.25),
    )
    optimizer.state[model.weight] = {"count": 3, "sum": torch.ones(1)}
    parts = sort_parts({"model": model, "optimizer": optimizer, "trainer": {"epoch": 2}})
    content = json.loads(encode_json(parts.trainer_json()))
    assert content["parts"] == {"trainer": {"epoch": 2}}
    assert content["optimizer"]["values"] == {"weight": {"count": 3}}
    first, second = content["optimizer"]["groups"]
    assert (first["params"], second["params"]) == (["weight"], ["bias"])
    assert (first["lr"], first["betas"], second["weight_decay"]) == (0.25, [0.9, 0.999], 0.5)


def test_an_optimizer_state_that_is_neither_tensor_nor_number_is_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"history": [1, 2]}
    parts = sort_parts({"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="state 'history' of weight is a list"):
        parts.trainer_json()


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"a": {"b": [1, torch.ones(1)]}}, r"a.b\[1\]"),
        ({"a": float("nan")}, "a is nan"),
        ({"a": {"b": {1, 2}}}, "a.b"),
        ({"a": {(1, 2): 3}}, r"a.\(1, 2\)"),
    ],
)
def test_what_is_not_json_is_named_by_its_place(content: dict[str, Any], where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        encode_json(content)
