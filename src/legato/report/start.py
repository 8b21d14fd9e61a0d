"""What a run says before its first step: facts in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from legato.words import counted

_LABEL_WIDTH = 14


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """Everything that the start block shows.

    Attributes:
        config_name: Name that the config was given by, without suffix.
        recipe: Recipe name.
        model: Hub id or folder of the base model.
        num_parameters: Parameters of the model, tied ones once.
        num_trainable_parameters: Those that the optimizer changes.
        least_bytes_read: Fewest bytes of weights that a rank read, of a model that ranks share;
            None: each read all.
        most_bytes_read: The most that one of them read.
        quantize_base: ``none``, or what the frozen weights are kept in, such as ``nf4``.
        num_quantized_weights: How many weights that are.
        quantized_bytes: What they take, counted once however many ranks share them.
        unquantized_bytes: What they would take in ``dtype``.
        num_whole_weights: Those that each rank holds whole, because they can't be cut evenly.
        dtype: Compute and file dtype, as in the config.
        master_weights: ``fp32`` or ``none``.
        device: Device type as torch names it, such as ``cuda``.
        device_detail: What stands behind it, such as a GPU's name or a thread count; may be empty.
        compile: What torch.compile compiles: ``off``, ``block`` (each decoder block) or ``model``.
        world_size: Number of processes.
        num_samples: Training samples after dropping; None: they are read while training.
        num_tokens: Their tokens; None as well.
        num_trained_tokens: Those of them that the loss sees; None as well.
        num_packed_rows: Rows that the samples are packed into; None: each is a row.
        packing_efficiency: Tokens per slot of those rows.
        epochs: Epochs asked for; None means until ``total_steps``.
        steps_per_epoch: Optimizer steps in one epoch; None: nobody knows before its end.
        total_steps: Step at which the run ends.
        global_batch_size: Sequences per step over all ranks.
        batch_size: Rows per device and micro-batch.
        gradient_accumulation_steps: Micro-batches per step.
        save_when: When checkpoints are taken, in words; empty for "at the end only".
        checkpoint_bytes: Size of one checkpoint.
        output_dir: Where the run writes.
        free_bytes: Free disk at ``output_dir``; None where the storage can't tell.
        resumes_from: Folder that the run continues from; None for a fresh start.
        resume_step: Step of that folder.
        advice: Warnings about what goes ahead all the same; not a part of the block.
    """

    config_name: str
    recipe: str
    model: str
    num_parameters: int
    num_trainable_parameters: int
    least_bytes_read: int | None = None
    most_bytes_read: int | None = None
    quantize_base: str = "none"
    num_quantized_weights: int = 0
    quantized_bytes: int = 0
    unquantized_bytes: int = 0
    num_whole_weights: int = 0
    dtype: str
    master_weights: str
    device: str
    device_detail: str = ""
    compile: str = "off"
    world_size: int = 1
    num_samples: int | None
    num_tokens: int | None
    num_trained_tokens: int | None
    num_packed_rows: int | None = None
    packing_efficiency: float | None = None
    epochs: int | None
    steps_per_epoch: int | None
    total_steps: int
    global_batch_size: int
    batch_size: int
    gradient_accumulation_steps: int
    save_when: str
    checkpoint_bytes: int
    output_dir: str
    free_bytes: int | None
    resumes_from: str | None = None
    resume_step: int = 0
    advice: tuple[str, ...] = ()


def start_block(facts: StartFacts) -> str:
    """Return the start block: one fact a line, under 15 lines, no line break at its end."""
    lines = [
        ("run", f"{facts.config_name} ({facts.recipe})"),
        ("model", facts.model),
        ("parameters", _parameters(facts)),
        ("precision", _precision(facts)),
        *([] if facts.quantize_base == "none" else [("base", _base(facts))]),
        ("device", _device(facts)),
        ("data", _data(facts)),
        ("batch", _batch(facts)),
        ("length", _length(facts)),
        ("checkpoints", _checkpoints(facts)),
        ("output", _output(facts)),
        ("starts from", _source(facts)),
    ]
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}" for label, text in lines)


def human_bytes(num_bytes: int) -> str:
    """Return a size with three figures and a decimal unit: ``1.61 GB``, ``84.0 MB``, ``12 B``."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    return _scaled(num_bytes, (" kB", " MB", " GB", " TB", " PB"))


def human_count(count: int) -> str:
    """Return a count with three figures and a decimal unit: ``135M``, ``4.88M``, ``960``."""
    if count < 1000:
        return str(count)
    return _scaled(count, ("k", "M", "B", "T", "q"))


