from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.train.loss import COMPILED_ROWS, compile_chunk_loss, sum_token_loss


class LoRAHead(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(4, base.in_features))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden @ self.lora_a.T @ self.lora_b.T


class SoftcappedHead(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, hidden: Tensor) -> Tensor:
        return 5.0 * torch.tanh(self.base(hidden) / 5.0)


def build_head(kind: str) -> nn.Module:
    base = nn.Linear(16, 50, bias=False)
    if kind == "lora":
        return LoRAHead(base)
    if kind == "softcapped":
        return SoftcappedHead(base)
    return base.requires_grad_(kind == "trainable")


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    inputs = [hidden, *(weight for weight in head.parameters() if weight.requires_grad)]
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("kind", ["trainable", "frozen", "lora", "softcapped"])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_loss_and_gradients_equal_torchs_cross_entropy_over_all_logits(
    kind: str, chunk_tokens: int
) -> None:
    head = build_head(kind)
    hidden = torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(0, 50, (37,))

    loss = sum_token_loss(hidden, targets, head=head, chunk_tokens=chunk_tokens)
    reference = cross_entropy(head(hidden), targets, reduction="sum")

    torch.testing.assert_close(loss, reference)
    for ours, theirs in zip(
        gradients(loss / 7, hidden, head), gradients(reference / 7, hidden, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_compiled_loss_is_torchs_and_one_graph_whatever_the_number_of_tokens() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    chunk_loss = compile_chunk_loss(backend=counting)
    head = build_head("trainable")
    for num_tokens in (COMPILED_ROWS - 1, COMPILED_ROWS, 3 * COMPILED_ROWS + 5):
        hidden = torch.randn(num_tokens, 16, requires_grad=True)
        targets = torch.randint(0, 50, (num_tokens,))
        loss = sum_token_loss(hidden, targets, head=head, chunk_loss=chunk_loss, chunk_tokens=256)
        with torch.no_grad():
            same = sum_token_loss(hidden, targets, head=head, chunk_loss=chunk_loss)
        reference = cross_entropy(head(hidden), targets, reduction="sum")
        torch.testing.assert_close(loss, reference)
        torch.testing.assert_close(same, reference)
        for ours, theirs in zip(
            gradients(loss, hidden, head), gradients(reference, hidden, head), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    assert len(graphs) == 1


@pytest.fixture
def bf16_case() -> tuple[Tensor, Tensor, nn.Linear]:
    """1000 positions of a head as wide as SmolLM2's, with a vocabulary of 2048."""
    head = nn.Linear(576, 2048, bias=False)
    nn.init.normal_(head.weight, std=0.05)
    return torch.randn(1000, 576), torch.randint(0, 2048, (1000,)), head


def test_in_bf16_the_mean_loss_is_within_a_thousandth_of_fp32(
    bf16_case: tuple[Tensor, Tensor, nn.Linear],
) -> None:
    hidden, targets, head = bf16_case
    hidden, head = hidden.bfloat16(), head.bfloat16()
    loss = sum_token_loss(hidden, targets, head=head) / 1000
    reference = cross_entropy(hidden.float() @ head.weight.float().T, targets)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - reference.item()) <= 1e-3


def test_in_bf16_gradients_of_many_chunks_are_as_near_to_fp32_as_bf16_can_hold(
    bf16_case: tuple[Tensor, Tensor, nn.Linear],
) -> None:
    hidden, targets, head = bf16_case
    hidden, head = hidden.bfloat16().requires_grad_(), head.bfloat16()
    loss = sum_token_loss(hidden, targets, head=head, chunk_tokens=50) / 1000
    loss.backward()

    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = head.weight.detach().float().requires_grad_()
    cross_entropy(exact_hidden @ exact_weight.T, targets).backward()
    for ours, exact in ((hidden, exact_hidden), (head.weight, exact_weight)):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype is torch.bfloat16
        error = (ours.grad.float() - exact.grad).norm() / exact.grad.norm()
        assert error < 2**-8, error  # half a step of bf16; sums in bf16 are off by more


def test_without_gradients_the_loss_is_the_same() -> None:
    head, hidden = build_head("trainable"), torch.randn(37, 16)
    targets = torch.randint(0, 50, (37,))
    with torch.no_grad():
        loss = sum_token_loss(hidden, targets, head=head, chunk_tokens=8)
    torch.testing.assert_close(loss, cross_entropy(head(hidden), targets, reduction="sum").detach())
    assert not loss.requires_grad


def test_no_positions_give_a_loss_of_zero_and_gradients_of_zero() -> None:
    head, hidden = build_head("trainable"), torch.randn(5, 16, requires_grad=True)
    loss = sum_token_loss(hidden[:0], torch.empty(0, dtype=torch.long), head=head)
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(loss, hidden, head))


def test_no_more_logits_exist_at_a_time_than_one_chunk_has() -> None:
    seen: list[int] = []

    class WatchedHead(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(len(hidden))
            return super().forward(hidden)

    hidden = torch.randn(37, 16, requires_grad=True)
    head = WatchedHead(16, 50)
    sum_token_loss(hidden, torch.zeros(37, dtype=torch.long), head=head, chunk_tokens=8).backward()
    assert seen == [8, 8, 8, 8, 5]  # and none of them twice


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    head, hidden = build_head("trainable"), torch.randn(3, 16, requires_grad=True)
    loss = sum_token_loss(hidden, torch.zeros(3, dtype=torch.long), head=head)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once only"):
        loss.backward()


@pytest.mark.parametrize(
    ("num_targets", "chunk_tokens", "message"), [(4, 8, "hidden \\[N, D\\]"), (5, 0, "1 or more")]
)
def test_wrong_arguments_are_refused(num_targets: int, chunk_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sum_token_loss(
            torch.randn(5, 16),
            torch.zeros(num_targets, dtype=torch.long),
            head=build_head("frozen"),
            chunk_tokens=chunk_tokens,
        )


@pytest.mark.real_model
@pytest.mark.slow
def test_on_a_real_model_in_bf16_loss_and_gradients_are_those_of_fp32(smollm2_dir: Path) -> None:
    """The same hidden states and weights, through ours in bf16 and through torch in fp32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :513]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, :-1]
    targets = ids[0, 1:]

    hidden = hidden.requires_grad_()
    loss = sum_token_loss(hidden, targets, head=model.lm_head, chunk_tokens=128) / len(targets)
    loss.backward()
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = model.lm_head.weight.detach().float().requires_grad_()
    exact = cross_entropy(exact_hidden @ exact_weight.T, targets)
    exact.backward()

    assert abs(loss.item() - exact.item()) <= 1e-3
    for ours, theirs in (
        (hidden.grad, exact_hidden.grad),
        (model.lm_head.weight.grad, exact_weight.grad),
    ):
        assert ours is not None
        assert theirs is not None
        assert (ours.float() - theirs).norm() / theirs.norm() < 2**-6
