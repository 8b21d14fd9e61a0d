from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from legato.data.loader import Batch
from legato.errors import DataError, ModelError, NonFiniteError
from legato.models.head import split_head
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.train.in_backward import InBackward
from legato.train.masters import Masters
from legato.train.model import TrainableModel
from legato.train.step import StepResult, loss_positions, train_step
from tests.helpers.rows import Row, as_batch, as_batches, as_labels, random_rows

ALONE = World.single("cpu")
LENGTHS = (5, 9, 3, 12, 7, 4, 11, 6)


class Setup:
    """A live model with everything that a step takes."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **changes)
        self.model.train()
        self.decode, self.head = split_head(self.model)
        self.masters = Masters(dict(self.model.named_parameters()))
        self.optimizer = build_optimizer(self.masters.tensors, lr=1.0, weight_decay=0.01)

    def step(
        self,
        batches: list[Batch],
        *,
        step: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        world: World = ALONE,
        clip_grad_norm: float | None = None,
        on_nonfinite: str = "stop",
        lr: float = 1e-3,
        seed: int = 0,
        before_update: Callable[[], object] | None = None,
        **of_model: Any,
    ) -> StepResult:
        model = TrainableModel(
            self.model, self.decode, self.head, self.masters.tensors, masters=self.masters
        )
        return train_step(
            batches,
            model=replace(model, **of_model),
            optimizer=optimizer or self.optimizer,
            world=world,
            lr=lr,
            step=step,
            seed=seed,
            clip_grad_norm=clip_grad_norm,
            on_nonfinite=on_nonfinite,
            before_update=before_update,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.model.state_dict().items()}


@pytest.fixture
def setup(tiny_model_dir: Path) -> Setup:
    return Setup(tiny_model_dir)


@pytest.fixture
def rows() -> list[Row]:
    return random_rows(LENGTHS)


def test_loss_norm_and_weights_equal_a_plain_transformers_loop(
    tiny_model_dir: Path, setup: Setup, rows: list[Row]
) -> None:
    """The reference: transformers' own loss over the padded batch, torch's clipping and AdamW."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    matrices = [weight for weight in reference.parameters() if weight.dim() > 1]
    vectors = [weight for weight in reference.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    )
    for step in (1, 2, 3):
        lr = 1e-3 / step
        batch = as_batch(rows)
        for group in optimizer.param_groups:
            group["lr"] = lr
        output = reference(
            input_ids=batch.input_ids,
            attention_mask=torch.ones_like(batch.input_ids),
            labels=as_labels(batch),
        )
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

        result = setup.step(as_batches(rows, 3), step=step, lr=lr, clip_grad_norm=0.5)
        assert result.loss == pytest.approx(output.loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.num_loss_tokens == batch.num_loss_tokens
        assert result.num_tokens == sum(LENGTHS)
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(setup.model.state_dict()[name], weight, atol=2e-6, rtol=0)


def test_loss_and_gradient_norm_dont_depend_on_how_rows_are_cut(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    results = [
        Setup(tiny_model_dir).step(as_batches(rows, batch_size)) for batch_size in (1, 2, 3, 4, 8)
    ]
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


def test_bf16_loss_is_that_of_transformers_in_bf16(tiny_model_dir: Path, rows: list[Row]) -> None:
    setup = Setup(tiny_model_dir, dtype=torch.bfloat16)
    batch = as_batch(rows)
    with torch.no_grad():
        logits = setup.model(input_ids=batch.input_ids).logits[:, :-1].float()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), as_labels(batch)[:, 1:].flatten())
    result = setup.step([batch])
    assert result.loss == pytest.approx(expected.item(), abs=1e-3)
    assert all(weight.dtype is torch.bfloat16 for weight in setup.model.parameters())


def test_the_update_is_published_to_the_bf16_weights(tiny_model_dir: Path, rows: list[Row]) -> None:
    setup = Setup(tiny_model_dir, dtype=torch.bfloat16)
    before = setup.weights()
    setup.step(as_batches(rows, 4), lr=1e-2)
    for name, weight in setup.model.named_parameters():
        assert torch.equal(weight, setup.masters.tensors[name].bfloat16()), name
        assert not torch.equal(weight, before[name]), name


def test_no_gradient_is_left_behind(setup: Setup, rows: list[Row]) -> None:
    setup.step(as_batches(rows, 4))
    assert all(weight.grad is None for weight in setup.model.parameters())


