"""A folder through lm-eval: tasks in, figures with their standard errors out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from legato.errors import (
    DataError,
    LegatoError,
    MissingDependencyError,
    ModelError,
    UsageError,
)
from legato.evaluation.truthfulqa import TASK_NAME, mc2_task
from legato.generate import NO_NUMBERS, load_for_generation
from legato.models.quiet import silence_known_noise

logger = logging.getLogger(__name__)

INSTALL = "pip install 'lm-eval>=0.4.9'"


@dataclass(frozen=True)
class Score:
    """One figure.

    Attributes:
        task: lm-eval's name.
        metric: What was measured, such as ``acc`` or ``acc_norm``.
        value: The figure.
        standard_error: Its standard error; None where lm-eval computes none.
        num_samples: Questions that it stands on.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    num_samples: int | None


def evaluate_folder(
    name_or_path: str | Path,
    *,
    tasks: Sequence[str],
    truthfulqa_csv: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    apply_chat_template: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> list[Score]:
    """Measure a model on tasks of lm-eval.

    Args:
        name_or_path: A step folder, an adapter folder, any Hugging Face folder, or a hub id.
        tasks: lm-eval's names; ``truthfulqa_mc2_local`` is read from ``truthfulqa_csv``, data of
            the others comes from the hub.
        truthfulqa_csv: TruthfulQA.csv as its authors publish it.
        limit: Take the first questions of each task only.
        num_fewshot: Solved examples before each question; None takes the task's number. A task
            whose config says 0 keeps to it, as ``truthfulqa_mc2_local`` would.
        batch_size: Sequences at a time.
        apply_chat_template: Ask through the tokenizer's chat template.
        dtype: Dtype of the parameters; None takes the files'.
        device: Where the model computes.
        trust_remote_code: Run code that lies in the model's folder.

    Returns:
        Figures in the order of tasks.

    Raises:
        MissingDependencyError: lm-eval isn't installed.
        UsageError: An unknown task, one that takes no further examples, or the CSV is missing
            where it is needed.
        DataError: Data of a task can't be had.
        ModelError: The folder can't be used, or the model's logits aren't numbers.
    """
    if find_spec("lm_eval") is None:
        raise MissingDependencyError(f"legato eval needs lm-eval, which isn't here: {INSTALL}")
    silence_known_noise()
    chosen, manager = _find_tasks(tasks, truthfulqa_csv)
    if TASK_NAME in tasks and num_fewshot:  # lm-eval would ignore it
        raise UsageError(
            f"--num-fewshot {num_fewshot}: {TASK_NAME} has six examples in its prompt, and takes "
            "no others. Leave it out"
        )
    model, tokenizer = load_for_generation(
        name_or_path, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )

    _refuse_nan(model, name_or_path)

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    try:
        found = simple_evaluate(
            wrapped,
            tasks=chosen,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (ConnectionError, FileNotFoundError) as error:  # the hub's data, without the hub
        raise DataError(
            f"the data of {', '.join(tasks)} can't be had ({type(error).__name__}: {error}). "
            f"{TASK_NAME} needs no hub."
        ) from error
    _say_fixed_examples(found, num_fewshot)
    return _scores(found)


def _say_fixed_examples(found: Any, num_fewshot: int | None) -> None:
    """Of a task whose config says 0 examples lm-eval ignores how many were asked for."""
    for task, number in (found or {}).get("n-shot", {}).items():
        if num_fewshot is not None and number != num_fewshot:
            logger.warning(
                "%s: asked with %d solved examples, as its own config has it, not with %d",
                task, number, num_fewshot,
            )  # fmt: skip


def _refuse_nan(model: Any, name_or_path: str | Path) -> None:
    """Of logits that are no numbers lm-eval makes figures: that of the first choice, or NaN."""
    token = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        logits = model(input_ids=token).logits
    if bool(logits.isnan().any()):
        raise ModelError(f"{name_or_path}: {NO_NUMBERS}", path=str(name_or_path))


def _find_tasks(
    tasks: Sequence[str], truthfulqa_csv: Path | None
) -> tuple[list[str | dict[str, Any]], Any]:
    """What lm-eval is to run, all of it checked before the model is loaded."""
    if TASK_NAME in tasks and truthfulqa_csv is None:
        raise UsageError(f"--tasks {TASK_NAME} needs --truthfulqa-csv TruthfulQA.csv")
    if tasks and TASK_NAME not in tasks and truthfulqa_csv is not None:
        raise UsageError(f"--truthfulqa-csv is read by the task {TASK_NAME}, which isn't asked for")

    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of its own defaults
    named = [task for task in tasks if task != TASK_NAME]
    manager = TaskManager(include_defaults=bool(named))
    unknown = [task for task in named if not manager.match_tasks([task])]
    if unknown or not tasks:
        what = f"lm-eval knows no task {', '.join(unknown)}" if unknown else "no task is given"
        raise UsageError(
            f"--tasks: {what}. `lm-eval ls tasks` lists them; without a hub: {TASK_NAME}"
        )
    chosen: list[str | dict[str, Any]] = list(named)
    if truthfulqa_csv is not None:
        chosen.append(mc2_task(truthfulqa_csv))
    return chosen, manager


def _scores(found: Any) -> list[Score]:
    if not found or not found.get("results"):
        raise LegatoError("lm-eval measured nothing")
    scores = []
    for task, figures in found["results"].items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in figures.items():
            metric, _, variant = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, float):
                continue
            error = figures.get(f"{metric}_stderr,{variant}")
            error = error if isinstance(error, float) else None
            scores.append(Score(task, metric, value, error, samples))
    return scores
