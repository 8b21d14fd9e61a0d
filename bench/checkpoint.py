"""How long a save blocks training, and until when it is durable, beside other ways to save.

SmolLM2-135M's shape with random values in fp32, AdamW with its moments, FSDP2 over gloo on one
host; LoRA of rank 16 on all linear layers. All rows run in the same processes, in an order that
rotates with each repetition, each after a sync of the disk. Per repetition the slowest rank counts.
Times to block: medians. Times to be durable: minima, for the disk is shared. Memory: what all
processes together held at most, beyond what training holds; buffers that stay allocated count.

    python bench/checkpoint.py --world 1 2 4 8 --method full lora --json out/bench/checkpoint.json
    python bench/checkpoint.py --rss    # memory over 50 saves, of each rank
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from checkpoint_rows import (
    ROWS,
    Row,
    Training,
    build_model,
    build_training,
    config_json,
    open_checkpointer,
    shards,
)
from workers import installed_version, rotated

Figures = dict[str, dict[str, Any]]
RSS_SAVES = 50
# What a rank may take beside its shards and their copy, whatever their size: words, threads, gloo.
CONSTANT_BYTES = 16_000_000


def main() -> None:
    args = parse_args()
    runs = [
        run_ranks(method, world_size, args=args)
        for method in args.method
        for world_size in args.world
    ]
    table = memory_table(runs) if args.rss else save_table(runs)
    verdicts = [] if args.tiny else [v for run in runs for v in judge(run, rss=args.rss)]
    print(table)
    print("\n".join(["", *map(str, verdicts)] if verdicts else ["", "not judged: --tiny"]))
    if args.json:
        report = {
            "environment": environment(args),
            "table": table,
            "must_show": [asdict(verdict) for verdict in verdicts],
            "runs": runs,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks")
    parser.add_argument("--method", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rss", action="store_true", help=f"memory over {RSS_SAVES} saves instead")
    parser.add_argument("--tiny", action="store_true", help="2 small layers: to try this script")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser.parse_args()


# -- the parent


def run_ranks(method: str, world_size: int, *, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of one method and world size; hand back what they measured."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        start = time.monotonic()
        mp.spawn(measure_rank, (world_size, method, folder, args), nprocs=world_size)
        run: dict[str, Any] = json.loads((folder / "result.json").read_text())
        if not args.rss:
            for row, loadable in check_loadable(folder, method=method, args=args).items():
                run["figures"][row]["loadable"] = loadable
    run |= {"method": method, "world_size": world_size}
    print(f"{method}, ranks: {world_size}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return run


def check_loadable(folder: Path, *, method: str, args: argparse.Namespace) -> dict[str, bool]:
    """Whether transformers (PEFT) loads what each row left, as it lies, with every value right."""
    expected = dict(build_model(method, tiny=args.tiny)[0].named_parameters())
    found = {}
    for name in args.rows:
        row = ROWS[name]
        if method in row.methods and row.model_folder is not None:
            try:
                loaded = load(folder / name / row.model_folder, method=method, args=args)
                found[name] = all(torch.equal(loaded[k], v) for k, v in expected.items())
            except (OSError, ValueError, KeyError) as error:
                print(f"{row.title}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
                found[name] = False
    return found


def load(path: Path, *, method: str, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """What peers don't write are the configs: they get them, so that only the weights count."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if method == "full":
        if not (path / "config.json").exists():
            (path / "config.json").write_bytes(config_json(tiny=args.tiny))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return dict(model.named_parameters())
    if not (path / "adapter_model.safetensors").exists():  # PEFT would ask the hub for it
        raise FileNotFoundError(f"{path.name} holds no adapter_model.safetensors")
    base, _ = build_model("full", tiny=args.tiny)
    return dict(PeftModel.from_pretrained(base, path).named_parameters())


# -- a rank


