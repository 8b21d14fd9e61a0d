"""Compile a model block by block, in place: one graph for all blocks, names as they were."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from legato.errors import CompileError
from legato.models.blocks import decoder_blocks

logger = logging.getLogger(__name__)

# Each form of batch (number of rows, bucket of lengths, training or not) is one graph. torch's own
# limit of 8 is used up by ordinary batches, and then blocks run uncompiled without a word.
RECOMPILE_LIMIT = 32


def compile_blocks(
    model: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    recompile_limit: int = RECOMPILE_LIMIT,
) -> int:
    """Compile every decoder block in place; nothing runs until the first forward.

    ``module.compile()``, not ``torch.compile(module)``: no ``_orig_mod.`` gets into any name. Also
    sets torch's recompile limit for the whole process and makes reaching it an error.

    Args:
        model: The model, changed in place.
        backend: torch.compile's backend.
        mode: torch.compile's mode, e.g. ``max-autotune-no-cudagraphs``.
        dynamic: False compiles a graph for each shape; True one for all; None decides while
            running.
        recompile_limit: Graphs per block before it is an error.

    Returns:
        How many blocks are compiled.

    Raises:
        UnsupportedModelError: The model has no blocks that can be told apart.
    """
    blocks = decoder_blocks(model)
    torch._dynamo.config.recompile_limit = recompile_limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for name, block in blocks.items():
        block.compile(backend=backend, mode=mode, dynamic=dynamic)
        block._compiled_call_impl = _explained(block._compiled_call_impl, name)
    logger.info("compiled %d blocks", len(blocks))
    return len(blocks)


class _LastGuard(logging.Filter):
    """Keeps the guard that torch names when the limit is reached, and drops torch's own warning."""

    guard = "unknown, TORCH_LOGS=recompiles tells"

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("torch._dynamo hit config."):
            return True
        found = re.search(r"last reason: (.*)", record.getMessage())
        self.guard = found[1] if found else self.guard
        return False


def _explained(call: Callable[..., Any] | None, name: str) -> Callable[..., Any]:
    """``call``, with torch's internal error at the recompile limit said in Legato's words."""
    assert call is not None, "module.compile() sets it"
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
        finally:
            torch_log.removeFilter(last)

    return compiled_call
