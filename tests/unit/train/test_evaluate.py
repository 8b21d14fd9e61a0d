from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from legato.data.loader import Loader
from legato.errors import DataError
from legato.models.head import split_head
from legato.parallel.world import World
from legato.train.evaluate import evaluate
from legato.train.model import TrainableModel
from tests.helpers.rows import PAD_ID, Row, as_batch, as_data, as_labels, random_rows

ALONE = World.single("cpu")
ROWS = random_rows((5, 9, 3, 12, 7, 4, 11))


@pytest.fixture
def model(tiny_model_dir: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attention_dropout=0.5)
    model.train()
    return model


def build_loader(batch_size: int, rows: list[Row] = ROWS) -> Loader:
    return Loader(
        as_data(rows),
        global_batch_size=batch_size,
        batch_size=batch_size,
        seed=0,
        pad_id=PAD_ID,
        shuffle=False,
    )


def trainable(model: PreTrainedModel) -> TrainableModel:
    decode, head = split_head(model)
    return TrainableModel(model, decode, head, parameters=dict(model.named_parameters()))


def run(
    model: PreTrainedModel,
    loader: Loader,
    *,
    should_stop: Callable[[], bool] | None = None,
    world: World = ALONE,
) -> dict[str, float | int] | None:
    return evaluate(loader, model=trainable(model), world=world, should_stop=should_stop)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_the_loss_is_transformers_mean_over_trained_tokens_whatever_the_batch(
    model: PreTrainedModel, batch_size: int
) -> None:
    result = run(model, build_loader(batch_size))
    batch = as_batch(ROWS)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, labels=as_labels(batch)).loss.item()
    assert result is not None
    assert result["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert result["num_loss_tokens"] == batch.num_loss_tokens
    assert result["eval_seconds"] > 0


def test_modes_random_streams_and_gradients_are_as_before(model: PreTrainedModel) -> None:
    trained = trainable(model)
    model.model.layers[0].eval()  # a module that is frozen in evaluation mode
    modes = [module.training for module in model.modules()]
    streams = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    evaluate(build_loader(3), model=trained, world=ALONE)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.is_grad_enabled()


def test_the_mode_is_given_back_after_an_error(model: PreTrainedModel) -> None:
    def fail() -> bool:
        assert not model.training
        raise RuntimeError("from outside")

    with pytest.raises(RuntimeError, match="from outside"):
        run(model, build_loader(3), should_stop=fail)
    assert model.training


def test_a_stop_between_batches_gives_no_result(model: PreTrainedModel) -> None:
    answers = iter([False, False, True])
    assert run(model, build_loader(2), should_stop=lambda: next(answers)) is None
    assert next(answers, "all asked") == "all asked"


def test_sums_and_not_means_are_added_up_over_ranks(model: PreTrainedModel) -> None:
    alone = run(model, build_loader(7))
    asked: list[list[float]] = []

    class OtherRankHasLosslessTokens(World):
        def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
            asked.append(list(values))
            return [values[0], values[1] * 2]

    both = run(model, build_loader(7), world=OtherRankHasLosslessTokens(0, 2, ALONE.device))
    assert alone is not None
    assert both is not None
    assert both["eval_loss"] == pytest.approx(alone["eval_loss"] / 2)
    assert len(asked) == 1


def test_data_without_a_trained_token_is_an_error(model: PreTrainedModel) -> None:
    rows = [Row(row.input_ids, [False] * len(row.trained)) for row in ROWS]
    with pytest.raises(DataError, match="no token of its rows is trained"):
        run(model, build_loader(3, rows))
