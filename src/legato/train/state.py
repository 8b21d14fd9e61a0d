"""What a resumed run needs to know besides weights and moments: ``state/trainer.json``."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from legato.errors import CheckpointMismatchError


@dataclass(frozen=True)
class BestMetric:
    """The best value of the watched metric so far, and the step that had it.

    Of a step from before it was recorded, ``metric`` is None: which metric that is, isn't known.
    """

    value: float
    step: int
    metric: str | None = None


@dataclass
class TrainState:
    """Counters of a run, and the facts under which it began. JSON in and out.

    Everything that can be computed isn't stored twice: the learning rate, the data order and the
    random streams are pure functions of ``step`` and the facts.

    Attributes:
        step: Optimizer steps completed.
        rows_seen: Rows (a sample, or a pack of samples) consumed since step 0, over all epochs.
        tokens_seen: Tokens consumed since step 0, padding not counted.
        window_loss_sum: Sum of token losses since the last save; with ``window_loss_tokens`` it
            gives the train loss that ``best`` watches when there is no evaluation data.
        window_loss_tokens: Trained tokens since the last save.
        best: Best metric so far; None until one was measured.
        evaluation_left: A stop cut the evaluation after ``step`` short: the resumed run begins
            with it.
        data_place: Where training stands in the data; None: at its beginning.
        facts: What belongs to the run and not to the process: seed, global batch, schedule,
            start date (templates with a date keep the first start's), config.
        process: What computes, as :func:`process_facts` says it. Stored, and not taken over from a
            checkpoint: it is this process's.
    """

    step: int = 0
    rows_seen: int = 0
    tokens_seen: int = 0
    window_loss_sum: float = 0.0
    window_loss_tokens: int = 0
    best: BestMetric | None = None
    evaluation_left: bool = False
    data_place: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    process: dict[str, Any] = field(default_factory=dict)

    @property
    def window_train_loss(self) -> float | None:
        """Mean loss per trained token since the last save; None when nothing was trained."""
        if not self.window_loss_tokens:
            return None
        return self.window_loss_sum / self.window_loss_tokens

    def advance(
        self,
        *,
        rows: int,
        tokens: int,
        loss: float,
        loss_tokens: int,
        data_place: Mapping[str, Any] | None = None,
    ) -> None:
        """Count one finished optimizer step.

        Args:
            rows: Rows in the step, over all ranks.
            tokens: Tokens in the step without padding, over all ranks.
            loss: Mean loss per trained token.
            loss_tokens: Trained tokens in the step, over all ranks.
            data_place: Where the step leaves the data.
        """
        self.step += 1
        self.rows_seen += rows
        self.tokens_seen += tokens
        self.window_loss_sum += loss * loss_tokens
        self.window_loss_tokens += loss_tokens
        self.data_place = None if data_place is None else dict(data_place)

    def close_window(self) -> None:
        """Begin a new train-loss window: called at each save."""
        self.window_loss_sum, self.window_loss_tokens = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counters and facts of a checkpoint.

        Args:
            state: What :meth:`state_dict` gave, read back from ``trainer.json``.

        Raises:
            CheckpointMismatchError: A counter is missing: the file is another program's.
        """
        try:
            self.step = int(state["step"])
            self.rows_seen = int(state["rows_seen"])
            self.tokens_seen = int(state["tokens_seen"])
            self.window_loss_sum = float(state["window_loss_sum"])
            self.window_loss_tokens = int(state["window_loss_tokens"])
            self.best = BestMetric(**state["best"]) if state["best"] else None
            self.evaluation_left = bool(state.get("evaluation_left"))  # older steps don't say
            self.data_place = state["data_place"]
            self.facts = dict(state["facts"])
        except KeyError as error:
            raise CheckpointMismatchError(
                f"trainer.json: {error.args[0]} is missing: not a Legato training state",
                key=error.args[0],
            ) from error


def process_facts(device: torch.device) -> dict[str, Any]:
    """What must be equal for a resumed run to be bit-exact, besides the run's own facts.

    Args:
        device: Where the run computes.

    Returns:
        Versions, the kind of device (a GPU's name) and, on a CPU, the number of threads.
    """
    is_cuda = device.type == "cuda"
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
    }
    if device.type == "cpu":
        facts["num_threads"] = torch.get_num_threads()
    return facts
