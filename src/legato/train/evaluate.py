"""Loss on held-out data: what a step computes, without gradients."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from legato.data.loader import Loader
from legato.errors import DataError
from legato.models.modes import evaluation_mode
from legato.train.loss import ChunkLoss
from legato.train.step import Decode, SumOverRanks, batch_loss, loss_positions


def evaluate(
    loader: Loader,
    *,
    model: nn.Module,
    decode: Decode,
    head: nn.Module,
    device: torch.device,
    chunk_loss: ChunkLoss | None = None,
    should_stop: Callable[[], bool] | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> dict[str, float | int] | None:
    """Mean loss per trained token over the first epoch of ``loader``. Collective on several ranks.

    Rows come in the loader's order (build it with ``shuffle=False``); batch size doesn't change
    the mean. The model is in evaluation mode meanwhile, and every module's mode and torch's random
    state are as before afterwards.

    Args:
        loader: The evaluation rows.
        model: The module whose mode is switched.
        decode: ``input_ids [B, T] -> hidden [B, T, D]``.
        head: ``hidden [N, D] -> logits [N, V]``.
        device: Where the model is.
        chunk_loss: Loss of a chunk of logits, as in training.
        should_stop: Asked between batches; true ends the evaluation early. The
            same on every rank.
        sum_over_ranks: Adds up numbers over all ranks; None: there is one rank.

    Returns:
        ``eval_loss``, ``num_loss_tokens`` and ``eval_seconds``; None when it was ended early: a
        mean over some of the rows isn't comparable with one over all.

    Raises:
        DataError: No token of the evaluation data is trained.
    """
    began = time.perf_counter()
    loss_sum, num_loss_tokens = 0.0, 0.0
    with evaluation_mode(model, device), torch.no_grad():
        for step in range(1, loader.steps_per_epoch + 1):
            for batch in loader.micro_batches(step):
                if should_stop is not None and should_stop():
                    return None
                positions = loss_positions(batch.trained)
                loss = batch_loss(
                    batch,
                    positions,
                    decode=decode,
                    head=head,
                    device=device,
                    chunk_loss=chunk_loss,
                )
                loss_sum += loss.item()
                num_loss_tokens += len(positions)
    if sum_over_ranks is not None:
        loss_sum, num_loss_tokens = sum_over_ranks([loss_sum, num_loss_tokens])
    if not num_loss_tokens:
        raise DataError("evaluation: no token of its rows is trained")
    return {
        "eval_loss": loss_sum / num_loss_tokens,
        "num_loss_tokens": int(num_loss_tokens),
        "eval_seconds": time.perf_counter() - began,
    }
