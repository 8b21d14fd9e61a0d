from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from legato.errors import CompileError
from legato.models.attention import settle_packing
from legato.models.compile import (
    CompileClock,
    Scope,
    check_compiler,
    compile_in_place,
    keep_gradients,
)
from legato.models.head import split_head
from legato.models.lora import attach_lora
from legato.models.names import named_weights
from legato.models.wrap import apply_activation_checkpointing
from tests.helpers import families
from tests.unit.models.test_wrap import loss_and_gradients

# torch reads .grad of activations while it compiles, and hides this warning in its own way.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("own_compiler_state"),
]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("scope", "num_parts"), [("block", 2), ("model", 1)])
def test_a_compiled_model_trains_as_a_plain_one_under_the_same_names(
    scope: Scope, num_parts: int, checkpointed: bool
) -> None:
    expected = loss_and_gradients(families.build_family("llama"))
    model = families.build_family("llama")
    names = list(named_weights(model))
    if checkpointed:
        apply_activation_checkpointing(model)
    assert compile_in_place(model, scope=scope, backend="aot_eager") == num_parts
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)
    assert list(named_weights(model)) == names
    assert list(model.state_dict()) == list(families.build_family("llama").state_dict())


@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("lora", [{}, {"lora_dropout": 0.1}], ids=str)
def test_all_blocks_share_one_graph_and_the_whole_model_is_one(
    scope: Scope, lora: dict[str, object]
) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = families.build_family("llama")
    if lora:
        attach_lora(model, lora_rank=2, lora_alpha=4, base_name="none", **lora)
    compile_in_place(model, scope=scope, backend=counting)
    model.train()(input_ids=torch.arange(3, 9).view(1, 6), use_cache=False)
    assert len(graphs) == 1
    with torch.no_grad():  # evaluation is another form, and one for all blocks again
        model.eval()(input_ids=torch.arange(3, 9).view(1, 6), use_cache=False)
    assert len(graphs) == 2


def test_dora_trains_as_uncompiled_though_its_layers_break_the_graph() -> None:
    losses, gradients = [], []
    for is_compiled in (False, True):
        model = families.build_family("llama")
        attach_lora(model, lora_rank=2, lora_alpha=4, base_name="none", use_dora=True, seed=0)
        if is_compiled:
            compile_in_place(model, backend="eager")
        loss, found = loss_and_gradients(model)
        losses.append(loss)
        gradients.append(found)
    torch.testing.assert_close(losses[1], losses[0])
    assert gradients[1].keys() == gradients[0].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_packed_rows_with_other_documents_are_no_other_form() -> None:
    """attention: varlen, whose bounds of documents are more or fewer in each row."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = families.build_family("llama")
    decode, _ = split_head(model)
    assert settle_packing(model, decode, attention="varlen", max_seq_len=12) == "varlen"
    input_ids = torch.arange(3, 15).view(1, 12)
    rows = [[12], [5, 7], [1, 2, 3, 6], [2] * 6, [4, 4, 4]]
    positions = [torch.cat([torch.arange(n) for n in row])[None] for row in rows]
    expected = [decode(input_ids, at) for at in positions]
    compile_in_place(model, backend=counting)
    found, counts = [], []
    for at in positions:
        found.append(decode(input_ids, at))
        counts.append(len(graphs))
    assert set(counts) == {counts[0]}, counts  # pieces between the attentions, and no more of them
    torch.testing.assert_close(found, expected)


def test_too_many_forms_of_batches_are_an_error_that_names_the_guard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = families.build_family("llama")
    compile_in_place(model, backend="eager", dynamic=False, recompile_limit=3)

    def run(length: int) -> None:
        model(input_ids=torch.arange(3, 3 + length).view(1, length), use_cache=False)

    with torch.no_grad():
        for length in (4, 5, 6):
            run(length)
        with pytest.raises(CompileError, match="compiled for 3 forms") as caught:
            run(7)
    assert "size mismatch at index 1" in caught.value.facts["guard"]
    assert "recompile_limit" not in caplog.text  # said once, by us


@pytest.mark.parametrize("scope", ["block", "model"])
def test_a_compiler_that_fails_is_an_error_with_its_own_line(scope: Scope) -> None:
    def broken(_graph: torch.fx.GraphModule, _inputs: object) -> None:
        raise RuntimeError("C++ compile error\n\nOutput:\nx.cpp:1: error: no Python.h\nmore")

    model = families.build_family("llama")
    compile_in_place(model, scope=scope, backend=broken)
    with pytest.raises(CompileError, match=r"x\.cpp:1: error: no Python\.h\. .*compile: false"):
        model(input_ids=torch.arange(3, 9).view(1, 6), use_cache=False)


@pytest.mark.parametrize(
    ("device", "named", "message"),
    [
        (
            "cpu",
            None,
            r"needs a C\+\+ compiler, .*looked for .*\+\+\).* CXX, or set compile: false",
        ),
        ("cpu", "nowhere/g++", r"looked for CXX=nowhere/g\+\+"),
        ("cuda", None, r"needs a C compiler, .*gcc and clang.* CC, or set"),
    ],
)
def test_no_compiler_is_said_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str, named: str | None, message: str
) -> None:
    check_compiler(torch.device(device))  # here there is one
    monkeypatch.setenv("PATH", "/nowhere")
    for variable in ("CC", "CXX"):
        if named is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, named)
    with pytest.raises(CompileError, match=message):
        check_compiler(torch.device(device))


class GradientOfAGraph(torch.autograd.Function):
    """Its gradient lies where the next one will be, as that of a replayed CUDA graph."""

    memory = torch.zeros(2)

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        memory = GradientOfAGraph.memory.fill_(ctx.value)
        return torch.empty(0).set_(memory.untyped_storage(), 0, (2,)), None


@pytest.mark.parametrize(("is_kept", "total"), [(True, 3.0), (False, 4.0)])
def test_gradients_of_micro_batches_add_up_in_memory_that_no_graph_writes_to(
    is_kept: bool, total: float
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    if is_kept:
        keep_gradients([weight])
    for value in (1.0, 2.0):
        GradientOfAGraph.apply(weight, value).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [total, total]  # without it, what is there twice


def test_the_clock_counts_compiling_and_nothing_else() -> None:
    def slow(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        time.sleep(0.3)
        return graph

    function = torch.compile(lambda x: x + 1, backend=slow)
    with CompileClock() as clock:
        function(torch.ones(3))
        first = clock.seconds
        function(torch.ones(3))
        time.sleep(0.01)
        assert clock.seconds == first >= 0.3
    function(torch.ones(3, dtype=torch.float64))  # another form, after the end
    assert clock.seconds == first
