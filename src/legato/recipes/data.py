"""The data of a run: read by the config, split, and dealt to steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from legato.config.schema import DatasetConfig, RunConfig
from legato.data.build import split_validation
from legato.data.cache import build_cached, cache_folder
from legato.data.chat import ChatFormatter
from legato.data.formats import DatasetSpec
from legato.data.loader import Loader
from legato.data.order import EpochOrder
from legato.data.packing import PackedData, pack_samples
from legato.data.samples import Rows, Sample, TokenizedData
from legato.errors import ConfigError, DataError
from legato.models.load import find_model, load_tokenizer, model_facts
from legato.parallel.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Compiled blocks are one graph for each row length: torch is slow to make one, and its limit is 32.
MAX_COMPILED_LENGTHS = 6


@dataclass(frozen=True)
class Samples:
    """What the config's data sets hold, tokenized.

    Attributes:
        train: Samples to train on.
        held_out: Samples to evaluate on; None: there are none.
        tokenizer: Theirs.
        chat_template: The template that made them.
        max_seq_len: Longest sample that was let in, in tokens.
    """

    train: TokenizedData
    held_out: TokenizedData | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    max_seq_len: int


@dataclass(frozen=True)
class RunData:
    """What a run reads: its samples, how they were made, and who deals them.

    Attributes:
        train: Samples to train on.
        held_out: Samples to evaluate on; None: there are none.
        loader: Deals them to steps.
        eval_loader: Deals the evaluation's rows; None: there are none.
        tokenizer: Theirs.
        chat_template: The template that made them.
        max_seq_len: Longest sample that was let in, in tokens.
        packed: The rows that the training samples are packed into; None: each is a row.
    """

    train: TokenizedData
    held_out: TokenizedData | None
    loader: Loader
    eval_loader: Loader | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    max_seq_len: int
    packed: PackedData | None = None


def read_samples(config: RunConfig, *, start_date: date) -> Samples:
    """Read, tokenize and split the config's data sets.

    Args:
        config: The run.
        start_date: The day that chat templates write, of the run's first start.

    Returns:
        The samples.

    Raises:
        LegatoError: Data, template or tokenizer that can't be used.
    """
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    formatter = ChatFormatter(
        tokenizer,
        template=config.chat_template,
        template_kwargs=config.chat_template_kwargs,
        train_on_inputs=config.train_on_inputs,
        roles_to_train=config.roles_to_train,
        turns_to_train=config.turns_to_train,
        special_tokens_in_text=config.special_tokens_in_text,
        eos_ids=stop_ids(config.model),
        start_date=start_date,
    )
    max_seq_len = longest_row(config)
    read = partial(
        build_cached,
        folder=cache_folder(os.environ),
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
    return Samples(train, held_out, tokenizer, formatter.chat_template, max_seq_len)


def first_samples(data: TokenizedData, *, count: int, seed: int) -> list[Sample]:
    """The samples that a run comes to first, each as a row of its own."""
    return [data[int(i)] for i in EpochOrder(data, seed=seed, shuffle=True).epoch(0)[:count]]


def build_run_data(
    config: RunConfig, *, start_date: date, world: World, global_batch_size: int
) -> RunData:
    """Read the data and make the loaders that deal it.

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
    samples = read_samples(config, start_date=start_date)
    train: Rows = samples.train
    held_out: Rows | None = samples.held_out
    packed: PackedData | None = None
    if config.packing:
        pack = partial(pack_samples, max_seq_len=samples.max_seq_len, seed=config.seed)
        train = packed = pack(samples.train)
        held_out = None if samples.held_out is None else pack(samples.held_out)
    if len(train) < world.world_size:
        raise DataError(
            f"{world.world_size} processes, but only {len(train)} rows to train on: some would "
            f"never get one. Start at most {len(train)} processes."
        )
    buckets = None
    if config.compile:
        buckets = [samples.max_seq_len] if packed else compiled_lengths(train, held_out)
    tokenizer = samples.tokenizer
    deal = partial(
        Loader,
        batch_size=config.batch_size,
        seed=config.seed,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        rank=world.rank,
        world_size=world.world_size,
        length_buckets=buckets,
        fill_rows=bool(config.compile),
    )
    return RunData(
        train=samples.train,
        held_out=samples.held_out,
        loader=deal(
            train,
            global_batch_size=global_batch_size,
            max_steps_per_epoch=config.max_steps_per_epoch,
        ),
        eval_loader=None
        if held_out is None
        else deal(held_out, global_batch_size=config.batch_size * world.world_size, shuffle=False),
        tokenizer=tokenizer,
        chat_template=samples.chat_template,
        max_seq_len=samples.max_seq_len,
        packed=packed,
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


def compiled_lengths(*data: Rows | None) -> list[int]:
    """At most six row lengths that every row fits into, close to what the data holds."""
    lengths = np.concatenate([each.lengths for each in data if each is not None])
    shares = np.linspace(0, 1, MAX_COMPILED_LENGTHS + 1)[1:]
    # Multiples of 64: what kernels like, and few near-equal ones.
    return sorted({-(-int(n) // 64) * 64 for n in np.quantile(lengths, shares, method="higher")})
