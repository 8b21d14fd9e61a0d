"""A run up to its first step, with nothing written."""

from __future__ import annotations

import logging
from pathlib import Path

from legato.checkpoint.foresight import Foresight, foresee
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.space import checkpoint_bytes, refuse_full_disk
from legato.config.rules import is_distributed
from legato.config.schema import RunConfig
from legato.parallel.world import World
from legato.recipes.beginning import begin_run, has_steps_left
from legato.recipes.data import RunData
from legato.recipes.facts import introduce, start_facts
from legato.recipes.memory import check_memory, estimate_memory, free_memory
from legato.recipes.output import refuse_others_files
from legato.recipes.parts import build_parts
from legato.recipes.plan import plan_total_steps
from legato.train.state import TrainState

logger = logging.getLogger(__name__)


def preflight(config: RunConfig, *, config_name: str) -> None:
    """Do everything that a run does before step 1, and write nothing.

    What the run would say is said: which step it goes on from, what changed since, the start block.

    Args:
        config: The run.
        config_name: What it is called.

    Raises:
        LegatoError: What would stand in the run's way.
    """
    with World.join(config.device, distributed=is_distributed(config)) as world:
        refuse_others_files(Path(config.output_dir), config_name)
        ahead = foresee(
            config.output_dir, resume=config.resume_from_checkpoint, verify=config.verify_on_load
        )
        with begin_run(config, ahead, world=world, accept_changes=False) as (state, data):
            _rehearse(config, ahead, state, data, config_name=config_name, world=world)


def _rehearse(
    config: RunConfig,
    ahead: Foresight,
    state: TrainState,
    data: RunData,
    *,
    config_name: str,
    world: World,
) -> None:
    total_steps = plan_total_steps(config, data.loader)
    if not has_steps_left(config, ahead, state, data.loader, total_steps=total_steps):
        return
    # Before the model is loaded: a machine that runs out of memory says nothing of use.
    needs = estimate_memory(config, world=world)
    free = free_memory(world.device, num_sharing=world.local_world_size)
    world.on_every_rank(lambda: check_memory(needs, free, cpu_offload=config.cpu_offload))
    parts = build_parts(config, data, world=world, state=state)
    ahead.restore(parts.saved, allow_missing=config.allow_missing)
    facts = start_facts(
        config,
        config_name=config_name,
        world=world,
        data=data,
        parts=parts,
        total_steps=total_steps,
        checkpoint_bytes=checkpoint_bytes(
            sort_parts(parts.saved), with_state=not config.save_only_model
        ),
        source=ahead.source,
    )
    introduce(facts, data)
    refuse_full_disk(
        facts.output_dir, each_bytes=facts.checkpoint_bytes, free_bytes=facts.free_bytes
    )
