"""What a run knows of itself before step 1, for the start block and the checks."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from rich.console import Console

from legato.checkpoint import Committed
from legato.config.schema import RunConfig
from legato.data.show import marked_sample
from legato.parallel.world import World
from legato.recipes.advice import advise
from legato.recipes.data import RunData
from legato.recipes.parts import RunParts
from legato.recipes.policies import metric_of_best, saves_new_best
from legato.report.start import StartFacts, start_block

logger = logging.getLogger(__name__)


def start_facts(
    config: RunConfig,
    *,
    config_name: str,
    world: World,
    data: RunData,
    parts: RunParts,
    total_steps: int,
    checkpoint_bytes: int,
    source: Committed | None,
) -> StartFacts:
    """Collective: gather what the start block shows.

    Args:
        config: The run.
        config_name: What it is called.
        world: The ranks.
        data: What is trained on.
        parts: What is trained.
        total_steps: Last step of the run.
        checkpoint_bytes: Size of one checkpoint.
        source: The step that the run goes on from; None: a fresh start.

    Returns:
        The facts, the same on every rank but for what this host has.
    """
    reads = [num_bytes for num_bytes in world.gather(parts.bytes_read) if num_bytes is not None]
    return StartFacts(
        config_name=config_name,
        recipe=config.recipe,
        model=config.model,
        num_parameters=parts.num_parameters,
        num_trainable_parameters=parts.num_trainable_parameters,
        least_bytes_read=min(reads, default=None),
        most_bytes_read=max(reads, default=None),
        quantize_base=config.quantize_base,
        num_quantized_weights=parts.quantized.num_weights if parts.quantized else 0,
        quantized_bytes=parts.quantized.num_bytes if parts.quantized else 0,
        unquantized_bytes=parts.quantized.full_bytes if parts.quantized else 0,
        num_whole_weights=parts.quantized.num_whole if parts.quantized else 0,
        dtype=config.dtype,
        master_weights=config.master_weights,
        device=world.device.type,
        device_detail=device_detail(world.device),
        compile=compile_scope(config),
        world_size=world.world_size,
        num_samples=None if config.streaming else len(data.train),
        num_tokens=None if config.streaming else data.train.num_tokens,
        num_trained_tokens=None if config.streaming else data.train.num_loss_tokens,
        num_packed_rows=len(data.packed) if data.packed is not None else None,
        packing_efficiency=data.packed.efficiency if data.packed is not None else None,
        epochs=None if config.streaming else config.epochs,
        steps_per_epoch=data.loader.steps_per_epoch,
        total_steps=total_steps,
        global_batch_size=data.loader.global_batch_size,
        batch_size=config.batch_size,
        gradient_accumulation_steps=data.loader.micro_batches_per_step,
        save_when=save_when(config),
        checkpoint_bytes=checkpoint_bytes,
        output_dir=config.output_dir,
        free_bytes=free_bytes(Path(config.output_dir)),
        resumes_from=source.path if source is not None else None,
        resume_step=source.step if source is not None else 0,
        advice=tuple(advise(config, module=parts.model.module, total_steps=total_steps)),
    )


def save_when(config: RunConfig) -> str:
    """When the config saves, and how it tells the ones to keep as the best, in words."""
    when, words = config.save_every_n_train_steps, []
    if when is not None:
        rare = "from step {} on, ever more rarely"
        words.append(f"every {when} steps" if isinstance(when, int) else rare.format(when.first))
    if config.save_every_n_seconds is not None:
        words.append(f"every {config.save_every_n_seconds:g} s")
    if config.save_at_epoch_end:
        words.append("at each end of an epoch")
    metric = metric_of_best(config)
    if saves_new_best(config):
        words.append(f"at each new best {metric}")
    judges = config.keep_best_n_checkpoints is not None and metric == "train_loss"
    return ", ".join(words) + (f" (best by {metric})" if words and judges else "")


def device_detail(device: torch.device) -> str:
    """A GPU's name; on a CPU the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads" if device.type == "cpu" else ""


def compile_scope(config: RunConfig) -> str:
    """``block`` or ``model`` where the config compiles; else ``off``."""
    if not config.compile:
        return "off"
    return "block" if config.compile is True else config.compile.scope


def free_bytes(folder: Path) -> int | None:
    """Free space where ``folder`` is or will be."""
    there = next((p for p in (folder, *folder.absolute().parents) if p.exists()), None)
    return None if there is None else shutil.disk_usage(there).free


def introduce(facts: StartFacts, data: RunData) -> None:
    """Say what is about to be trained, and show one row as the model will see it.

    Args:
        facts: For the start block; their advice comes last, as warnings.
        data: What became of the rows, and the first one.
    """
    for line in data.train.report.lines():
        logger.info("%s", line)
    if data.held_out is not None:
        for line in data.held_out.report.lines_beyond(data.train.report):
            logger.info("evaluation: %s", line)
    if data.eval_loader is not None:
        logger.info("evaluation: %d rows held out", data.eval_loader.rows_per_epoch)
    logger.info("%s", start_block(facts))
    sample = data.loader.first_document()
    if sample is not None:
        logger.info("one sample (%s), what is trained in [[ ]]:", sample.sample_id)
        # Not wrapped: a line break that isn't in the sample would look like one of its own.
        Console(stderr=True, soft_wrap=True).print(
            marked_sample(sample, data.tokenizer, brackets=True)
        )
    for line in facts.advice:
        logger.warning("%s", line)
