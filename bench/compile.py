"""What torch.compile brings: eager, each block compiled, the whole model compiled, by method.

Each runs in a process of its own on the same rows in the same order; the ways of one method follow
each other, in an order that rotates with each repetition. Speed is the mean over --iterations after
--skip others. The first iteration holds the compiling: it counts in the first --first-repetitions,
which begin with an empty compile cache; the others find in theirs what those compiled. The loss
curves of the first repetition go into the JSON and into a plot: compiling changes a loss by
rounding only.

    python bench/compile.py --model .cache/smollm2-135m-instruct --json out/bench/compile.json

On a CPU the defaults are few and small iterations, and one empty cache for each way; on a GPU they
are 100 iterations from the 300th, and an empty cache for all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers import installed_version, rotated, run_alone

HOW: dict[str, Any] = {"eager": False, "block": True, "model": {"scope": "model"}}
NAMES = {"eager": "eager", "block": "each block", "model": "whole model"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"recipe": "full_finetune_single_device", "optimizer": {"name": "adamw", "lr": 2e-5}},
    "lora": {
        "recipe": "lora_finetune_single_device",
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_target_modules": "all-linear",
    },
}
METHODS["qlora"] = METHODS["lora"] | {"quantize_base": "nf4"}
# Words that are one token each in most vocabularies.
WORDS = ("time", "person", "year", "way", "day", "thing", "world", "life", "hand", "part", "child")
COLORS = {"eager": "#444444", "block": "#1f77b4", "model": "#d62728"}
CURVES = ("losses", "step_seconds", "compile_seconds")
SEED = 0


def main() -> None:
    args = parse_args()
    if args.worker:
        args.json.write_text(json.dumps(train(args)))
        return
    order = [
        (repetition, method, how)
        for repetition in range(args.repetitions)
        for method in args.methods
        for how in rotated(args.how, repetition)
    ]
    runs = []
    with tempfile.TemporaryDirectory() as caches:
        for repetition, method, how in order:
            runs.append(run_worker(method, how, repetition=repetition, caches=caches, args=args))
            if args.json:  # what is done is kept if a later one fails
                report = {"environment": environment(args), "table": summary(runs), "runs": runs}
                args.json.write_text(as_json(report))
                args.json.with_suffix(".svg").write_text(plot(runs))
    print(summary(runs))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--json", type=Path, help="where the results go; the plot lies beside it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--first-repetitions", type=int, help="those with an empty cache (cpu 1, cuda all)"
    )
    parser.add_argument("--skip", type=int, help="iterations before the timed ones (cpu 2, 300)")
    parser.add_argument("--iterations", type=int, help="timed iterations (cpu 8, cuda 100)")
    parser.add_argument("--batch-size", type=int, help="rows (cpu 1, cuda 8)")
    parser.add_argument("--seq-len", type=int, help="tokens in every row (cpu 64, cuda 512)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--worker", nargs=2, metavar=("METHOD", "HOW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    small = {"skip": 2, "iterations": 8, "batch_size": 1, "seq_len": 64}
    large = {"skip": 300, "iterations": 100, "batch_size": 8, "seq_len": 512}
    for name, value in (small if args.device == "cpu" else large).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.first_repetitions is None:
        args.first_repetitions = 1 if args.device == "cpu" else args.repetitions
    if not 1 <= args.first_repetitions <= args.repetitions:
        parser.error("expected 1 <= --first-repetitions <= --repetitions")
    return args


def run_worker(
    method: str, how: str, *, repetition: int, caches: str, args: argparse.Namespace
) -> dict[str, Any]:
    cache = Path(caches) / f"{method}-{how}"
    is_first = repetition < args.first_repetitions
    if is_first:  # as on a machine that never ran it
        shutil.rmtree(cache, ignore_errors=True)
    chosen = ("device", "skip", "iterations", "batch_size", "seq_len", "dtype")
    run: dict[str, Any] = run_alone(
        __file__,
        name=f"{method}, {how}",
        worker=[method, how],
        options={key: getattr(args, key) for key in chosen} | {"model": args.model.resolve()},
        environment={"TORCHINDUCTOR_CACHE_DIR": str(cache), "LEGATO_CACHE": "off"},
    )
    if repetition > 0:  # one curve is enough to look at, and to compare
        for curve in CURVES:
            del run[curve]
    if not is_first:
        del run["first_iteration_seconds"]
    run = {"method": method, "how": how, "repetition": repetition} | run
    first = f"{run['first_iteration_seconds']:.1f} s" if is_first else "from the cache"
    print(
        f"{repetition + 1}/{args.repetitions}  {method:<6}{NAMES[how]:<12}"
        f"{run['iterations_per_second']:8.3f} it/s, first iteration {first}, "
        f"{run['peak_bytes'] / 1e9:.2f} GB",
        file=sys.stderr,
    )
    return run


def train(args: argparse.Namespace) -> dict[str, Any]:
    from legato import load_config, recipes
    from legato.report.metrics import read_events

    method, how = args.worker
    folder, num_steps = Path.cwd(), args.skip + args.iterations
    write_rows(folder / "rows.jsonl", count=num_steps * args.batch_size, args=args)
    config = METHODS[method] | {
        "model": str(args.model),
        "output_dir": str(folder / "run"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "text"}],
        "device": args.device,
        "dtype": args.dtype,
        "compile": HOW[how],
        "batch_size": args.batch_size,
        "max_seq_len": args.seq_len,
        "epochs": 1,
        "lr_scheduler": {"name": "constant"},
        "log_every_n_steps": 1,
        "save_every_n_train_steps": None,
        "enable_async_checkpointing": False,
        "save_only_model": True,
        "seed": SEED,
    }
    (folder / "bench.yaml").write_text(json.dumps(config))  # JSON is YAML
    loaded = load_config(str(folder / "bench.yaml"), [])
    recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    steps = [e for e in read_events(folder / "run" / "metrics.jsonl") if e["event"] == "step"]
    timed = steps[args.skip :]
    assert len(timed) == args.iterations
    return {
        "iterations_per_second": len(timed) / sum(step["step_seconds"] for step in timed),
        "first_iteration_seconds": steps[0]["step_seconds"],
        "compile_seconds": [step.get("compile_seconds", 0.0) for step in steps],
        "step_seconds": [step["step_seconds"] for step in steps],
        "tokens_per_iteration": steps[0]["num_tokens"],
        "peak_bytes": max(step["peak_memory_bytes"] for step in steps),
        "losses": [step["loss"] for step in steps],
    }


def write_rows(path: Path, *, count: int, args: argparse.Namespace) -> None:
    """Rows of any words, all of one length: the end of the text is a token too."""
    rng = random.Random(SEED)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(rng.choice(WORDS) for _ in range(args.seq_len - 1))
            file.write(json.dumps({"text": text}) + "\n")


def as_json(report: Mapping[str, Any]) -> str:
    """JSON with each list of numbers in one line."""
    text = json.dumps(report, indent=1)
    flat = re.sub(r"\[[\d\s.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    return flat + "\n"


def summary(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| method | compiled | it/s: median (min to max) | to eager "
        "| first iteration, s: median (min to max) | to the whole model "
        "| peak memory, GB | largest difference of the loss to eager |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        by_name.setdefault((run["method"], run["how"]), []).append(run)
    for (method, how), chosen in by_name.items():
        eager, whole = by_name.get((method, "eager"), []), by_name.get((method, "model"), [])
        first = ratio(chosen, whole, "first_iteration_seconds") if how == "block" else ""
        peak = statistics.median(values(chosen, "peak_bytes")) / 1e9
        lines.append(
            f"| {method} | {NAMES[how]} | {spread(chosen, 'iterations_per_second', digits=3)} "
            f"| {ratio(chosen, eager, 'iterations_per_second')} "
            f"| {spread(chosen, 'first_iteration_seconds', digits=1)} | {first} "
            f"| {peak:.2f} | {loss_difference(chosen[0], eager)} |"
        )
    return "\n".join(lines)


def values(runs: list[dict[str, Any]], key: str) -> list[float]:
    return [run[key] for run in runs if key in run]


def spread(runs: list[dict[str, Any]], key: str, *, digits: int) -> str:
    found = values(runs, key)
    middle, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(found), min(found), max(found))
    )
    return f"{middle} ({low} to {high})" if len(found) > 1 else middle


def ratio(runs: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> str:
    if not others:
        return ""
    return f"{statistics.median(values(runs, key)) / statistics.median(values(others, key)):.2f}"


def loss_difference(run: dict[str, Any], eager: list[dict[str, Any]]) -> str:
    if not eager or run["how"] == "eager":
        return ""
    expected = eager[0]["losses"]
    gaps = [abs(a - b) for a, b in zip(run["losses"], expected, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return f"{gaps[worst]:.4f} (at {expected[worst]:.3f}, iteration {worst + 1})"


def plot(runs: list[dict[str, Any]]) -> str:
    """Loss curves as SVG, one panel for each method."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    width, height, left, top = 360, 220, 50, 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(methods) * (width + left) + 20}" '
        f'height="{height + top + 60}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for column, method in enumerate(methods):
        chosen = [run for run in runs if run["method"] == method and run["repetition"] == 0]
        losses = [loss for run in chosen for loss in run["losses"]]
        low, high = min(losses), max(losses)
        x0 = left + column * (width + left)
        parts += [
            f'<text x="{x0}" y="20" font-weight="bold">{method}: loss by iteration</text>',
            f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" '
            'stroke="#999999"/>',
            f'<text x="{x0 - 4}" y="{top + 10}" text-anchor="end">{high:.2f}</text>',
            f'<text x="{x0 - 4}" y="{top + height}" text-anchor="end">{low:.2f}</text>',
            f'<text x="{x0 + width}" y="{top + height + 15}" text-anchor="end">'
            f"{len(chosen[0]['losses'])}</text>",
        ]
        for row, run in enumerate(chosen):
            curve, count = run["losses"], max(len(run["losses"]) - 1, 1)
            points = " ".join(
                f"{x0 + i / count * width:.1f},"
                f"{top + height - (loss - low) / ((high - low) or 1) * height:.1f}"
                for i, loss in enumerate(curve)
            )
            # Dashes of their own: curves lie on each other.
            style = f'stroke="{COLORS[run["how"]]}" stroke-dasharray="{8 - 3 * row},{3 * row}"'
            parts.append(f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>')
            y = top + height + 16 + 14 * row
            parts.append(
                f'<line x1="{x0}" x2="{x0 + 30}" y1="{y}" y2="{y}" stroke-width="2" {style}/>'
            )
            parts.append(f'<text x="{x0 + 36}" y="{y + 4}">{NAMES[run["how"]]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    packages = ("torch", "transformers", "peft", "torchao", "legato")
    return {
        "command": " ".join(["python", "bench/compile.py", *sys.argv[1:]]),
        "python": sys.version.split()[0],
        "packages": {name: installed_version(name) for name in packages},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    } | {
        name: getattr(args, name)
        for name in (
            *("device", "dtype", "batch_size", "seq_len", "skip", "iterations"),
            *("repetitions", "first_repetitions"),
        )
    }


if __name__ == "__main__":
    main()
