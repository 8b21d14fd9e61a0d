"""Fine-tuning written out, to copy and change.

    legato run ./my.py --config my.yaml [key=value ...]

It trains the weights that ``legato run --config my.yaml`` trains on one device, full or LoRA by the
config's recipe, and reads the same checkpoints: stop either one, and the other goes on.

Left out: evaluation, answers and ``best`` (a config that asks for one of the keys in ``LEFT_OUT``
is refused); metrics.jsonl, the bar and the start block; the saves that a signal, the file ``SAVE``
or a loss that isn't finite asks for: such an end leaves the newest checkpoint as it is.
"""

import logging
import sys

from legato import RunConfig, load_config
from legato.errors import ConfigError
from legato.parallel.world import World
from legato.recipes.beginning import begin_run
from legato.recipes.parts import build_parts
from legato.recipes.plan import plan_last_step, plan_total_steps, rate_of
from legato.recipes.training import open_checkpointer
from legato.train.determinism import repeated_bits
from legato.train.step import train_step

logger = logging.getLogger("legato.script")

LEFT_OUT = (
    "eval_datasets",
    "val_set_size",
    "run_val_every_n_steps",
    "generate_samples",
    "keep_best_n_checkpoints",
    "log_every_n_steps",
    "loggers",
    "num_workers",
)
"""Keys that this loop doesn't follow: take out of the list what you build in."""


def main(config_file: str, *overrides: str) -> None:
    """Train as the config says; the same command again goes on where it was stopped."""
    loaded = load_config(config_file, overrides)
    refuse_left_out(loaded.config)
    config, world = loaded.config, World.single(loaded.config.device)
    with (
        repeated_bits(config.deterministic),
        open_checkpointer(
            config, config_name=loaded.name, config_yaml=loaded.yaml, start_over=False, world=world
        ) as checkpointer,
        begin_run(config, checkpointer, world=world, accept_changes=False) as (state, data),
    ):
        parts = build_parts(config, data, world=world, state=state)
        checkpointer.restore(parts.saved)

        values = config.model_dump(mode="json")
        total_steps = plan_total_steps(config, data.loader)
        state.facts |= {
            "config": values,
            "total_steps": total_steps,
            "global_batch_size": data.loader.global_batch_size,
            "inputs": data.inputs,
        }
        learning_rate = rate_of(values, total_steps=total_steps)
        last_step = plan_last_step(config, total_steps=total_steps)
        for step in range(state.step + 1, last_step + 1):
            fetched = data.loader.fetch(step)
            result = train_step(
                fetched.batches,
                model=parts.model,
                optimizer=parts.optimizer,
                world=world,
                lr=learning_rate(step),
                step=step,
                seed=config.seed,
                clip_grad_norm=config.clip_grad_norm,
                on_nonfinite=config.on_nonfinite,
                before_update=checkpointer.wait_staged,
            )
            state.advance(
                rows=fetched.num_rows,
                tokens=result.num_tokens,
                loss=0.0 if result.skipped else result.loss,
                loss_tokens=0 if result.skipped else result.num_loss_tokens,
                data_place=fetched.data_place,
            )
            logger.info("step %d/%d  loss %.4f", step, total_steps, result.loss)
            if reason := checkpointer.due(step, epoch_end=fetched.ends_epoch):
                checkpointer.save(parts.saved, step=step, reason=reason)
            for save in checkpointer.poll():  # tries a failed save again, too
                logger.info("step %d: %s", save.step, save.path or save.error)
        checkpointer.save(parts.saved, step=state.step, reason="final")


def refuse_left_out(config: RunConfig) -> None:
    """Raise :class:`ConfigError` where the config asks for what this loop doesn't do."""
    keys = RunConfig.model_fields
    if asked := [key for key in LEFT_OUT if getattr(config, key) != keys[key].default]:
        raise ConfigError([f"{key}: this script's loop doesn't follow it" for key in asked])


if __name__ == "__main__":
    main(*[word for word in sys.argv[1:] if word != "--config"])