def measure_rank(
    rank: int, world_size: int, method: str, folder: Path, args: argparse.Namespace
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=dt.timedelta(minutes=10),
    )
    training = build_training(method, tiny=args.tiny, world_size=world_size)
    state_bytes = sum(t.numel() * t.element_size() for t in shards(training))
    result: dict[str, Any] = {"state_bytes": total(state_bytes)}
    if args.rss:
        result |= memory_over_saves(training, folder / "rss")
    else:
        result["figures"] = measure_rows(training, folder, args=args)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure_rows(training: Training, folder: Path, *, args: argparse.Namespace) -> Figures:
    names = [name for name in args.rows if training.method in ROWS[name].methods]
    figures: Figures = {name: {} for name in names}
    # Imports and first calls, which a run pays once, fall into a round on a tiny model.
    rehearsal = build_training(training.method, tiny=True, world_size=dist.get_world_size())
    for name in names:
        measure(ROWS[name], rehearsal, folder / name)
    for repetition in range(args.repetitions):
        for name in rotated(names, repetition):
            for figure, value in measure(ROWS[name], training, folder / name).items():
                figures[name].setdefault(figure, []).append(value)
    return figures


def measure(row: Row, training: Training, folder: Path) -> dict[str, Any]:
    """Collective: one save of one row; the figures of the slowest rank, bytes of all together."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
    dist.barrier()
    before = start_memory_watch()
    with row.open(training, folder) as save:
        dist.barrier()
        start = time.perf_counter()
        finish = save()
        blocked_seconds = time.perf_counter() - start
        staged_bytes = finish()
        durable_seconds = time.perf_counter() - start
        extra_bytes = status_bytes("VmHWM") - before
    figures = {
        "blocked_seconds": largest(blocked_seconds),
        "durable_seconds": largest(durable_seconds),
        "extra_bytes": total(extra_bytes),
        "written_bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
    }
    if staged_bytes is not None:
        figures["staged_bytes"] = int(largest(staged_bytes))
    return figures


def memory_over_saves(training: Training, folder: Path) -> dict[str, Any]:
    """Collective: what all processes hold after each of many saves, and what saving took at most.

    The latter for each rank, beyond what training holds, beside the size of its shards.
    """
    shard_bytes = sum(t.numel() * t.element_size() for t in shards(training))
    before = start_memory_watch()
    held = []
    with open_checkpointer(folder) as checkpointer:
        for step in range(1, RSS_SAVES + 1):
            checkpointer.save(training.for_legato, step=step).result()
            held.append(total(status_bytes("VmRSS")))
    saving_bytes = status_bytes("VmHWM") - before
    ranks = [
        {"shard_bytes": own, "saving_bytes": saving}
        for own, saving in zip(by_rank(shard_bytes), by_rank(saving_bytes), strict=True)
    ]
    return {"rss_bytes": held, "ranks": ranks}


def highest_of(run: dict[str, Any], *, less_bytes: int = 0) -> float:
    """Of the rank where it is most: its shards and what saving took at most / its shards."""
    return max(
        (rank["shard_bytes"] + rank["saving_bytes"] - less_bytes) / rank["shard_bytes"]
        for rank in run["ranks"]
    )


def constant_of(run: dict[str, Any]) -> int:
    """Bytes that saving took at most beyond a copy of the shards, on the rank where it is most."""
    return max(rank["saving_bytes"] - rank["shard_bytes"] for rank in run["ranks"])


def start_memory_watch() -> int:
    """Give freed memory back, restart the kernel's high-water mark; bytes held now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def largest(value: float) -> float:
    return float(reduced(value, dist.ReduceOp.MAX))


def total(value: int) -> int:
    return int(reduced(value, dist.ReduceOp.SUM))


def by_rank(value: int) -> list[int]:
    mine = torch.tensor([value])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [int(each) for each in found]


