"""A sample as a person can check it: decoded, with the trained tokens marked."""

from __future__ import annotations

import itertools

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from legato.data.samples import Sample


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
    position = 0
    for is_trained, run in itertools.groupby(sample.trained.tolist()):
        length = len(list(run))
        ids = sample.input_ids[position : position + length].tolist()
        position += length
        decoded = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if is_trained and brackets:
            decoded = f"[[{decoded}]]"
        text.append(decoded, style="bold green" if is_trained else "dim")
    return text