def test_dropout_is_the_same_again_for_the_same_step_and_another_for_the_next(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    def loss(step: int, seed: int = 0, rank: int = 0) -> float:
        setup = Setup(tiny_model_dir, attention_dropout=0.5)
        torch.rand(step)  # draws from elsewhere don't matter
        world = World(rank, 2, ALONE.device)
        return setup.step(as_batches(rows, 4), step=step, seed=seed, world=world).loss

    assert loss(1) == loss(1)
    assert len({loss(1), loss(2), loss(1, seed=1), loss(1, rank=1)}) == 4


def test_the_rate_of_the_step_is_the_one_that_is_used(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    still, moved = Setup(tiny_model_dir), Setup(tiny_model_dir)
    before = still.weights()
    still.step([as_batch(rows)], lr=0.0)
    moved.step([as_batch(rows)], lr=1e-3)
    assert all(torch.equal(still.weights()[name], before[name]) for name in before)
    assert any(not torch.equal(moved.weights()[name], before[name]) for name in before)


def test_the_hook_before_the_update_sees_the_weights_of_the_step_before(
    setup: Setup, rows: list[Row]
) -> None:
    before, seen = setup.weights(), {}
    setup.step([as_batch(rows)], before_update=lambda: seen.update(setup.weights()))
    assert all(torch.equal(seen[name], before[name]) for name in before)
    assert any(not torch.equal(setup.weights()[name], before[name]) for name in before)


def test_a_gradient_that_isnt_finite_stops_before_the_update_and_names_the_samples(
    setup: Setup, rows: list[Row]
) -> None:
    setup.model.model.norm.weight.data[0] = math.inf
    before, updates = setup.weights(), []
    with pytest.raises(NonFiniteError, match=r"step 5: loss nan.*batch0:0.*on_nonfinite=skip") as e:
        setup.step(as_batches(rows, 4), step=5, before_update=lambda: updates.append(1))
    assert e.value.step == 5
    assert e.value.sample_ids == tuple(f"batch{i}:{b}" for i in (0, 1) for b in range(4))
    assert updates == []
    assert all(torch.equal(setup.weights()[name], before[name]) for name in before)


def test_only_the_micro_batch_with_the_broken_loss_is_named(setup: Setup, rows: list[Row]) -> None:
    def poison(rows: list[Row], token: int) -> list[Row]:
        return [Row([token if t == 200 else t for t in row.input_ids], row.trained) for row in rows]

    setup.model.config.tie_word_embeddings = False
    setup.model.model.embed_tokens = nn.Embedding.from_pretrained(
        setup.model.model.embed_tokens.weight.detach().clone(), freeze=True
    )
    setup.model.model.embed_tokens.weight[200] = math.nan
    good = poison(rows, 201)
    bad = [Row([200, *row.input_ids[1:]], row.trained) for row in good[:2]]
    setup.masters = Masters({n: w for n, w in setup.model.named_parameters() if w.requires_grad})
    setup.optimizer = build_optimizer(setup.masters.tensors, lr=1.0)
    with pytest.raises(NonFiniteError) as caught:
        setup.step([as_batch(good[2:5], name="good"), as_batch(bad, name="bad")])
    assert caught.value.sample_ids == ("bad:0", "bad:1")


def test_a_skipped_step_changes_nothing_and_says_so(setup: Setup, rows: list[Row]) -> None:
    setup.model.model.norm.weight.data[0] = math.nan
    before = setup.weights()
    result = setup.step(as_batches(rows, 4), on_nonfinite="skip")
    assert result.skipped
    assert math.isnan(result.loss)
    assert all(
        torch.equal(w, before[n]) or torch.isnan(w).any() for n, w in setup.weights().items()
    )
    assert all(weight.grad is None for weight in setup.model.parameters())


def test_a_step_without_a_trained_token_is_an_error_and_no_nan(
    setup: Setup, rows: list[Row]
) -> None:
    untrained = [Row(row.input_ids, [False] * len(row.trained)) for row in rows]
    with pytest.raises(DataError, match="step 4: no token of its rows is trained"):
        setup.step(as_batches(untrained, 4), step=4)


def test_a_micro_batch_without_a_trained_token_weighs_nothing(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    empty = as_batch([Row([3], [False])])
    without = Setup(tiny_model_dir).step([as_batch(rows)])
    result = Setup(tiny_model_dir).step([as_batch(rows), empty])
    assert result.loss == pytest.approx(without.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(without.grad_norm, rel=1e-6)


def test_an_optimizer_over_other_parameters_is_refused(setup: Setup, rows: list[Row]) -> None:
    some = dict(list(setup.masters.tensors.items())[:-1])
    with pytest.raises(ModelError, match="must be equal"):
        setup.step([as_batch(rows)], parameters=some)


def test_parameters_that_the_loss_doesnt_depend_on_are_an_error(
    setup: Setup, rows: list[Row]
) -> None:
    dead = nn.Parameter(torch.ones(2, 2))
    setup.model.requires_grad_(False)
    with pytest.raises(ModelError, match=r"no trainable parameter got a gradient.*dead"):
        setup.step(
            [as_batch(rows)],
            parameters={"dead": dead},
            optimizer=torch.optim.SGD([dead], lr=0.1),
            masters=None,
            decode=lambda ids: setup.decode(ids).requires_grad_(),
        )


def test_counts_and_losses_are_added_up_over_ranks(tiny_model_dir: Path, rows: list[Row]) -> None:
    """Two ranks of equal rows: the same loss, gradients of half the weight each."""
    alone = Setup(tiny_model_dir).step([as_batch(rows)])

    class AnotherLikeIt(World):
        def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
            return [2 * value for value in values]

    world = AnotherLikeIt(0, 2, ALONE.device)
    one_of_two = Setup(tiny_model_dir).step([as_batch(rows)], world=world)
    assert one_of_two.loss == pytest.approx(alone.loss, rel=1e-6)
    assert one_of_two.num_loss_tokens == 2 * alone.num_loss_tokens
    assert one_of_two.num_tokens == 2 * alone.num_tokens
    assert one_of_two.grad_norm == pytest.approx(alone.grad_norm / 2, rel=1e-5)


def test_ranks_decide_together_and_name_the_rows_of_the_rank_that_broke(
    setup: Setup, rows: list[Row]
) -> None:
    """Here everything is finite; another rank tells of a loss that isn't, and of its row."""
    said: list[Any] = []
    sums = iter([lambda counts: counts, lambda losses: [math.nan, losses[1]]])

    class AnotherThatBreaks(World):
        def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
            return list(next(sums)(values))

        def gather(self, value: Any) -> list[Any]:
            said.append(value)
            return [value, [["theirs:7"], ["theirs:9"]]]

    before = setup.weights()
    with pytest.raises(NonFiniteError, match="Samples: theirs:7\\. ") as caught:
        setup.step(as_batches(rows, 4), world=AnotherThatBreaks(0, 2, ALONE.device))
    assert caught.value.sample_ids == ("theirs:7",)
    assert said[0][0] == []
    assert len(said[0][1]) == len(rows)
    assert all(torch.equal(weight, before[name]) for name, weight in setup.weights().items())


def test_gradients_are_added_up_over_ranks_after_the_last_micro_batch_only(
    setup: Setup, rows: list[Row]
) -> None:
    told: list[bool] = []
    setup.step(as_batches(rows, 3), set_gradient_sync=told.append)
    assert told == [False, False, True]


def test_positions_are_those_before_a_trained_token() -> None:
    trained = torch.tensor([[True, False, True, True], [False, True, False, False]])
    assert loss_positions(trained).tolist() == [1, 2, 4]


def test_stochastic_rounding_repeats_whatever_was_drawn_elsewhere(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    def train(draws_elsewhere: int) -> dict[str, torch.Tensor]:
        setup = Setup(tiny_model_dir, dtype=torch.bfloat16)
        setup.masters.close()
        parameters = dict(setup.model.named_parameters())
        optimizer = build_optimizer(parameters, lr=1.0, stochastic_rounding=True)
        for step in (1, 2):
            torch.rand(draws_elsewhere)
            setup.step(
                as_batches(rows, 4),
                step=step,
                optimizer=optimizer,
                parameters=parameters,
                masters=None,
                before_update=lambda: torch.rand(draws_elsewhere),
                world=World(rank=draws_elsewhere, world_size=3, device=ALONE.device),
            )
        return setup.weights()

    first, second = train(1), train(2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_norm_of_bf16_gradients_isnt_rounded_to_bf16(
    tiny_model_dir: Path, rows: list[Row]
) -> None:
    setup = Setup(tiny_model_dir, dtype=torch.bfloat16)
    setup.masters.close()
    parameters = dict(setup.model.named_parameters())
    seen: list[float] = []

    def remember() -> None:
        gradients = [weight.grad.double().flatten() for weight in parameters.values()]
        seen.append(torch.cat(gradients).norm().item())

    result = setup.step(
        [as_batch(rows)],
        optimizer=build_optimizer(parameters, lr=1.0, stochastic_rounding=True),
        parameters=parameters,
        masters=None,
        before_update=remember,
    )
    assert result.grad_norm == pytest.approx(seen[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_updates_in_backward_are_those_after_it_bit_for_bit(
    tiny_model_dir: Path, rows: list[Row], name: str, dtype: torch.dtype
) -> None:
    after, during = (Setup(tiny_model_dir, dtype=dtype) for _ in range(2))
    for setup in (after, during):
        setup.optimizer = build_optimizer(
            setup.masters.tensors, name=name, lr=1.0, weight_decay=0.01
        )
    updates = InBackward(
        during.optimizer, parameters=during.masters.tensors, masters=during.masters
    )
    for step in (1, 2, 3):
        expected = after.step([as_batch(rows)], step=step)
        assert during.step([as_batch(rows)], step=step, in_backward=updates) == expected
        assert all(p.grad is None for p in during.model.parameters())
        assert all(p.grad is None for p in during.masters.tensors.values())
    for key, weight in after.weights().items():
        assert torch.equal(during.weights()[key], weight), key
    for key, held in after.masters.tensors.items():
        found = during.optimizer.state[during.masters.tensors[key]]
        for moment, value in after.optimizer.state[held].items():
            assert torch.equal(found[moment], value), (key, moment)


def test_no_more_than_one_gradient_exists_at_a_time(tiny_model_dir: Path, rows: list[Row]) -> None:
    setup = Setup(tiny_model_dir)
    most = 0

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in setup.model.parameters()))

    # Before the hook that updates, so each gradient is seen.
    for parameter in setup.model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    updates = InBackward(setup.optimizer, parameters=setup.masters.tensors, masters=setup.masters)
    setup.step([as_batch(rows)], in_backward=updates)
    assert most == 1
    updates.close()
    setup.step([as_batch(rows)])
    assert most == len(list(setup.model.parameters()))


def test_what_is_staged_must_be_there_before_backward_that_updates(
    setup: Setup, rows: list[Row]
) -> None:
    before = setup.weights()
    seen = []

    def staged() -> None:
        seen.append(all(torch.equal(before[k], v) for k, v in setup.weights().items()))
        assert all(p.grad is None for p in setup.model.parameters())

    updates = InBackward(setup.optimizer, parameters=setup.masters.tensors)
    setup.step([as_batch(rows)], in_backward=updates, before_update=staged)
    assert seen == [True]
    assert not torch.equal(before["model.norm.weight"], setup.weights()["model.norm.weight"])


def test_a_loss_that_isnt_finite_is_found_before_backward_changes_a_weight(
    setup: Setup, rows: list[Row]
) -> None:
    updates = InBackward(setup.optimizer, parameters=setup.masters.tensors)
    with torch.no_grad():
        setup.model.model.norm.weight[0] = float("inf")
    before = setup.weights()
    with pytest.raises(NonFiniteError, match=r"loss nan\. No update was made") as caught:
        setup.step([as_batch(rows)], in_backward=updates)
    assert not caught.value.weights_changed
    assert "or leave optimizer_in_backward out" in str(caught.value)  # which can't skip
    assert all(torch.equal(before[k], v) for k, v in setup.weights().items())


def test_a_gradient_that_isnt_finite_is_told_as_found_too_late(
    setup: Setup, rows: list[Row]
) -> None:
    updates = InBackward(setup.optimizer, parameters=setup.masters.tensors)
    setup.model.model.layers[0].mlp.down_proj.register_full_backward_hook(
        lambda _module, inputs, _outputs: (inputs[0] * float("nan"),)
    )
    with pytest.raises(NonFiniteError, match="update was made before that was known") as caught:
        setup.step([as_batch(rows)], in_backward=updates)
    assert caught.value.weights_changed


@pytest.mark.parametrize(
    "options", [{"clip_grad_norm": 1.0}, {"on_nonfinite": "skip"}, {"cut": 4}], ids=str
)
def test_what_updates_in_backward_cant_do_is_an_error(
    setup: Setup, rows: list[Row], options: dict[str, Any]
) -> None:
    updates = InBackward(setup.optimizer, parameters=setup.masters.tensors)
    batches = as_batches(rows, options.pop("cut", 8))
    with pytest.raises(ValueError, match="one micro-batch, no clip_grad_norm"):
        setup.step(batches, in_backward=updates, **options)
