"""A sample as a person can check it: decoded, with the trained tokens marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from legato.data.samples import Sample


@dataclass(frozen=True, slots=True)
class DecodedRun:
    """Tokens in a row that are all trained, or all not, as text."""

    text: str
    is_trained: bool


def decode_runs(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[DecodedRun]:
    """Decode a sample in runs of trained and untrained tokens.

    Args:
        sample: The sample.
        tokenizer: Decodes it, control tokens included.

    Returns:
        The runs, in order.
    """
    runs: list[DecodedRun] = []
    position = 0
    for is_trained, tokens in itertools.groupby(sample.trained.tolist()):
        length = len(list(tokens))
        ids = sample.input_ids[position : position + length].tolist()
        position += length
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        runs.append(DecodedRun(text, bool(is_trained)))
    return runs


def marked_sample(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, brackets: bool = False
) -> Text:
    """Decode a sample; trained tokens are bold green, the others dim.

    Args:
        sample: The sample.
        tokenizer: Decodes it, control tokens included.
        brackets: Also put ``[[`` and ``]]`` around trained text, for where there are no colours.

    Returns:
        Text for a rich console.
    """
    text = Text()
    for run in decode_runs(sample, tokenizer):
        shown = f"[[{run.text}]]" if run.is_trained and brackets else run.text
        text.append(shown, style="bold green" if run.is_trained else "dim")
    return text