def reduced(value: float, op: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return tensor.item()


# -- what comes out


@dataclass(frozen=True)
class Verdict:
    """One thing that the figures must show."""

    claim: str
    found: float
    at_most: float

    def __str__(self) -> str:
        word = "pass" if self.found <= self.at_most else "MISS"
        return f"{word}  {self.claim}: {self.found:.3g}, at most {self.at_most:.3g}"


def judge(run: dict[str, Any], *, rss: bool) -> list[Verdict]:
    """What Legato promises; rows that were left out can't be judged."""
    world_size, method = run["world_size"], run["method"]
    where = f"{method}, ranks: {world_size}"
    if rss:
        held = run["rss_bytes"]
        grown = (held[-1] - held[4]) / run["state_bytes"]
        most = (
            f"{where}: any rank's shards and what saving took at most, but for "
            f"{CONSTANT_BYTES / 1e6:.0f} MB whatever their size ({constant_of(run) / 1e6:.1f} MB "
            "here) / its shards"
        )
        return [
            Verdict(f"{where}: memory grown from save 5 to {len(held)} / state", grown, 0.02),
            Verdict(most, highest_of(run, less_bytes=CONSTANT_BYTES), 2),
        ]
    figures = run["figures"]
    if not {"legato_async", "memcpy", "raw_write", "gather_loop"} <= figures.keys():
        return []
    blocked = median(figures, "legato_async", "blocked_seconds")
    verdicts = [
        Verdict(
            f"{where}: staged bytes per rank x ranks / state",
            max(figures["legato_async"]["staged_bytes"]) * world_size / run["state_bytes"],
            1.05,
        )
    ]
    if method == "lora" or world_size > 1:
        limit = 1 / 5 if method == "lora" else 1 / 40 if world_size >= 8 else 1 / 20
        claim = f"{where}: blocked / the faster gather + torch.save"
        verdicts.append(Verdict(claim, blocked / best_gather(figures), limit))
    if method == "lora":
        if "torch_save" in figures:
            alone = median(figures, "torch_save", "blocked_seconds")
            verdicts.append(Verdict(f"{where}: blocked / torch.save alone", blocked / alone, 1 / 5))
        return verdicts  # too small for the other ratios: words between ranks are most of it
    if world_size <= (os.cpu_count() or 1):
        memcpy = median(figures, "memcpy", "blocked_seconds")
        verdicts.append(Verdict(f"{where}: blocked / memcpy", blocked / memcpy, 1.3))
    raw = min(figures["raw_write"]["durable_seconds"])
    durable = min(figures["legato_async"]["durable_seconds"])
    verdicts.append(Verdict(f"{where}: durable / raw write + fsync", durable / raw, 1.3))
    extra = median(figures, "legato_async", "extra_bytes")
    verdicts.append(Verdict(f"{where}: extra host bytes / state", extra / run["state_bytes"], 1.1))
    return verdicts


def best_gather(figures: Figures) -> float:
    names = [name for name in ("gather", "gather_loop") if name in figures]
    return min((median(figures, name, "blocked_seconds") for name in names), default=math.nan)


def median(figures: Figures, row: str, figure: str) -> float:
    return float(statistics.median(figures[row][figure]))


def save_table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| method, ranks | row | blocks, s: median (min to max) | times less than the gather "
        "| durable after, s: min (median) | to raw write | extra host memory, MB "
        "| staged per rank, MB | loads in transformers / PEFT |",
        "| --- " * 9 + "|",
    ]
    for run in runs:
        figures = run["figures"]
        gather = best_gather(figures)
        raw = min(figures.get("raw_write", {}).get("durable_seconds", [math.nan]))
        for name, row in figures.items():
            blocked, durable = row["blocked_seconds"], row["durable_seconds"]
            middle = statistics.median(blocked)
            staged = max(row["staged_bytes"]) / 1e6 if "staged_bytes" in row else None
            cells = [
                f"{run['method']}, {run['world_size']}",
                ROWS[name].title,
                f"{middle:.4f} ({min(blocked):.4f} to {max(blocked):.4f})",
                f"{gather / middle:.1f}",
                f"{min(durable):.3f} ({statistics.median(durable):.3f})",
                f"{min(durable) / raw:.2f}",
                f"{statistics.median(row['extra_bytes']) / 1e6:.0f}",
                "" if staged is None else f"{staged:.1f}",
                {True: "yes", False: "no", None: ""}[row.get("loadable")],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| method, ranks | state, MB | held after save 1, MB | 5 | 10 | 25 | last "
        "| most on any rank: shards and saving / shards | beyond twice its shards, MB |",
        "| --- " * 9 + "|",
    ]
    for run in runs:
        held = [run["rss_bytes"][i] / 1e6 for i in (0, 4, 9, 24, -1)]
        cells = [f"{run['method']}, {run['world_size']}", f"{run['state_bytes'] / 1e6:.0f}"]
        cells += [*(f"{value:.0f}" for value in held), f"{highest_of(run):.2f}"]
        cells.append(f"{constant_of(run) / 1e6:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "bench/checkpoint.py", *sys.argv[1:]]),
        "python": sys.version.split()[0],
        "packages": {name: installed_version(name) for name in ("torch", "transformers", "legato")},
        "cores": os.cpu_count(),
        "repetitions": args.repetitions,
    }


if __name__ == "__main__":
    main()
