"""A data set that is read while training: block by block, each shuffled as a whole.

A block is ``shuffle_buffer_size`` rows that follow each other in the source. What it holds, how it
is packed and its order are pure functions of (seed, pass, number of its first row). So a place in
the stream is three numbers, and a resumed run reads again at most the rows of one block.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from legato.data.build import check_options
from legato.data.chat import ChatFormatter
from legato.data.chunks import (
    CHUNK_ROWS,
    Account,
    Chunk,
    RowChunk,
    RowFormatter,
    row_chunks,
    settle_type,
)
from legato.data.dealing import Dealer, StepBatches
from legato.data.formats import DatasetSpec
from legato.data.hub import ShardStart, ShardStarts
from legato.data.order import block_order
from legato.data.packing import pack_samples
from legato.data.prefetch import OneAhead
from legato.data.samples import (
    DataReport,
    Indices,
    Rows,
    Sample,
    SampleColumns,
    TokenizedData,
    samples_digest,
)
from legato.data.sources import BadRow, Row, read_rows
from legato.data.workers import map_ahead
from legato.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """Where training stands in a stream.

    Attributes:
        epoch: The pass over the source, from 0.
        first_row: Number of the block's first row in the source, from 0.
        taken: Rows of the block, in its shuffled order, that have been trained on.
        digest: Of the block's samples; None: they haven't been read yet.
        start: Of a hub data set: the shard that the block begins in, where it is entered.
    """

    epoch: int
    first_row: int
    taken: int = 0
    digest: str | None = None
    start: ShardStart | None = None

    def as_state(self) -> dict[str, Any]:
        """The place as a checkpoint holds it; what a source doesn't have isn't named."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StreamPlace:
        """The place that a checkpoint holds, from JSON."""
        start = state.get("start")
        return cls(**{**state, "start": None if start is None else ShardStart(**start)})


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of the source, tokenized.

    Attributes:
        epoch: The pass over the source, from 0.
        first_row: Number of its first row in the source, from 0.
        samples: What its rows became; may be none.
        chunks: The same, and what is worth saying about it.
    """

    epoch: int
    first_row: int
    samples: TokenizedData
    chunks: tuple[Chunk, ...]

    def place(self, taken: int, digest: str) -> StreamPlace:
        """Where training stands in it, after so many of its rows in their order."""
        start = self.chunks[0].start
        return StreamPlace(self.epoch, self.first_row, taken, digest=digest, start=start)


class Stream:
    """A data set as blocks, pass after pass.

    Args:
        spec: The data set.
        formatter: Template, tokenizer, and which turns are trained.
        max_seq_len: Most tokens of a sample.
        block_rows: Rows of a block.
        excess_length: ``drop``, ``truncate`` or ``error``: what happens to a longer sample.
        on_bad_row: ``error`` or ``skip``: what happens to a row that can't be used.
        num_held_out: Rows at the beginning that aren't trained on.
        num_workers: Processes that format and tokenize ahead; what is read doesn't depend on it.

    Attributes:
        path: As given in the config.
        num_held_out: Rows at the beginning that aren't trained on.

    Raises:
        DataError: Nothing there, or a first row that fits no format.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        *,
        formatter: ChatFormatter,
        max_seq_len: int,
        block_rows: int,
        excess_length: str = "drop",
        on_bad_row: str = "error",
        num_held_out: int = 0,
        num_workers: int = 0,
    ) -> None:
        check_options([spec], max_seq_len, excess_length, on_bad_row)
        self.path, self.num_held_out = spec.path, num_held_out
        self._spec, self._block_rows, self._num_workers = spec, block_rows, num_workers
        with closing(self._rows(0)) as rows:
            name, mapping, _ = settle_type(spec, rows)
        self._maker = RowFormatter(
            spec, name, mapping, formatter, max_seq_len, excess_length, on_bad_row
        )

    def blocks(
        self, place: StreamPlace | None = None, *, is_over: Callable[[], bool] = lambda: False
    ) -> Generator[Block, None, None]:
        """Every block from ``place`` on, or from the beginning; there is no end.

        Args:
            place: Its block comes first.
            is_over: Asked between chunks of rows: there is an end after all, in mid-block.

        Yields:
            Block: In the order of the source; after the last one comes the first one again.

        Raises:
            DataError: A file or a row that can't be used; no rows.
        """
        place = place or StreamPlace(0, self.num_held_out)
        # A whole block ahead: at its end the next one is there.
        ahead = -(-self._block_rows // CHUNK_ROWS) + self._num_workers
        members: list[Chunk] = []
        with (
            closing(self._chunks(place)) as rows,
            closing(
                map_ahead(self._maker, rows, num_workers=self._num_workers, ahead=ahead)
            ) as chunks,
        ):
            for chunk in chunks:
                if is_over():
                    return
                self.account([chunk]).refuse_bad_rows()
                if chunk.num_rows:
                    members.append(chunk)
                is_whole = sum(each.num_rows for each in members) == self._block_rows
                if is_whole or (members and not chunk.num_rows):
                    yield self._block(members)
                    members = []

    def first_samples(self) -> TokenizedData:
        """What the first block holds; :class:`DataError` if that is nothing."""
        with closing(self.blocks()) as blocks:
            block = next(blocks)
        self.account(block.chunks).refuse_nothing_left()
        return block.samples

    def held_out(self) -> TokenizedData:
        """The rows that aren't trained on; :class:`DataError` if none of them can be used."""
        with closing(self._rows(0)) as rows:
            first = itertools.islice(rows, self.num_held_out)
            chunks = tuple(map(self._maker, row_chunks(first)))
        self.account(chunks).refuse_bad_rows()
        self.account(chunks).refuse_nothing_left()
        return self._samples(chunks)

    def account(self, chunks: Iterable[Chunk] = ()) -> Account:
        """A new account of rows, with those of ``chunks`` in it."""
        account = Account(self._maker)
        for chunk in chunks:
            account.add(chunk)
        return account

    def _rows(
        self, skip: int, starts: ShardStarts | None = None
    ) -> Generator[Row | BadRow, None, None]:
        spec = self._spec
        return read_rows(spec.path, split=spec.split, skip=skip, streaming=True, starts=starts)

    def _chunks(self, place: StreamPlace) -> Generator[RowChunk, None, None]:
        first_row = place.first_row
        for epoch in itertools.count(place.epoch):
            begin, before = first_row, -1
            starts = ShardStarts(place.start if epoch == place.epoch else None)
            with closing(self._rows(first_row, starts)) as rows:
                while before < first_row:
                    before = first_row
                    block = itertools.islice(rows, self._block_rows)
                    for chunk in row_chunks(block, epoch=epoch, first_row=first_row):
                        first_row += len(chunk.rows)
                        yield replace(chunk, start=starts.before(chunk.first_row))
            if first_row == begin:
                held = self.num_held_out
                if held and begin == held:
                    raise DataError(
                        f"val_set_size: {held:,} rows of {self.path} are held out, and it has no "
                        "others to train on. The config holds out so many; set val_set_size to "
                        "fewer, or to 0 for no evaluation",
                        path=self.path,
                    )
                behind = f" behind the {begin} that are read already" if begin else ""
                raise DataError(f"{self.path}: no rows{behind}", path=self.path)
            yield RowChunk(epoch, first_row, ())  # the pass has ended, and with it a short block
            first_row = self.num_held_out

    def _block(self, chunks: Sequence[Chunk]) -> Block:
        return Block(chunks[0].epoch, chunks[0].first_row, self._samples(chunks), tuple(chunks))

    def _samples(self, chunks: Sequence[Chunk]) -> TokenizedData:
        columns = SampleColumns()
        for chunk in chunks:
            for row, sample in chunk.samples:
                columns.append(sample, row=row, dataset=0)
        notes = self._maker.formatter.notes
        report = replace(self.account(chunks).as_report(), notes=notes)
        return columns.finish(weights=[1.0], report=report)


class StreamLoader:
    """Deals the rows of a stream to steps, ranks and micro-batches, as :class:`Dealer` says.

    Every rank reads all rows, and takes its own of each step: the rows of a step are the same on
    any number of ranks. The last step of a pass may hold fewer rows than ``global_batch_size``.
    While one block is dealt, a thread reads the next one: two are in memory, and no step waits for
    a block unless its steps were faster. Where a step leaves the stream doesn't depend on it.

    Args:
        stream: The data set.
        dealer: Who takes which rows.
        global_batch_size: Rows of one optimizer step over all ranks.
        seed: Of the order.
        pack_to: Tokens of a row that holds several samples of a block; None: each is a row.
        step: The last step that has been taken; 0: none.
        place: Where it left the stream, as :class:`StepBatches` gave it.

    Attributes:
        global_batch_size: Rows of one optimizer step over all ranks.
        samples: The block that training is in.
        digest: Of that block's samples.
        steps_per_epoch: None: nobody knows before the end of the stream.
        reads_while_training: True.

    Raises:
        DataError: A file or a row that can't be used; the place isn't in the stream.
    """

    reads_while_training = True
    steps_per_epoch = None

    def __init__(
        self,
        stream: Stream,
        *,
        dealer: Dealer,
        global_batch_size: int,
        seed: int,
        pack_to: int | None = None,
        step: int = 0,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        self.global_batch_size = global_batch_size
        self._stream, self._dealer, self._seed, self._pack_to = stream, dealer, seed, pack_to
        self._step = step
        start = (
            StreamPlace(0, stream.num_held_out) if place is None else StreamPlace.of_state(place)
        )
        self._closing = threading.Event()
        self._blocks = OneAhead(stream.blocks(start, is_over=self._closing.is_set))
        self._account = stream.account()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._enter(self._blocks.take())
            self._taken = start.taken
            if place is not None and not self._stands_at(start):
                raise DataError(
                    f"{stream.path}: the checkpoint stands at row {start.taken} of the block that "
                    f"begins with row {start.first_row + 1}, and there is no such row any more. "
                    "Give the run the data that it had, or begin a new one",
                    path=stream.path,
                )
            self._move_on()
            on_error.pop_all()

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that each rank runs in a full step."""
        return self._dealer.micro_batches_of(self.global_batch_size)

    def fetch(self, step: int) -> StepBatches:
        """This rank's part of ``step``, which follows the last one that was asked for."""
        assert step == self._step + 1, f"a stream is read in order: {step} after {self._step}"
        self._step = step
        epoch, rows = self._block.epoch, list[list[Sample]]()
        while self._block.epoch == epoch and len(rows) < self.global_batch_size:
            missing = self.global_batch_size - len(rows)
            chosen = self._order[self._taken : self._taken + missing]
            rows += [self._rows.documents(int(i)) for i in chosen]
            self._taken += len(chosen)
            self._move_on()
        lengths = [sum(len(document.input_ids) for document in row) for row in rows]
        return StepBatches(
            batches=[
                self._dealer.batch(mine, is_packed=self._rows.is_packed)
                for mine in self._dealer.deal(rows, lengths)
            ],
            num_rows=len(rows),
            epoch=epoch,
            ends_epoch=self._block.epoch != epoch,
            data_place=self._block.place(self._taken, self.digest).as_state(),
        )

    def next_row(self) -> str:
        """Where the next step begins, in words."""
        return (
            f"row {self._taken + 1:,} of the {len(self._order):,} of the block of the stream that "
            f"begins with row {self._block.first_row + 1:,} (pass {self._block.epoch + 1})"
        )

    def first_document(self) -> Sample:
        """What the next step begins with."""
        return self._rows.documents(int(self._order[self._taken]))[0]

    def report(self) -> DataReport:
        """What became of the rows that this process has read in this pass."""
        return self._account.as_report()

    def stop_reading(self) -> None:
        """A block that is being read ends soon; nothing can be fetched any more."""
        self._closing.set()

    def close(self) -> None:
        """End the thread and the processes that read ahead, and close the files."""
        self.stop_reading()
        self._blocks.close()

    def _move_on(self) -> None:
        """Go to the next row that is to be trained on, through blocks that hold none."""
        while self._taken == len(self._order):
            block = self._blocks.take()
            if block.epoch > self._block.epoch:
                self._account.refuse_nothing_left()
                for line in self.report().lines():
                    logger.info("pass %d has ended: %s", block.epoch, line)
                self._account = self._stream.account()
            self._enter(block)

    def _stands_at(self, place: StreamPlace) -> bool:
        here = (self._block.epoch, self._block.first_row) == (place.epoch, place.first_row)
        return here and place.taken < len(self._order)

    def _enter(self, block: Block) -> None:
        for chunk in block.chunks:
            self._account.add(chunk)
        self._block, self._taken = block, 0
        self.samples, self.digest = block.samples, samples_digest(block.samples)
        self._rows: Rows = (
            block.samples
            if self._pack_to is None
            else pack_samples(block.samples, max_seq_len=self._pack_to, seed=self._seed).at_epoch(
                block.epoch
            )
        )
        self._order: Indices = block_order(
            len(self._rows), seed=self._seed, epoch=block.epoch, first_row=block.first_row
        )
