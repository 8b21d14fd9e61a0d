"""What the Trainer can do and a callback can't follow: refused before training, all at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from legato.checkpoint import NewBest, OnSignal
from legato.checkpoint.policy import AnySave, KeepPolicy, Moment, SavePolicy
from legato.integrations.trainer_parts import is_peft_model

# accelerate's names of what places the same whole model on every rank.
_WHOLE_MODEL = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")

_SHARDED = (
    "the Trainer loads and saves sharded models by a layout of their own, before any callback is "
    "asked. Train with DDP (torchrun, no fsdp and no deepspeed)."
)


def argument_problems(
    args: TrainingArguments, *, save: SavePolicy | None, keep: KeepPolicy | None
) -> list[str]:
    """What can't work, by the arguments alone.

    Args:
        args: The Trainer's.
        save: When Legato saves; None: when the Trainer wants to.
        keep: What Legato keeps; None: what the Trainer wants kept.

    Returns:
        Each problem as text: argument, reason, remedy.
    """
    return [*_unreachable(args), *_schedule_problems(args, save, keep)]


def _unreachable(args: TrainingArguments) -> Iterator[str]:
    """What lies out of a callback's reach."""
    if args.fsdp:
        yield f"fsdp: {_SHARDED}"
    if args.deepspeed:
        yield f"deepspeed: {_SHARDED}"
    if args.parallel_mode.value == "not_distributed":
        yield (
            "several GPUs in one process (DataParallel): their random states aren't stored. Start "
            "one process per GPU with torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    elif args.parallel_mode.value not in ("not_parallel", "distributed"):
        yield f"parallel mode {args.parallel_mode.value}: use a single process, or DDP by torchrun."
    if args.fp16:
        yield (
            "fp16: the state of its gradient scaler can't be reached from a callback, so a resumed "
            "run would go on differently. Use bf16=True."
        )
    if args.load_best_model_at_end:
        yield (
            "load_best_model_at_end: the Trainer looks for its own checkpoint-N folders. Set it to "
            "False and load output_dir/best after training: metric_for_best_model says what best "
            "means, keep=KeepLast(..) | KeepBest(..) keeps it."
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size: it starts the training over, and would meet the steps that were "
            "saved before. Set it to False and choose per_device_train_batch_size."
        )
    if args.restore_callback_states_from_checkpoint:
        yield (
            "restore_callback_states_from_checkpoint: a callback can't see the states of the "
            "others, so they aren't saved. Set it to False."
        )
    if args.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint: on SIGTERM the Trainer would write a checkpoint of its own, "
            "past Legato. Set it to False; a callback that sets control.should_save and "
            "control.should_training_stop saves through Legato."
        )
    if args.save_on_each_node:
        yield "save_on_each_node: Legato writes one folder that all nodes see. Set it to False."
    if args.push_to_hub and args.hub_strategy.value != "end":
        yield (
            f"hub_strategy={args.hub_strategy.value}: the Trainer pushes its own checkpoints only. "
            'Set hub_strategy="end".'
        )


def _schedule_problems(
    args: TrainingArguments, save: SavePolicy | None, keep: KeepPolicy | None
) -> Iterator[str]:
    """Two places that say when to save, or none."""
    strategy = args.save_strategy.value
    if strategy == "best":
        yield (
            "save_strategy=best: the Trainer decides it after the last callback was asked. Use "
            'save_strategy="no" and LegatoCheckpoints(save=NewBest()).'
        )
    elif save is not None and strategy != "no":
        yield (
            f"save_strategy={strategy}: LegatoCheckpoints(save=..) says when to save. Set "
            'save_strategy="no", or leave save out: the Trainer\'s schedule is followed then.'
        )
    elif save is None and strategy == "no":
        yield (
            "save_strategy=no: nothing says when to save. Set LegatoCheckpoints("
            'save=EverySteps(500)), or save_strategy="steps".'
        )
    if keep is not None and args.save_total_limit is not None:
        yield (
            f"save_total_limit={args.save_total_limit}: LegatoCheckpoints(keep=..) says what to "
            "keep. Leave one of them out."
        )
    policies = list(_policies(save)) if save is not None else []
    if any(isinstance(policy, OnSignal) for policy in policies):
        yield (
            "LegatoCheckpoints(save=OnSignal()): a callback takes no signals from the Trainer. "
            "Leave it out; a callback that sets control.should_save saves through Legato."
        )
    if any(isinstance(policy, NewBest) for policy in policies):
        if args.metric_for_best_model is None:
            yield (
                "LegatoCheckpoints(save=NewBest()): metric_for_best_model is unset. Set it, e.g. "
                'metric_for_best_model="loss", greater_is_better=False.'
            )
        if args.eval_strategy.value == "no":
            yield (
                "LegatoCheckpoints(save=NewBest()): eval_strategy is no, nothing is evaluated. Set "
                'eval_strategy="steps".'
            )


