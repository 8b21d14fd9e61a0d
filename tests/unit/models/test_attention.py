"""Documents of one row don't see each other: own attention, transformers' ways, the probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from legato.data.loader import Batch, Loader
from legato.data.packing import pack_samples
from legato.errors import UnsupportedModelError
from legato.models.attention import (
    VARLEN,
    document_bounds,
    grouped_heads,
    packing_difference,
    settle_packing,
    states_apart,
    varlen_attention,
)
from legato.models.compile import compile_in_place
from legato.models.head import split_head
from legato.train.step import batch_loss, loss_positions
from tests.helpers.families import DENSE, build_family
from tests.helpers.rows import as_batch, as_data, random_rows
from tests.helpers.tiny import build_config


def positions_of(*rows: list[int]) -> Tensor:
    return torch.tensor([[i for n in row for i in range(n)] for row in rows])


def dense(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Softmax attention written out, ``[B, H, T, K]`` and a mask ``[B, T, T]``."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_varlen_is_dense_attention_with_a_mask_of_documents(window: int | None) -> None:
    position_ids = positions_of([4, 1, 7], [12])
    query, key, value = (torch.randn(2, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    at = torch.arange(12)
    document = (position_ids == 0).cumsum(1)
    allowed = (document[:, :, None] == document[:, None]) & (at[:, None] >= at)
    if window is not None:
        allowed &= at[:, None] - at < window
    expected = dense(query, key, value, allowed)
    bounds = document_bounds(position_ids, device=torch.device("cpu"))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 4, 5, 12, 24]
    found, _ = varlen_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, **bounds
    )
    assert torch.allclose(found, expected, atol=1e-6)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * weight).sum(), (query, key, value))
    references = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for gradient, reference in zip(gradients, references, strict=True):
        assert torch.allclose(gradient, reference, atol=1e-5)


@pytest.mark.parametrize("family", DENSE)
def test_packed_documents_are_apart_in_every_dense_family(family: str) -> None:
    model = build_family(family)
    decode, _ = split_head(model)
    used = settle_packing(model, decode, attention="auto", max_seq_len=64)
    # Gemma 2 caps its scores, which no fused kernel here does.
    assert used == ("eager" if family == "gemma2" else "varlen")
    own = build_family(family)
    apart = states_apart(own, split_head(own)[0])
    difference, tolerance = packing_difference(model, decode, apart=apart)
    assert difference <= tolerance == 1e-4


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_a_window_shorter_than_the_documents_holds_in_packed_rows(
    family: str, attention: str
) -> None:
    rows = random_rows([9, 30, 4, 17, 25, 12, 3], vocab_size=96)
    data = pack_samples(as_data(rows), max_seq_len=40, seed=0)
    (packed,) = Loader(
        data, global_batch_size=4, batch_size=4, seed=0, pad_id=0, length_buckets=[48]
    ).micro_batches(1)

    def loss(model: Any, batch: Batch) -> float:
        decode, head = split_head(model)
        positions = loss_positions(batch.trained)
        cpu = torch.device("cpu")
        return batch_loss(batch, positions, decode=decode, head=head, device=cpu).item()

    wide, model = build_family(family), build_family(family, **WINDOWED[family])
    expected = loss(model, as_batch(rows))
    settle_packing(model, split_head(model)[0], attention=attention, max_seq_len=40)
    assert loss(model, packed) == pytest.approx(expected, rel=1e-5)
    assert abs(loss(wide, as_batch(rows)) - expected) > 1e-3 * expected  # the window matters


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa", "eager", "compiled"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("own_compiler_state")
def test_loss_and_gradient_of_packed_rows_are_those_of_padded_ones(attention: str) -> None:
    from transformers import AutoModelForCausalLM

    implementation = "eager" if attention == "eager" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        build_config(), dtype=torch.float32, attn_implementation=implementation
    )
    decode, head = split_head(model)
    rows = random_rows([9, 30, 4, 17, 25, 12, 3])
    gradients: list[list[Tensor]] = []
    losses = []
    for packed in (False, True):
        if packed and attention == "compiled":
            settle_packing(model, decode, attention="auto", max_seq_len=40, is_compiled=True)
            compile_in_place(model, backend="aot_eager", dynamic=False)
        elif packed:
            settle_packing(model, decode, attention=attention, max_seq_len=40)
        if packed:
            data = pack_samples(as_data(rows), max_seq_len=40, seed=0)
            assert len(data) < 4
            (batch,) = Loader(
                data, global_batch_size=4, batch_size=4, seed=0, pad_id=0, length_buckets=[48]
            ).micro_batches(1)
        else:
            batch = as_batch(rows)
        loss = batch_loss(
            batch,
            loss_positions(batch.trained),
            decode=decode,
            head=head,
            device=torch.device("cpu"),
        )
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch._dynamo.reset()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for packed_gradient, gradient in zip(*gradients, strict=True):
        assert torch.allclose(packed_gradient, gradient, rtol=1e-4, atol=1e-5)


def test_a_model_whose_documents_see_each_other_is_refused() -> None:
    model = build_family("llama")
    inner, _ = split_head(model)

    def decode(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return inner(input_ids)  # as a family does that doesn't look at position_ids

    with pytest.raises(UnsupportedModelError) as caught:
        settle_packing(model, decode, attention="auto", max_seq_len=64)
    text = str(caught.value)
    assert text.startswith("packing: LlamaForCausalLM can't be trained on packed rows here.")
    assert "varlen: hidden states of two short documents differ by" in text
    assert "sdpa: hidden states of two short documents differ by" in text
    assert caught.value.attention == "auto"  # type: ignore[attr-defined]
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_that_differs_from_the_models_own_is_refused() -> None:
    """Documents are apart in it, but what is trained would be another model."""

    def doubled(*args: Any, **options: Any) -> tuple[Tensor, None]:
        return 2 * sdpa_attention_forward(*args, **options)[0], None

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    model = build_family("llama")
    model.set_attn_implementation("doubled")
    decode, _ = split_head(model)
    with pytest.raises(UnsupportedModelError, match="varlen: hidden states of two short documents"):
        settle_packing(model, decode, attention="varlen", max_seq_len=64)
    assert settle_packing(model, decode, attention="auto", max_seq_len=64) == "doubled"


def test_a_cache_that_stays_on_is_found_by_the_probe() -> None:
    """transformers looks at position_ids only without a cache, and has one by default."""
    model = build_family("llama")

    def decode(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return model.model(input_ids, position_ids=position_ids).last_hidden_state

    with pytest.raises(UnsupportedModelError, match="sdpa: hidden states of two short documents"):
        settle_packing(model, decode, attention="sdpa", max_seq_len=64)


def test_masks_of_long_rows_are_refused_and_varlen_is_not() -> None:
    model = build_family("gemma2")
    decode, _ = split_head(model)
    with pytest.raises(UnsupportedModelError, match="eager would build a mask of 9000 x 9000"):
        settle_packing(model, decode, attention="auto", max_seq_len=9000)
    model = build_family("llama")
    decode, _ = split_head(model)
    assert settle_packing(model, decode, attention="auto", max_seq_len=9000) == "varlen"


def test_compiled_blocks_on_a_cpu_get_a_mask() -> None:
    model = build_family("llama")
    decode, _ = split_head(model)
    used = settle_packing(model, decode, attention="auto", max_seq_len=64, is_compiled=True)
    assert used == "sdpa"


def test_answers_are_the_same_after_the_attention_was_switched() -> None:
    model = build_family("llama")
    prompts: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    before = model.generate(**prompts, max_new_tokens=6, do_sample=False)
    decode, _ = split_head(model)
    settle_packing(model, decode, attention="varlen", max_seq_len=64)
    assert model.config._attn_implementation == VARLEN
    after = model.generate(**prompts, max_new_tokens=6, do_sample=False)
    assert after.tolist() == before.tolist()


def test_fewer_heads_of_keys_are_said_to_the_kernels_that_want_to_know() -> None:
    def of_torch_2_11(query: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        return query

    def later(query: torch.Tensor, *, enable_gqa: bool = False) -> torch.Tensor:
        return query

    assert grouped_heads(of_torch_2_11) == {}
    assert grouped_heads(later) == {"enable_gqa": True}
