"""The data of a run: read by the config, split, and dealt to steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from legato.config.schema import RunConfig
from legato.data.dealing import Dealer
from legato.data.loader import Loader
from legato.data.order import EpochOrder, block_order
from legato.data.packing import PackedData, pack_samples
from legato.data.places import EpochPlace
from legato.data.samples import Rows, Sample, TokenizedData
from legato.data.stream import StreamLoader, StreamPlace
from legato.errors import DataError
from legato.models.facts import model_facts
from legato.parallel.world import World
from legato.recipes.inputs import Inputs, find_inputs, read_same
from legato.recipes.reading import Reading, open_stream, plan_reading, read_all
from legato.train.state import TrainState
from legato.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A compiled model has one graph for each row length, and torch is slow to make one.
MAX_COMPILED_LENGTHS = 6


@dataclass(frozen=True)
class Samples:
    """What the config's data sets hold, tokenized.

    Attributes:
        train: Samples to train on; of a stream, those of its first block.
        held_out: Samples to evaluate on; None: there are none.
        tokenizer: Theirs.
        max_seq_len: Longest sample that was let in, in tokens.
        first_row: Where training begins in a stream; None: all is read.
    """

    train: TokenizedData
    held_out: TokenizedData | None
    tokenizer: PreTrainedTokenizerBase
    max_seq_len: int
    first_row: int | None = None


@dataclass(frozen=True)
class RunData:
    """What a run reads: its samples, how they were made, and who deals them.

    Attributes:
        train: Samples to train on; of a stream, those of the block where training begins.
        held_out: Samples to evaluate on; None: there are none.
        loader: Deals them to steps.
        eval_loader: Deals the evaluation's rows; None: there are none.
        tokenizer: Theirs.
        chat_template: The template that made them.
        max_seq_len: Longest sample that was let in, in tokens.
        inputs: What tells the model and the data files from others.
        packed: The rows that all training samples are packed into; None: each is a row, or a stream
            packs them while training.
    """

    train: TokenizedData
    held_out: TokenizedData | None
    loader: Loader | StreamLoader
    eval_loader: Loader | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    max_seq_len: int
    inputs: Inputs
    packed: PackedData | None = None


def read_samples(config: RunConfig, *, start_date: date) -> Samples:
    """Read, tokenize and split the config's data sets; of a stream, its first block.

    Args:
        config: The run.
        start_date: The day that chat templates write, of the run's first start.

    Returns:
        The samples.

    Raises:
        LegatoError: Data, template or tokenizer that can't be used.
    """
    reading = plan_reading(config, start_date=start_date)
    if config.streaming:
        stream, held_out = open_stream(config, reading, num_workers=0)
        train, first_row = stream.first_samples(), stream.num_held_out
    else:
        (train, held_out), first_row = read_all(config, reading), None
    return Samples(train, held_out, reading.tokenizer, reading.max_seq_len, first_row=first_row)


def first_samples(samples: Samples, *, count: int, seed: int) -> list[Sample]:
    """The samples that a run comes to first, each as a row of its own.

    Args:
        samples: What its data sets hold.
        count: How many; fewer where there are fewer.
        seed: The run's.

    Returns:
        Samples in the order of the first epoch, or of a stream's first block.
    """
    data = samples.train
    if samples.first_row is None:
        order = EpochOrder(data, seed=seed, shuffle=True).epoch(0)
    else:
        order = block_order(len(data), seed=seed, epoch=0, first_row=samples.first_row)
    return [data[int(i)] for i in order[:count]]


@contextmanager
def open_run_data(
    config: RunConfig, state: TrainState, *, global_batch_size: int, world: World
) -> Iterator[RunData]:
    """Collective: read the run's data; what is open is closed when the block ends, however it ends.

    Every rank reads for itself: a host that doesn't see model or data is named.

    Args:
        config: The run.
        state: Where it stands.
        global_batch_size: Rows of one optimizer step over all ranks.
        world: Who takes which rows.

    Yields:
        RunData: The data, ready to be dealt.

    Raises:
        LegatoError: Data, template or tokenizer that can't be used, here or on another rank; ranks
            that read different rows or files.
    """
    with ExitStack() as opened:

        def read() -> RunData:
            data = build_run_data(
                config,
                start_date=date.fromisoformat(state.facts["start_date"]),
                world=world,
                global_batch_size=global_batch_size,
                step=state.step,
                data_place=state.data_place,
            )
            # At once: another rank's error may come before the next line here does.
            opened.callback(data.loader.close)
            return data

        def inputs_of(data: RunData) -> Inputs:
            if not isinstance(data.loader, StreamLoader):
                return data.inputs
            # Each rank holds it against the checkpoint by itself, and all must come to the same.
            block = {"path": config.datasets[0].path, "digest": data.loader.digest}
            return {**data.inputs, "block": block}

        yield read_same(read, inputs=inputs_of, world=world)


def build_run_data(
    config: RunConfig,
    *,
    start_date: date,
    world: World,
    global_batch_size: int,
    step: int = 0,
    data_place: Mapping[str, Any] | None = None,
) -> RunData:
    """Read the data and make the loaders that deal it.

    Args:
        config: The run.
        start_date: The day that chat templates write, of the run's first start.
        world: Who takes which rows.
        global_batch_size: Rows of one optimizer step over all ranks.
        step: The last step that has been taken; 0: none.
        data_place: Where it left the data; None: at its beginning.

    Returns:
        The data, ready to be dealt. Close its loader in the end.

    Raises:
        LegatoError: Data, template or tokenizer that can't be used; fewer rows than ranks.
    """
    reading = plan_reading(config, start_date=start_date)
    data_place = _readable_place(data_place, StreamPlace if config.streaming else EpochPlace)
    if config.streaming:
        return _stream_data(
            config,
            reading,
            world=world,
            global_batch_size=global_batch_size,
            step=step,
            data_place=data_place,
        )
    train, held_out = read_all(config, reading)
    rows, held_out_rows = (_rows_of(data, config, reading) for data in (train, held_out))
    assert rows is not None
    _refuse_idle_ranks(rows, world)
    lengths = compiled_lengths(rows, held_out_rows, max_seq_len=reading.max_seq_len)
    dealing = _dealing(config, reading, world, lengths)
    return RunData(
        train=train,
        held_out=held_out,
        loader=Loader(
            rows,
            global_batch_size=global_batch_size,
            seed=config.seed,
            max_steps_per_epoch=config.max_steps_per_epoch,
            step=step,
            place=data_place,
            **dealing,
        ),
        eval_loader=_eval_loader(held_out_rows, config, world, dealing),
        tokenizer=reading.tokenizer,
        chat_template=reading.formatter.chat_template,
        max_seq_len=reading.max_seq_len,
        inputs=_inputs(config, reading, train, held_out),
        packed=rows if isinstance(rows, PackedData) else None,
    )


def _readable_place(
    place: Mapping[str, Any] | None, kind: type[StreamPlace | EpochPlace]
) -> Mapping[str, Any] | None:
    """The place, unless it is one in a stream and the data is none, or the other way round."""
    names = {each.name for each in fields(kind)}
    return place if place is not None and names >= place.keys() else None


def _stream_data(
    config: RunConfig,
    reading: Reading,
    *,
    world: World,
    global_batch_size: int,
    step: int,
    data_place: Mapping[str, Any] | None,
) -> RunData:
    stream, held_out = open_stream(config, reading, num_workers=config.num_workers)
    dealing = _dealing(config, reading, world, stream_lengths(reading.max_seq_len))
    eval_loader = _eval_loader(_rows_of(held_out, config, reading), config, world, dealing)
    loader = StreamLoader(  # last: from here on something is open
        stream,
        dealer=Dealer(**dealing),
        global_batch_size=global_batch_size,
        seed=config.seed,
        pack_to=reading.max_seq_len if config.packing else None,
        step=step,
        place=data_place,
    )
    return RunData(
        train=loader.samples,
        held_out=held_out,
        loader=loader,
        eval_loader=eval_loader,
        tokenizer=reading.tokenizer,
        chat_template=reading.formatter.chat_template,
        max_seq_len=reading.max_seq_len,
        inputs=_inputs(config, reading, loader.samples, held_out),
    )


def _inputs(
    config: RunConfig, reading: Reading, train: TokenizedData, held_out: TokenizedData | None
) -> Inputs:
    return find_inputs(
        config,
        chat_template=reading.formatter.chat_template,
        data=train.report,
        held_out=held_out.report if held_out is not None else None,
    )


def _eval_loader(
    rows: Rows | None, config: RunConfig, world: World, dealing: dict[str, Any]
) -> Loader | None:
    if rows is None:
        return None
    rows_at_once = config.batch_size * world.world_size
    return Loader(rows, global_batch_size=rows_at_once, seed=config.seed, shuffle=False, **dealing)


def _rows_of(data: TokenizedData | None, config: RunConfig, reading: Reading) -> Rows | None:
    if data is None or not config.packing:
        return data
    return pack_samples(data, max_seq_len=reading.max_seq_len, seed=config.seed)


def _refuse_idle_ranks(rows: Rows, world: World) -> None:
    if len(rows) < world.world_size:
        raise DataError(
            f"{world.world_size} processes, but only {counted(len(rows), 'row')} to train on: "
            f"some would never get one. Start {counted(len(rows), 'process', 'processes')} at most."
        )


def _dealing(
    config: RunConfig, reading: Reading, world: World, lengths: list[int]
) -> dict[str, Any]:
    """How every loader of the run deals rows; ``lengths``: of rows, where a graph is compiled."""
    buckets = [reading.max_seq_len] if config.packing else lengths
    pad_id = reading.tokenizer.pad_token_id
    facts = model_facts(config.model)
    vocab_size = facts.vocab_size if facts is not None else None
    return {
        "batch_size": config.batch_size,
        # Masked, so any token will do; one that the model has.
        "pad_id": pad_id if pad_id is not None and pad_id < (vocab_size or math.inf) else 0,
        "rank": world.rank,
        "world_size": world.world_size,
        "length_buckets": buckets if config.compile else None,
        "fill_rows": bool(config.compile),
    }


def compiled_lengths(*data: Rows | None, max_seq_len: int) -> list[int]:
    """At most six row lengths that every row fits into, close to what the data holds.

    Args:
        *data: The rows; None where there are none.
        max_seq_len: Tokens that no row is padded beyond: the model may have no more positions.

    Returns:
        Lengths in tokens, ascending.
    """
    lengths = np.concatenate([each.lengths for each in data if each is not None])
    shares = np.linspace(0, 1, MAX_COMPILED_LENGTHS + 1)[1:]
    # Multiples of 64: what kernels like, and few near-equal ones.
    ends = np.quantile(lengths, shares, method="higher")
    return sorted({min(-(-int(end) // 64) * 64, max_seq_len) for end in ends})


def stream_lengths(max_seq_len: int) -> list[int]:
    """At most six row lengths up to the longest one, where nobody knows what is to come."""
    halves = (max_seq_len >> number for number in range(MAX_COMPILED_LENGTHS))
    return sorted({min(max_seq_len, -(-n // 64) * 64) for n in halves})
