"""``legato chat``: talk to a checkpoint, on the terminal or through a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from legato.cli.answering import (
    ChatTemplate,
    Device,
    Dtype,
    Folder,
    MaxNewTokens,
    Seed,
    Temperature,
    TemplateKwargs,
    TrustRemoteCode,
    load_to_answer,
)
from legato.cli.errors import append_whole, told
from legato.errors import LegatoError, UsageError

HELP = "/save FILE keeps the conversation, /clear forgets it, /exit ends. Ctrl-C stops an answer."

Answer = Callable[[list[dict[str, str]], Callable[[str], None]], str]
"""Messages and what takes each piece of the answer -> the whole answer."""

Question = Annotated[
    str | None,
    typer.Option(
        "--ask",
        metavar="QUESTION",
        help="Answer one question and end; - reads it from standard input.",
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The system message, where the template has one."),
]


def chat(
    folder: Folder,
    question: Question = None,
    system: System = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat_template: ChatTemplate = "auto",
    chat_template_kwargs: TemplateKwargs = None,
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a model; answers appear while they are made. Lines from a pipe are turns too."""
    from legato.cli.logs import show_log

    if question == "-":
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise UsageError("--ask: the question is empty")
    show_log()
    model, tokenizer = load_to_answer(
        folder,
        chat_template=chat_template,
        template_kwargs=chat_template_kwargs,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from legato.generate import stream_answer

    def answer(messages: list[dict[str, str]], on_text: Callable[[str], None]) -> str:
        made = stream_answer(
            model,
            tokenizer,
            messages,
            on_text=on_text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            # The same question asked twice in one chat may get another answer.
            seed=seed + len(messages),
        )
        if made.finish_reason == "length":
            typer.echo("\n(cut here: no more tokens; --max-new-tokens sets how many)", err=True)
        return made.text

    conversation = Conversation(answer, system=system, show=_show)
    if question is not None:
        conversation.ask(question.strip())
        return
    if sys.stdin.isatty():
        typer.echo(f"{folder}: {HELP}", err=True)
    conversation.run(_typed_lines())


class Conversation:
    """Turns of a chat, and what each typed line does to them.

    Args:
        answer: Makes the next turn.
        system: The system message; None for none.
        show: Takes pieces of text as they come.

    Attributes:
        messages: The turns so far, as chat templates take them.
    """

    def __init__(self, answer: Answer, *, system: str | None, show: Callable[[str], None]) -> None:
        self._answer = answer
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._show = show
        self.messages = list(self._opening)

    def run(self, lines: Iterable[str]) -> None:
        """Take each line as a turn or a command, until /exit or the end.

        Args:
            lines: What is typed.
        """
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            try:
                self._take(text)
            except LegatoError as error:  # told, and the conversation goes on
                typer.echo(f"error: {error.message}", err=True)
            except OSError as error:
                typer.echo(f"error: {told(error)}", err=True)

    def ask(self, question: str) -> None:
        """Answer a question; it and its answer join the turns.

        A turn that fails or is interrupted leaves the conversation as it was.

        Args:
            question: What the user says.
        """
        turns = [*self.messages, {"role": "user", "content": question}]
        try:
            answer = self._answer(turns, self._show)
        except BaseException:
            self._show("\n")
            raise
        self._show("\n")
        self.messages = [*turns, {"role": "assistant", "content": answer}]

    def save(self, file: Path) -> None:
        """Add the conversation to a file as one row of ``messages`` data.

        Args:
            file: A jsonl; made where it isn't there.

        Raises:
            UsageError: Nothing has been said yet.
            OSError: The file can't be written to; it is as it was.
        """
        if len(self.messages) == len(self._opening):
            raise UsageError("/save: nothing has been said yet")
        row = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        append_whole(file, row)
        typer.echo(f"added {len(self.messages)} messages to {file}", err=True)

    def _take(self, text: str) -> None:
        command, _, argument = text.partition(" ")
        if not text:
            return
        if command == "/clear":
            self.messages = list(self._opening)
            typer.echo("forgotten", err=True)
        elif command == "/save":
            if not argument.strip():
                raise UsageError("/save needs a file: /save good.jsonl")
            self.save(Path(argument.strip()).expanduser())
        elif command in ("/help", "/?"):
            typer.echo(HELP, err=True)
        elif command.startswith("/") and "/" not in command[1:] and command[1:].isalpha():
            raise UsageError(f"{command}: no such command. {HELP}")
        else:
            try:
                self.ask(text)
            except KeyboardInterrupt:
                typer.echo("stopped; this turn is forgotten", err=True)


def _typed_lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # gives input() its editing and history

    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo("")
            return


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
