"""Learning rate: a pure function of the step, so nothing of it is stored in a checkpoint.

Convention: the update of step ``s``, counted from 1, uses the rate that transformers' schedulers of
the same name have after ``s - 1`` updates, so curves can be laid over a Trainer's. With warm-up the
first step's rate is therefore 0 and step ``num_warmup_steps + 1`` is the first at ``peak``; without
it, step 1 is at ``peak``.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, name: str = "cosine", peak: float, num_warmup_steps: int = 0, total_steps: int
) -> float:
    """The rate of one optimizer step.

    Args:
        step: Optimizer step, from 1.
        name: What follows the linear warm-up: ``cosine`` (half a wave down to 0), ``linear`` (down
            to 0) or ``constant``.
        peak: Rate at the end of the warm-up.
        num_warmup_steps: Steps of linear warm-up, from 0.
        total_steps: Steps over which the rate falls, warm-up included; 0 from then on.

    Returns:
        The rate, between 0 and ``peak``.

    Raises:
        ValueError: ``step`` is below 1, or there is no schedule of that name.

    Example:
        >>> [learning_rate(s, peak=1.0, num_warmup_steps=2, total_steps=6) for s in (1, 2, 3, 5)]
        [0.0, 0.5, 1.0, 0.5]
    """
    if step < 1:
        raise ValueError(f"step: expected 1 or more, found {step}")
    num_done = step - 1
    if num_done < num_warmup_steps:
        return peak * (num_done / num_warmup_steps)
    if name == "constant":
        return peak
    progress = min(1.0, (num_done - num_warmup_steps) / max(1, total_steps - num_warmup_steps))
    if name == "linear":
        return peak * (1.0 - progress)
    if name == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    raise ValueError(f"lr_scheduler.name: expected cosine, linear or constant, found {name!r}")
