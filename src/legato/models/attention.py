"""Attention over packed rows, where each document sees itself only.

``varlen`` is Legato's own: no mask is built, and the time is that of the documents, not of the row
squared. On CUDA it is torch's kernel for documents of various lengths; elsewhere each document is
attended by itself. Whatever is used, :func:`settle_packing` runs the real model before step 1, as
a family that doesn't pass the documents' bounds on would let them see each other, without a word.
"""

# B batch, T tokens, H heads, K head width, D model width, N tokens of all rows

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from legato.config.rules import MOST_MASKED_TOKENS
from legato.errors import UnsupportedModelError, first_line

logger = logging.getLogger(__name__)

VARLEN = "legato_varlen"
"""Name under which transformers knows the attention of this module."""

# Relative distance of hidden states, documents packed and apart. A leak is far above.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_PROBED_LENGTHS = (5, 11)

# What torch's kernel wants to be told of fewer heads of keys than of queries; see grouped_heads.
# Filled before a block is compiled: a graph can't look at signatures.
_GROUPED_HEADS: dict[str, Any] = {}

# What the kernels here don't know of: families that need one of these use another attention.
_UNKNOWN = ("softcap", "s_aux", "position_bias")


def document_bounds(position_ids: Tensor, *, device: torch.device) -> dict[str, Any]:
    """Where documents begin, in transformers' words for its flash kernels.

    Args:
        position_ids: ``[B, T]``, from 0 in each document; best on the CPU, as it is waited for.
        device: Where the bounds are needed.

    Returns:
        ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 ``[documents + 1]``, counted over all rows;
        ``max_length_q`` and ``max_length_k``, the row's length: an upper limit that never changes.
    """
    starts = (position_ids.flatten() == 0).nonzero().squeeze(-1)
    bounds = F.pad(starts, (0, 1), value=position_ids.numel()).to(device, torch.int32)
    # Another number of documents in each batch: a compiled model isn't to be compiled for each.
    torch._dynamo.maybe_mark_dynamic(bounds, 0)
    longest = position_ids.shape[1]
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def wants_bounds(config: Any) -> bool:
    """Whether the attention of a model with this config takes :func:`document_bounds`."""
    name = str(config._attn_implementation)
    return name == VARLEN or name.startswith("flash_attention")


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside of each document, as transformers calls an attention.

    Without bounds, or with a mask (an answer being generated), it is transformers' sdpa.

    Args:
        module: The layer; its ``is_causal`` doesn't matter to documents.
        query: ``[B, H, T, K]``.
        key: ``[B, H or fewer, T, K]``.
        value: ``[B, H or fewer, T, K]``.
        attention_mask: None for packed rows.
        dropout: Share of weights that are dropped.
        scaling: Of the scores; None: ``K ** -0.5``.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
        cu_seq_lens_q: Int32 ``[documents + 1]``, over all rows.
        max_length_q: Upper limit of a document's length.
        **options: What the family has besides.

    Returns:
        ``[B, T, H, K]``, and no weights.

    Raises:
        NotImplementedError: The family's attention does something that isn't known here.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None or attention_mask is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise NotImplementedError(f"its attention has {name}")
    rows, _, length, _ = query.shape
    query_NHK, key_NHK, value_NHK = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    if query.is_cuda:
        if dropout:
            raise NotImplementedError("torch's varlen kernel has no attention dropout")
        output_NHK = _on_cuda(
            query_NHK, key_NHK, value_NHK, cu_seq_lens_q, max_length_q or length,
            scaling=scaling, sliding_window=sliding_window,
        )  # fmt: skip
    else:
        output_NHK = _by_document(
            query_NHK, key_NHK, value_NHK, cu_seq_lens_q,
            dropout=dropout, scaling=scaling, sliding_window=sliding_window,
        )  # fmt: skip
    return output_NHK.view(rows, length, *output_NHK.shape[1:]), None


def _on_cuda(
    query_NHK: Tensor,
    key_NHK: Tensor,
    value_NHK: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    is_grouped = query_NHK.shape[1] != key_NHK.shape[1]
    output = varlen_attn(
        query_NHK,
        key_NHK,
        value_NHK,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_GROUPED_HEADS if is_grouped else {},
    )
    assert isinstance(output, Tensor), "no auxiliary outputs were asked for"
    return output


def grouped_heads(kernel: Callable[..., Any]) -> dict[str, Any]:
    """The options by which a varlen kernel takes fewer heads of keys than of queries.

    Args:
        kernel: torch's. That of torch 2.11 takes them without being told, and knows no option.

    Returns:
        Keyword arguments.
    """
    is_told = "enable_gqa" in inspect.signature(kernel).parameters
    return {"enable_gqa": True} if is_told else {}


@_disable_dynamo  # not compiled: a graph would hold these very documents
def _by_document(
    query_NHK: Tensor, key_NHK: Tensor, value_NHK: Tensor, bounds: Tensor, **options: Any
) -> Tensor:
    """One document after the other, in a loop: ``[N, H, K]``.

    In fp32: on a CPU the backward pass of short documents takes longer in bf16 (twice as long for
    7 of 150 tokens).
    """
    dtype = query_NHK.dtype
    query_NHK, key_NHK, value_NHK = (t.float() for t in (query_NHK, key_NHK, value_NHK))
    documents = [
        _attend(query_NHK[start:end], key_NHK[start:end], value_NHK[start:end], **options)
        for start, end in itertools.pairwise(bounds.tolist())
    ]
    return torch.cat(documents).to(dtype)


def _attend(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THK: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """One document by itself: ``[T, H, K]``."""
    length = len(query_THK)
    mask: Tensor | None = None
    if sliding_window is not None and sliding_window < length:
        at = torch.arange(length, device=query_THK.device)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind < sliding_window)
    output_HTK = F.scaled_dot_product_attention(
        query_THK.transpose(0, 1)[None],
        key_THK.transpose(0, 1)[None],
        value_THK.transpose(0, 1)[None],
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_THK.shape[1] != key_THK.shape[1],
    )[0]
    return output_HTK.transpose(0, 1)


def _varlen_mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask where rows are packed or padded on the right; transformers' own for an answer."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None:
        return None
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **options)
    return mask


