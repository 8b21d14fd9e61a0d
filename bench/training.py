"""The work that training is measured by: rows, and one full fine-tuning by each system.

Each ``train_with_`` function runs in a process and a folder of its own, and hands back a
``result``.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

WORDS = ("time", "person", "year", "way", "day", "thing", "world", "life", "hand", "part", "child")
LEARNING_RATE = 1e-5
SEED = 0


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


def train_with_hf(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from legato.models.load import load_tokenizer

    collator = DataCollatorForSeq2Seq(load_tokenizer(str(args.model)), padding=True)
    return train_with_peer(
        args,
        arguments=TrainingArguments,
        build=lambda **parts: Trainer(data_collator=collator, **parts),
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
