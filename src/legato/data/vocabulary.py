"""A tokenizer may know more tokens than its model has rows for."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from legato.data.spans import TemplateProblem


def refuse_unknown(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> None:
    """See that every token is one of the model's.

    Only what is used counts: tokenizers hold tokens that their model never sees, as those of images
    for a family's text model.

    Args:
        ids: Tokens of a row.
        tokenizer: Who made them.
        vocab_size: Rows of the model's embedding; None: nobody knows.

    Raises:
        TemplateProblem: The token, its id, and how many the model has.
    """
    problem = unknown_token(ids, tokenizer, vocab_size)
    if problem is not None:
        raise TemplateProblem(
            f"{problem}. Take the tokenizer that belongs to the model, or enlarge the model's "
            "embedding first (transformers: resize_token_embeddings)"
        )


def unknown_token(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> str | None:
    """What is wrong with tokens that a model may not have.

    Args:
        ids: Tokens.
        tokenizer: Who made them.
        vocab_size: Rows of the model's embedding; None: nobody knows.

    Returns:
        Of the highest id, what to tell; None: the model has a row for each.
    """
    highest = max(ids, default=0)
    if vocab_size is None or highest < vocab_size:
        return None
    return (
        f"the tokenizer makes the token {tokenizer.convert_ids_to_tokens(highest)!r} (id "
        f"{highest}), and the model has {vocab_size}, ids 0 to {vocab_size - 1}"
    )
