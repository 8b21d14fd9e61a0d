"""A causal language model as two halves, so that a loss can skip logits that nobody needs."""

# B batch, T tokens, N positions, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from legato.errors import UnsupportedModelError
from legato.models.attention import document_bounds, wants_bounds


class Decoder:
    """Everything up to the last hidden state: ``[B, T] -> [B, T, D]``; the model's own module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states of every position.

        Args:
            input_ids: ``[B, T]``, rows padded on the right.
            position_ids: ``[B, T]``, from 0 in each document of a row, on any device; by default
                0, 1, 2, ... in each row.

        Returns:
            ``[B, T, D]`` in the model's dtype.
        """
        # No attention mask: rows are padded on the right, where a causal model can't look.
        # No cache: with one, transformers ignores document boundaries in position_ids.
        options: dict[str, Any] = {}
        if position_ids is not None:
            options["position_ids"] = position_ids.to(input_ids.device)
            if wants_bounds(self.module.config):
                options |= document_bounds(position_ids, device=input_ids.device)
        output = self.module(input_ids=input_ids, use_cache=False, **options)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


class Head(nn.Module):
    """Hidden states to logits, with the family's own scaling: ``[N, D] -> [N, V]``.

    Args:
        projection: The model's output embedding itself, possibly with LoRA inside or tied.
        factor: What the logits are multiplied by (Cohere, Granite, Falcon-H1); 1 elsewhere.
        softcap: ``softcap * tanh(logits / softcap)`` (Gemma); None elsewhere.
    """

    def __init__(
        self, projection: nn.Module, *, factor: float = 1.0, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.projection = projection
        self.factor = factor
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of some positions.

        Args:
            hidden: ``[..., D]``, from the decoder.

        Returns:
            ``[..., V]`` in the model's dtype.
        """
        logits: torch.Tensor = self.projection(hidden)
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def split_head(model: nn.Module) -> tuple[Decoder, Head]:
    """Take a model apart into ``decode`` and ``head``, and prove that they make the same logits.

    Args:
        model: A causal language model of transformers, or a PEFT model around one.

    Returns:
        ``decode(input_ids, position_ids=None) -> hidden [B, T, D]`` and
        ``head(hidden [N, D]) -> logits [N, V]``. Both use the model's own modules: what trains
        there trains in the model.

    Raises:
        UnsupportedModelError: The family has no separate head, or the halves give other logits
            than the model; ``.architecture``, ``.difference``.
    """
    causal: Any = model
    if hasattr(causal, "get_base_model"):  # PEFT's wrapper; its layers lie inside of the base
        causal = causal.get_base_model()
    architecture = type(causal).__name__
    projection = causal.get_output_embeddings()
    decoder = causal.get_decoder()
    if projection is None or decoder is None or decoder is causal:
        raise UnsupportedModelError(
            f"{architecture}: can't be taken apart into a decoder and a head; Legato needs that "
            "to compute the loss of trained tokens only.",
            architecture=architecture,
        )
    decode = Decoder(decoder)
    factor, softcap = _scaling(causal.config.get_text_config())
    head = Head(projection, factor=factor, softcap=softcap)
    # On the meta device there is nothing to compute with: the caller checks when weights are there.
    if causal.get_input_embeddings().weight.device.type != "meta":
        check_halves(causal, decode, head)
    return decode, head


def _scaling(config: Any) -> tuple[float, float | None]:
    """What the family does to its logits, by the fields that transformers' families read."""
    factor = 1.0
    if (multiplier := getattr(config, "logit_scale", None)) is not None:  # Cohere
        factor *= multiplier
    if (multiplier := getattr(config, "lm_head_multiplier", None)) is not None:  # Falcon-H1
        factor *= multiplier
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        factor /= divisor
    return factor, getattr(config, "final_logit_softcapping", None)  # Gemma


@torch.no_grad()
def check_halves(model: Any, decode: Callable[..., torch.Tensor], head: nn.Module) -> None:
    """Compare the halves with the whole on a short input. Collective if the model is sharded.

    Args:
        model: The whole model, or an adapter's model around it.
        decode: Its decoder.
        head: Its head.

    Raises:
        UnsupportedModelError: Their logits differ; ``.architecture``, ``.difference``.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    input_ids = (torch.arange(16, device=device) * 7 % vocab_size).view(2, 8)
    was_training = model.training
    model.eval()  # dropout would make any two calls differ
    try:
        whole: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
        halves: torch.Tensor = head(decode(input_ids).flatten(0, 1)).view_as(whole)
    finally:
        model.train(was_training)
    # The same operations on rows in another order: equal up to the rounding of the model's dtype.
    exact = whole.dtype in (torch.float32, torch.float64)
    tolerance = (1e-4 if exact else 3e-2) * max(1.0, whole.float().abs().max().item())
    difference = (whole.float() - halves.float()).abs().max().item()
    if not difference <= tolerance:  # also when it is NaN
        architecture = type(model).__name__
        raise UnsupportedModelError(
            f"{architecture}: decoder and head apart give logits that differ by {difference:.3g} "
            f"from the model's (at most {tolerance:.3g} expected). Its forward does something "
            "to the logits that Legato doesn't know, or its weights aren't finite.",
            architecture=architecture,
            difference=difference,
        )
