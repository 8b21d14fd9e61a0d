"""Sample from a model: batches of prompts to texts, or one answer word by word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from legato.data.templates import told
from legato.data.vocabulary import unknown_token
from legato.errors import DataError, ModelError
from legato.models.adapter import file_dtype, is_adapter, load_adapter
from legato.models.folder import find_model
from legato.models.load import load_model, load_tokenizer
from legato.models.modes import evaluation_mode
from legato.models.quiet import silence_known_noise
from legato.models.shard import gathered_root


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is to be answered, and what the answer may call.

    Attributes:
        messages: As chat templates take them.
        tools: Schemas, as chat templates take them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


NO_NUMBERS = (
    "the model's logits aren't numbers (NaN): its weights are damaged, or overflow in this dtype. "
    "Use another step, or fp32."
)
"""What is said before an answer or a figure is made of such logits."""

_LEAST_TEMPERATURE = 1e-6

Prompt = str | Sequence[Mapping[str, Any]] | Chat


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said.

    Attributes:
        text: Without special tokens.
        finish_reason: ``stop``: the model ended it; ``length``: it was cut at the most tokens.
    """

    text: str
    finish_reason: Literal["stop", "length"]


def load_for_generation(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A model and its tokenizer from a Hugging Face folder, a step folder or an adapter folder.

    Args:
        path: The folder, or a hub id. An adapter's base is loaded first, as its config names it.
        dtype: Dtype of the parameters; None takes the files'.
        device: Where the parameters go.
        trust_remote_code: Run code that lies in the model's folder.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        ModelError: Not a model, not an adapter, or an adapter for another base; ``.path``.
    """
    silence_known_noise()
    folder = tokenizer_folder = find_model(str(path)).path
    options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    if is_adapter(folder):
        adapter = load_adapter(folder, dtype=dtype, **options)
        model = adapter.model
        if not (folder / "tokenizer_config.json").is_file():
            tokenizer_folder = adapter.base.path
    else:
        model = load_model(folder, dtype=dtype or file_dtype(folder), **options)
    model.eval()
    return model, load_tokenizer(tokenizer_folder, trust_remote_code=trust_remote_code)


def generate_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    on_answers: Callable[[Mapping[int, Answer]], None] | None = None,
) -> list[Answer]:
    """Answer each prompt.

    Prompts of similar length are put into one batch, padded on the left. The random state, the
    training mode and compiled blocks are left as they were.

    Args:
        model: A causal language model of transformers or PEFT.
        tokenizer: Its tokenizer.
        prompts: Texts, continued as they stand, or chats or lists of messages, rendered by the
            tokenizer's chat template and answered.
        max_new_tokens: Tokens to make at most, for each prompt.
        batch_size: Prompts at a time.
        temperature: 0 takes the most probable token; above, samples.
        seed: Seed of the samples.
        on_answers: Called after each batch with its answers, by the number of their prompt from 0.

    Returns:
        The answers in the order of the prompts.

    Raises:
        ModelError: A prompt and its answer don't fit into the model's positions, or the tokenizer
            makes a token that the model doesn't have; its logits aren't numbers.
        DataError: The chat template refuses a conversation.
    """
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            rows.append(_prompt_tokens(model, tokenizer, prompt))
        except (DataError, ModelError) as error:
            raise type(error)(f"prompt {number}: {error}", prompt=number) from error
    _check_positions(model, rows, max_new_tokens=max_new_tokens)
    options = _generate_options(model, tokenizer, max_new_tokens, temperature)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    answers: dict[int, Answer] = {}
    with _generating(model, seed=seed):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            texts = _answer(model, tokenizer, [rows[i] for i in chosen], options, **_refusing_nan())
            made = dict(zip(chosen, texts, strict=True))
            answers |= made
            if on_answers is not None:
                on_answers(made)
    return [answers[i] for i in range(len(rows))]


def continue_rows(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Go on with rows of tokens, taking the most probable one; a model in training stays as it is.

    Collective if the model is sharded: every rank gives the same rows.

    Args:
        model: A causal language model of transformers or PEFT.
        tokenizer: Its tokenizer.
        rows: Token ids, each row shorter than the model's positions.
        max_new_tokens: Tokens to make at most; fewer where the model's positions end before.
        batch_size: Rows at a time, in their order.

    Returns:
        What the model went on with, without special tokens, in the order of the rows.
    """
    limit = _max_positions(model)
    texts: list[str] = []
    with gathered_root(model) as is_sharded, _generating(model, seed=0):
        for first in range(0, len(rows), batch_size):
            batch = [list(row) for row in rows[first : first + batch_size]]
            room = max_new_tokens if limit is None else limit - max(map(len, batch))
            most = max(1, min(max_new_tokens, room))
            options = _generate_options(model, tokenizer, most, temperature=0.0)
            # The ranks gather a sharded model's blocks together, so none may end before the others.
            made = _answer(model, tokenizer, batch, options, synced_gpus=is_sharded)
            texts += [answer.text for answer in made]
    return texts


def stream_answer(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    *,
    on_text: Callable[[str], None],
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    """Answer one prompt, and hand the answer out while it is made.

    Args:
        model: A causal language model of transformers or PEFT.
        tokenizer: Its tokenizer.
        prompt: As in :func:`generate_batch`.
        on_text: Called with each further piece of the answer.
        max_new_tokens: Tokens to make at most; fewer where the model's positions end before.
        temperature: 0 takes the most probable token; above, samples.
        seed: Seed of the samples.

    Returns:
        The whole answer, and what ended it.

    Raises:
        ModelError: The prompt leaves no position for an answer, ``.prompt_tokens``, ``.limit``;
            the model's logits aren't numbers.
    """
    from transformers import TextStreamer

    class Pieces(TextStreamer):  # type: ignore[misc, unused-ignore]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    row = _prompt_tokens(model, tokenizer, prompt)
    limit = _max_positions(model)
    if limit is not None:
        max_new_tokens = max(1, min(max_new_tokens, limit - len(row)))
    _check_positions(model, [row], max_new_tokens=max_new_tokens)
    options = _generate_options(model, tokenizer, max_new_tokens, temperature)
    pieces = Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with _generating(model, seed=seed):
        [answer] = _answer(model, tokenizer, [row], options, streamer=pieces, **_refusing_nan())
    return answer


@contextmanager
def _generating(model: Any, *, seed: int) -> Iterator[None]:
    """Evaluation mode and a random state of its own; everything as before afterwards."""
    # Each new token is another shape: compiled blocks would be compiled again and again.
    with (
        evaluation_mode(model, _device(model)),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        torch.manual_seed(seed)
        yield


def _answer(
    model: Any, tokenizer: Any, rows: list[list[int]], options: Any, **how: Any
) -> list[Answer]:
    longest = max(len(row) for row in rows)
    pads = [longest - len(row) for row in rows]
    input_ids = torch.tensor(
        [[options.pad_token_id] * pad + row for pad, row in zip(pads, rows, strict=True)],
        device=_device(model),
    )
    mask = torch.tensor(
        [[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)],
        device=_device(model),
    )
    output = model.generate(
        input_ids=input_ids, attention_mask=mask, generation_config=options, **how
    )
    stops = set(options.eos_token_id or ())
    return [
        Answer(
            tokenizer.decode(row, skip_special_tokens=True),
            "length" if stops.isdisjoint(row) else "stop",
        )
        for row in output[:, longest:].tolist()
    ]


def _refusing_nan() -> dict[str, Any]:
    """For ``generate``: of logits that aren't numbers it would take the first token, or fail."""
    from transformers import LogitsProcessorList

    def refuse(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(scores.isnan().any()):
            raise ModelError(NO_NUMBERS)
        return scores

    return {"logits_processor": LogitsProcessorList([refuse])}


def _device(model: Any) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def _prompt_tokens(model: Any, tokenizer: Any, prompt: Prompt) -> list[int]:
    is_text = isinstance(prompt, str)
    text = prompt
    if not isinstance(prompt, str):
        text = _rendered(tokenizer, prompt if isinstance(prompt, Chat) else Chat(prompt))
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=is_text)["input_ids"]
    except TypeError as error:  # what tokenizers says of half a surrogate pair
        raise DataError(
            "the text holds what isn't a character, as bytes do that aren't UTF-8. Remove it."
        ) from error
    if not ids:
        raise DataError("the prompt is empty: there is no token to go on from. Give a text.")
    problem = unknown_token(ids, tokenizer, model.get_input_embeddings().weight.shape[0])
    if problem is not None:
        raise ModelError(f"{problem}. Take the tokenizer that belongs to the model.")
    return ids


def _rendered(tokenizer: Any, chat: Chat) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tools=[dict(tool) for tool in chat.tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise DataError(f"the chat template refuses the conversation: {told(error)}") from error
    return text


def _generate_options(model: Any, tokenizer: Any, max_new_tokens: int, temperature: float) -> Any:
    from transformers import GenerationConfig

    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
    pad = tokenizer.pad_token_id
    # Nearer to 0 the logits overflow when they are divided by it, and there the choice is certain.
    is_sampled = temperature >= _LEAST_TEMPERATURE
    sampling = {"do_sample": True, "temperature": temperature} if is_sampled else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        use_cache=True,  # load_model switched it off, for training
        eos_token_id=sorted(stops) or None,
        # Masked, so any token will do.
        pad_token_id=pad if pad is not None else min(stops, default=0),
        bos_token_id=tokenizer.bos_token_id,
        **(sampling or {"do_sample": False}),
    )


def _max_positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_positions(model: Any, rows: list[list[int]], *, max_new_tokens: int) -> None:
    limit = _max_positions(model)
    longest = max((len(row) for row in rows), default=0)
    if limit is not None and longest + max_new_tokens > limit:
        number = next(i for i, row in enumerate(rows, start=1) if len(row) == longest)
        which = f"prompt {number} of {len(rows)}" if len(rows) > 1 else "the prompt"
        raise ModelError(
            f"{which} has {longest} tokens and max_new_tokens is {max_new_tokens}: together more "
            f"than the {limit} positions of the model. Shorten it, or lower max_new_tokens.",
            prompt_tokens=longest,
            limit=limit,
        )
