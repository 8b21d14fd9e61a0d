"""From the start of the process to the first resumed step: HF Trainer and Legato.

Full fine-tuning of the same model on the same rows, saved once by one process and once by two, and
gone on from by one and by two: `legato run` and a plain Trainer script, which torchrun starts where
there are two (DDP). The rows are tokenized before, for both. Both resume from their own checkpoint,
with the optimizer's state; files are in the page cache. Seconds are until that step begins. When it
has ended the processes are killed, and so every repetition finds the same checkpoint.

Bytes read are those of read() calls of a rank until then (/proc/PID/io, rchar), without what
`import` alone reads. Files that are mapped into memory aren't in it: the Trainer's weights are.

    python bench/resume.py --model .cache/smollm2-135m-instruct --json out/bench/resume.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from training import LEARNING_RATE, SEED, tokenized_steps, write_rows
from workers import environment, rotated

NAMES = {"hf": "HF Trainer", "legato": "Legato"}
SAVED_STEP = 2
TIMEOUT_SECONDS = 300.0
LIMIT = 0.7


@dataclass(frozen=True)
class Row:
    """One line of the table: who goes on, from a checkpoint of how many processes, on how many."""

    system: str
    saved_by: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.system}_{self.saved_by}_{self.ranks}"


CHANGES = ((1, 1), (2, 1), (1, 2))
ROWS = {row.name: row for change in CHANGES for row in (Row("hf", *change), Row("legato", *change))}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        prepare(folder, args=args)
        baseline = {name: import_bytes(name) for name in NAMES}
        runs: list[dict[str, Any]] = []
        for repetition in range(args.repetitions):
            for name in rotated(args.rows, repetition):
                runs.append(resume(ROWS[name], folder, repetition=repetition, args=args))
            # After each one: what was measured stays, whatever ends the rest.
            table, verdict = report(runs, baseline, args=args)
    print(f"{table}\n\n{verdict}")


def report(
    runs: list[dict[str, Any]], baseline: dict[str, int], *, args: argparse.Namespace
) -> tuple[str, str]:
    """The table and whether the targets are met, written to --json too."""
    check_losses(runs)
    table, verdict = summary(runs, baseline)
    if args.json:
        content = {
            "environment": environment(args),
            "table": table,
            "must_show": verdict,
            "import_bytes": baseline,
            "runs": runs,
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return table, verdict


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--folder", type=Path, help="keeps the checkpoints, for another run of this"
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2, help="rows of a step, on all ranks")
    parser.add_argument("--mean-tokens", type=int, default=64, help="mean length of a row")
    parser.add_argument("--steps", type=int, default=500, help="steps that the data is enough for")
    args = parser.parse_args()
    args.warm_up_steps, args.master_weights, args.gradient_checkpointing = 0, "fp32", False
    return args


# -- what both systems go on from


def prepare(folder: Path, *, args: argparse.Namespace) -> None:
    """Rows, configs and the four checkpoints, each where it isn't there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "rows").exists():
        write_rows(folder / "rows.jsonl", share=65, args=args)
        write_configs(folder, args=args)
        write_peer_rows(folder, args=args)
    for name in {f"{row.system}_{row.saved_by}" for row in map(ROWS.get, args.rows) if row}:
        system, _, ranks = name.partition("_")
        if (folder / name).exists():
            continue
        command = COMMANDS[system](folder, folder / name, int(ranks), stop_after=SAVED_STEP)
        done = subprocess.run(
            command, env=variables(folder, int(ranks)), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        print(f"{NAMES[system]} saved on {ranks}", file=sys.stderr)
    os.sync()  # what these left in the page cache isn't the first one's to write


def write_configs(folder: Path, *, args: argparse.Namespace) -> None:
    for ranks in (1, 2):
        where = "distributed" if ranks > 1 else "single_device"
        config = {
            "recipe": f"full_finetune_{where}",
            "model": str(args.model.resolve()),
            "output_dir": str(folder / "unused"),
            "datasets": [{"path": str(folder / "rows.jsonl"), "type": "prompt_completion"}],
            "dtype": "bf16",
            "master_weights": "fp32",
            "batch_size": args.batch_size // ranks,
            "epochs": 1,
            "optimizer": {"name": "adamw", "lr": LEARNING_RATE},
            "lr_scheduler": {"name": "constant"},
            "save_only_model": False,
            "seed": SEED,
        }
        (folder / f"legato_{ranks}.yaml").write_text(json.dumps(config))  # JSON is YAML


def write_peer_rows(folder: Path, *, args: argparse.Namespace) -> None:
    """The token ids and labels that Legato makes, in its order."""
    from datasets import Dataset

    from legato.config.load import load_config

    config = load_config(str(folder / "legato_1.yaml"), []).config
    steps = tokenized_steps(config, args=args)
    samples = [sample for step in steps for sample in step]
    rows = []
    for sample in samples:
        pairs = zip(sample.input_ids.tolist(), sample.trained.tolist(), strict=True)
        labels = [token if trained else -100 for token, trained in pairs]
        rows.append({"input_ids": sample.input_ids.tolist(), "labels": labels})
    Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    for ranks in (1, 2):
        values = {
            "model": str(args.model.resolve()),
            "rows": str(folder / "rows"),
            "batch_size": args.batch_size // ranks,
            "learning_rate": LEARNING_RATE,
            "seed": SEED,
        }
        (folder / f"hf_{ranks}.json").write_text(json.dumps(values))


def legato_command(folder: Path, run: Path, ranks: int, *, stop_after: int | None) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "legato",
        "run",
        "--config",
        str(folder / f"legato_{ranks}.yaml"),
    ]
    command += [f"output_dir={run}"]
    command += [f"stop_after_step={stop_after}"] if stop_after is not None else []
    return command + ([f"--nproc-per-node={ranks}"] if ranks > 1 else [])


