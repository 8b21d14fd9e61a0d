"""One optimizer step: forward and backward per micro-batch, clip, check, update."""

# B rows, T tokens, D model width, N trained positions

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from legato.data.loader import Batch
from legato.errors import DataError, ModelError, NonFiniteError
from legato.optim.build import set_learning_rate
from legato.parallel.world import World
from legato.train.loss import ChunkLoss, sum_token_loss
from legato.train.model import Decode, TrainableModel
from legato.train.rng import seed_everything

# Stands for "the update" where a micro-batch's number is expected.
_UPDATE = -1


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, over all ranks.

    Attributes:
        loss: Mean loss per trained token, of the weights before the update.
        grad_norm: L2 norm of the whole gradient before clipping.
        num_loss_tokens: Trained tokens.
        num_tokens: Tokens without padding.
        skipped: No update was made, because something wasn't finite.
        nonfinite_ids: The samples whose loss isn't finite; all of the step's if only the gradient
            isn't; none when everything was finite.
    """

    loss: float
    grad_norm: float
    num_loss_tokens: int
    num_tokens: int
    skipped: bool = False
    nonfinite_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """How long a step took.

    Attributes:
        seconds: From asking for its batches to its update.
        compile_seconds: Those of them in which torch compiled.
    """

    seconds: float
    compile_seconds: float


def train_step(
    batches: Sequence[Batch],
    *,
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    world: World,
    lr: float,
    step: int,
    seed: int,
    clip_grad_norm: float | None = None,
    on_nonfinite: str = "stop",
    before_update: Callable[[], object] | None = None,
) -> StepResult:
    """Take one optimizer step over ``batches``. Collective where there are several ranks.

    The loss is the sum of all token losses divided by the number of trained tokens of the whole
    step, over all micro-batches and ranks: how rows are cut into micro-batches doesn't change it.

    Args:
        batches: The micro-batches of this rank, as many as on every other rank; on any device.
        model: What is trained. It adds gradients up over the ranks itself, and doesn't average.
        optimizer: Over exactly the model's ``parameters``.
        world: The ranks, and where this one computes.
        lr: Rate of this update.
        step: Number of this step, from 1.
        seed: The run's seed; each micro-batch draws from a stream derived from it.
        clip_grad_norm: Largest L2 norm of the whole gradient; None: no clipping.
        on_nonfinite: ``stop`` raises before the update, ``skip`` leaves the update out.
        before_update: Called when an update is certain, before anything is changed.

    Returns:
        The step's figures.

    Raises:
        DataError: There is no trained token in the whole step.
        ModelError: No parameter took part in the loss, or the optimizer holds other parameters.
        NonFiniteError: The loss or the gradient isn't finite and ``on_nonfinite`` is ``stop``; the
            weights are those of the step before unless ``.weights_changed``: updated in backward,
            they are spoiled by a gradient that isn't finite. ``.step``, ``.sample_ids``,
            ``.loss``, ``.grad_norm``.
        ValueError: The model updates ``in_backward``, with what that can't do.
    """
    _check_parameters(optimizer, model.parameters)
    in_backward = model.in_backward
    if in_backward is not None and (
        len(batches) > 1 or clip_grad_norm is not None or on_nonfinite != "stop"
    ):
        raise ValueError(
            "in_backward: takes one micro-batch, no clip_grad_norm and on_nonfinite='stop'"
        )
    positions = [loss_positions(batch.trained) for batch in batches]
    num_loss_tokens, num_tokens = world.sum_over_ranks(
        [float(sum(map(len, positions))), float(sum(batch.num_tokens for batch in batches))]
    )
    if not num_loss_tokens:
        raise DataError(f"step {step}: no token of its rows is trained", step=step)

    judge = partial(_judge, batches, counts=(int(num_tokens), int(num_loss_tokens)), world=world)
    begin_update = partial(_begin_update, optimizer, lr=lr, before_update=before_update)

    losses = []
    for number, (batch, at) in enumerate(zip(batches, positions, strict=True)):
        seed_everything(seed, step, number, world.rank)
        if model.set_gradient_sync is not None:
            model.set_gradient_sync(number == len(batches) - 1)
        loss = batch_loss(
            batch,
            at,
            decode=model.decode,
            head=model.head,
            device=world.device,
            chunk_loss=model.chunk_loss,
        )
        if in_backward is not None:
            # Backward changes the weights: all that can be known before is the loss.
            result = judge([loss.item()], 0.0)
            if result.skipped:
                raise _nonfinite_error(result, step=step, is_in_backward=True)
            begin_update()
        (loss / num_loss_tokens).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())

    if in_backward is not None:
        norm = _total_norm(in_backward.take_norms().values(), model.parameters)
    else:
        norm = _clip(model.parameters, clip_grad_norm)
    *sums, grad_norm = torch.stack([*losses, norm]).tolist()  # the step's one wait
    result = judge(sums, grad_norm)
    if not result.skipped and in_backward is None:
        begin_update()
        # Equal on every rank: replicas that round at random must round alike.
        seed_everything(seed, step, _UPDATE, 0)
        optimizer.step()
        if model.masters is not None:
            model.masters.publish()
    optimizer.zero_grad(set_to_none=True)
    if result.skipped and on_nonfinite == "stop":
        is_in_backward = in_backward is not None
        raise _nonfinite_error(
            result, step=step, is_in_backward=is_in_backward, weights_changed=is_in_backward
        )
    return result


def loss_positions(trained: Tensor) -> Tensor:
    """Where a trained token is predicted: the positions before them, in the flattened batch.

    Args:
        trained: ``[B, T]``, true where the model must produce the token at that place. A row's
            first token has nothing before it and can't be trained.

    Returns:
        ``[N]`` ascending indices into ``[B * T]``; the token to produce stands one later.
    """
    predicts_trained = torch.zeros_like(trained, dtype=torch.bool)
    predicts_trained[:, :-1] = trained[:, 1:]
    return predicts_trained.flatten().nonzero().squeeze(-1)


def batch_loss(
    batch: Batch,
    positions: Tensor,
    *,
    decode: Decode,
    head: nn.Module,
    device: torch.device,
    chunk_loss: ChunkLoss | None = None,
) -> Tensor:
    """Sum of the token losses of one micro-batch.

    Args:
        batch: The micro-batch.
        positions: What :func:`loss_positions` gives for it.
        decode: ``input_ids [B, T] -> hidden [B, T, D]``; takes ``position_ids [B, T]`` as well
            where rows are packed.
        head: ``hidden [N, D] -> logits [N, V]``.
        device: Where the model is.
        chunk_loss: Of :func:`sum_token_loss`; None: its own.

    Returns:
        A 0-dim fp32 tensor.
    """
    targets = to_device(batch.input_ids.flatten()[positions + 1], device)
    input_ids = to_device(batch.input_ids, device)
    # Only where rows hold several documents: without them a model may use what's fast for one.
    where = () if batch.position_ids is None else (batch.position_ids,)
    hidden_BTD = decode(input_ids, *where)
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, to_device(positions, device))
    return sum_token_loss(hidden_ND, targets, head=head, chunk_loss=chunk_loss)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a batch's tensor; on CUDA through pinned memory, so that kernels needn't end first."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def _check_parameters(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """A parameter that only one side knows would never be updated, or never be cleared."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in parameters.values()}
    if not trained or held != trained:
        raise ModelError(
            f"the optimizer holds {len(held)} parameters, {len(trained)} are trained, and "
            f"{len(held & trained)} are the same: they must be equal and not empty"
        )


