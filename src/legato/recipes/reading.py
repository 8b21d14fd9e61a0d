"""How the config's rows become samples, read before training or as a stream."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from legato.config.formats import unread_keys
from legato.config.schema import DatasetConfig, RunConfig
from legato.data.build import split_validation
from legato.data.cache import build_cached, cache_folder
from legato.data.chat import ChatFormatter
from legato.data.formats import DatasetSpec
from legato.data.samples import DatasetReport, TokenizedData
from legato.data.stream import Stream
from legato.errors import ConfigError
from legato.models.load import find_model, load_tokenizer, model_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Reading:
    """What rows are made into samples with.

    Attributes:
        tokenizer: The model's.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Longest sample that is let in, in tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    formatter: ChatFormatter
    max_seq_len: int


def plan_reading(config: RunConfig, *, start_date: date) -> Reading:
    """Load the tokenizer, and settle the template and the longest row.

    Args:
        config: The run.
        start_date: The day that chat templates write, of the run's first start.

    Returns:
        What rows are made into samples with.

    Raises:
        LegatoError: A template or a tokenizer that can't be used.
    """
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    facts = model_facts(config.model)
    formatter = ChatFormatter(
        tokenizer,
        template=config.chat_template,
        template_kwargs=config.chat_template_kwargs,
        train_on_inputs=config.train_on_inputs,
        roles_to_train=config.roles_to_train,
        turns_to_train=config.turns_to_train,
        special_tokens_in_text=config.special_tokens_in_text,
        eos_ids=stop_ids(config.model),
        vocab_size=facts.vocab_size if facts is not None else None,
        start_date=start_date,
    )
    return Reading(tokenizer, formatter, longest_row(config))


def read_all(config: RunConfig, reading: Reading) -> tuple[TokenizedData, TokenizedData | None]:
    """Read the config's data sets to their end.

    Args:
        config: The run.
        reading: What rows are made into samples with.

    Returns:
        Samples to train on, and to evaluate on; None: there are none.

    Raises:
        DataError: A file, a row or a column that can't be used; nothing left to train on.
        ConfigError: A key that these rows have no use for.
    """
    train = _read(config.datasets, config, reading)
    held_out = _read_held_out(config, reading)
    _refuse_unread(config, train.report.datasets, held_out)
    if config.val_set_size:
        return split_validation(train, val_set_size=config.val_set_size, seed=config.seed)
    return train, held_out


def open_stream(
    config: RunConfig, reading: Reading, *, num_workers: int
) -> tuple[Stream, TokenizedData | None]:
    """Open the config's data set to be read while training, and read what is held out.

    Args:
        config: The run; ``streaming`` leaves it one data set.
        reading: What rows are made into samples with.
        num_workers: Processes that make samples while training.

    Returns:
        The stream, and samples to evaluate on; None: there are none.

    Raises:
        DataError: Nothing there, or a row that can't be used.
        ConfigError: A key that these rows have no use for.
    """
    stream = Stream(
        dataset_spec(config.datasets[0]),
        formatter=reading.formatter,
        max_seq_len=reading.max_seq_len,
        block_rows=config.shuffle_buffer_size,
        excess_length=config.excess_length,
        on_bad_row=config.on_bad_row,
        num_held_out=int(config.val_set_size),
        num_workers=num_workers,
    )
    held_out = _read_held_out(config, reading)
    _refuse_unread(config, [stream.account().report()], held_out)
    return stream, stream.held_out() if stream.num_held_out else held_out


def _read_held_out(config: RunConfig, reading: Reading) -> TokenizedData | None:
    return _read(config.eval_datasets, config, reading) if config.eval_datasets else None


def _refuse_unread(
    config: RunConfig, train: Iterable[DatasetReport], held_out: TokenizedData | None
) -> None:
    reports = [*train, *(held_out.report.datasets if held_out is not None else ())]
    if problems := unread_keys(config, formats=[each.type for each in reports]):
        raise ConfigError(problems)


def _read(datasets: Sequence[DatasetConfig], config: RunConfig, reading: Reading) -> TokenizedData:
    return build_cached(
        [dataset_spec(each) for each in datasets],
        folder=cache_folder(os.environ),
        formatter=reading.formatter,
        max_seq_len=reading.max_seq_len,
        excess_length=config.excess_length,
        on_bad_row=config.on_bad_row,
        num_workers=config.num_workers,
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
