"""Every key of a run's config: type, default, meaning, unit, and what another value does on resume.

``docs/config.md`` and ``run_config.schema.json`` are generated from here by
``scripts/generate_config_docs.py``.
Which keys only work together is said in :mod:`legato.config.rules`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from legato.config import rules
from legato.config.sections import (
    CompileChoice,
    CompileConfig,
    DatasetConfig,
    Interval,
    LRSchedulerConfig,
    OptimizerConfig,
    Schedule,
)
from legato.config.types import (
    RECIPES,
    AllOrCount,
    LoggerList,
    Recipe,
    ResumeSource,
    Section,
    Switch,
    SwitchOrCount,
    TargetModules,
    TextList,
    Whole,
    key,
)

__all__ = [
    "RECIPES",
    "CompileConfig",
    "DatasetConfig",
    "LRSchedulerConfig",
    "OptimizerConfig",
    "RunConfig",
    "Schedule",
]


class RunConfig(Section):
    """A whole run."""

    # -- what is trained, and where it goes
    recipe: Recipe = key(..., "Which training to do.", on_resume="fixed")
    model: str = key(
        ...,
        "Hub id, model folder or step folder; a relative path starts at the current folder.",
        on_resume="contents",
        min_length=1,
    )
    output_dir: str = key(
        ...,
        "Where checkpoints, metrics and the resolved config go; out/<config name> when absent.",
        on_resume="-",
        min_length=1,
    )
    trust_remote_code: Switch = key(
        False, "Run Python code that comes with the model.", on_resume="free"
    )
    dtype: Literal["bf16", "fp32"] = key(
        "bf16", "Compute dtype and dtype of the model files.", on_resume="fixed"
    )
    master_weights: Literal["fp32", "none"] = key(
        "fp32",
        "With dtype bf16: keep an fp32 copy for the optimizer, or none and round stochastically.",
        on_resume="fixed",
    )
    device: str = key(
        "auto",
        "auto (cuda, else mps, else cpu), cpu, cuda, cuda:<n> or mps.",
        on_resume="free",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
    )
    seed: int = key(
        0, "Seed of data order, dropout and new weights.", on_resume="refuse", ge=0, le=2**63 - 1
    )
    deterministic: Switch = key(
        False,
        "Only algorithms that repeat their bits: a resumed run is bit-equal on a GPU too, slower.",
        on_resume="warn",
    )

    # -- data
    datasets: list[DatasetConfig] = key(
        ...,
        "What to train on. `dataset: FILE` is short for a list of one.",
        on_resume="refuse",
        min_length=1,
    )
    eval_datasets: list[DatasetConfig] = key([], "What to evaluate on.", on_resume="warn")
    val_set_size: float = key(
        0,
        "Rows held out of `datasets` for evaluation: a share below 1, a number of rows from 1 on.",
        on_resume="refuse",
        ge=0,
    )
    chat_template: str = key(
        "auto",
        "auto (the tokenizer's, else the packaged alpaca), alpaca, chatml or a .jinja file.",
        on_resume="contents",
        min_length=1,
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "Variables passed to the template.", on_resume="refuse"
    )
    train_on_inputs: Switch = key(False, "Train on prompts as well.", on_resume="refuse")
    roles_to_train: TextList = key(
        ["assistant"], "Whose turns are trained.", on_resume="refuse", min_length=1
    )
    turns_to_train: Literal["all", "last"] = key(
        "all",
        "Of the turns of these roles, all, or the last one of each conversation.",
        on_resume="refuse",
    )
    special_tokens_in_text: Literal["error", "allow"] = key(
        "error", "What to do when a row's text holds a control token.", on_resume="refuse"
    )
    max_seq_len: Whole = key(
        2048,
        "Longest sample; the model's limit where that is smaller.",
        on_resume="refuse",
        unit="tokens",
        ge=2,
    )
    excess_length: Literal["drop", "truncate", "error"] = key(
        "drop", "What to do with longer samples.", on_resume="refuse"
    )
    on_bad_row: Literal["error", "skip"] = key(
        "error", "What to do with a row that can't be read.", on_resume="refuse"
    )
    packing: Switch = key(False, "Put several samples into one row.", on_resume="refuse")
    attention: Literal["auto", "sdpa", "eager", "flex", "flash", "varlen"] = key(
        "auto", "Attention implementation.", on_resume="warn"
    )
    streaming: Switch = key(
        False, "Read the data while training instead of before.", on_resume="refuse"
    )
    shuffle_buffer_size: Whole = key(
        10_000,
        "Rows of a stream that are shuffled together.",
        on_resume="refuse",
        unit="rows",
        ge=1,
    )
    num_workers: Whole = key(
        0,
        "Processes that tokenize; from 1 on a thread makes the next batches during a step.",
        on_resume="free",
        ge=0,
    )

    # -- length of the run
    batch_size: Whole = key(
        1, "Rows per device and micro-batch.", on_resume="refuse", unit="rows", ge=1
    )
    gradient_accumulation_steps: Whole = key(
        1, "Micro-batches per optimizer step.", on_resume="refuse", unit="micro-batches", ge=1
    )
    epochs: Whole | None = key(
        1,
        "Passes over the data; null repeats it until max_steps.",
        on_resume="warn",
        unit="epochs",
        ge=1,
    )
    max_steps: Whole | None = key(
        None,
        "The run ends here if its epochs haven't ended before.",
        on_resume="warn",
        unit="optimizer steps",
        ge=0,
    )
    max_steps_per_epoch: Whole | None = key(
        None,
        "An epoch ends here if its rows haven't ended before.",
        on_resume="warn",
        unit="optimizer steps",
        ge=0,
    )
    stop_after_step: Whole | None = key(
        None,
        "End this process after this step, with a checkpoint; the schedule stays as it is.",
        on_resume="free",
        unit="optimizer steps",
        ge=1,
    )

    # -- the update
    optimizer: OptimizerConfig = key(..., "The update rule.", on_resume="warn")
    lr_scheduler: LRSchedulerConfig = key(
        LRSchedulerConfig(), "The learning rate as a function of the step.", on_resume="warn"
    )
    clip_grad_norm: float | None = key(
        1.0,
        "Largest gradient norm; null doesn't clip.",
        on_resume="warn",
        gt=0,
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "What to do at a loss or gradient that isn't finite.", on_resume="free"
    )

    # -- LoRA
    lora_rank: Whole = key(16, "Width of the update.", on_resume="fixed", unit="features", ge=1)
    lora_alpha: float = key(
        32, "Strength: the update is scaled by alpha / rank.", on_resume="refuse", gt=0, le=1e6
    )
    lora_dropout: float = key(0.0, "Dropout on the update's input.", on_resume="refuse", ge=0, lt=1)
    lora_target_modules: TargetModules = key(
        "all-linear", "Names of the layers that get an update.", on_resume="fixed"
    )
    lora_modules_to_save: TextList = key(
        [],
        "Modules that train as a whole beside the adapter and are saved in it: embed_tokens, "
        "lm_head, norms.",
        on_resume="fixed",
    )
    use_dora: Switch = key(False, "Weight-decomposed LoRA.", on_resume="fixed")
    use_rslora: Switch = key(False, "Scale by alpha / sqrt(rank) instead.", on_resume="refuse")
    quantize_base: Literal["none", "nf4"] = key(
        "none",
        "nf4 keeps the frozen linear weights of the decoder's layers in 4 bits (QLoRA); "
        "needs torchao.",
        on_resume="refuse",
    )

    # -- checkpoints
    save_every_n_train_steps: Interval | None = key(
        500,
        "Steps between checkpoints: a number or a schedule; null saves at the end only.",
        on_resume="free",
        unit="optimizer steps",
    )
    save_every_n_seconds: float | None = key(
        None,
        "Longest time between checkpoints.",
        on_resume="free",
        unit="seconds",
        gt=0,
    )
    save_at_epoch_end: Switch = key(False, "Save at the end of each epoch too.", on_resume="free")
    keep_last_n_checkpoints: Whole | None = key(
        None,
        "Keep the newest n; all when neither this nor another keep_ key is set.",
        on_resume="free",
        unit="checkpoints",
        ge=1,
    )
    keep_last_n_states: Whole | None = key(
        None,
        "Older checkpoints lose what only a resumed run needs.",
        on_resume="free",
        unit="checkpoints",
        ge=1,
    )
    keep_best_n_checkpoints: Whole | None = key(
        None,
        "Keep the best n by metric_for_best_model; a new best is saved.",
        on_resume="free",
        unit="checkpoints",
        ge=1,
    )
    keep_every_n_steps: Interval | None = key(
        None,
        "Keep every checkpoint whose step is a multiple of n, or is on a schedule.",
        on_resume="free",
        unit="optimizer steps",
    )
    metric_for_best_model: Literal["eval_loss", "train_loss"] | None = key(
        None,
        "Metric of `best`; eval_loss where there is evaluation data, else train_loss, the mean "
        "since the last save.",
        on_resume="free",
    )
    greater_is_better: Switch = key(False, "Whether a larger metric is better.", on_resume="free")
    prune: Literal["delete", "move"] = key(
        "delete",
        "What happens to a checkpoint that isn't kept; move: to output_dir/.pruned/.",
        on_resume="free",
    )
    save_only_model: Switch = key(
        False,
        "Leave out what only a resumed run needs; such a run can't be resumed.",
        on_resume="free",
    )
    resume_from_checkpoint: ResumeSource = key(
        "auto", "auto (the newest of this run), false, or a step folder.", on_resume="free"
    )
    allow_missing: list[Literal["optimizer"]] = key(
        [],
        "Parts that the state folder of a checkpoint to resume from may lack; without a state "
        "folder nothing resumes.",
        on_resume="free",
    )
    verify_on_load: Switch = key(False, "Compare digests when resuming.", on_resume="free")
    enable_async_checkpointing: Switch = key(
        True, "Write checkpoints while training goes on.", on_resume="free"
    )
    staging: Literal["overlap", "blocking"] = key(
        "overlap",
        "Copy a snapshot during the next forward and backward, or before them.",
        on_resume="free",
    )
    on_save_error: Literal["continue", "raise"] = key(
        "continue", "Whether a failed save ends the run.", on_resume="free"
    )
    final_save_patience_seconds: float = key(
        600.0,
        "How long a failed final save is tried again.",
        on_resume="free",
        unit="seconds",
        ge=0,
    )
    shared_storage: Switch = key(
        True,
        "All hosts see the same output_dir. false: all of each checkpoint goes to rank 0's host, "
        "and a resumed run brings it from there to the others.",
        on_resume="free",
    )

    # -- what one sees
    run_val_every_n_steps: Interval | None = key(
        None,
        "Steps between evaluations: a number or a schedule; null evaluates at the end only.",
        on_resume="free",
        unit="optimizer steps",
    )
    generate_samples: Whole = key(
        0,
        "Prompts to answer at each evaluation: of the evaluation data, else of the training data.",
        on_resume="free",
        ge=0,
    )
    log_every_n_steps: Interval = key(
        1,
        "Steps between log lines: a number or a schedule.",
        on_resume="free",
        unit="optimizer steps",
    )
    loggers: LoggerList = key([], "Where metrics go besides metrics.jsonl.", on_resume="free")

    # -- speed and memory
    compile: CompileChoice = key(
        False, "torch.compile: false, true (each decoder block) or a mapping.", on_resume="free"
    )
    enable_activation_checkpointing: SwitchOrCount = key(
        False,
        "Recompute activations in backward: false, true (every block) or every n-th block.",
        on_resume="free",
    )
    enable_activation_offloading: Switch = key(
        False, "Keep activations in host memory.", on_resume="free"
    )
    optimizer_in_backward: Switch = key(
        False, "Update each weight as its gradient is ready.", on_resume="refuse"
    )

    # -- many devices
    dp_shard: AllOrCount = key("all", "Ranks that share one copy of the model.", on_resume="free")
    dp_replicate: Whole = key(1, "Copies of the model.", on_resume="free", ge=1)
    reshard_after_forward: Switch = key(
        True, "Free gathered weights after forward.", on_resume="free"
    )
    cpu_offload: Switch = key(
        False, "Keep parameters and moments in host memory.", on_resume="free"
    )

    @field_validator("val_set_size")
    @classmethod
    def _whole_rows(cls, size: float) -> float:
        if size >= 1 and size != int(size):
            raise PydanticCustomError("range", "expected a share below 1 or a whole number of rows")
        return size

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> RunConfig:
        unreadable = (info.context or {}).get("unreadable", frozenset())
        problems = rules.check(self, unreadable=unreadable)
        if problems:
            raise PydanticCustomError(
                "combination",
                "{text}",
                {"text": "; ".join(str(p) for p in problems), "problems": problems},
            )
        return self
