"""torch.compile without a trace in names: in place for Legato's own runs, wrapped for others' code.

In a run each decoder block is compiled in place, or the decoder as a whole. All blocks share one
graph for each form of input (rows, row length, training or not), and reaching torch's limit of such
forms is an error: torch itself would run what it met last uncompiled, without a word.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from legato.errors import CompileError
from legato.models.blocks import decoder_blocks
from legato.models.names import COMPILE_PREFIX

logger = logging.getLogger(__name__)

# A run has at most 6 row lengths, each in training and evaluation; a family may have two kinds of
# blocks (Gemma), and every n-th of them may be checkpointed: 48. torch's own limit is 8.
RECOMPILE_LIMIT = 64

Scope = Literal["block", "model"]


def compile_in_place(
    model: nn.Module,
    *,
    scope: Scope = "block",
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = False,
    recompile_limit: int = RECOMPILE_LIMIT,
) -> int:
    """Compile the decoder blocks or the whole decoder; nothing runs until the first forward.

    ``module.compile()``, not ``torch.compile(module)``: no ``_orig_mod.`` gets into any name. Also
    sets torch's recompile limit for the whole process and makes reaching it an error.

    Args:
        model: A causal language model of transformers, or a PEFT model around one; changed in
            place. Its head isn't compiled: it is called on the trained positions only, whose number
            is another one in each batch.
        scope: ``block``: each block, one graph for all of them; ``model``: from the embedding to
            the last norm, as one graph.
        backend: torch.compile's backend.
        mode: torch.compile's mode, e.g. ``max-autotune-no-cudagraphs``.
        dynamic: False compiles a graph for each shape, and a resumed run computes the same bits;
            True one for all shapes; None decides while running.
        recompile_limit: Graphs of one part before it is an error.

    Returns:
        How many parts are compiled: the blocks, or 1.

    Raises:
        UnsupportedModelError: The model has no blocks that can be told apart.
    """
    if scope == "block":
        parts = decoder_blocks(model)
        _let_blocks_get_the_same(model)
    else:
        parts = {"the model": _decoder(model)}
    torch._dynamo.config.recompile_limit = recompile_limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for name, part in parts.items():
        part.compile(backend=backend, mode=mode, dynamic=dynamic)
        assert part._compiled_call_impl is not None, "module.compile() sets it"
        part._compiled_call_impl = explained(part._compiled_call_impl, name=name)
    logger.info("compiled: %s", "the whole model" if scope == "model" else f"{len(parts)} blocks")
    return len(parts)


def _let_blocks_get_the_same(model: Any) -> None:
    """Make the first block's input require a gradient, as every other block's does.

    Behind a frozen embedding (LoRA) it wouldn't, and would need a second graph: the compile time of
    all others once more. The price is that gradient: three small products in one block.
    """
    embedding = model.get_input_embeddings()

    def require_gradient(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if not any(weight.requires_grad for weight in embedding.parameters()):
        embedding.register_forward_hook(require_gradient)


def _decoder(model: Any) -> nn.Module:
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder: nn.Module = causal.get_decoder()
    return decoder


def begin_passes(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``decode`` that tells CUDA graphs where a forward pass begins.

    By itself torch takes each call of a compiled block for a new pass while no backward is pending,
    as in evaluation and where a checkpointed block computes again, and gives it the memory that the
    block before has just written to.

    Args:
        decode: A forward pass of a compiled model's blocks.

    Returns:
        The same function.
    """

    def beginning(*inputs: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return decode(*inputs)

    return beginning


def keep_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy each gradient out of the memory of CUDA graphs, which their next pass overwrites.

    The gradients of several micro-batches are added up otherwise in memory that isn't theirs, and
    torch doesn't always notice.

    Args:
        parameters: Those whose gradients stay on them until the update.

    Source:
        pytorch issues 96693 (a first micro-batch left out without a word) and 169545.
    """

    def copy_out(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(copy_out)  # type: ignore[no-untyped-call]


def wrap_compile(module: nn.Module, **compile_options: Any) -> nn.Module:
    """``torch.compile(module)`` whose ``state_dict()`` is that of a module that isn't compiled.

    For code that calls torch.compile itself. Under DistributedDataParallel, fully_shard and
    checkpoint_wrapper, around or inside of them, in any order: a hook belongs to the module that
    puts the prefix in, and torch runs hooks from the inside out. ``load_state_dict()`` takes keys
    with and without the prefix, and names missing and unexpected ones without it. Copies and
    unpickled modules have the hooks too. Modules inside of ``module`` that are compiled already get
    them as well.

    ``torch.distributed.checkpoint.state_dict`` takes the prefix out by itself and insists on
    finding it: hand it ``compiled._orig_mod``, the module that was compiled.

    Args:
        module: Any module. One that torch.compile returned stays as it is compiled.
        **compile_options: torch.compile's own: ``backend``, ``mode``, ``dynamic``, ``fullgraph``.

    Returns:
        The compiled module; ``module`` itself if it was one.

    Example:
        >>> layer = wrap_compile(nn.Linear(2, 2, bias=False))
        >>> list(layer.state_dict()), [name for name, _ in layer.named_parameters()]
        (['weight'], ['_orig_mod.weight'])
    """
    from torch._dynamo.eval_frame import OptimizedModule

    compiled = module
    if not isinstance(module, OptimizedModule):
        compiled = cast("nn.Module", torch.compile(module, **compile_options))
    for part in compiled.modules():
        hooks = part._state_dict_hooks.values()
        if isinstance(part, OptimizedModule) and _take_prefix_out not in hooks:
            part.register_state_dict_post_hook(_take_prefix_out)  # type: ignore[no-untyped-call]
            part.register_load_state_dict_pre_hook(_put_prefix_in)  # type: ignore[no-untyped-call]
            part.register_load_state_dict_post_hook(_name_without_prefix)  # type: ignore[no-untyped-call]
            # torch makes a copy anew, without hooks. An attribute of the class stays as it is for
            # others, and a weak reference lets go of the weights when the module does.
            part.__dict__["__reduce_ex__"] = partial(_how_to_copy, weakref.ref(part))
    return compiled


def _how_to_copy(module: weakref.ref[Any], _protocol: int) -> tuple[Callable[..., Any], Any]:
    """What copy and pickle make a compiled module of: as torch's own, and wrapped again."""
    compiled: Any = module()
    return _compiled_again, (compiled._orig_mod, compiled.dynamo_ctx)


def _compiled_again(module: nn.Module, context: Any) -> nn.Module:
    from torch._dynamo.eval_frame import OptimizedModule

    return wrap_compile(OptimizedModule(module, context))


def _take_prefix_out(
    _module: nn.Module, state_dict: dict[str, Any], prefix: str, _local_metadata: dict[str, Any]
) -> None:
    """After ``state_dict()`` of a compiled module, whose own keys are those behind ``prefix``."""
    inner = f"{prefix}{COMPILE_PREFIX}"
    for key in [key for key in state_dict if key.startswith(inner)]:
        state_dict[prefix + key.removeprefix(inner)] = state_dict.pop(key)
    # Versions of the modules, by their names without the dot at the end.
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(inner)]:
        versions[(prefix + f"{key}.".removeprefix(inner))[:-1]] = versions.pop(key)