def hf_command(folder: Path, run: Path, ranks: int, *, stop_after: int | None) -> list[str]:
    values = json.loads((folder / f"hf_{ranks}.json").read_text())
    told = folder / f"{run.name}_{ranks}.json"
    told.write_text(json.dumps(values | {"folder": str(run), "stop_after": stop_after}))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(Path(__file__).with_name("resume_hf.py")), str(told)]
    return [sys.executable, *(torchrun if ranks > 1 else []), *script]


COMMANDS = {"legato": legato_command, "hf": hf_command}


def variables(folder: Path, ranks: int) -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LEGATO_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }


# -- one resume


def resume(row: Row, folder: Path, *, repetition: int, args: argparse.Namespace) -> dict[str, Any]:
    run = folder / f"{row.system}_{row.saved_by}"
    steps = run / ("metrics.jsonl" if row.system == "legato" else "steps.jsonl")
    skip = steps.stat().st_size
    command = COMMANDS[row.system](folder, run, row.ranks, stop_after=None)
    with tempfile.TemporaryFile() as said:
        started = time.time()
        process = subprocess.Popen(
            command, env=variables(folder, row.ranks), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            events, read = watch(process, steps, skip=skip)
        finally:
            kill(process)
        if not events:
            said.seek(0)
            sys.exit(f"{row.name} failed:\n{said.read().decode()[-4000:]}")
    step = next(event for event in events if event["event"] == "step")
    if step["step"] != SAVED_STEP + 1:
        sys.exit(f"{row.name} went on at step {step['step']}")
    # The step itself costs what every step does: bench/throughput.py has that.
    seconds = step["time"] - started - step["step_seconds"]
    print(f"{repetition + 1}/{args.repetitions}  {row.name:<12}{seconds:7.2f} s", file=sys.stderr)
    return {
        "row": row.name,
        "repetition": repetition,
        "seconds": seconds,
        "step_seconds": step["step_seconds"],
        "read_bytes": read,
        "loss": step["loss"],
    }


def watch(
    process: subprocess.Popen[bytes], steps: Path, *, skip: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """Until there is a step: the events, and the bytes that each rank's read() calls returned."""
    read: list[int] = []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with steps.open("rb") as file:
            file.seek(skip)
            lines = file.read().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        read = bytes_read(process.pid) or read
        if any(event["event"] == "step" for event in events):
            return events, read
        time.sleep(0.25)
    return [], []


def bytes_read(launcher: int) -> list[int]:
    """Of each process that trains: the launched ones, or the only one."""
    try:
        parent = psutil.Process(launcher)
        workers = [child for child in parent.children() if "RANK" in child.environ()]
        return [each.io_counters().read_chars for each in workers or [parent]]
    except psutil.Error:
        return []


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def import_bytes(system: str) -> int:
    """What is read by imports alone: of everything that a resume needs."""
    code = {
        "hf": "import torch, datasets, accelerate\n"
        "from transformers import LlamaForCausalLM, LlamaTokenizerFast, Trainer",
        "legato": "from legato import recipes\n"
        "from transformers import LlamaForCausalLM, LlamaTokenizerFast",
    }[system]
    code += "\nprint(open('/proc/self/io').read())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(said.stdout.split("rchar:")[1].split()[0])


# -- what is said


def check_losses(runs: list[dict[str, Any]]) -> None:
    """The resumed step is the same step for all, up to bf16 rounding: else nothing is compared."""
    losses = {run["loss"] for run in runs}
    if max(losses) - min(losses) > 0.05:
        sys.exit(f"losses of the resumed step differ: {sorted(losses)}")


def summary(runs: list[dict[str, Any]], baseline: dict[str, int]) -> tuple[str, str]:
    lines = [
        "| saved by | resumed on | system | seconds until the step: median (min to max) "
        "| to HF Trainer | with the step, s "
        "| MB read per rank, without imports | loss of the step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios: dict[str, float] = {}
    for name in [name for name in ROWS if name in {run["row"] for run in runs}]:
        row, chosen = ROWS[name], [run for run in runs if run["row"] == name]
        peers = [run for run in runs if run["row"] == name.replace("legato", "hf")]
        seconds = [run["seconds"] for run in chosen]
        if peers:
            # Neighbours in time share what else the machine does.
            pairs = zip(chosen, peers, strict=True)
            ratios[name] = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        read = [
            statistics.median(run["read_bytes"][rank] for run in chosen) - baseline[row.system]
            for rank in range(row.ranks)
        ]
        cells = [
            *(str(row.saved_by), str(row.ranks), NAMES[row.system]),
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            f"{ratios[name]:.2f}" if name in ratios else "",
            f"{statistics.median(run['seconds'] + run['step_seconds'] for run in chosen):.2f}",
            ", ".join(f"{each / 1e6:.0f}" for each in read),
            f"{chosen[0]['loss']:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    verdicts = [
        f"{'pass' if ratio <= LIMIT else 'MISS'}  {name}: {ratio:.2f} x HF Trainer, at most {LIMIT}"
        for name, ratio in ratios.items()
        if name.startswith("legato")
    ]
    return "\n".join(lines), "\n".join(verdicts)


if __name__ == "__main__":
    main()
