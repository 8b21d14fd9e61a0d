"""The parts of a run, each built from the config: data, model, optimizer, policies."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from legato.checkpoint import (
    EpochEnd,
    EverySeconds,
    EverySteps,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    LogSchedule,
    ModelPart,
    NewBest,
    OnSignal,
    OptimizerPart,
)
from legato.checkpoint.policy import KeepPolicy, SavePolicy
from legato.config.schema import DatasetConfig, RunConfig, Schedule
from legato.data.build import build_data, split_validation
from legato.data.chat import ChatFormatter
from legato.data.formats import DatasetSpec
from legato.data.loader import Loader
from legato.data.samples import TokenizedData
from legato.errors import ConfigError, DataError
from legato.models.compile import compile_blocks
from legato.models.load import find_model, load_model, load_tokenizer, model_facts, split_head
from legato.models.names import named_weights
from legato.models.wrap import apply_activation_checkpointing
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.methods import METHODS, read_folder
from legato.train.evaluate import evaluate
from legato.train.masters import Masters
from legato.train.state import TrainState
from legato.train.trainer import Evaluate, TrainableModel, WatchedMetric

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Compiled blocks are one graph for each row length: torch is slow to make one, and its limit is 32.
MAX_COMPILED_LENGTHS = 6


@dataclass(frozen=True)
class RunData:
    """What a run reads: its rows, and how they were made.

    Attributes:
        train: Rows to train on.
        loader: Deals them to steps.
        eval_loader: Deals the evaluation's rows; None: there are none.
        tokenizer: Theirs.
        chat_template: The template that made them.
        max_seq_len: Longest row that was let in, in tokens.
    """

    train: TokenizedData
    loader: Loader
    eval_loader: Loader | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    max_seq_len: int


@dataclass(frozen=True)
class RunParts:
    """What trains, and what a checkpoint holds of it.

    Attributes:
        model: The model as the loop sees it.
        optimizer: Over the model's parameters.
        saved: The checkpoint's parts by name.
        evaluate: Evaluation loss; None without evaluation data.
        num_parameters: All parameters, tied ones once.
        num_trainable_parameters: Those that train.
    """

    model: TrainableModel
    optimizer: torch.optim.Optimizer
    saved: Mapping[str, Any]
    evaluate: Evaluate | None
    num_parameters: int
    num_trainable_parameters: int


def build_run_data(
    config: RunConfig, *, start_date: date, world: World, global_batch_size: int
) -> RunData:
    """Read, tokenize and split the data.

    Args:
        config: The run.
        start_date: The day that chat templates write, of the run's first start.
        world: Who takes which rows.
        global_batch_size: Rows of one optimizer step over all ranks.

    Returns:
        The data, ready to be dealt.

    Raises:
        LegatoError: Data, template or tokenizer that can't be used; fewer rows than ranks.
    """
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    formatter = ChatFormatter(
        tokenizer,
        template=config.chat_template,
        template_kwargs=config.chat_template_kwargs,
        train_on_inputs=config.train_on_inputs,
        roles_to_train=config.roles_to_train,
        special_tokens_in_text=config.special_tokens_in_text,
        eos_ids=stop_ids(config.model),
        start_date=start_date,
    )
    max_seq_len = longest_row(config)
    read = partial(
        build_data,
        formatter=formatter,
        max_seq_len=max_seq_len,
        excess_length=config.excess_length,
        on_bad_row=config.on_bad_row,
    )
    train, held_out = read([dataset_spec(each) for each in config.datasets]), None
    if config.val_set_size:
        train, held_out = split_validation(
            train, val_set_size=config.val_set_size, seed=config.seed
        )
    elif config.eval_datasets:
        held_out = read([dataset_spec(each) for each in config.eval_datasets])
    if len(train) < world.world_size:
        raise DataError(
            f"{world.world_size} processes, but only {len(train)} rows to train on: some would "
            f"never get one. Start at most {len(train)} processes."
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    buckets = compiled_lengths(train, held_out) if config.compile else None
    deal = partial(
        Loader,
        batch_size=config.batch_size,
        seed=config.seed,
        pad_id=pad_id,
        rank=world.rank,
        world_size=world.world_size,
        length_buckets=buckets,
        fill_rows=bool(config.compile),
    )
    return RunData(
        train=train,
        loader=deal(
            train,
            global_batch_size=global_batch_size,
            max_steps_per_epoch=config.max_steps_per_epoch,
        ),
        eval_loader=None
        if held_out is None
        else deal(held_out, global_batch_size=config.batch_size * world.world_size, shuffle=False),
        tokenizer=tokenizer,
        chat_template=formatter.chat_template,
        max_seq_len=max_seq_len,
    )


def build_parts(config: RunConfig, data: RunData, *, world: World, state: TrainState) -> RunParts:
    """Load the model, prepare it by the config's method, and build its optimizer.

    Args:
        config: The run.
        data: Its data; the tokenizer goes into each step folder.
        world: Where it computes.
        state: The run's counters, saved with each step.

    Returns:
        The parts, the weights still those of the base.

    Raises:
        LegatoError: A model that can't be used.
    """
    dtype = DTYPES[config.dtype]
    base = load_model(
        config.model,
        dtype=dtype,
        device=world.device,
        attention=config.attention,
        trust_remote_code=config.trust_remote_code,
    )
    trained = METHODS[config.recipe](base, config)
    module = trained.module
    decode, head = split_head(module)
    if every := int(config.enable_activation_checkpointing):
        apply_activation_checkpointing(module, every=every)
    if config.compile:
        options = {} if config.compile is True else config.compile.model_dump(exclude={"scope"})
        compile_blocks(module, **options)

    trainable = named_weights(module, trainable_only=True)
    parameters = {n: t for n, t in trainable.items() if isinstance(t, nn.Parameter)}
    keep_masters = config.master_weights == "fp32"
    masters = Masters(parameters) if keep_masters else None
    held = masters.tensors if masters is not None else parameters
    optimizer = build_optimizer(
        held,
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        betas=config.optimizer.betas,
        stochastic_rounding=dtype != torch.float32 and not keep_masters,
    )
    saved = {
        "model": ModelPart(
            tensors=named_weights(module, trainable_only=trained.kind == "adapter"),
            kind=trained.kind,
            keys=trained.keys,
            file_dtype=dtype,
            masters=masters.copies if masters is not None else {},
            files={**trained.files, **tokenizer_files(data.tokenizer, data.chat_template)},
        ),
        "optimizer": OptimizerPart(optimizer, names=held),
        "trainer": state,
    }
    return RunParts(
        model=TrainableModel(module, decode, head, held, masters),
        optimizer=optimizer,
        saved=saved,
        evaluate=_evaluation(data.eval_loader, module, decode, head, world),
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_trainable_parameters=sum(p.numel() for p in parameters.values()),
    )


def _evaluation(
    loader: Loader | None, module: Any, decode: Any, head: Any, world: World
) -> Evaluate | None:
    if loader is None:
        return None
    return lambda should_stop: evaluate(
        loader,
        model=module,
        decode=decode,
        head=head,
        device=world.device,
        should_stop=should_stop,
        sum_over_ranks=world.sum_over_ranks,
    )


def dataset_spec(config: DatasetConfig) -> DatasetSpec:
    """A config's data set as the data room takes it."""
    return DatasetSpec(
        path=config.path,
        type=config.type,
        columns=config.columns,
        split=config.split,
        weight=config.weight,
    )