def _begin_update(
    optimizer: torch.optim.Optimizer, *, lr: float, before_update: Callable[[], object] | None
) -> None:
    if before_update is not None:
        before_update()
    set_learning_rate(optimizer, lr)


def _clip(parameters: Mapping[str, nn.Parameter], clip_grad_norm: float | None) -> Tensor:
    """Clip the gradients in place; returns their L2 norm before that."""
    with_grad = [p for p in parameters.values() if p.grad is not None]
    gradients = [p.grad for p in with_grad if p.grad is not None]
    # fp32 whatever the gradients are: get_total_norm would round the norm of bf16 ones to 8 bits.
    norms = torch._foreach_norm(gradients, 2.0, torch.float32) if gradients else ()
    norm = _total_norm(norms, parameters)
    if clip_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_grad, clip_grad_norm, norm)
    return norm


def _total_norm(norms: Collection[Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """The L2 norm of the whole gradient from that of each of its tensors."""
    if not norms:
        raise ModelError(
            "no trainable parameter got a gradient: the loss doesn't depend on any of "
            f"{', '.join(list(parameters)[:3])}, ..."
        )
    norm = torch.linalg.vector_norm(torch.stack(list(norms)))
    # Of shards: each rank knows its part.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _judge(
    batches: Sequence[Batch],
    sums: list[float],
    grad_norm: float,
    *,
    counts: tuple[int, int],
    world: World,
) -> StepResult:
    """The step's figures, to be skipped if they aren't finite. Collective on several ranks."""
    num_tokens, num_loss_tokens = counts
    # Decided on what every rank knows: one that updates alone would wait for ever.
    total, norms = world.sum_over_ranks([sum(sums), grad_norm])
    is_finite = math.isfinite(total) and math.isfinite(norms)
    return StepResult(
        loss=total / num_loss_tokens,
        grad_norm=grad_norm,
        num_loss_tokens=num_loss_tokens,
        num_tokens=num_tokens,
        skipped=not is_finite,
        nonfinite_ids=() if is_finite else _nonfinite_ids(batches, sums, world=world),
    )


def _nonfinite_ids(batches: Sequence[Batch], sums: list[float], *, world: World) -> tuple[str, ...]:
    """Samples of the micro-batches whose loss isn't finite, on any rank; of all if each one is."""
    found: list[list[str]] = [[], []]  # of broken micro-batches, of the others
    for batch, loss in zip(batches, sums, strict=True):
        found[math.isfinite(loss)].extend(batch.sample_ids)
    by_rank = world.gather(found)
    broken = [sample_id for theirs, _ in by_rank for sample_id in theirs]
    return tuple(broken or [sample_id for _, theirs in by_rank for sample_id in theirs])


def _nonfinite_error(
    result: StepResult, *, step: int, is_in_backward: bool, weights_changed: bool = False
) -> NonFiniteError:
    ids = result.nonfinite_ids
    shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    figures = f"loss {result.loss}, gradient norm {result.grad_norm}"
    what_now, way_out = "No update was made", "set on_nonfinite=skip"
    if is_in_backward:  # which can't skip
        way_out = "leave optimizer_in_backward out"
        if weights_changed:
            what_now = "The update was made before that was known, so this step isn't saved"
        else:
            figures = f"loss {result.loss}"
    return NonFiniteError(
        f"step {step}: {figures}. {what_now}. Samples: {shown}. Look at these rows, lower "
        f"optimizer.lr, or {way_out}. Weights that had diverged before stay so: then go on from "
        "an earlier step (resume_from_checkpoint=<its folder> and --start-over).",
        step=step,
        sample_ids=ids,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_changed=weights_changed,
    )
