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
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PEERS = ("hf", "trl")
SYSTEMS = ("legato", "packed", *PEERS)
NAMES = {
    "legato": "Legato",
    "packed": "Legato, packing",
    "hf": "HF Trainer",
    "trl": "TRL SFTTrainer",
}
WORDS = ("time", "person", "year", "way", "day", "thing", "world", "life", "hand", "part", "child")
LEARNING_RATE = 1e-5
SEED = 0


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
    parser.add_argument("--packed-tokens", type=int, default=1024, help="slots of a packed step")
    parser.add_argument("--trained-share", nargs="+", type=int, default=[65, 100], help="percent")
    parser.add_argument("--master-weights", choices=("fp32", "none"), default="fp32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the parent: starts workers, compares what they say


def rotated(systems: list[str], by: int) -> list[str]:
    by %= len(systems)
    return systems[by:] + systems[:by]


def run_worker(
    system: str, *, share: int, repetition: int, args: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", system, "--json", str(result)]
        command += ["--model", str(args.model.resolve()), "--trained-share", str(share)]
        command += ["--steps", str(args.steps), "--warm-up-steps", str(args.warm_up_steps)]
        command += ["--batch-size", str(args.batch_size), "--mean-tokens", str(args.mean_tokens)]
        command += ["--packed-tokens", str(args.packed_tokens)]
        command += ["--master-weights", args.master_weights]
        command += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{NAMES[system]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        run: dict[str, Any] = json.loads(result.read_text())
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


def environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    packages = ("torch", "transformers", "accelerate", "trl", "legato")
    return {
        "command": " ".join(["python", "bench/throughput.py", *sys.argv[1:]]),
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


# -- what every worker shares


def write_rows(path: Path, *, share: int, args: argparse.Namespace) -> None:
    """Rows with the spread of lengths of instruction data (log-normal), of any words."""
    rng = random.Random(SEED)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(args.batch_size * (args.warm_up_steps + args.steps)):
            # 32 tokens of every row are the template's, and none of those is trained.
            length = max(24, int(args.mean_tokens * rng.lognormvariate(-0.18, 0.6)))
            num_trained = min(length - 8, int(length * min(share, 65) / 100 * 1.02))
            num_prompt = max(4, length - num_trained - 32)
            prompt, completion = (
                " ".join(rng.choice(WORDS) for _ in range(count))
                for count in (num_prompt, num_trained)
            )
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def run_config(folder: Path, *, args: argparse.Namespace, packing: bool = False) -> Any:
    """Legato's config of the run; the peers take their rows and their order from it."""
    from legato.config.load import load_config

    share = args.trained_share[0]
    write_rows(folder / "rows.jsonl", share=share, args=args)
    config = {
        "recipe": "full_finetune_single_device",
        "model": str(args.model),
        "output_dir": str(folder / "run"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "prompt_completion"}],
        "train_on_inputs": share == 100,
        "dtype": "bf16",
        "master_weights": args.master_weights,
        "batch_size": args.batch_size,
        "epochs": 1,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE},
        "lr_scheduler": {"name": "constant"},
        "enable_activation_checkpointing": args.gradient_checkpointing,
        # The peers don't save; Legato always does at the end, after the last timed step.
        "save_every_n_train_steps": None,
        "enable_async_checkpointing": False,
        "save_only_model": True,
        "seed": SEED,
    }
    if packing:  # a step of one row, of about as many tokens as the others' steps
        config |= {"packing": True, "max_seq_len": args.packed_tokens, "batch_size": 1}
    (folder / "bench.yaml").write_text(json.dumps(config))  # JSON is YAML
    return load_config(str(folder / "bench.yaml"), [])


def tokenized_steps(config: Any, *, args: argparse.Namespace) -> list[list[Any]]:
    """The samples of each step, in the order in which Legato trains on them."""
    from legato.data.build import build_data
    from legato.data.chat import ChatFormatter
    from legato.data.formats import DatasetSpec
    from legato.data.loader import Loader
    from legato.models.load import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    formatter = ChatFormatter(tokenizer, train_on_inputs=config.train_on_inputs)
    spec = DatasetSpec(path=config.datasets[0].path, type=config.datasets[0].type)
    data = build_data([spec], formatter=formatter, max_seq_len=config.max_seq_len)
    loader = Loader(
        data,
        global_batch_size=args.batch_size,
        batch_size=args.batch_size,
        seed=config.seed,
        pad_id=tokenizer.pad_token_id,
    )
    numbers = range(1, loader.steps_per_epoch + 1)
    return [[data[row] for row in loader.step_rows(step)] for step in numbers]


def result(
    steps: list[list[Any]],
    *,
    step_ends: list[float],
    losses: list[float],
    peak_bytes: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What a worker hands back; ``step_ends``: the clock after each step."""
    num_tokens = [sum(len(sample.input_ids) for sample in step) for step in steps]
    num_trained = [sum(sample.num_loss_tokens for sample in step) for step in steps]
    seconds = step_ends[-1] - step_ends[args.warm_up_steps - 1]
    return {
        "tokens_per_second": sum(num_tokens[args.warm_up_steps :]) / seconds,
        "num_tokens": num_tokens,
        "token_efficiency": sum(num_tokens)
        / sum(len(step) * max(len(sample.input_ids) for sample in step) for step in steps),
        "real_trained_share": sum(num_trained) / sum(num_tokens),
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": peak_bytes,
    }


# -- the workers


def train_with_legato(args: argparse.Namespace) -> dict[str, Any]:
    from legato import recipes
    from legato.report.metrics import read_events

    folder = Path.cwd()
    loaded = run_config(folder, args=args)
    steps = tokenized_steps(loaded.config, args=args)
    recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml)
    done = [e for e in read_events(folder / "run" / "metrics.jsonl") if e["event"] == "step"]
    return result(
        steps,
        step_ends=[event["time"] for event in done],
        losses=[event["loss"] for event in done],
        peak_bytes=done[-1]["peak_memory_bytes"],
        args=args,
    )


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


def train_with_hf(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from legato.models.load import load_tokenizer

    collator = DataCollatorForSeq2Seq(load_tokenizer(str(args.model)), padding=True)
    return train_with_peer(
        args,
        arguments=TrainingArguments,
        build=lambda **parts: Trainer(data_collator=collator, **parts),
    )


def train_with_trl(args: argparse.Namespace) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    from legato.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(args.model))
    return train_with_peer(
        args,
        arguments=lambda **values: SFTConfig(max_length=None, **values),
        build=lambda **parts: SFTTrainer(processing_class=tokenizer, **parts),
    )


def train_with_peer(args: argparse.Namespace, *, arguments: Any, build: Any) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback

    folder = Path.cwd()
    loaded = run_config(folder, args=args)
    steps = tokenized_steps(loaded.config, args=args)
    rows = Dataset.from_list(
        [
            {
                "input_ids": sample.input_ids.tolist(),
                "labels": [
                    token if trained else -100
                    for token, trained in zip(
                        sample.input_ids.tolist(), sample.trained.tolist(), strict=True
                    )
                ],
            }
            for step in steps
            for sample in step
        ]
    )
    has_masters = args.master_weights == "fp32"
    # fp32 masters: the weights are fp32 and autocast computes in bf16; none: the weights are bf16.
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32 if has_masters else torch.bfloat16
    )
    step_ends: list[float] = []
    losses: list[float] = []
    peaks: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            step_ends.append(time.time())
            peaks.append(peak_bytes())

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any, **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    trainer = build(
        model=model,
        train_dataset=rows,
        callbacks=[Clock()],
        args=arguments(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            bf16=has_masters,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=args.gradient_checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=SEED,
        ),
    )
    trainer.train()
    return result(steps, step_ends=step_ends, losses=losses, peak_bytes=peaks[-1], args=args)


def peak_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


WORKERS = {
    "legato": train_with_legato,
    "packed": train_with_packing,
    "hf": train_with_hf,
    "trl": train_with_trl,
}

if __name__ == "__main__":
    main()
