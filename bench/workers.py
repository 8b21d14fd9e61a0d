"""What the scripts here share: a worker in a process of its own, and where it all ran."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


def rotated(systems: list[Item], by: int) -> list[Item]:
    by %= len(systems)
    return systems[by:] + systems[:by]


def run_alone(
    script: str,
    *,
    name: str,
    worker: list[str],
    options: dict[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run ``script --worker`` in an empty folder of its own; what it wrote to ``--json``.

    ``options``: by argparse's names; True is a switch that is set, False one that isn't.
    """
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, script, "--worker", *worker, "--json", str(answer)]
        for key, value in options.items():
            flag = f"--{key.replace('_', '-')}"
            if isinstance(value, bool):
                command += [flag] if value else []
            else:
                command += [flag, str(value)]
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | fixed | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(answer.read_text())


def environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    packages = ("torch", "transformers", "accelerate", "trl", "legato")
    return {
        "command": " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "python": sys.version.split()[0],
        "packages": {name: installed_version(name) for name in packages},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "master_weights": args.master_weights,
        "gradient_checkpointing": args.gradient_checkpointing,
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None
