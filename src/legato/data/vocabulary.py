"""A tokenizer may know more tokens than its model has rows for."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from legato.data.spans import TemplateProblem


def refuse_unknown(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int | None
) -> None:
    """Raise :class:`TemplateProblem` where a token isn't one of the model's.

    Only what is used counts: tokenizers hold tokens that their model never sees, as those of images
    for a family's text model.

    Args:
        ids: Tokens of a row; at least one.
        tokenizer: Who made them.
        vocab_size: Rows of the model's embedding; None: nobody knows.
    """
    if vocab_size is None or max(ids) < vocab_size:
        return
    token = tokenizer.convert_ids_to_tokens(max(ids))
    raise TemplateProblem(
        f"the tokenizer makes the token {token!r} (id {max(ids)}), and the model has {vocab_size}, "
        f"ids 0 to {vocab_size - 1}. Take the tokenizer that belongs to the model, or enlarge the "
        "model's embedding first (transformers: resize_token_embeddings)"
    )
