"""What a checkpoint of a Trainer's run is made of, from the objects that the Trainer holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerState

from legato.checkpoint import ModelPart, OptimizerPart, RngPart
from legato.errors import CheckpointError
from legato.models.lora import adapter_config_bytes, adapter_file_keys
from legato.models.names import named_weights
from legato.models.saved_files import model_files, saved_files

# The Trainer reads step, epoch and best metric of a step that it resumes from in this file.
STATE_FILE = "trainer_state.json"

# Beside the states of the Trainer's own stateful callbacks: which step of which run this is.
IDENTITY = "legato"


class LaterRng(RngPart):
    """Random states that are restored later than the rest.

    The Trainer deals itself past the batches that it has seen, and that takes random numbers.
    """

    def __init__(self) -> None:
        self._waiting: Mapping[str, Tensor] | None = None

    def write(self, states: Mapping[str, Tensor]) -> None:
        """Keep ``states`` until :meth:`set_now`."""
        self._waiting = dict(states)

    def set_now(self) -> None:
        """Set the random states that were restored; without effect when none were."""
        if self._waiting is not None:
            super().write(self._waiting)
            self._waiting = None


class SchedulerPart:
    """A learning rate scheduler's state as JSON.

    Args:
        scheduler: Any scheduler whose state is plain values.

    Raises:
        CheckpointError: Its state isn't; ``.scheduler``.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        state = scheduler.state_dict()
        try:
            returned = _from_json(json.loads(json.dumps(_to_json(state), allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise self._not_plain(str(error)) from error
        if returned != state:
            raise self._not_plain("it doesn't come back from JSON as it was")

    def _not_plain(self, why: str) -> CheckpointError:
        name = type(self.scheduler).__name__
        return CheckpointError(
            f"the state of {name} can't be stored as JSON ({why}). Use one of the Trainer's own "
            "schedulers, or one whose state_dict() holds numbers, texts, lists and dicts.",
            scheduler=name,
        )

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        encoded: dict[str, Any] = _to_json(self.scheduler.state_dict())
        return encoded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""
        self.scheduler.load_state_dict(_from_json(state))


def _to_json(value: Any) -> Any:
    """Floats that JSON lacks as ``{"float": ..}``: ``ReduceLROnPlateau`` starts at infinity."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: _from_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_json(inner) for inner in value]
    return value


def build_model_part(model: Any, *, processing_class: Any, args: Any) -> ModelPart:
    """The weights of a Trainer's model and the files beside them.

    Args:
        model: The Trainer's model, unwrapped: a module, a transformers model, a PEFT model.
        processing_class: Its tokenizer or processor, if it has one.
        args: The ``TrainingArguments``, kept as training_args.json.

    Returns:
        A whole model, or for a PEFT model its adapter.

    Raises:
        ModelError: PEFT wouldn't write a tensor that is trained; ``.names``.
    """
    # The Trainer's own file is a pickle.
    files = {"training_args.json": (args.to_json_string() + "\n").encode()}
    if processing_class is not None:
        files |= saved_files(processing_class)
    if is_peft_model(model):
        config = model.peft_config[model.active_adapter]
        keys, twins = adapter_file_keys(model)
        return ModelPart(
            tensors=named_weights(model, trainable_only=True),
            kind="adapter",
            keys=keys,
            twins=twins,
            files={**files, "adapter_config.json": adapter_config_bytes(config)},
        )
    if isinstance(model, PreTrainedModel):
        files |= model_files(model)
    return ModelPart(tensors=named_weights(model), files=files)


def build_optimizer_part(optimizer: Any, model: ModelPart) -> OptimizerPart:
    """A Trainer's optimizer; its hyperparameters are restored with it.

    Args:
        optimizer: As the Trainer holds it, wrapped by accelerate.
        model: Names the tensors.

    Returns:
        The part.
    """
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    names = {name: tensor for name, tensor in model.tensors.items() if id(tensor) in held}
    return OptimizerPart(inner, names=names, restore_groups=True)


def with_trainer_state(
    model: ModelPart, state: TrainerState, *, run_id: str, branch: int
) -> ModelPart:
    """The model with the Trainer's own trainer_state.json beside it, as the Trainer writes it.

    Args:
        model: The model.
        state: The Trainer's state now.
        run_id: The run that saves.
        branch: Which continuation of it.

    Returns:
        The same model, with one file more.
    """
    content = dataclasses.asdict(state)
    identity = {"run_id": run_id, "branch": branch, "step": state.global_step}
    content["stateful_callbacks"] = {**(state.stateful_callbacks or {}), IDENTITY: identity}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    return dataclasses.replace(model, files={**model.files, STATE_FILE: text.encode()})


def logged_metrics(state: TrainerState) -> dict[str, Any]:
    """What the Trainer has logged at this step: training loss, learning rate, evaluation."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {key: value for entry in logged for key, value in entry.items() if key != "step"}


def is_peft_model(model: Any) -> bool:
    """Whether PEFT wraps ``model``; without importing PEFT where nobody else has."""
    return hasattr(model, "peft_config") and hasattr(model, "active_adapter")
