"""What ``chat`` and ``generate`` share: their options, and a model that is ready to answer."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from legato.errors import UsageError

Folder = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A step folder such as out/my/latest, an adapter, any Hugging Face folder, a hub id.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="NUMBER",
        min=0.0,
        max=100.0,
        help="0: the most probable token; above: samples.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Seed of the samples.")]
ChatTemplate = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="auto (the folder's own; the packaged alpaca where it has none), alpaca, chatml, "
        "or a Jinja file.",
    ),
]
TemplateKwargs = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="KEY=VALUE",
        help="KEY=VALUE or JSON, for the template; without it those that training used.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="bf16, fp16 or fp32; the files' own where absent."),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that lies in the model's folder.")
]


def load_to_answer(
    folder: str,
    *,
    chat_template: str | None,
    template_kwargs: Sequence[str] | None,
    dtype: str | None,
    device: str,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """A model and its tokenizer, with a chat template.

    Args:
        folder: A folder or a hub id.
        chat_template: As the config key of that name; None leaves the tokenizer as it is.
        template_kwargs: Variables for it, as they were typed; they come before the folder's own.
        dtype: A name of :func:`dtype_of`, or None for the files' own.
        device: As the config key of that name.
        trust_remote_code: Run code that lies in the model's folder.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        LegatoError: The folder, the template or the device can't be used.
    """
    from legato.data.templates import resolve_template, variables_of, with_variables
    from legato.generate import load_for_generation
    from legato.parallel.world import pick_device

    variables = read_variables(template_kwargs or ())
    if variables and chat_template is None:
        raise UsageError("--chat-template-kwargs: --raw uses no chat template. Leave out one")
    refuse_damaged(folder)
    model, tokenizer = load_for_generation(
        folder,
        dtype=None if dtype is None else dtype_of(dtype),
        device=pick_device(device),
        trust_remote_code=trust_remote_code,
    )
    if chat_template is not None:
        found = resolve_template(tokenizer, chat_template, start_date=dt.date.today())
        if found.note:
            typer.echo(found.note, err=True)
        tokenizer.chat_template = with_variables(found.text, variables)
        if used := variables_of(tokenizer.chat_template):
            told = ", ".join(f"{name}={value}" for name, value in used.items())
            typer.echo(f"chat template: with {told}", err=True)
    return model, tokenizer


def read_variables(words: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from a command line, read as a config's are.

    Args:
        words: Each ``KEY=VALUE``, or a JSON object.

    Returns:
        Names and values.

    Raises:
        UsageError: A word is neither.
    """
    from legato.config.problems import Problem
    from legato.config.source import read_override

    variables: dict[str, Any] = {}
    for word in words:
        is_object = word.startswith("{")
        read = read_override(f"chat_template_kwargs{'=' if is_object else '.'}{word}")
        fits = not isinstance(read, Problem) and len(read.path) == (1 if is_object else 2)
        if isinstance(read, Problem) or not fits:
            raise UsageError(f"--chat-template-kwargs {word}: expected KEY=VALUE or JSON")
        variables |= read.value if is_object else {str(read.path[1]): read.value}
    return variables


def refuse_damaged(folder: str, *, leaves: bool = False) -> None:
    """Stop before any work when an adapter in a step folder isn't what was saved.

    Args:
        folder: A folder or a hub id.
        leaves: It is about to be handed on, and is read from end to end for that: a whole model is
            compared, too.

    Raises:
        LegatoError: No such folder, or a file of it is damaged.
    """
    from legato.checkpoint.sound import check_adapter, check_step
    from legato.models.folder import find_model

    check = check_step if leaves else check_adapter
    check(find_model(folder).path)


def dtype_of(name: str) -> Any:
    """The torch dtype of ``bf16``, ``fp16`` or ``fp32``.

    Args:
        name: What was typed.

    Returns:
        The dtype.

    Raises:
        UsageError: Another name.
    """
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in dtypes:
        raise UsageError(f"--dtype {name}: expected {', '.join(dtypes)}")
    return dtypes[name]


def refuse_existing(path: Path) -> None:
    """Stop before any work when the file to write is there already."""
    if path.exists():
        raise UsageError(f"{path}: is already there. Remove it, or choose another name")
