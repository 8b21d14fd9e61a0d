"""Sample from a model: batches of prompts to texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from legato.errors import ModelError, ModelNotFoundError
from legato.models.folder import find_model, read_config, weight_files, weights_digest
from legato.models.load import load_model, load_tokenizer
from legato.models.lora import BASE_FILE
from legato.models.quiet import silence_known_noise

Prompt = str | Sequence[Mapping[str, Any]]


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
    folder = find_model(str(path)).path
    options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    if (folder / "config.json").is_file() or not (folder / "adapter_config.json").is_file():
        dtype = dtype or _dtype_of(read_config(folder))
        model: Any = load_model(folder, dtype=dtype, **options)
        tokenizer_from: str | Path = folder
    else:
        model, base = _load_adapter(folder, dtype=dtype, options=options)
        tokenizer_from = folder if (folder / "tokenizer_config.json").is_file() else base
    model.eval()
    tokenizer = load_tokenizer(tokenizer_from, trust_remote_code=trust_remote_code)
    return model, tokenizer


def generate_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Answer each prompt.

    Prompts of similar length are put into one batch, padded on the left. The random state, the
    training mode and compiled blocks are left as they were.

    Args:
        model: A causal language model of transformers or PEFT.
        tokenizer: Its tokenizer.
        prompts: Texts, continued as they stand, or lists of messages, rendered by the tokenizer's
            chat template and answered.
        max_new_tokens: Tokens to make at most, for each prompt.
        batch_size: Prompts at a time.
        temperature: 0 takes the most probable token; above, samples.
        seed: Seed of the samples.

    Returns:
        The answers in the order of the prompts, without special tokens.

    Raises:
        ModelError: A prompt and its answer don't fit into the model's positions.
    """
    rows = [_prompt_tokens(tokenizer, prompt) for prompt in prompts]
    _check_positions(model, rows, max_new_tokens=max_new_tokens)
    options = _generate_options(model, tokenizer, max_new_tokens, temperature)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    answers: dict[int, str] = {}
    was_training = model.training
    model.eval()
    device = model.get_input_embeddings().weight.device
    devices = [device] if device.type == "cuda" else []
    try:
        # Each new token is another shape: compiled blocks would be compiled again and again.
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng(devices=devices),
        ):
            torch.manual_seed(seed)
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                texts = _answer(model, tokenizer, [rows[i] for i in chosen], device, options)
                answers.update(zip(chosen, texts, strict=True))
    finally:
        model.train(was_training)
    return [answers[i] for i in range(len(rows))]


def _answer(
    model: Any, tokenizer: Any, rows: list[list[int]], device: torch.device, options: Any
) -> list[str]:
    longest = max(len(row) for row in rows)
    pads = [longest - len(row) for row in rows]
    input_ids = torch.tensor(
        [[options.pad_token_id] * pad + row for pad, row in zip(pads, rows, strict=True)],
        device=device,
    )
    mask = torch.tensor(
        [[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)], device=device
    )
    output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=options)
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in output]


def _prompt_tokens(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        plain: list[int] = tokenizer(prompt)["input_ids"]
        return plain
    text = tokenizer.apply_chat_template(
        [dict(message) for message in prompt], tokenize=False, add_generation_prompt=True
    )
    rendered: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return rendered


def _generate_options(model: Any, tokenizer: Any, max_new_tokens: int, temperature: float) -> Any:
    from transformers import GenerationConfig

    own = model.generation_config.eos_token_id
    stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
    pad = tokenizer.pad_token_id
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        use_cache=True,  # load_model switched it off, for training
        eos_token_id=sorted(stops) or None,
        # Masked, so any token will do.
        pad_token_id=pad if pad is not None else min(stops, default=0),
        bos_token_id=tokenizer.bos_token_id,
        **(sampling or {"do_sample": False}),
    )


def _check_positions(model: Any, rows: list[list[int]], *, max_new_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max((len(row) for row in rows), default=0)
    if limit is not None and longest + max_new_tokens > limit:
        raise ModelError(
            f"a prompt has {longest} tokens and max_new_tokens is {max_new_tokens}: together more "
            f"than the {limit} positions of the model.",
            prompt_tokens=longest,
            limit=limit,
        )


def _load_adapter(
    folder: Path, *, dtype: torch.dtype | None, options: dict[str, Any]
) -> tuple[Any, str]:
    """The base that an adapter names, with the adapter on it; and the base's name."""
    from peft import PeftModel

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not name:
        raise ModelError(
            f"{folder}: its adapter_config.json doesn't say which base it is for.",
            path=str(folder),
        )
    try:
        base = find_model(name, revision=revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{folder}: is an adapter whose base {name} can't be found: {error}. Put the base "
            "there, or change base_model_name_or_path in adapter_config.json.",
            path=str(folder),
            base=name,
        ) from error
    if (folder / BASE_FILE).is_file():
        expected = json.loads((folder / BASE_FILE).read_text(encoding="utf-8")).get("digest")
        found = weights_digest(weight_files(base.path))
        if expected is not None and expected != found:
            raise ModelError(
                f"{folder}: was trained on another base than the one that is at {base.path} now "
                f"(weights {expected}, found {found}).",
                path=str(folder),
                base=str(base.path),
            )
    dtype = dtype or _dtype_of(read_config(base.path))
    model = load_model(name, dtype=dtype, revision=revision, **options)
    return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False), name


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    text = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