def planned_saves(args: TrainingArguments, state: TrainerState, *, save: SavePolicy | None) -> int:
    """How many saves are still to come, as far as that can be known.

    Args:
        args: The Trainer's.
        state: The Trainer's; epochs are taken to be equally long.
        save: When Legato saves; None: when the Trainer wants to.

    Returns:
        Their number, the final one and one for each evaluation that may find a new best included.
    """
    steps_per_epoch = max(1, math.ceil(state.max_steps / max(1, state.num_train_epochs)))

    def happens(strategy: str, interval: float, step: int) -> bool:
        return step % {"steps": max(1, int(interval)), "epoch": steps_per_epoch}[strategy] == 0

    def is_due(step: int) -> bool:
        if save is None:
            return happens(args.save_strategy.value, state.save_steps, step)
        evaluates = args.eval_strategy.value
        moment = Moment(
            step,
            epoch_end=step % steps_per_epoch == 0,
            new_best=evaluates != "no" and happens(evaluates, state.eval_steps, step),
        )
        return save.reason(moment) is not None

    return 1 + sum(is_due(step) for step in range(state.global_step + 1, state.max_steps))


def _policies(policy: SavePolicy) -> Iterator[SavePolicy]:
    if isinstance(policy, AnySave):
        for inner in policy.policies:
            yield from _policies(inner)
    else:
        yield policy


def model_problems(model: Any, optimizer: Any, *, is_search: bool) -> list[str]:
    """What can't work, known once the Trainer has prepared model and optimizer.

    Args:
        model: The Trainer's model, unwrapped.
        optimizer: Its optimizer, wrapped by accelerate.
        is_search: The training is a trial of a hyperparameter search.

    Returns:
        Each problem as text.
    """
    problems = []
    if is_search:
        problems.append(
            "hyperparameter_search: the trials would share one output_dir. Search without "
            "LegatoCheckpoints, then train with it."
        )
    # Set by accelerate launch too, past the arguments.
    kind = getattr(getattr(optimizer, "accelerator_state", None), "distributed_type", None)
    is_sharded = any(type(p).__name__ == "DTensor" for p in model.parameters())
    if is_sharded or (kind is not None and kind.value not in _WHOLE_MODEL):
        problems.append(f"{kind.value if kind else 'DTensor'}: {_SHARDED}")
    elif is_peft_model(model):
        problems += _adapter_problems(model)
    elif isinstance(model, PreTrainedModel):
        problems += _name_problems(model)
    return problems


def _adapter_problems(model: Any) -> list[str]:
    if len(model.peft_config) == 1:
        return []
    names = ", ".join(sorted(model.peft_config))
    return [
        f"the PEFT model holds {len(model.peft_config)} adapters ({names}); a step folder holds "
        "one. Delete the others with model.delete_adapter(name)."
    ]


def _name_problems(model: PreTrainedModel) -> list[str]:
    """Families whose tensors transformers renames or splits when it writes files."""
    from transformers.core_model_loading import revert_weight_conversion

    ours = {name: tensor.shape for name, tensor in model.state_dict().items()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in ours.items()}
    try:
        written = revert_weight_conversion(model, empty)
        theirs = {name: tensor.shape for name, tensor in written.items()}
    except NotImplementedError:  # an operation that can't run without memory: not the identity
        theirs = {}
    if ours == theirs:
        return []
    example = next(name for name in ours if ours[name] != theirs.get(name))
    return [
        f"{type(model).__name__} keeps its weights under other names in files than in memory, such "
        f"as {example}. Legato saves the families where the two are the same."
    ]
