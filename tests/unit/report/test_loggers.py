from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legato.errors import ConfigError, MissingDependencyError
from legato.report.loggers import RunFacts, build_loggers, curves
from legato.report.metrics import MetricsLog

CONFIG = {"optimizer": {"lr": 1e-3}, "datasets": [{"path": "a.jsonl"}], "betas": [0.9, 0.99]}


def facts(folder: Path, resumed_step: int = 0) -> RunFacts:
    return RunFacts(folder, "orders", "ab12", CONFIG, resumed_step)


def write_run(folder: Path, name: str, *, first: int, last: int, resumed_step: int = 0) -> None:
    loggers = build_loggers([name], facts(folder, resumed_step))
    log = MetricsLog(folder / "metrics.jsonl", loggers=loggers)
    log.write("start", model="tiny")
    for step in range(first, last + 1):
        log.write("step", step=step, loss=1 / step, lr=0.5)
    log.write("eval", step=last, eval_loss=0.25, eval_seconds=1.5)
    log.write(
        "sample", step=last, sample_id="a:7", prompt="*Hi*\n\nyou", expected="1", answer="<b>"
    )
    log.write("save", step=last, reason="final", path="step_2", blocked_seconds=0.125, error=None)
    log.close()


def test_curves_are_the_numbers_of_step_eval_and_save_events() -> None:
    assert curves("step", {"step": 3, "loss": 0.5, "epoch": 1, "skipped": True, "note": "x"}) == {
        "train/loss": 0.5,
        "train/epoch": 1.0,
    }
    assert curves("save", {"step": 3, "written_bytes": 7, "error": None}) == {
        "save/written_bytes": 7.0
    }
    assert math.isnan(curves("eval", {"step": 3, "eval_loss": math.nan})["eval/loss"])
    assert curves("start", {"num_parameters": 5}) == {}


# tensorboard's generated protobuf code, on import
@pytest.mark.filterwarnings("ignore:.*PyType_Spec with a metaclass:DeprecationWarning")
def test_tensorboard_files_hold_the_curves_and_a_resumed_run_replaces_later_points(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, "tensorboard", first=1, last=4)
    write_run(tmp_path, "tensorboard", first=3, last=5, resumed_step=2)

    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert {
        tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]
    } == {
        "train/loss": [(s, pytest.approx(1 / s)) for s in (1, 2, 3, 4, 5)],
        "train/lr": [(s, 0.5) for s in (1, 2, 3, 4, 5)],
        "eval/loss": [(5, 0.25)],
        "eval/seconds": [(5, 1.5)],
        "save/blocked_seconds": [(5, 0.125)],
    }
    # Indented by four is code in Markdown: shown as it is.
    [text] = seen.Tensors("samples/a:7/text_summary")[-1:]
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (
        5,
        "prompt\n\n    *Hi*\n    \n    you\n\nexpected\n\n    1\n\nanswer\n\n    <b>\n",
    )


class Calls:
    """Stands for somebody else's package: takes any call and remembers it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args, kwargs))
            return self.answers.get(name, self)

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for made, args, kwargs in self.made if made == name]


def test_wandb_gets_the_run_id_and_its_own_step_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    write_run(tmp_path, "wandb", first=1, last=1)
    (_, init), *_ = calls.named("init")
    assert (init["project"], init["id"], init["resume"]) == ("legato", "ab12", "allow")
    assert init["config"] == CONFIG
    assert calls.named("define_metric") == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert [args[0] for args, _ in calls.named("log")] == [
        {"train/loss": 1.0, "train/lr": 0.5, "step": 1},
        {"eval/loss": 0.25, "eval/seconds": 1.5, "step": 1},
        {"save/blocked_seconds": 0.125, "step": 1},
    ]
    assert len(calls.named("finish")) == 1


def test_mlflow_gets_flat_parameters_once_and_metrics_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    run = SimpleNamespace(info=SimpleNamespace(run_id="m1"))
    calls.answers = {
        "set_experiment": SimpleNamespace(experiment_id="7"),
        "search_runs": [],
        "create_run": run,
    }
    monkeypatch.setitem(sys.modules, "mlflow", calls)
    write_run(tmp_path, "mlflow", first=1, last=1)
    calls.answers["search_runs"] = [run]
    write_run(tmp_path, "mlflow", first=2, last=2, resumed_step=1)

    assert calls.named("search_runs")[0][0] == (["7"], "tags.`legato.run_id` = 'ab12'")
    assert len(calls.named("create_run")) == 1
    assert [args for args, _ in calls.named("log_param")] == [
        ("m1", "optimizer.lr", 1e-3),
        ("m1", "datasets.0.path", "a.jsonl"),
        ("m1", "betas", [0.9, 0.99]),
    ]
    losses = [(a[2], k["step"]) for a, k in calls.named("log_metric") if a[1] == "train/loss"]
    assert losses == [(1.0, 1), (0.5, 2)]
    assert calls.named("set_terminated") == [(("m1",), {}), (("m1",), {})]


def test_trackio_goes_on_in_the_run_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "trackio", calls)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    write_run(tmp_path, "trackio", first=1, last=1)
    (_, init), *_ = calls.named("init")
    assert (init["project"], init["name"], init["resume"]) == ("legato", "orders-ab12", "allow")
    assert calls.named("log")[0] == (({"train/loss": 1.0, "train/lr": 0.5},), {"step": 1})
    assert len(calls.named("finish")) == 1


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("tensorboard", "tensorboard", "legato[loggers]"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
        ("trackio", "trackio", "trackio"),
    ],
)
def test_a_package_that_isnt_installed_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as caught:
        build_loggers([name], facts(tmp_path))
    assert str(caught.value) == (
        f"loggers: {package} isn't installed. Run: pip install '{install}'"
    )


def test_no_logger_is_opened_when_one_of_the_names_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected any of tensorboard, wandb, mlflow, trackio"):
        build_loggers(["tensorboard", "comet"], facts(tmp_path))
    assert list(tmp_path.iterdir()) == []
