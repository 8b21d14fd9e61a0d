from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from legato.errors import CompileError
from legato.models.compile import compile_blocks
from legato.models.names import named_weights
from legato.models.wrap import apply_activation_checkpointing
from tests.helpers import families
from tests.unit.models.test_wrap import loss_and_gradients

# torch reads .grad of activations while it compiles, and hides this warning in its own way.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def own_compiler_state() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_train_as_plain_ones_under_the_same_names(checkpointed: bool) -> None:
    expected = loss_and_gradients(families.build_family("llama"))
    model = families.build_family("llama")
    names = list(named_weights(model))
    if checkpointed:
        apply_activation_checkpointing(model)
    assert compile_blocks(model, backend="aot_eager", dynamic=False) == 2
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)
    assert list(named_weights(model)) == names
    assert list(model.state_dict()) == list(families.build_family("llama").state_dict())


def test_both_blocks_share_one_graph() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = families.build_family("llama")
    compile_blocks(model, backend=counting, dynamic=False)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9).view(1, 6), use_cache=False)
    assert len(graphs) == 1


def test_too_many_forms_of_batches_are_an_error_that_names_the_guard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = families.build_family("llama")
    compile_blocks(model, backend="eager", dynamic=False, recompile_limit=3)

    def run(length: int) -> None:
        model(input_ids=torch.arange(3, 3 + length).view(1, length), use_cache=False)

    with torch.no_grad():
        for length in (4, 5, 6):
            run(length)
        with pytest.raises(CompileError, match="compiled for 3 forms") as caught:
            run(7)
    assert "size mismatch at index 1" in caught.value.facts["guard"]
    assert "recompile_limit" not in caplog.text  # said once, by us
