"""Loss on held-out data: what a step computes, without gradients."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from legato.data.loader import Loader
from legato.errors import DataError
from legato.models.modes import evaluation_mode
from legato.parallel.world import World
from legato.train.model import TrainableModel
from legato.train.step import batch_loss, loss_positions


def evaluate(
    loader: Loader,
    *,
    model: TrainableModel,
    world: World,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, float | int] | None:
    """Mean loss per trained token over the first epoch of ``loader``. Collective on several ranks.

    Rows come in the loader's order (build it with ``shuffle=False``); batch size doesn't change
    the mean. The model is in evaluation mode meanwhile, and every module's mode and torch's random
    state are as before afterwards.

    Args:
        loader: The evaluation rows.
        model: What is evaluated.
        world: The ranks, and where this one computes.
        should_stop: Asked between batches; true ends the evaluation early. The same on every rank.

    Returns:
        ``eval_loss``, ``num_loss_tokens`` and ``eval_seconds``; None when it was ended early: a
        mean over some of the rows isn't comparable with one over all.

    Raises:
        DataError: No token of the evaluation data is trained.
    """
    began = time.perf_counter()
    loss_sum, num_loss_tokens = 0.0, 0.0
    with evaluation_mode(model.module, world.device), torch.no_grad():
        for step in range(1, loader.steps_per_epoch + 1):
            for batch in loader.micro_batches(step):
                if should_stop is not None and should_stop():
                    return None
                positions = loss_positions(batch.trained)
                loss = batch_loss(
                    batch,
                    positions,
                    decode=model.decode,
                    head=model.head,
                    device=world.device,
                    chunk_loss=model.chunk_loss,
                )
                loss_sum += loss.item()
                num_loss_tokens += len(positions)
    loss_sum, num_loss_tokens = world.sum_over_ranks([loss_sum, num_loss_tokens])
    if not num_loss_tokens:
        raise DataError("evaluation: no token of its rows is trained")
    return {
        "eval_loss": loss_sum / num_loss_tokens,
        "num_loss_tokens": int(num_loss_tokens),
        "eval_seconds": time.perf_counter() - began,
    }
