"""Samples cut in two: what the model is given, and what it is expected to go on with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.data.samples import Sample, TokenizedData, Tokens


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A sample as a question.

    Attributes:
        sample_id: Where it came from.
        prompt_ids: What the model is given, int32 ``[P]``, at least one token.
        expected_ids: What the sample goes on with, int32 ``[E]``.
    """

    sample_id: str
    prompt_ids: Tokens
    expected_ids: Tokens


def first_prompts(data: TokenizedData, *, count: int) -> list[SamplePrompt]:
    """The first ``count`` samples as prompts: the same ones whenever a run asks.

    Args:
        data: Samples in the order of the files.
        count: How many; fewer where there are fewer samples.

    Returns:
        Prompts and what is expected of the model.
    """
    return [as_prompt(data[i]) for i in range(min(count, len(data)))]


def as_prompt(sample: Sample) -> SamplePrompt:
    """Cut a sample before its last trained part: the answer to all that comes before it.

    Where all of it is trained, as plain text is, there is no prompt in it: then the first half is.
    """
    trained = np.flatnonzero(sample.trained[1:]) + 1
    begins = trained[np.diff(trained, prepend=-1) > 1]
    start, end = int(begins[-1]), int(trained[-1]) + 1
    if start <= 1:
        start = max(1, end // 2)
    return SamplePrompt(sample.sample_id, sample.input_ids[:start], sample.input_ids[start:end])