def longest_row(config: RunConfig) -> int:
    """``max_seq_len``; where it wasn't set, at most what the model was made for.

    Args:
        config: The run.

    Returns:
        Tokens.

    Raises:
        ConfigError: It was set to more than the model takes.
    """
    facts = model_facts(config.model)
    limit = facts.max_positions if facts is not None else None
    if limit is None or config.max_seq_len <= limit:
        return config.max_seq_len
    if "max_seq_len" not in config.model_fields_set:
        return limit
    raise ConfigError(
        f"max_seq_len: {config.max_seq_len} tokens, but {config.model} was made for {limit}. "
        f"Set max_seq_len={limit} or less."
    )


def stop_ids(model: str) -> tuple[int, ...]:
    """Ids that end a generation by the model's generation_config.json; empty where it has none."""
    from transformers import GenerationConfig

    folder = find_model(model).path
    if not (folder / "generation_config.json").is_file():
        return ()
    ids = GenerationConfig.from_pretrained(folder).eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> dict[str, bytes]:
    """The tokenizer's files with the template that training used, whatever it came with."""
    own = tokenizer.chat_template
    tokenizer.chat_template = chat_template
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return read_folder(folder)
    finally:
        tokenizer.chat_template = own


def compiled_lengths(*data: TokenizedData | None) -> list[int]:
    """At most six row lengths that every row fits into, close to what the data holds."""
    lengths = np.concatenate([each.lengths for each in data if each is not None])
    shares = np.linspace(0, 1, MAX_COMPILED_LENGTHS + 1)[1:]
    # Multiples of 64: what kernels like, and few near-equal ones.
    return sorted({-(-int(n) // 64) * 64 for n in np.quantile(lengths, shares, method="higher")})


def step_set(value: int | Schedule) -> EverySteps | LogSchedule:
    """An interval of the config as a set of steps."""
    if isinstance(value, int):
        return EverySteps(value)
    return LogSchedule(value.first, factor=value.factor, max_interval=value.max_interval)


def save_policy(config: RunConfig) -> SavePolicy:
    """When the config wants checkpoints."""
    policy: SavePolicy = OnSignal()
    if config.save_every_n_train_steps is not None:
        policy = step_set(config.save_every_n_train_steps) | policy
    if config.save_every_n_seconds is not None:
        policy |= EverySeconds(config.save_every_n_seconds)
    if config.save_at_epoch_end:
        policy |= EpochEnd()
    if config.keep_best_n_checkpoints is not None:
        policy |= NewBest()
    return policy


def keep_policy(config: RunConfig) -> KeepPolicy:
    """Which checkpoints the config wants kept."""
    policies: list[KeepPolicy] = []
    if config.keep_last_n_checkpoints is not None:
        policies.append(KeepLast(config.keep_last_n_checkpoints))
    if config.keep_best_n_checkpoints is not None:
        watched = watched_metric(config)
        policies.append(
            KeepBest(config.keep_best_n_checkpoints, watched.name, watched.greater_is_better)
        )
    if config.keep_every_n_steps is not None:
        policies.append(KeepEvery(config.keep_every_n_steps))
    if not policies:
        return KeepAll()
    policy, *others = policies
    for other in others:
        policy |= other
    return policy


def watched_metric(config: RunConfig) -> WatchedMetric:
    """What ``best`` means: eval_loss where there is evaluation data, else train_loss."""
    has_evaluation = bool(config.eval_datasets) or config.val_set_size > 0
    name = config.metric_for_best_model or ("eval_loss" if has_evaluation else "train_loss")
    return WatchedMetric(name=name, greater_is_better=config.greater_is_better)
