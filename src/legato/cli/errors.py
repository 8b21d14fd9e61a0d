"""How a command ends: one message for the user, and an exit code that a script can rely on.

0 done; 1 error; 2 usage or config; 3 a checkpoint could not be written; 129 / 130 / 143 stopped by
a signal after a saved checkpoint.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from legato.errors import ConfigError, LegatoError, StopRequested

INTERRUPTED = 130
LESS_MEMORY = (
    "A run takes less with a smaller batch_size (more gradient_accumulation_steps keep its updates "
    "as they are), a smaller max_seq_len, enable_activation_checkpointing=true or, in the LoRA "
    "recipes, quantize_base=nf4: docs/memory.md."
)

_MAKE_ROOM = "Make room there, or choose another place."
_BE_ALLOWED = "Put its rights in order, or choose another place."
_NO_FOLDER = "A part of this path is a file, not a folder: choose another place."
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "Choose a place that takes files of this size.",
    errno.EACCES: _BE_ALLOWED,
    errno.EPERM: _BE_ALLOWED,
    errno.EEXIST: "Remove or rename what is there, or choose another place.",
    errno.ENOTDIR: _NO_FOLDER,
    errno.EROFS: "It can only be read: choose another place.",
}


def run_app(build_app: Callable[[], typer.Typer], words: Sequence[str], *, debug: bool) -> int:
    """Build the app, run ``words``, turn whatever comes out of it into an exit code.

    Args:
        build_app: Makes the app; an error in there is reported like any other.
        words: The command line without the program's name.
        debug: Show the traceback before the message.

    Returns:
        The exit code.
    """
    try:
        result = build_app()(args=list(words), standalone_mode=False, prog_name="legato")
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
        return _end(error)
    if result == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        _say("interrupted")
    return result if isinstance(result, int) else 0


def _end(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, StopRequested):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone (`legato ls | head`); nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, LegatoError):
        _say(_message(error))
        return error.exit_code
    if hasattr(error, "format_message"):  # the command line doesn't fit the verb's options
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help
            sys.stderr.write(f"{error}\n")
        else:
            _say(_misfit(error))
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, OSError) and error.strerror is not None:
        _say(told(error))
        return 1
    if is_out_of_memory(error):
        _say(f"out of memory: {str(error).strip() or type(error).__name__}\n{LESS_MEMORY}")
        return 1
    _say(f"{type(error).__name__}: {error}\nThis is a fault in Legato; --debug shows where.")
    return 1


def told(error: OSError) -> str:
    """What the system says, of which file, and what helps where that is known."""
    place = "" if error.filename is None else f"{error.filename}: "
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{place}{error.strerror or error}" + (f". {remedy}" if remedy else "")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the block the name of the file that it is about.

    Args:
        path: What the block writes. The system names it where it is opened, and not where its disk
            is full.

    Yields:
        None: the block writes it.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.strerror is not None:
            error.filename = str(path)
        raise


def write_whole(file: Path, text: str) -> None:
    """Write a file, or leave what is there as it was: half of one would be taken for all of it.

    Args:
        file: Text in UTF-8. A link stays one; what it leads to is written.
        text: All of it.

    Raises:
        OSError: It can't be written; with its name.
    """
    target = Path(os.path.realpath(file))
    beside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        error.filename, error.filename2 = str(file), None
        raise


def append_whole(file: Path, text: str) -> None:
    """Append ``text`` to a file, made where it isn't there; or leave it as it was.

    Args:
        file: Text in UTF-8. Half a row would make its others unreadable.
        text: Whole lines.

    Raises:
        OSError: It can't be written to; with its name.
    """
    before = file.stat().st_size if file.exists() else None
    try:
        with naming(file), file.open("a", encoding="utf-8") as opened:
            opened.write(text)
    except OSError:
        with suppress(OSError):
            if before is None:
                file.unlink()
            else:
                os.truncate(file, before)
        raise


def _misfit(error: Any) -> str:
    """What doesn't fit in the words of our own errors, and where the right form is told."""
    message = error.format_message()
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    if details:  # pydantic's, of which typer shows the text alone
        from legato.config.explain import expected_and_found

        option = max(error.param.opts, key=len)
        message = f"{option}: {expected_and_found(details[0])}."
    context = getattr(error, "ctx", None)
    if context is None:
        return str(message)
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end} `{context.command_path} --help` shows the form"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, by name and text: no torch is imported for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _message(error: LegatoError) -> str:
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        return f"{len(error.problems)} problems\n{lines}"
    return error.message


def _say(message: str) -> None:
    word = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        word = f"\033[31m{word}\033[0m"
    sys.stderr.write(f"{word} {message}\n")
