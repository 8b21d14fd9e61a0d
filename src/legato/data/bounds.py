"""Which tokens a part of a text is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato.data.samples import Indices
from legato.data.spans import Span


def token_bounds(offsets: Sequence[tuple[int, int]], text_length: int) -> tuple[Indices, Indices]:
    """First character of each token, and the first character after it.

    A token reaches to where the next one begins, whatever its own end says: some tokenizers report
    empty offsets. Tokens that share a character (the bytes of an emoji) share its bounds.

    Args:
        offsets: ``(start, end)`` in characters, as the tokenizer reports them.
        text_length: Characters of the text.

    Returns:
        Starts and ends, int64 ``[T]`` each, neither falling.
    """
    starts = np.maximum.accumulate(np.array([start for start, _ in offsets], dtype=np.int64))
    next_start = np.searchsorted(starts, starts, side="right")
    return starts, np.append(starts, text_length)[next_start]


def tokens_of(span: Span, starts: Indices, ends: Indices) -> tuple[int, int]:
    """The tokens of a span: from the first one that ends in it to the last one that begins in it.

    Args:
        span: A part of a text.
        starts: First character of each token, int64 ``[T]``.
        ends: Where each token ends, int64 ``[T]``.

    Returns:
        First and last token, the latter included.
    """
    first = int(np.searchsorted(ends, span.start, side="right"))
    return first, int(np.searchsorted(starts, span.end, side="left")) - 1
