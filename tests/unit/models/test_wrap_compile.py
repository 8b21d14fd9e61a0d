"""wrap_compile: names as if nothing was compiled, whatever is wrapped around or inside of it."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle  # noqa: TID251 - people do it with modules
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from legato.models import compile as compile_module
from legato.models.compile import wrap_compile
from legato.models.names import COMPILE_PREFIX, named_weights


def build(seed: int = 0) -> nn.Module:
    """A module with a submodule, a buffer and a module whose version counts (BatchNorm)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


def compiled(module: nn.Module) -> nn.Module:
    return wrap_compile(module, backend="eager")


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "ddp": DistributedDataParallel,
    "fsdp": sharded,
}
ORDERS = [
    order
    for length in (1, 2, 3)
    for order in itertools.permutations(WRAPPERS, length)
    # One of the two ways to train on several ranks.
    if "compile" in order and not {"ddp", "fsdp"} <= set(order)
]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(order: tuple[str, ...], module: nn.Module) -> nn.Module:
    for name in order:
        module = WRAPPERS[name](module)
    return module


def plain(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Names without DistributedDataParallel's own prefix, values whole."""
    return {
        name.removeprefix("module."): (t.full_tensor() if isinstance(t, DTensor) else t).detach()
        for name, t in tensors.items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    found = plain(found)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_names_and_values_are_those_of_the_bare_module_in_any_order(
    order: tuple[str, ...], one_rank: None
) -> None:
    bare = build().state_dict()
    module = wrapped(order, build())
    state = module.state_dict()
    assert_same(state, bare)
    assert not any(COMPILE_PREFIX in f"{name}." for name in state._metadata)  # type: ignore[attr-defined]
    assert_same(named_weights(module), dict(named_weights(build())))
    # And back: what one such module saved goes into another one, and what a bare one saved.
    other = wrapped(order, build(seed=1))
    other.load_state_dict(state)
    assert_same(other.state_dict(), bare)
    if "fsdp" not in order:  # it takes its own shards only
        prefix = "module." if next(iter(state)).startswith("module.") else ""
        another = wrapped(order, build(seed=2))
        another.load_state_dict({f"{prefix}{name}": tensor for name, tensor in bare.items()})
        assert_same(another.state_dict(), bare)
    # torch's own functions put in and take out the prefix of the module that was compiled.
    inner = next((m for m in module.modules() if hasattr(m, "dynamo_ctx")), module)._orig_mod
    assert_same(get_model_state_dict(inner), bare)
    set_model_state_dict(inner, get_model_state_dict(inner))


def test_it_is_compiled_and_computes_what_the_bare_module_does() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        calls.append(graph)
        return graph

    module = wrap_compile(build(), backend=backend)
    x = torch.ones(3, 4)
    assert torch.equal(module(x), build()(x))
    assert len(calls) == 1


def test_wrapping_twice_is_wrapping_once() -> None:
    once = compiled(build())
    assert wrap_compile(once) is once
    assert len(once._state_dict_hooks) == 1
    assert len(once._load_state_dict_pre_hooks) == 1
    assert list(once.state_dict()) == list(build().state_dict())


def test_a_module_that_torch_compiled_gets_the_hooks_and_stays_what_it_is() -> None:
    theirs = torch.compile(build(), backend="eager")
    assert all(name.startswith(COMPILE_PREFIX) for name in theirs.state_dict())
    prefixed = theirs.state_dict()
    assert wrap_compile(theirs) is theirs
    assert_same(theirs.state_dict(), build().state_dict())
    # A checkpoint from before it was wrapped still loads.
    other = compiled(build(seed=1))
    other.load_state_dict(prefixed)
    assert_same(other.state_dict(), build().state_dict())


def test_compiled_modules_inside_get_the_hooks_too() -> None:
    module = build()
    module[1] = torch.compile(module[1], backend="eager")
    names = list(compiled(module).state_dict())
    assert names == list(build().state_dict())


def test_keys_that_are_missing_or_unknown_are_still_named() -> None:
    module = compiled(build())
    state = module.state_dict()
    del state["1.1.weight"]
    state["1.7.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state)
    assert '1.1.weight"' in str(caught.value)
    assert '1.7.weight"' in str(caught.value)


def test_keys_that_dont_fit_are_named_as_the_bare_module_names_them() -> None:
    state = build().state_dict()
    del state["1.1.weight"]
    state["1.7.weight"] = torch.zeros(1)
    for module in (compiled(build(seed=1)), nn.ModuleDict({"inner": compiled(build(seed=1))})):
        at = "inner." if isinstance(module, nn.ModuleDict) else ""
        found = module.load_state_dict({f"{at}{k}": v for k, v in state.items()}, strict=False)
        assert found.missing_keys == [f"{at}1.1.weight"]
        assert found.unexpected_keys == [f"{at}1.7.weight"]
        assert torch.equal(module.state_dict()[f"{at}0.weight"], state["0.weight"])


def pickled(module: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes
    return found


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_copy_has_the_names_too_and_weights_of_its_own(
    again: Callable[[nn.Module], nn.Module],
) -> None:
    bare = build().state_dict()
    for module in (compiled(build()), nn.ModuleDict({"inner": compiled(build())})):
        other = again(again(module))
        at = "inner." if isinstance(module, nn.ModuleDict) else ""
        assert_same(other.state_dict(), {f"{at}{name}": t for name, t in bare.items()})
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert_same(module.state_dict(), {f"{at}{name}": t for name, t in bare.items()})
        other.load_state_dict(module.state_dict())
        assert torch.equal(next(other.parameters()), next(module.parameters()))
    assert again(compiled(build()))(torch.ones(3, 4)).shape == (3, 2)


def test_a_wrapped_module_is_freed_when_nobody_holds_it() -> None:
    module = compiled(build())
    weight = weakref.ref(module._orig_mod[0].weight)
    gc.disable()
    try:
        del module
        assert weight() is None
    finally:
        gc.enable()


def test_torchs_optimizer_state_has_the_names_of_the_bare_module(one_rank: None) -> None:
    states = []
    for wrap in (lambda module: module, compiled):
        module = wrap(build())
        inner = getattr(module, "_orig_mod", module)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        states.append(get_optimizer_state_dict(inner, optimizer))
    assert states[1].keys() == states[0].keys()
    assert states[1]["state"].keys() == states[0]["state"].keys() >= {"0.weight", "1.1.bias"}
    assert states[1]["param_groups"] == states[0]["param_groups"]


def test_an_eager_module_reads_what_a_wrapped_one_saved_and_knows_its_version() -> None:
    state = compiled(build()).state_dict()
    assert state._metadata == build().state_dict()._metadata  # type: ignore[attr-defined]
    eager = build(seed=1)
    eager.load_state_dict(state)
    assert_same(eager.state_dict(), build().state_dict())


@pytest.mark.parametrize("hook", [compile_module._take_prefix_out, compile_module._put_prefix_in])
def test_a_hook_writes_its_arguments_out_and_marks_those_it_ignores(
    hook: Callable[..., None],
) -> None:
    used = hook.__code__.co_names + hook.__code__.co_varnames[hook.__code__.co_argcount :]
    assert used  # the body does something
    parameters = inspect.signature(hook).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [p.name for p in parameters if not p.name.startswith("_")] == ["state_dict", "prefix"]
