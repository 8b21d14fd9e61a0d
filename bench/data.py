r"""How long data takes before step 1: tokenizing and packing, cold and kept, and finding a place.

Every figure is taken in a process of its own, imports and tokenizer not counted. Without --data the
rows are made here: as many and about as long as GSM8K's training set.

    python bench/data.py --model .cache/smollm2-135m-instruct --json out/bench/data.json
    python bench/data.py --model ... --data gsm8k_train.jsonl --columns prompt=question \
        completion=answer
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

NUM_ROWS = 7473
SEEK_TO = 1_000_000
MAX_SEQ_LEN = 1024
WORDS = ("time", "person", "year", "way", "day", "thing", "world", "life", "hand", "part", "child")


def main() -> None:
    args = parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            args.data = write_rows(Path(folder, "rows.jsonl"))
        args.folder = Path(folder)
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
        for _ in range(args.repetitions):
            for name in PARTS:  # what "kept" reads is what "cold" left
                results[name].append(run_part(name, args))
    table = summary(results, num_rows=len(args.data.read_text().splitlines()))
    print(table)
    if args.json:
        report = {"environment": environment(), "table": table, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--data", type=Path, help="a jsonl file; made here if absent")
    parser.add_argument("--columns", nargs="*", default=[], help="ours=the file's")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one process each


def cold(args: argparse.Namespace, *, num_workers: int = 0) -> dict[str, Any]:
    return tokenized(args, Path(tempfile.mkdtemp(dir=args.folder)), num_workers=num_workers)


def cold_with_workers(args: argparse.Namespace) -> dict[str, Any]:
    return tokenized(args, args.folder / "kept", num_workers=2)


def kept(args: argparse.Namespace) -> dict[str, Any]:
    return tokenized(args, args.folder / "kept", num_workers=0)


def tokenized(args: argparse.Namespace, cache: Path, *, num_workers: int) -> dict[str, Any]:
    from legato.data import ChatFormatter, DatasetSpec
    from legato.data.cache import build_cached
    from legato.data.packing import pack_samples
    from legato.models.load import load_tokenizer

    formatter = ChatFormatter(load_tokenizer(str(args.model), trust_remote_code=False))
    columns = dict(pair.split("=") for pair in args.columns)
    spec = DatasetSpec(str(args.data), columns=columns)
    began = time.perf_counter()
    data = build_cached(
        [spec],
        folder=cache,
        formatter=formatter,
        max_seq_len=MAX_SEQ_LEN,
        num_workers=num_workers,
    )
    packed = pack_samples(data, max_seq_len=MAX_SEQ_LEN, seed=0)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "num_tokens": data.num_tokens, "efficiency": packed.efficiency}


def seek(args: argparse.Namespace) -> dict[str, Any]:
    """From a new loader to the batches that hold sample 10^6 of the epoch's order."""
    import numpy as np

    from legato.data.loader import Loader
    from legato.data.samples import DataReport, TokenizedData

    count, length = SEEK_TO + 50_000, 8
    starts = np.arange(count, dtype=np.int64) * length
    data = TokenizedData(
        tokens=np.zeros(count * length, dtype=np.int32),
        trained=np.ones(count * length, dtype=np.bool_),
        starts=starts,
        lengths=np.full(count, length, dtype=np.int64),
        id_bytes=b"row",
        id_starts=np.zeros(count, dtype=np.int64),
        id_ends=np.full(count, 3, dtype=np.int64),
        rows=np.arange(count, dtype=np.int64),
        datasets=np.zeros(count, dtype=np.int64),
        weights=(1.0,),
        report=DataReport(()),
    )
    loader = Loader(data, global_batch_size=16, batch_size=16, seed=0, pad_id=0)
    step = SEEK_TO // 16 + 1
    began = time.perf_counter()
    fetched = loader.fetch(step)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    loader.fetch(step - 1000)
    return {
        "seconds": seconds,
        "again_seconds": time.perf_counter() - began,
        "num_rows": fetched.num_rows,
    }


def seek_lines(args: argparse.Namespace) -> dict[str, Any]:
    place = args.folder / "long.jsonl"
    if not place.exists():
        line = json.dumps({"text": "a row of a hundred characters " * 3}) + "\n"
        place.write_text(line * (SEEK_TO + 1))
    return entered(place)


def seek_table(args: argparse.Namespace) -> dict[str, Any]:
    import pyarrow as pa
    from pyarrow import parquet

    place = args.folder / "long.parquet"
    if not place.exists():
        table = pa.table({"text": ["a row of a hundred characters " * 3] * (SEEK_TO + 1)})
        parquet.write_table(table, place, row_group_size=10_000)
    return entered(place)


def entered(place: Path) -> dict[str, Any]:
    """The time to row 10^6 of a stream."""
    from legato.data.sources import Row, read_rows

    began = time.perf_counter()
    row = next(read_rows(str(place), skip=SEEK_TO, streaming=True))
    seconds = time.perf_counter() - began
    assert isinstance(row, Row)
    assert row.sample_id.endswith(f":{SEEK_TO + 1}")
    return {"seconds": seconds}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cold": cold,
    "cold_with_workers": cold_with_workers,
    "kept": kept,
    "seek": seek,
    "seek_lines": seek_lines,
    "seek_table": seek_table,
}


# -- the parent


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name == "cold_with_workers":
        for left in (args.folder / "kept").glob("*"):  # of the repetition before
            left.rename(args.folder / f"old-{time.time_ns()}")
    command = [sys.executable, __file__, "--part", name, "--model", str(args.model)]
    command += ["--data", str(args.data), "--folder", str(args.folder)]
    command += ["--columns", *args.columns] if args.columns else []
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def write_rows(place: Path) -> Path:
    draw = random.Random(0)
    with place.open("w") as file:
        for _ in range(NUM_ROWS):
            row = {
                "prompt": " ".join(draw.choices(WORDS, k=draw.randint(20, 80))),
                "completion": " ".join(draw.choices(WORDS, k=draw.randint(30, 150))),
            }
            file.write(json.dumps(row) + "\n")
    return place


def summary(results: dict[str, list[dict[str, Any]]], *, num_rows: int) -> str:
    first = results["cold"][0]
    what = f"{num_rows:,} rows, {first['num_tokens']:,} tokens"
    rows = {
        "cold": (f"tokenize and pack {what}, nothing kept", "15 s"),
        "cold_with_workers": ("the same with num_workers: 2", ""),
        "kept": ("the same, read from the cache, and packed", "1 s"),
        "seek": ("batches of sample 1,000,000 of 1,050,000, order made anew", "0.050 s"),
        "seek_lines": ("stream: row 1,000,001 of a jsonl file of 105 bytes a line", ""),
        "seek_table": ("stream: row 1,000,001 of a parquet file", ""),
    }
    lines = ["| what | seconds: median (each) | target |", "| --- | --- | --- |"]
    for name, (text, target) in rows.items():
        seconds = [result["seconds"] for result in results[name]]
        each = ", ".join(f"{s:.3g}" for s in seconds)
        lines.append(f"| {text} | {statistics.median(seconds):.3g} ({each}) | {target} |")
    again = statistics.median(result["again_seconds"] for result in results["seek"])
    lines.append(f"| another place in the same epoch | {again:.2g} | |")
    lines.append("")
    lines.append(f"Packed rows are {first['efficiency']:.1%} full.")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    names = ("torch", "transformers", "tokenizers", "numpy", "pyarrow")
    return {
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        **{name: version(name) for name in names},
    }


if __name__ == "__main__":
    main()
