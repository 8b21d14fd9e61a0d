"""Texts that no template writes, plain or in segments: opened as the tokenizer opens a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from legato.data.bounds import token_bounds, tokens_of
from legato.data.examples import Example
from legato.data.samples import Mask, Sample, Tally
from legato.data.spans import PlannedText

STRADDLING = (
    "answers that begin inside a token which also holds the end of the prompt, and which inference "
    "never sees (strip the white space at their beginning)"
)
SEGMENTS_STOPPED = "rows whose last segment is trained and ends without a stop token, appended"


@dataclass(frozen=True)
class BareTexts:
    """Makes samples of tokenized texts that have no template.

    Attributes:
        opening: Ids that the tokenizer puts before a text: a BOS, or nothing.
        stop_id: Ends what is trained to its end.
        stop_ids: Ids after which generation stops.
        train_on_inputs: Train every segment.
    """

    opening: list[int]
    stop_id: int
    stop_ids: frozenset[int]
    train_on_inputs: bool

    def plain_sample(self, example: Example, ids: Sequence[int]) -> Sample:
        """Plain text, opened and ended; all of it is trained.

        Args:
            example: The row.
            ids: Its text's.

        Returns:
            The sample.
        """
        opened = self._opened(ids)
        if not opened or opened[-1] != self.stop_id:
            opened.append(self.stop_id)
        return finished_sample(opened, np.ones(len(opened), dtype=np.bool_), example.sample_id)

    def segments_sample(
        self,
        example: Example,
        planned: PlannedText,
        ids: list[int],
        offsets: list[tuple[int, int]],
        *,
        tally: Tally,
    ) -> Sample:
        """Segments as they stand, opened; the last one is ended if it is trained.

        Args:
            example: The row.
            planned: Its text, and which parts are trained.
            ids: Its tokens.
            offsets: Their characters.
            tally: Counts what is worth saying.

        Returns:
            The sample.
        """
        starts, ends = token_bounds(offsets, len(planned.text))
        trained = np.zeros(len(ids), dtype=np.bool_)
        for span in planned.spans:
            first, last = tokens_of(span, starts, ends)
            if first < len(ids) and starts[first] < span.start < span.end:
                tally.add(STRADDLING, example.sample_id)
            trained[first : last + 1] = True
        opened = self._opened(ids)
        trained = np.append(np.zeros(len(opened) - len(ids), dtype=np.bool_), trained)
        if example.segments[-1].is_trained and not self.stop_ids.intersection(opened[-1:]):
            opened.append(self.stop_id)
            trained = np.append(trained, True)
            tally.add(SEGMENTS_STOPPED, example.sample_id)
        kept = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else len(opened)
        if self.train_on_inputs:
            trained[:] = True
            kept = len(opened)
        return finished_sample(opened[:kept], trained[:kept], example.sample_id)

    def _opened(self, ids: Sequence[int]) -> list[int]:
        """``ids`` with what opens a text, once, whether it was written out or not."""
        opening = self.opening
        return list(ids) if list(ids[: len(opening)]) == opening else [*opening, *ids]


def finished_sample(ids: Sequence[int], trained: Mask, sample_id: str) -> Sample:
    """A sample whose first token is never trained: nothing comes before it.

    Args:
        ids: Token ids.
        trained: Bool ``[T]``.
        sample_id: Where it came from.

    Returns:
        The sample, with arrays of its own.
    """
    trained = trained.copy()
    trained[:1] = False
    return Sample(np.array(ids, dtype=np.int32), trained, sample_id)
