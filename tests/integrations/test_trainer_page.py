"""docs/trainer.md: its script starts a training, and goes on with it; its names exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from legato.integrations.transformers import LegatoCheckpoints
from tests.helpers import tiny
from tests.integrations.trainers import build_rows

PAGE = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text("utf-8")


def run_script(script: str) -> Any:
    model = AutoModelForCausalLM.from_config(tiny.build_config())
    names: dict[str, Any] = {"model": model, "rows": build_rows(16)}
    exec(script, names)  # the page's own lines
    return names["trainer"]


def test_the_script_of_the_page_starts_and_then_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    # 16 rows, 8 a step: 2 steps an epoch.
    cpu = 'save_strategy="no", use_cpu=True, report_to="none", '
    script = script.replace('save_strategy="no", ', cpu).replace("EverySteps(500)", "EverySteps(2)")
    run_script(script)
    assert sorted(path.name for path in Path("out").glob("step_*")) == ["step_4", "step_6"]
    longer = script.replace("num_train_epochs=3", "num_train_epochs=4")
    trainer = run_script(longer)
    assert [e["step"] for e in trainer.state.log_history if "train_runtime" in e] == [6, 8]
    assert sorted(path.name for path in Path("out").glob("step_*")) == ["step_6", "step_8"]


def test_the_page_names_every_option() -> None:
    options = set(inspect.signature(LegatoCheckpoints).parameters)
    assert {name for name in options if not re.search(rf"`{name}[`=]", PAGE)} == set()