def settle_packing(
    model: Any,
    decode: Callable[..., Tensor],
    *,
    attention: str,
    max_seq_len: int,
    is_compiled: bool = False,
) -> str:
    """Choose an attention for packed rows, and prove on the real model that it keeps them apart.

    Collective if the model is sharded.

    Args:
        model: A causal language model of transformers, or a PEFT model around one; with weights.
        decode: ``(input_ids, position_ids) -> hidden [B, T, D]``, of that model.
        attention: The config's: ``auto`` takes varlen, and where that can't be had what
            transformers chose; another one is taken as it is.
        max_seq_len: Tokens of a row.
        is_compiled: Its blocks are going to be compiled.

    Returns:
        What the config calls the attention that is used.

    Raises:
        UnsupportedModelError: Documents in a row would see each other; ``.architecture``,
            ``.attention``. Or rows are too long for the mask that keeps them apart.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = str(causal.config._attn_implementation)
    names = [attention] if attention != "auto" else ["varlen", _OURS.get(own, own)]
    if attention == "auto" and is_compiled and causal.device.type == "cpu":
        names.remove("varlen")  # a loop over documents breaks every block's graph
    refused: list[str] = []
    for name in dict.fromkeys(names):
        if name in ("sdpa", "eager") and max_seq_len > MOST_MASKED_TOKENS:
            refused.append(
                f"{name} would build a mask of {max_seq_len} x {max_seq_len} for each row; it is "
                f"for at most {MOST_MASKED_TOKENS} tokens"
            )
            continue
        reason = _try(causal, decode, VARLEN if name == "varlen" else own)
        if reason is None:
            logger.info("packing: documents in a row are kept apart by %s, as a probe shows", name)
            return name
        refused.append(f"{name}: {reason}")
    architecture = type(causal).__name__
    raise UnsupportedModelError(
        f"packing: {architecture} can't be trained on packed rows here. {'; '.join(refused)}. "
        "Set packing: false, or another attention (varlen, flex and flash build no mask).",
        architecture=architecture,
        attention=attention,
    )


_OURS = {"flex_attention": "flex", "flash_attention_2": "flash", VARLEN: "varlen"}


def _try(causal: Any, decode: Callable[..., Tensor], implementation: str) -> str | None:
    """Switch to an attention and hold it against the model's own; returns why it can't be used."""
    from transformers import AttentionInterface, AttentionMaskInterface

    before = causal.config._attn_implementation
    if implementation == VARLEN:
        if causal.device.type == "cuda":
            from torch.nn.attention.varlen import varlen_attn

            _GROUPED_HEADS.update(grouped_heads(varlen_attn))
        AttentionInterface.register(VARLEN, varlen_attention)
        AttentionMaskInterface.register(VARLEN, _varlen_mask)
        if not causal._can_set_attn_implementation():
            return "the family has an attention of its own"
    try:
        apart = states_apart(causal, decode)  # as the family itself attends
        causal.set_attn_implementation(implementation)
        difference, tolerance = packing_difference(causal, decode, apart=apart)
    except (NotImplementedError, RuntimeError, ValueError, TypeError, ImportError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        if difference <= tolerance:
            return None
        reason = (
            f"hidden states of two short documents differ by {difference:.2g} between one row and "
            f"two (at most {tolerance:.0e} expected): documents see each other, or not all that "
            "the model's own attention shows them"
        )
    causal.set_attn_implementation(before)
    return reason


def packing_difference(
    causal: Any, decode: Callable[..., Tensor], *, apart: Tensor
) -> tuple[float, float]:
    """How far two documents' hidden states in one row are from those in rows of their own.

    Args:
        causal: The model.
        decode: Its decoder.
        apart: What :func:`states_apart` gave.

    Returns:
        The relative distance, and the most that rounding explains.
    """
    packed = _states(causal, decode, [_probe(causal)], [torch.cat(_probe_positions(), dim=1)])
    difference = ((packed - apart).double().norm() / apart.double().norm()).item()
    return difference, _TOLERANCE[apart.dtype]


def states_apart(causal: Any, decode: Callable[..., Tensor]) -> Tensor:
    """Hidden states of two short documents in rows of their own, ``[1, T, D]``.

    Args:
        causal: The model.
        decode: Its decoder.

    Returns:
        Those of one document behind those of the other, by the attention that the model has now.
    """
    documents = torch.split(_probe(causal), list(_PROBED_LENGTHS), dim=1)
    return _states(causal, decode, documents, _probe_positions())


def _probe(causal: Any) -> Tensor:
    num_rows = causal.get_input_embeddings().weight.shape[0]
    return (torch.arange(1, sum(_PROBED_LENGTHS) + 1) * 7 % num_rows)[None]


def _probe_positions() -> list[Tensor]:
    return [torch.arange(length)[None] for length in _PROBED_LENGTHS]


@torch.no_grad()
def _states(
    causal: Any,
    decode: Callable[..., Tensor],
    rows: Sequence[Tensor],
    position_ids: Sequence[Tensor],
) -> Tensor:
    was_training = causal.training
    causal.eval()  # dropout would make any two calls differ
    try:
        pairs = zip(rows, position_ids, strict=True)
        return torch.cat([decode(ids.to(causal.device), at) for ids, at in pairs], dim=1)
    finally:
        causal.train(was_training)
