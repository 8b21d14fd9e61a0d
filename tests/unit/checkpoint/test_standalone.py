"""The loop in docs/checkpoints.md runs as it stands, and resumes bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def loop_of_the_docs() -> str:
    code, *_ = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    return code


def run(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_the_loop_in_the_docs_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = loop_of_the_docs()
    torch.manual_seed(0)
    whole = run(code, tmp_path / "whole", monkeypatch)

    torch.manual_seed(0)
    half = code.replace(", 101):", ", 61):")
    assert half != code
    run(half, tmp_path / "parted", monkeypatch)
    torch.manual_seed(12345)  # another process would have another state
    resumed = run(code, tmp_path / "parted", monkeypatch)

    assert resumed["progress"] == {"step": 100}
    for name, value in whole["model"].state_dict().items():
        assert torch.equal(resumed["model"].state_dict()[name], value), name
    assert resumed["scheduler"].get_last_lr() == whole["scheduler"].get_last_lr()
    steps = sorted(p.name for p in (tmp_path / "parted" / "out").glob("step_*"))
    assert {"step_100", "step_75"} <= set(steps)
    assert (tmp_path / "parted" / "out" / "best").is_symlink()
    weights = load_file(tmp_path / "parted" / "out" / "latest" / "model.safetensors")
    assert torch.equal(weights["0.weight"], whole["model"][0].weight)


NEVER_CLOSED = """
import errno, sys
import torch
from legato.checkpoint import Checkpointer
from legato.storage import LocalStorage

class Full(LocalStorage):
    def rename(self, source, target):
        raise OSError(errno.ENOSPC, "No space left on device", target)

storage = Full() if sys.argv[2] == "full" else None
checkpointer = Checkpointer(sys.argv[1], storage=storage)
model = torch.nn.Linear(2, 2)
for step in (1, 2, 3):
    checkpointer.save({"model": model}, step=step)
print("done")
"""


@pytest.mark.parametrize(("disk", "code", "kept"), [("free", 0, [1, 2, 3]), ("full", 3, [])])
def test_a_loop_that_never_closes_keeps_its_last_save_or_ends_with_exit_code_3(
    disk: str, code: int, kept: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, str(out), disk],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (code, "done\n"), ended.stderr
    assert [step for step in (1, 2, 3) if (out / f"step_{step}").is_dir()] == kept
    assert ("error: step 3 could not be saved: " in ended.stderr) == (disk == "full")
