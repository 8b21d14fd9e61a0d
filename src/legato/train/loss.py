"""Cross-entropy over the positions that are trained, and over those only.

Most of the memory of a fine-tuning step with a large vocabulary is logits: of prompt and padding
positions that nobody trains, in three copies. Here the caller drops untrained positions before the
head, and the rest goes through it in chunks, each turned into its loss and its gradient at once.
So no more than one chunk of logits exists at any time, and none is computed twice.

``torch.nn.functional.linear_cross_entropy`` isn't used: with its default options it holds the full
logits, and it returns the loss rounded to bf16 (0.06 at a loss of 12).
"""

# N trained positions, C positions in a chunk, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from legato.models.compile import explained

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits ``[C, V]`` and targets ``[C]`` -> loss and its gradient: :func:`loss_and_gradient`."""

# One chunk of a 128k vocabulary is then 0.25 GB of bf16; smaller chunks add up the head's weight
# gradient more often, which costs more than it saves.
CHUNK_TOKENS = 1024

# Elements of a chunk that are fp32 at a time. On a CPU as many as stay in its cache (twice as fast
# as whole chunks, measured); on a GPU enough to keep it busy.
_CPU_FP32_ELEMENTS = 1 << 20
_FP32_ELEMENTS = 1 << 25

# Rows of the one form that is compiled; enough of them for each part of a GPU to have one.
COMPILED_ROWS = 128


def sum_token_loss(
    hidden: Tensor,
    targets: Tensor,
    *,
    head: nn.Module,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_loss: ChunkLoss | None = None,
) -> Tensor:
    """Sum of ``-log p(target)``, in fp32 whatever the dtype of the model.

    The gradient is computed with the loss, chunk by chunk, and kept until backward asks for it;
    that of the head's weights is added up in fp32. ``head`` may hold frozen weights, trainable ones
    or a LoRA beside a frozen one.

    Args:
        hidden: ``[N, D]``: the last hidden states of the trained positions.
        targets: ``[N]``, integer: the token that each position must produce.
        head: ``[C, D] -> [C, V]`` logits. A module, because its trainable parameters are asked for.
        chunk_tokens: Positions whose logits exist at a time.
        chunk_loss: Loss and gradient of their logits; :func:`loss_and_gradient` by default.

    Returns:
        A 0-dim fp32 tensor; 0 when ``N`` is 0. Its backward can run once.

    Raises:
        ValueError: ``hidden`` and ``targets`` differ in length, or ``chunk_tokens`` is below 1.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [N, D] and targets [N], found {list(hidden.shape)} and "
            f"{list(targets.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected 1 or more, found {chunk_tokens}")
    chunk_loss = chunk_loss or loss_and_gradient
    if torch.is_grad_enabled():
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        return _SumTokenLoss.apply(  # type: ignore[no-untyped-call]
            hidden, targets, head, chunk_tokens, chunk_loss, *weights
        )
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows in _chunks(len(targets), chunk_tokens):
        # Its gradient isn't asked for, but costs less than logits that are fp32 all at once.
        total += chunk_loss(head(hidden[rows]), targets[rows])[0]
    return total


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, start + chunk_tokens)


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the token losses of one chunk, and its gradient with respect to the logits.

    Args:
        logits: ``[C, V]``, any floating dtype.
        targets: ``[C]``, integer.

    Returns:
        The fp32 sum, and the gradient ``softmax - one-hot`` ``[C, V]`` in the dtype of ``logits``.
    """
    loss = logits.new_zeros((), dtype=torch.float32)
    gradient = torch.empty_like(logits)
    elements = _CPU_FP32_ELEMENTS if logits.device.type == "cpu" else _FP32_ELEMENTS
    for rows in _chunks(len(targets), max(1, elements // logits.shape[-1])):
        log_probs = torch.log_softmax(logits[rows].float(), dim=-1)
        column = targets[rows].unsqueeze(-1)
        loss -= log_probs.gather(-1, column).sum()
        probs = log_probs.exp_()
        probs.scatter_add_(-1, column, probs.new_full(column.shape, -1.0))
        gradient[rows] = probs
    return loss, gradient


def compile_chunk_loss(*, backend: str | Callable[..., Any] = "inductor") -> ChunkLoss:
    """:func:`loss_and_gradient`, compiled: a row's logits are read and its gradient written once.

    A graph takes ``COMPILED_ROWS`` rows and no other number: one form whatever the number of
    trained tokens, and the same bits in a resumed run, which a graph for any number doesn't give.
    The rows that are left over go the plain way.

    Args:
        backend: torch.compile's backend.

    Returns:
        The function. It raises CompileError where compiling fails.
    """
    whole = explained(
        torch.compile(_write_gradient, backend=backend, dynamic=False, fullgraph=True),
        name="the loss",
    )

    def chunk_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = logits.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(logits)
        for rows in _chunks(len(targets), COMPILED_ROWS):
            if len(targets[rows]) == COMPILED_ROWS:
                loss += whole(logits[rows], targets[rows], gradient[rows])
            else:
                rest, gradient[rows] = loss_and_gradient(logits[rows], targets[rows])
                loss += rest
        return loss, gradient

    return chunk_loss


def _write_gradient(logits: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    """Returns the loss of ``logits [R, V]``, and writes its gradient into ``gradient``."""
    scores = logits.float()
    highest = scores.amax(dim=-1, keepdim=True)
    powers = (scores - highest).exp()  # once a logit, which is what counts on a CPU
    total = powers.sum(dim=-1, keepdim=True)
    probs = powers / total
    column = targets.unsqueeze(-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == column
    gradient.copy_(torch.where(is_target, probs - 1, probs))
    return (total.log() + highest - scores.gather(-1, column)).sum()


class _SumTokenLoss(torch.autograd.Function):
    """:func:`sum_token_loss` with gradients: ``weights`` are the head's trainable parameters.

    Forward makes the gradients, while a chunk's logits are there. To make the logits anew in
    backward would hold no less of them and cost one more product with the head, the largest matrix
    of a small model. What is kept instead is the gradient of ``hidden``, as large as ``hidden``,
    and those of ``weights``, which backward would make as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: nn.Module,
        chunk_tokens: int,
        chunk_loss: ChunkLoss,
        *weights: Tensor,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden)
        weight_grads = [torch.zeros_like(weight) for weight in weights]
        for number, rows in enumerate(_chunks(len(targets), chunk_tokens)):
            with torch.enable_grad():
                chunk = hidden[rows].detach().requires_grad_()
                logits = head(chunk)
            loss, logits_grad = chunk_loss(logits.detach(), targets[rows])
            chunk_grad, *grads = torch.autograd.grad(logits, [chunk, *weights], logits_grad)
            total += loss
            hidden_grad[rows] = chunk_grad
            weight_grads = _add_up(weight_grads, grads, number)
        # Not save_for_backward: hooks that move saved activations elsewhere needn't see these.
        ctx.gradients = [hidden_grad, *weight_grads]
        ctx.dtypes = [hidden.dtype, *(weight.dtype for weight in weights)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("sum_token_loss: its backward has run already, and runs once only")
        # Into new tensors: autograd may hand out one gradient for two weights.
        scaled = [
            torch.mul(gradient, loss_grad, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (scaled[0], None, None, None, None, *scaled[1:])


def _add_up(sums: list[Tensor], grads: list[Tensor], number: int) -> list[Tensor]:
    """The sums after chunk ``number``: the gradients themselves after the first one, then fp32."""
    if number == 0:
        return grads
    if number == 1:
        # fp32: a sum over many chunks in bf16 would drop the smaller addends.
        return [total.float() + grad for total, grad in zip(sums, grads, strict=True)]
    return [total.add_(grad) for total, grad in zip(sums, grads, strict=True)]
