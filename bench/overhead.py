"""What saving costs a run: steps per second without saves, and with one every few steps.

Full fine-tuning; each row runs in a process of its own, in an order that rotates with each
repetition. A row with saves is compared with the same system's row without, of the same repetition.
The clock starts half an interval before the first save and stops half an interval after the last
one, so that what is written in the background is counted. Legato's losses must be the same in all
its rows: saving changes nothing.

    python bench/overhead.py --model .cache/smollm2-135m-instruct --json out/bench/overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import training
from training import result, run_config, tokenized_steps
from workers import environment, rotated, run_alone

SYSTEMS = {"hf_none": "hf", "hf_save": "hf"} | {
    f"legato_{row}": "legato" for row in ("none", "sync", "async")
}
NAMES = {
    "hf_none": "HF Trainer, no saves",
    "hf_save": "HF Trainer",
    "legato_none": "Legato, no saves",
    "legato_sync": "Legato, synchronous",
    "legato_async": "Legato, asynchronous",
}
BACKGROUND_THREAD = "legato-checkpoint"


def main() -> None:
    args = parse_args()
    if args.worker:
        worker = train_with_legato if SYSTEMS[args.worker] == "legato" else train_with_hf
        args.json.write_text(json.dumps(worker(args)))
        return
    runs = [
        run_worker(row, repetition=repetition, args=args)
        for repetition in range(args.repetitions)
        for row in rotated(args.rows, repetition)
    ]
    check_losses(runs)
    table, overheads = summary(runs, num_saves=args.saves)
    print(table)
    limit = 1.0 if environment(args)["gpu"] else 5.0
    verdict = None
    if "legato_async" in overheads:
        found = statistics.median(overheads["legato_async"])
        word = "pass" if found <= limit else "MISS"
        verdict = f"{word}  asynchronous saves cost {found:.1f} %, at most {limit:.0f} %"
        print(f"\n{verdict}")
    if args.json:
        report = {
            "environment": environment(args),
            "table": table,
            "must_show": verdict,
            "runs": runs,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--rows", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves")
    parser.add_argument("--saves", type=int, default=2, help="saves of one repetition")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--mean-tokens", type=int, default=160, help="mean length of a row")
    parser.add_argument("--master-weights", choices=("fp32", "none"), default="fp32")
    parser.add_argument("--worker", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.warm_up_steps = max(1, args.save_every // 2)
    args.steps = args.saves * args.save_every
    args.trained_share, args.gradient_checkpointing = [100], False
    return args


# -- the parent


def run_worker(row: str, *, repetition: int, args: argparse.Namespace) -> dict[str, Any]:
    chosen = ("save_every", "saves", "batch_size", "mean_tokens", "master_weights")
    options = {key: getattr(args, key) for key in chosen} | {"model": args.model.resolve()}
    run = run_alone(__file__, name=NAMES[row], worker=[row], options=options)
    os.sync()  # what this one left in the page cache isn't the next one's to write
    run |= {"row": row, "repetition": repetition, "steps_per_second": args.steps / run["seconds"]}
    print(
        f"{repetition + 1}/{args.repetitions}  {NAMES[row]:<22}"
        f"{run['steps_per_second']:7.3f} steps/s",
        file=sys.stderr,
    )
    return run


def check_losses(runs: list[dict[str, Any]]) -> None:
    ours = [run for run in runs if SYSTEMS[run["row"]] == "legato"]
    if len({tuple(run["losses"]) for run in ours}) > 1:
        sys.exit("Legato's losses differ between its rows: saving has changed the training")


def summary(runs: list[dict[str, Any]], *, num_saves: int) -> tuple[str, dict[str, list[float]]]:
    """The table, and by row the percentages by which saving slowed each repetition."""
    seconds = {(run["row"], run["repetition"]): run["seconds"] for run in runs}
    overheads: dict[str, list[float]] = {}
    lines = [
        "| | steps/s: median (min to max) | slower than without: median (min to max) "
        "| seconds a save | background CPU seconds a save |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in [row for row in SYSTEMS if row in {run["row"] for run in runs}]:
        chosen = [run for run in runs if run["row"] == row]
        speeds = [run["steps_per_second"] for run in chosen]
        cells = [NAMES[row], f"{statistics.median(speeds):.3f}{span(speeds, '.3f')}", "", "", ""]
        base = f"{SYSTEMS[row]}_none"
        pairs = [(r["seconds"], seconds.get((base, r["repetition"]))) for r in chosen]
        if row != base and all(without for _, without in pairs):
            overheads[row] = [(with_saves / without - 1) * 100 for with_saves, without in pairs]
            costs = [(with_saves - without) / num_saves for with_saves, without in pairs]
            middle = statistics.median(overheads[row])
            cells[2] = f"{middle:.1f} %{span(overheads[row], '.1f')}"
            cells[3] = f"{statistics.median(costs):.2f}"
        if row == "legato_async":
            cpu = statistics.median(run["background_cpu_seconds"] for run in chosen)
            cells[4] = f"{cpu / num_saves:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), overheads


def span(values: list[float], style: str) -> str:
    return f" ({min(values):{style}} to {max(values):{style}})"


# -- the workers


def train_with_legato(args: argparse.Namespace) -> dict[str, Any]:
    from legato import recipes
    from legato.config.load import load_config
    from legato.report.metrics import read_events

    folder = Path.cwd()
    run_config(folder, args=args)
    saving = {
        "legato_none": [],
        "legato_sync": [f"save_every_n_train_steps={args.save_every}"],
        "legato_async": [
            f"save_every_n_train_steps={args.save_every}",
            "enable_async_checkpointing=true",
        ],
    }[args.worker]
    common = ["save_only_model=false", "keep_last_n_checkpoints=1"]
    loaded = load_config(str(folder / "bench.yaml"), [*saving, *common])
    steps = tokenized_steps(loaded.config, args=args)
    with CpuWatch(BACKGROUND_THREAD) as watch:
        recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    events = list(read_events(folder / "run" / "metrics.jsonl"))
    saved = [e["step"] for e in events if e["event"] == "save" and e["path"] is not None]
    if len(saved) != (args.saves if saving else 0) + 1:  # and the one at the end
        sys.exit(f"saved at {saved}")
    done = [event for event in events if event["event"] == "step"]
    found = result(
        steps,
        step_ends=[event["time"] for event in done],
        losses=[event["loss"] for event in done],
        peak_bytes=done[-1]["peak_memory_bytes"],
        args=args,
    )
    return found | {"background_cpu_seconds": watch.seconds_until(done[-1]["time"])}


def train_with_hf(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from legato.models.load import load_tokenizer

    saving = {"save_strategy": "steps", "save_steps": args.save_every, "save_total_limit": 1}
    changes = saving if args.worker == "hf_save" else {}
    collator = DataCollatorForSeq2Seq(load_tokenizer(str(args.model)), padding=True)
    return training.train_with_peer(
        args,
        arguments=lambda **values: TrainingArguments(**{**values, **changes}),
        build=lambda **parts: Trainer(data_collator=collator, **parts),
    )


class CpuWatch:
    """Notes now and then how much CPU time the thread called ``name`` has used."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._samples: list[tuple[float, float]] = [(0.0, 0.0)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def seconds_until(self, moment: float) -> float:
        """CPU seconds used by then; ``moment`` in seconds since 1970."""
        return max(used for at, used in self._samples if at <= moment)

    def _watch(self) -> None:
        while not self._stopped.wait(0.25):
            for thread in threading.enumerate():
                if thread.name == self._name and thread.native_id is not None:
                    self._samples.append((time.time(), cpu_seconds(thread.native_id)))

    def __enter__(self) -> CpuWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


def cpu_seconds(thread_id: int) -> float:
    """User and system time of a thread of this process; 0 when it has ended."""
    try:
        text = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
