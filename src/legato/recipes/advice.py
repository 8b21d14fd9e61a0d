"""What is allowed and yet unlikely to be meant: told once, before step 1."""

from __future__ import annotations

from torch import nn

from legato.config.rules import is_lora
from legato.config.schema import RunConfig
from legato.models.lora import smallest_layer
from legato.recipes.plan import rate_of
from legato.words import counted


def advise(config: RunConfig, *, module: nn.Module, total_steps: int) -> list[str]:
    """Warnings about a run that goes ahead all the same.

    Args:
        config: The run.
        module: Its model, with its adapter if it trains one.
        total_steps: The run's last step.

    Returns:
        One sentence or two for each.
    """
    told = []
    if total_steps == 0:
        keys = [key for key in ("max_steps", "max_steps_per_epoch") if getattr(config, key) == 0]
        told.append(
            f"{' and '.join(keys)}: 0, so that nothing is trained: the model is written as it "
            "begins, as step_0. Set at least 1 to train."
        )
    warmup = config.lr_scheduler.num_warmup_steps
    if 0 < total_steps <= warmup:
        highest = rate_of(config.model_dump(mode="json"), total_steps=total_steps)(total_steps)
        told.append(
            f"lr_scheduler.num_warmup_steps: the warm-up of {warmup:,} steps isn't over when the "
            f"run ends, after {counted(total_steps, 'step')}: the highest learning rate will be "
            f"{highest:.3g}, not {config.optimizer.lr:.3g}. Set fewer, such as {total_steps // 10}."
        )
    if is_lora(config) and (found := smallest_layer(module)) and config.lora_rank > found[1]:
        name, width = found
        told.append(
            f"lora_rank: {config.lora_rank:,} is more than the {width:,} features of {name}: its "
            f"update can't have a higher rank than {width:,}, so that further parameters only cost "
            "memory. Set a smaller rank, or train all weights."
        )
    return told
