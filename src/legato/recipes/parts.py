"""The parts of a run, each built from the config: model, optimizer, what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from legato.checkpoint import ModelPart, OptimizerPart
from legato.config.schema import RunConfig
from legato.data.loader import Loader
from legato.data.templates import with_variables
from legato.errors import ConfigError
from legato.models.names import named_weights
from legato.models.quantize import QuantizedBase
from legato.models.saved_files import saved_files
from legato.optim.build import build_optimizer
from legato.parallel.world import World
from legato.recipes.answers import build_answers
from legato.recipes.data import RunData
from legato.recipes.model import DTYPES, LoadedModel, build_model
from legato.recipes.policies import metric_of_best
from legato.train.evaluate import evaluate
from legato.train.in_backward import InBackward
from legato.train.model import TrainableModel
from legato.train.state import TrainState
from legato.train.trainer import AnswerPrompts, Evaluate, WatchedMetric

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunParts:
    """What trains, and what a checkpoint holds of it.

    Attributes:
        model: The model as the loop sees it.
        optimizer: Over the model's parameters.
        saved: The checkpoint's parts by name.
        evaluate: Evaluation loss; None without evaluation data.
        answer_prompts: What the model says to some prompts; None: nothing was asked for.
        num_parameters: All parameters, tied ones once.
        num_trainable_parameters: Those that train.
        bytes_read: Bytes of the base's weights that this rank read; None: all of them.
        quantized: What of the base is quantized; None: nothing is.
    """

    model: TrainableModel
    optimizer: torch.optim.Optimizer
    saved: Mapping[str, Any]
    evaluate: Evaluate | None
    answer_prompts: AnswerPrompts | None
    num_parameters: int
    num_trainable_parameters: int
    bytes_read: int | None = None
    quantized: QuantizedBase | None = None


def build_parts(config: RunConfig, data: RunData, *, world: World, state: TrainState) -> RunParts:
    """Load the model, prepare it by the config's method, and build its optimizer.

    Collective if the recipe is a distributed one.

    Args:
        config: The run.
        data: Its data; the tokenizer goes into each step folder.
        world: Where it computes.
        state: The run's counters, saved with each step.

    Returns:
        The parts, the weights still those of the base.

    Raises:
        LegatoError: A model that can't be used, or a step that can't be taken.
    """
    num_micro_batches = data.loader.micro_batches_per_step
    if config.optimizer_in_backward and num_micro_batches > 1:
        raise ConfigError(
            f"optimizer_in_backward: the run's {data.loader.global_batch_size} rows a step are "
            f"{num_micro_batches} micro-batches on so many processes, and each would be an update "
            "of its own. Raise batch_size, start more processes, or leave it out."
        )
    loaded = build_model(config, world=world)
    optimizer = build_optimizer(
        loaded.parameters,
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        betas=config.optimizer.betas,
        stochastic_rounding=config.dtype != "fp32" and config.master_weights != "fp32",
    )
    in_backward = None
    if config.optimizer_in_backward:
        in_backward = InBackward(optimizer, parameters=loaded.parameters, masters=loaded.masters)
    saved = {
        "model": _model_part(config, loaded, data),
        "optimizer": OptimizerPart(optimizer, names=loaded.parameters),
        "trainer": state,
    }
    model = loaded.trainable(in_backward=in_backward)
    module = model.module
    return RunParts(
        model=model,
        optimizer=optimizer,
        saved=saved,
        evaluate=_evaluation(data.eval_loader, model, world),
        answer_prompts=build_answers(config, data, model=module),
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_trainable_parameters=sum(p.numel() for p in loaded.parameters.values()),
        bytes_read=loaded.bytes_read,
        quantized=loaded.quantized,
    )


def _model_part(config: RunConfig, loaded: LoadedModel, data: RunData) -> ModelPart:
    """What a step folder holds of the model: weights, their names, and the files beside them."""
    trained = loaded.trained
    template = with_variables(data.chat_template, config.chat_template_kwargs)
    return ModelPart(
        tensors=named_weights(trained.module, trainable_only=trained.kind == "adapter"),
        kind=trained.kind,
        keys=trained.keys,
        twins=trained.twins,
        file_dtype=DTYPES[config.dtype],
        masters=loaded.stored_masters,
        files={**trained.files, **tokenizer_files(data.tokenizer, template)},
    )


def _evaluation(loader: Loader | None, model: TrainableModel, world: World) -> Evaluate | None:
    if loader is None:
        return None
    return lambda should_stop: evaluate(loader, model=model, world=world, should_stop=should_stop)


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> dict[str, bytes]:
    """The tokenizer's files with the template that training used, whatever it came with.

    Args:
        tokenizer: The model's; left as it was.
        chat_template: The template as text.

    Returns:
        Name -> bytes, as a step folder holds them.
    """
    own = tokenizer.chat_template
    tokenizer.chat_template = chat_template
    try:
        return saved_files(tokenizer)
    finally:
        tokenizer.chat_template = own


def watched_metric(config: RunConfig) -> WatchedMetric:
    """What ``best`` means, as the loop takes it."""
    return WatchedMetric(name=metric_of_best(config), greater_is_better=config.greater_is_better)
