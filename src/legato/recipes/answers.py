"""What the model says to some prompts while it is trained, to be read by a person."""

from __future__ import annotations

import logging
from typing import Any

from legato.config.schema import RunConfig
from legato.data.prompts import SamplePrompt, first_prompts
from legato.generate import continue_rows
from legato.recipes.data import RunData
from legato.train.trainer import AnswerPrompts

logger = logging.getLogger(__name__)

# Enough to see what an answer is like; a model that doesn't stop costs this at each evaluation.
MOST_ANSWER_TOKENS = 128


def build_answers(config: RunConfig, data: RunData, *, model: Any) -> AnswerPrompts | None:
    """The answers to the run's prompts, greedy, by the weights of the moment.

    Args:
        config: The run; ``generate_samples`` is how many.
        data: Where the prompts come from: the evaluation data, else the training data.
        model: The live model, sharded or not.

    Returns:
        What makes the answers (collective if the model is sharded); None: none are wanted.
    """
    if not config.generate_samples:
        return None
    if data.held_out is None:
        logger.info("generate_samples: prompts are training samples, as there is no other data")
    prompts = first_prompts(
        data.train if data.held_out is None else data.held_out, count=config.generate_samples
    )
    tokenizer = data.tokenizer

    def answer_prompts() -> list[dict[str, str]]:
        answers = continue_rows(
            model,
            tokenizer,
            [prompt.prompt_ids.tolist() for prompt in prompts],
            max_new_tokens=MOST_ANSWER_TOKENS,
            batch_size=config.batch_size,
        )
        return [
            _sample(prompt, answer, tokenizer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    return answer_prompts


def _sample(prompt: SamplePrompt, answer: str, tokenizer: Any) -> dict[str, str]:
    return {
        "sample_id": prompt.sample_id,
        "prompt": tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False),
        "expected": tokenizer.decode(
            prompt.expected_ids[:MOST_ANSWER_TOKENS], skip_special_tokens=True
        ),
        "answer": answer,
    }