def _put_prefix_in(
    _module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
    _strict: bool,
    _missing_keys: list[str],
    _unexpected_keys: list[str],
    _error_msgs: list[str],
) -> None:
    """Before ``load_state_dict()`` of a compiled module looks for its keys."""
    inner = f"{prefix}{COMPILE_PREFIX}"
    own = [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]
    for key in own:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


def _name_without_prefix(_module: nn.Module, incompatible_keys: Any) -> None:
    """After ``load_state_dict()`` of a compiled module: missing and unexpected keys, in place."""
    wrapper = COMPILE_PREFIX.removesuffix(".")
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [".".join(part for part in key.split(".") if part != wrapper) for key in keys]


class CompileClock:
    """How long torch has been compiling while this context was open: forward, backward, again."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._seconds

    def __enter__(self) -> CompileClock:
        torch._dynamo.callback.on_compile_start(self._start)
        torch._dynamo.callback.on_compile_end(self._end)
        return self

    def __exit__(self, *_error: object) -> None:
        # Looked for first: torch._dynamo.reset() drops every callback.
        handler = torch._dynamo.callback.callback_handler
        if self._start in handler.start_callbacks:
            handler.remove_start_callback(self._start)
            handler.remove_end_callback(self._end)

    def _start(self, _args: object) -> None:
        self._began = time.perf_counter()

    def _end(self, _args: object) -> None:
        self._seconds += time.perf_counter() - self._began


def check_compiler(
    device: torch.device, *, key: str = "compile", instead: str = "set compile: false"
) -> None:
    """Refuse to compile where no C or C++ compiler is: torch would say so in the first step.

    Args:
        device: Where the model computes.
        key: The config's key that asks for compiling, for the message.
        instead: How the config does without, for the message.

    Raises:
        CompileError: There is none.
    """
    # Inductor writes C++ for a CPU, Triton a little C around each GPU kernel; both look like this.
    usual: tuple[str, ...]
    if device.type == "cpu":
        language, variable = "C++", "CXX"
        usual = ("clang++",) if sys.platform == "darwin" else ("g++",)
    elif device.type == "cuda":
        language, variable, usual = "C", "CC", ("gcc", "clang")
    else:
        return
    given = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((given,) if given else usual)):
        looked_for = f"{variable}={given}" if given else " and ".join(usual)
        raise CompileError(
            f"{key}: torch.compile needs a {language} compiler, and there is none (looked for "
            f"{looked_for}). Install one (Debian, Ubuntu: apt-get install g++), name it in the "
            f"environment variable {variable}, or {instead}.",
            guard=None,
        )


class _LastGuard(logging.Filter):
    """Keeps the guard that torch names when the limit is reached, and drops torch's own warning."""

    guard = "unknown, TORCH_LOGS=recompiles tells"

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("torch._dynamo hit config."):
            return True
        found = re.search(r"last reason: (.*)", record.getMessage())
        self.guard = found[1] if found else self.guard
        return False