def human_seconds(seconds: float) -> str:
    """Return a duration in words: ``0.10 s``, ``12 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    scaled = value / 1000
    for unit in units[:-1]:
        if scaled < 999.5:  # 999.5 would print as 1000
            return _three_figures(scaled) + unit
        scaled /= 1000
    return _three_figures(scaled) + units[-1]


def _three_figures(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _parameters(facts: StartFacts) -> str:
    read = ""
    if facts.least_bytes_read is not None and facts.most_bytes_read is not None:
        sizes = dict.fromkeys(map(human_bytes, (facts.least_bytes_read, facts.most_bytes_read)))
        read = f"; each rank read its part, {' to '.join(sizes)}"
    if facts.num_trainable_parameters == facts.num_parameters:
        return f"{human_count(facts.num_parameters)}, all trained{read}"
    share = 100 * facts.num_trainable_parameters / facts.num_parameters
    trained = human_count(facts.num_trainable_parameters)
    return f"{human_count(facts.num_parameters)}, {trained} of them trained ({share:.2g} %){read}"


def _precision(facts: StartFacts) -> str:
    if facts.dtype == "fp32":
        return "fp32"
    if facts.master_weights == "fp32":
        return f"{facts.dtype}, fp32 master weights"
    return f"{facts.dtype}, no master weights"


def _base(facts: StartFacts) -> str:
    saved = human_bytes(facts.unquantized_bytes - facts.quantized_bytes)
    text = (
        f"{facts.quantize_base}: {facts.num_quantized_weights} weights in "
        f"{human_bytes(facts.quantized_bytes)}, {saved} less than in {facts.dtype}"
    )
    if facts.num_whole_weights:
        text += f"; {facts.num_whole_weights} can't be cut evenly, each rank has them whole"
    return text


def _device(facts: StartFacts) -> str:
    text = facts.device if facts.world_size == 1 else f"{facts.world_size} x {facts.device}"
    detail = f" ({facts.device_detail})" if facts.device_detail else ""
    how = {"block": ", compiled block by block", "model": ", compiled as a whole"}
    return text + detail + how.get(facts.compile, "")


def _data(facts: StartFacts) -> str:
    if facts.num_samples is None or facts.num_tokens is None or facts.num_trained_tokens is None:
        return "read while training"
    share = 100 * facts.num_trained_tokens / max(facts.num_tokens, 1)
    packed = ""
    if facts.num_packed_rows is not None and facts.packing_efficiency is not None:
        rows = counted(facts.num_packed_rows, "row")
        packed = f" in {rows} ({100 * facts.packing_efficiency:.0f} % full)"
    return (
        f"{counted(facts.num_samples, 'sample')}{packed}, {human_count(facts.num_tokens)} tokens, "
        f"{share:.0f} % of them trained"
    )


def _batch(facts: StartFacts) -> str:
    factors = [f"{facts.batch_size} a micro-batch"]
    if facts.gradient_accumulation_steps > 1:
        factors.append(f"{facts.gradient_accumulation_steps} micro-batches")
    if facts.world_size > 1:
        factors.append(f"{facts.world_size} processes")
    slots = facts.batch_size * facts.gradient_accumulation_steps * facts.world_size
    step = f"{counted(facts.global_batch_size, 'sequence')} a step"
    if slots == facts.global_batch_size:
        return f"{step} ({' x '.join(factors)})"
    # A run that goes on with another number of processes may not come out even.
    processes = counted(facts.world_size, "process", "processes")
    return f"{step}, dealt to {processes} in micro-batches of at most {facts.batch_size}"


def _length(facts: StartFacts) -> str:
    steps = counted(facts.total_steps, "step")
    if facts.steps_per_epoch is None:
        return f"{steps} (the data is repeated where it ends before)"
    asked = None if facts.epochs is None else f"{counted(facts.epochs, 'epoch')} asked for"
    epochs = asked or "data repeated"
    return f"{steps} ({facts.steps_per_epoch:,} an epoch, {epochs})"


def _checkpoints(facts: StartFacts) -> str:
    when = f"{facts.save_when}, and at the end" if facts.save_when else "at the end"
    return f"{human_bytes(facts.checkpoint_bytes)} each, {when}"


def _output(facts: StartFacts) -> str:
    if facts.free_bytes is None:
        return facts.output_dir
    return f"{facts.output_dir} ({human_bytes(facts.free_bytes)} free)"


def _source(facts: StartFacts) -> str:
    if facts.resumes_from is None:
        return "the model as it is, step 1"
    name = Path(facts.resumes_from).name
    return f"{name} in {Path(facts.resumes_from).parent}, goes on at step {facts.resume_step + 1}"
