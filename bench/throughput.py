"""Training speed and peak memory beside HF Trainer and TRL's SFTTrainer, doing the same work.

Same model, rows, order, batch, dtype, master weights, optimizer, clipping and learning rate; each
system runs in a process of its own, in an order that rotates with each repetition. The peers get
the token ids and labels that Legato makes, so that no time goes into other people's tokenization.
Gradient checkpointing is off on all, or on on all with --gradient-checkpointing. TRL's entropy and
accuracy metrics can't be switched off: they are part of its step. "Legato, packing" trains on the
same rows, put together into rows of --packed-tokens: other steps, so its losses aren't compared.

    python bench/throughput.py --model .cache/smollm2-135m-instruct --json out/bench/throughput.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from training import run_config, train_with_hf, train_with_legato, train_with_peer
from workers import environment, rotated, run_alone

PEERS = ("hf", "trl")
SYSTEMS = ("legato", "packed", *PEERS)
NAMES = {
    "legato": "Legato",
    "packed": "Legato, packing",
    "hf": "HF Trainer",
    "trl": "TRL SFTTrainer",
}


def main() -> None:
    args = parse_args()
    if args.worker:
        result = WORKERS[args.worker](args)
        args.json.write_text(json.dumps(result))
        return
    runs = [
        run_worker(system, share=share, repetition=repetition, args=args)
        for repetition in range(args.repetitions)
        for share in args.trained_share
        for system in rotated(args.systems, repetition)
    ]
    check_same_work(runs)
    table = summary(runs)
    print(table)
    print("\n".join(["", *packing_gain(runs)]))
    if args.json:
        report = {"environment": environment(args), "table": table, "packing": packing_gain(runs)}
        report |= {"runs": runs}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one repetition")
    parser.add_argument("--warm-up-steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--mean-tokens", type=int, default=160, help="mean length of a row")
    parser.add_argument(
        "--packed-tokens",
        type=int,
        default=1344,
        help="slots of a packed step: about as many as a padded step of 8 rows has tokens",
    )
    parser.add_argument("--trained-share", nargs="+", type=int, default=[65, 100], help="percent")
    parser.add_argument("--master-weights", choices=("fp32", "none"), default="fp32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the parent: starts workers, compares what they say


def run_worker(
    system: str, *, share: int, repetition: int, args: argparse.Namespace
) -> dict[str, Any]:
    chosen = ("steps", "warm_up_steps", "batch_size", "mean_tokens", "packed_tokens")
    chosen += ("master_weights", "gradient_checkpointing")
    options = {key: getattr(args, key) for key in chosen}
    options |= {"model": args.model.resolve(), "trained_share": share}
    run = run_alone(__file__, name=NAMES[system], worker=[system], options=options)
    run |= {"system": system, "trained_share": share, "repetition": repetition}
    print(
        f"{repetition + 1}/{args.repetitions}  {share:3d} % trained  {NAMES[system]:<15}"
        f"{run['tokens_per_second']:8.1f} tokens/s  {run['peak_bytes'] / 1e9:.2f} GB",
        file=sys.stderr,
    )
    return run


def check_same_work(runs: list[dict[str, Any]]) -> None:
    """Equal token counts and, up to bf16 rounding, equal losses: else nothing is compared."""
    for share in {run["trained_share"] for run in runs}:
        same = [r for r in runs if r["trained_share"] == share and r["system"] != "packed"]
        for run in same:
            first = same[0]
            if run["num_tokens"] != first["num_tokens"]:
                sys.exit(f"{run['system']} saw {run['num_tokens']}, not {first['num_tokens']}")
            gaps = [abs(a - b) for a, b in zip(run["losses"], first["losses"], strict=True)]
            if max(gaps) > 0.05:
                sys.exit(f"{run['system']}: losses {run['losses']}, not {first['losses']}")


def summary(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| trained tokens | system | tokens/s: median (min to max) | to the better peer "
        "| peak memory, GB | to the better peer | loss, last step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for share in sorted({run["trained_share"] for run in runs}):
        figures = {
            system: chosen
            for system in SYSTEMS
            if (chosen := [r for r in runs if (r["trained_share"], r["system"]) == (share, system)])
        }
        for system, chosen in figures.items():
            speeds = [run["tokens_per_second"] for run in chosen]
            peaks = [run["peak_bytes"] for run in chosen]
            peers = [figures[name] for name in figures if name in PEERS]
            lines.append(
                f"| {chosen[0]['real_trained_share']:.0%} | {NAMES[system]} "
                f"| {statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) "
                f"| {to_best(chosen, peers, 'tokens_per_second', max)} "
                f"| {statistics.median(peaks) / 1e9:.2f} "
                f"| {to_best(chosen, peers, 'peak_bytes', min)} | {chosen[0]['losses'][-1]:.4f} |"
            )
    return "\n".join(lines)


def packing_gain(runs: list[dict[str, Any]]) -> list[str]:
    """How much faster packing is than padding, beside what the padding alone would give."""
    lines = []
    for share in sorted({run["trained_share"] for run in runs}):
        padded, packed = (
            [r for r in runs if (r["trained_share"], r["system"]) == (share, system)]
            for system in ("legato", "packed")
        )
        if padded and packed:
            pairs = zip(packed, padded, strict=True)
            gain = statistics.median(
                a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs
            )
            efficiency = padded[0]["token_efficiency"]
            lines.append(
                f"{padded[0]['real_trained_share']:.0%} trained: packing {gain:.2f} x padding; "
                f"{efficiency:.0%} of the padded slots are tokens, so at least "
                f"{0.9 / efficiency:.2f} is expected; packed: {packed[0]['token_efficiency']:.0%}"
            )
    return lines


def to_best(
    chosen: list[dict[str, Any]], peers: list[list[dict[str, Any]]], key: str, best: Any
) -> str:
    """Median over the repetitions of the ratio to the better peer of the same repetition.

    Neighbours in time share what else the machine does, so their ratio is steadier than a ratio of
    medians.
    """
    if not peers:
        return ""
    ratios = [run[key] / best(peer[i][key] for peer in peers) for i, run in enumerate(chosen)]
    return f"{statistics.median(ratios):.2f}"


# -- the workers that only this script has


def train_with_packing(args: argparse.Namespace) -> dict[str, Any]:
    from legato import recipes
    from legato.report.metrics import read_events

    loaded = run_config(Path.cwd(), args=args, packing=True)
    recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    done = [e for e in read_events(Path("run/metrics.jsonl")) if e["event"] == "step"]
    timed = done[args.warm_up_steps :]
    seconds = done[-1]["time"] - done[args.warm_up_steps - 1]["time"]
    num_tokens = [event["num_tokens"] for event in done]
    return {
        "tokens_per_second": sum(event["num_tokens"] for event in timed) / seconds,
        "num_tokens": num_tokens,
        "token_efficiency": sum(num_tokens) / (len(done) * args.packed_tokens),
        "real_trained_share": sum(event["num_loss_tokens"] for event in done) / sum(num_tokens),
        "seconds": seconds,
        "losses": [event["loss"] for event in done],
        "peak_bytes": done[-1]["peak_memory_bytes"],
    }


def train_with_trl(args: argparse.Namespace) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    from legato.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(args.model))
    return train_with_peer(
        args,
        arguments=lambda **values: SFTConfig(max_length=None, **values),
        build=lambda **parts: SFTTrainer(processing_class=tokenizer, **parts),
    )


WORKERS = {
    "legato": train_with_legato,
    "packed": train_with_packing,
    "hf": train_with_hf,
    "trl": train_with_trl,
}

if __name__ == "__main__":
    main()
