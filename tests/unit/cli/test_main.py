"""The command itself: its verbs, its speed, its exit codes."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import typer

from legato.cli.errors import LESS_MEMORY, run_app
from legato.cli.examples import EXAMPLES
from legato.cli.logs import show_log
from legato.cli.main import VERBS as MODULES
from legato.cli.main import build_app, main
from legato.errors import (
    CheckpointWriteError,
    ConfigError,
    DataError,
    ResumeError,
    StopRequested,
    UsageError,
)

VERBS = {
    "run",
    "ls",
    "cat",
    "cp",
    "validate",
    "download",
    "import gguf",
    "chat",
    "generate",
    "eval",
    "merge",
    "export gguf",
    "push",
    "demo",
    "data show",
    "ckpt ls",
    "ckpt show",
    "ckpt verify",
    "ckpt pin",
    "ckpt unpin",
    "ckpt rm",
    "ckpt prune",
    "ckpt diff",
}
HEAVY = ("torch", "transformers", "omegaconf", "numpy", "rich", "yaml")


def verbs_of(command: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, inner in command.commands.items():
        is_group = hasattr(inner, "commands")
        found |= verbs_of(inner, f"{name} ") if is_group else {f"{prefix}{name}"}
    return found


def test_the_app_has_these_verbs_and_no_others() -> None:
    assert verbs_of(typer.main.get_command(build_app())) == VERBS


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: legato {verb}")
    assert len(shown.splitlines()) > 4


@pytest.mark.parametrize("group", [[], ["data"], ["ckpt"]], ids=" ".join)
def test_no_verbs_line_is_cut_in_80_columns(
    group: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*group, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[1:] if line.endswith(("...", "\u2026"))] == []


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], (*HEAVY, "pydantic")),
        # typer itself may use pydantic to call a verb.
        (["ls"], HEAVY),
        (["cat", "smollm2/135M_full_single_device"], HEAVY),
    ],
)
def test_quick_verbs_import_nothing_heavy(words: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys; from legato.cli.main import main; "
        f"code = main({words!r}); "
        f"found = [name for name in {heavy!r} if name in sys.modules]; "
        "sys.exit(f'imported {found}' if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_m_legato_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "legato", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "legato 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validat", "x"], "No such command 'validat'. Did you mean 'validate'? `legato --help`"),
        (["export", "onnx"], "No such command 'onnx'. `legato export --help` shows the form"),
        (["ls", "--jsn"], "No such option: --jsn"),
        (["cat"], "Missing argument 'CONFIG'. `legato cat --help` shows the form"),
        (["cp", "a"], "Missing argument 'DESTINATION'."),
        (["download", "a"], "Missing option '--output-dir'. `legato download --help`"),
        (["demo", "--steps", "x"], "--steps: expected a whole number, found 'x'. `legato demo -"),
        (["demo", "--steps", "0"], "--steps: expected a number of at least 1, found"),
        (["chat", "a", "--temperature=hot"], "--temperature: expected a number, found 'hot'."),
    ],
)
def test_a_command_line_that_does_not_fit_ends_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.out == ""


@pytest.mark.parametrize("words", [[], ["ckpt"]], ids=" ".join)
def test_a_group_alone_shows_its_help_and_no_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("Usage: legato ")


def test_the_command_lists_its_verbs_in_the_order_of_a_run() -> None:
    listed = typer.main.get_command(build_app()).list_commands(None)  # type: ignore[attr-defined]
    assert (listed[0], listed[-1]) == ("run", "demo")
    assert listed == list(MODULES)


@pytest.fixture(scope="module")
def whole() -> Any:
    return typer.main.get_command(build_app())


@pytest.mark.parametrize(
    "line", [line for lines in EXAMPLES.values() for line in lines if " " in line]
)
def test_every_example_of_the_help_is_a_command_line_that_fits(line: str, whole: Any) -> None:
    _, *words = shlex.split(line)
    command = whole
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)  # would raise


def test_every_verb_has_an_example_and_no_other_has_one() -> None:
    assert EXAMPLES.keys() == VERBS | {""}


def run_raising(error: BaseException, *, debug: bool = False) -> int:
    def verb() -> None:
        raise error

    def build() -> typer.Typer:
        app = typer.Typer()
        app.command()(verb)
        return app

    return run_app(build, [], debug=debug)


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda: UsageError("no"), 2, "error: no\n"),
        (lambda: ConfigError("a: b"), 2, "error: a: b\n"),
        (lambda: ConfigError(["a: b", "c: d"]), 2, "error: 2 problems\n  a: b\n  c: d\n"),
        (lambda: ResumeError("changed"), 2, "error: changed\n"),
        (lambda: DataError("row 3"), 1, "error: row 3\n"),
        (lambda: CheckpointWriteError("full"), 3, "error: full\n"),
        (lambda: StopRequested(2), 130, ""),
        (lambda: StopRequested(15), 143, ""),
        (KeyboardInterrupt, 130, "error: interrupted\n"),
        (lambda: typer.Exit(4), 4, ""),
        (lambda: SystemExit(5), 5, ""),
        (lambda: SystemExit(None), 0, ""),
        (
            lambda: PermissionError(13, "Denied", "/x"),
            1,
            "error: /x: Denied. Put its rights in order, or choose another place.\n",
        ),
        (MemoryError, 1, f"error: out of memory: MemoryError\n{LESS_MEMORY}\n"),
        (
            lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes"),
            1,
            "error: out of memory: DefaultCPUAllocator: can't allocate memory: 4 bytes\n"
            f"{LESS_MEMORY}\n",
        ),
        (
            lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            1,
            "error: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            f"{LESS_MEMORY}\n",
        ),
        (
            lambda: ZeroDivisionError("division by zero"),
            1,
            "error: ZeroDivisionError: division by zero\n"
            "This is a fault in Legato; --debug shows where.\n",
        ),
    ],
)  # fmt: skip
def test_every_end_has_one_message_and_its_code(
    make: Callable[[], BaseException], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(make()) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback_before_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(DataError("row 3"), debug=True) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: row 3\n")


def test_debug_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", "nowhere", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version", "--debug"], ["--version"]], ids=" ".join)
def test_debug_shows_the_debug_lines_of_the_log(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    show_log()
    logging.getLogger("legato.data").debug("not pruned")
    logging.getLogger("torch").debug("a library's own")
    assert capsys.readouterr().err == ("not pruned\n" if "--debug" in words else "")


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m legato cat smollm2/135M_full_single_device | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("#", "")
