"""How long the commands take that a person waits for most often, and what they import.

Each command is timed beside ``python -c pass``, the limit, in an order that rotates; modules are
counted in a run of their own.

    python bench/startup.py --json out/bench/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HEAVY = ("torch", "transformers", "datasets", "pydantic", "omegaconf")
CONFIG = "smollm2/135M_full_single_device"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "python -c pass": ["-c", "pass"],
            "legato --help": ["-m", "legato", "--help"],
            "legato validate": ["-m", "legato", "validate", CONFIG, *small_run(Path(folder))],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        names = list(commands)
        for repetition in range(args.repetitions):
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                seconds[name].append(timed(commands[name]))
        modules = {name: imported_modules(command) for name, command in commands.items()}

    table = summary(seconds, modules)
    print(table)
    if args.json:
        report = {"environment": environment(), "table": table, "seconds": seconds}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def small_run(folder: Path) -> list[str]:
    """Overrides that point the config at a model and a data file that are there."""
    facts = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152}
    (folder / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 8192}))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return [f"model={folder}", f"dataset={folder / 'rows.jsonl'}"]


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    run(command)
    return time.perf_counter() - began


def imported_modules(command: list[str]) -> set[str]:
    lines = run(["-X", "importtime", *command]).stderr.splitlines()
    return {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("import time:")}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def summary(seconds: dict[str, list[float]], modules: dict[str, set[str]]) -> str:
    lines = [
        "| command | seconds: median (min) | modules | heavy ones |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in seconds.items():
        heavy = [module for module in HEAVY if module in modules[name]]
        lines.append(
            f"| `{name}` | {statistics.median(values):.2f} ({min(values):.2f}) "
            f"| {len(modules[name])} | {', '.join(heavy) or 'none'} |"
        )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    return {
        "command": " ".join(["python", "bench/startup.py", *sys.argv[1:]]),
        "python": sys.version.split()[0],
        "legato": version("legato"),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
