"""TensorBoard, Weights & Biases, MLflow and trackio, fed from the events of ``metrics.jsonl``.

Each package is imported when a config asks for it, and not before. Accounts, addresses and projects
are told to it by its own environment variables.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import ConfigError, MissingDependencyError
from legato.report.metrics import Logger

# Events with numbers worth a curve -> the group their curves stand in.
_GROUPS = {"step": "train", "eval": "eval", "save": "save"}
_PROJECT = "legato"


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told about the run when it begins.

    Attributes:
        output_dir: Folder of the run; local files of a logger go below it.
        name: Name to show.
        run_id: The same for a run and for what resumes it.
        config: The resolved config, as nested mappings.
        resumed_step: Step that the run goes on from; 0 for a fresh one.
    """

    output_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any]
    resumed_step: int = 0


def build_loggers(names: Sequence[str], facts: RunFacts) -> list[Logger]:
    """Open the loggers that a config names.

    Args:
        names: Of ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
        facts: The run.

    Returns:
        One logger for each name, in order, for :class:`legato.report.metrics.MetricsLog`.

    Raises:
        ConfigError: There is no logger of that name.
        MissingDependencyError: Its package isn't installed.
    """
    kinds: dict[str, Callable[[RunFacts], Logger]] = {
        "tensorboard": TensorBoardLogger,
        "wandb": WandbLogger,
        "mlflow": MLflowLogger,
        "trackio": TrackioLogger,
    }
    for name in names:
        if name not in kinds:
            raise ConfigError(f"loggers: expected any of {', '.join(kinds)}, found {name!r}")
    return [kinds[name](facts) for name in names]


def curves(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event, by the name of their curve.

    Args:
        event: Name of the event.
        fields: Its fields.

    Returns:
        ``{"train/loss": 1.5, ...}``; empty for events that aren't curves.

    Example:
        >>> curves("eval", {"step": 2, "eval_loss": 0.5, "note": "text"})
        {'eval/loss': 0.5}
    """
    if event not in _GROUPS:
        return {}
    return {
        f"{_GROUPS[event]}/{name.removeprefix('eval_')}": float(value)
        for name, value in fields.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoardLogger:
    """Event files in ``output_dir/tensorboard``.

    Args:
        facts: The run. When it goes on from a step, curves after that step are replaced.
    """

    name = "tensorboard"

    def __init__(self, facts: RunFacts) -> None:
        module = _import(
            "torch.utils.tensorboard", install="legato[loggers]", package="tensorboard"
        )
        self._writer = module.SummaryWriter(
            log_dir=str(facts.output_dir / "tensorboard"),
            purge_step=facts.resumed_step + 1 if facts.resumed_step else None,
        )

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a point to each curve of ``event``; what a model said to a prompt goes in as text."""
        for tag, value in curves(event, fields).items():
            self._writer.add_scalar(tag, value, fields["step"])
        if event == "sample":
            self._writer.add_text(
                f"samples/{fields['sample_id']}", _as_markdown(fields), fields["step"]
            )
        if event != "step":
            self._writer.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run; a resumed run goes on in the same one.

    Args:
        facts: The run.
    """

    name = "wandb"

    def __init__(self, facts: RunFacts) -> None:
        module = _import("wandb", install="wandb")
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=facts.name,
            id=facts.run_id,
            resume="allow",
            dir=str(facts.output_dir),
            config=dict(facts.config),
        )
        # wandb's own step can't go back, a resumed run can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a point to each curve of ``event``."""
        if values := curves(event, fields):
            self._run.log(values | {"step": fields["step"]})

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class MLflowLogger:
    """An MLflow run, tagged with the run id; a resumed run goes on in the same one.

    Args:
        facts: The run.
    """

    name = "mlflow"

    def __init__(self, facts: RunFacts) -> None:
        module = _import("mlflow", install="mlflow")
        self._client = module.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment_id = module.set_experiment(experiment).experiment_id
        found = self._client.search_runs(
            [experiment_id], f"tags.`legato.run_id` = '{facts.run_id}'", max_results=1
        )
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(
            experiment_id, run_name=facts.name, tags={"legato.run_id": facts.run_id}
        )
        self._run_id = run.info.run_id
        for key, value in _flat(facts.config).items():
            self._client.log_param(self._run_id, key, value)

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a point to each curve of ``event``."""
        for key, value in curves(event, fields).items():
            self._client.log_metric(self._run_id, key, value, step=fields["step"])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class TrackioLogger:
    """A trackio run; a resumed run goes on in the same one.

    Args:
        facts: The run.
    """

    name = "trackio"

    def __init__(self, facts: RunFacts) -> None:
        module = _import("trackio", install="trackio")
        self._run = module.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            # trackio knows a run by its name only.
            name=f"{facts.name}-{facts.run_id}",
            resume="allow",
            config=dict(facts.config),
        )

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a point to each curve of ``event``."""
        if values := curves(event, fields):
            self._run.log(values, step=fields["step"])

    def close(self) -> None:
        """Wait until all is written."""
        self._run.finish()


def _import(module: str, *, install: str, package: str | None = None) -> Any:
    """Import an optional package.

    Args:
        module: What to import.
        install: What pip is asked for.
        package: The package that must be there for ``module``; ``module`` itself when None.

    Returns:
        The module.

    Raises:
        MissingDependencyError: It isn't installed.
    """
    try:
        if package is not None:
            importlib.import_module(package)
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module
        raise MissingDependencyError(
            f"loggers: {name} isn't installed. Run: pip install '{install}'", package=name
        ) from error


def _as_markdown(sample: Mapping[str, Any]) -> str:
    """A prompt and its answers as code, so that nothing of them is read as markup."""
    parts = []
    for name in ("prompt", "expected", "answer"):
        code = "\n".join(f"    {line}" for line in str(sample[name]).splitlines())
        parts.append(f"{name}\n\n{code}\n")
    return "\n".join(parts)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists of them as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            flat |= _flat({str(i): item for i, item in enumerate(value)}, f"{key}.")
        else:
            flat[key] = value
    return flat