def explained(call: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    """``call``, a compiled function, with torch's errors of compiling said in Legato's words.

    Args:
        call: What torch.compile gave.
        name: What it computes, for the message.

    Returns:
        The same function; it raises CompileError where the limit of forms is reached (``.guard``),
        and where the compiler fails (``.guard`` is None).
    """
    torch_log = logging.getLogger("torch._dynamo.convert_frame")

    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        last = _LastGuard()
        torch_log.addFilter(last)
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            limit = torch._dynamo.config.recompile_limit
            raise CompileError(
                f"{name}: compiled for {limit} forms of input, and met another one. The guard that "
                f"failed last: {last.guard}. Let batches have fewer shapes, or set compile: false.",
                guard=last.guard,
            ) from error
        except torch._dynamo.exc.ShortenTraceback as error:  # what backends raise
            raise CompileError(
                f"{name}: torch.compile failed: {_reason(error)}. Try another compile.mode, or set "
                "compile: false; --debug shows all of the compiler's output.",
                guard=None,
            ) from error
        finally:
            torch_log.removeFilter(last)

    return compiled_call


def _reason(error: Exception) -> str:
    """The line of a compiler's long message that says what is wrong."""
    cause = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    said = next((line for line in lines if "error:" in line), lines[0] if lines else "")
    return f"{type(cause).__name__}: {said}".rstrip(".")
