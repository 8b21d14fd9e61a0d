from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.parallel.handlers import saves_held
from legato.parallel.reports import ask_to_save
from legato.train.signals import Request, StopSignals

NOTHING = Request(save=False, stop=None)

# A session of its own, with the terminal on standard input; the last line goes to the terminal.
TERMINAL = """
import atexit, fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)

def say():
    sys.stderr.write("saved\\n")
    print("the end", flush=True)

atexit.register(say)
"""

# Polls 100 times a second, as if steps took 10 ms, and says what it was asked.
LOOP = """
import sys, time
from legato.parallel.reports import ask_to_save
from legato.parallel.handlers import saves_held
from legato.train.signals import StopSignals
with StopSignals(sys.argv[1]) as signals:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if sys.argv[2] == "stubborn":
            continue
        request = signals.poll()
        if request.stop is not None:
            print("stop", request.stop, request.save, flush=True)
            sys.exit(128 + request.stop)
        if request.save:
            print("save", flush=True)
"""


class Loop:
    """The loop above in a process of its own."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(folder), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out.strip(), err


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    yield from started(tmp_path, "polling")


@pytest.fixture
def stubborn_loop(tmp_path: Path) -> Iterator[Loop]:
    """One that is in the middle of a long step: it doesn't poll."""
    yield from started(tmp_path, "stubborn")


def started(folder: Path, mode: str) -> Iterator[Loop]:
    loop = Loop(folder, mode)
    yield loop
    if loop.process.poll() is None:
        loop.process.kill()
        loop.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_sigterm_sigint_or_sighup_asks_to_save_and_stop(loop: Loop, number: int) -> None:
    os.kill(loop.process.pid, number)
    code, out, err = loop.end()
    assert (code, out) == (128 + number, f"stop {number} True")
    assert "saving a checkpoint, then stopping; a second Ctrl-C stops at once" in err


def test_sigusr1_asks_to_save_once_and_go_on(loop: Loop) -> None:
    for _ in range(2):
        os.kill(loop.process.pid, signal.SIGUSR1)
        assert loop.line() == "save"
    os.kill(loop.process.pid, signal.SIGTERM)
    assert loop.end()[:2] == (143, "stop 15 True")


def test_the_trigger_file_asks_to_save_once_and_is_removed(loop: Loop) -> None:
    (loop.folder / "SAVE").touch()
    assert loop.line() == "save"
    assert not (loop.folder / "SAVE").exists()
    os.kill(loop.process.pid, signal.SIGTERM)
    assert loop.end()[:2] == (143, "stop 15 True")


def test_a_second_sigint_stops_at_once(stubborn_loop: Loop) -> None:
    os.kill(stubborn_loop.process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert stubborn_loop.process.poll() is None
    os.kill(stubborn_loop.process.pid, signal.SIGINT)
    code, _, err = stubborn_loop.end()
    assert "KeyboardInterrupt" in err
    assert code in (1, -signal.SIGINT)


def test_repeated_sigterms_stay_one_request(stubborn_loop: Loop) -> None:
    for _ in range(3):
        os.kill(stubborn_loop.process.pid, signal.SIGTERM)
        time.sleep(0.05)
    assert stubborn_loop.process.poll() is None


def test_a_stop_stays_asked_for_and_the_first_one_counts() -> None:
    with StopSignals() as signals:
        assert not signals.stop_requested()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.stop_requested()
        assert signals.poll() == signals.poll() == Request(save=True, stop=signal.SIGTERM)


def test_a_closed_terminal_asks_to_save_and_stop_and_no_later_line_is_an_error(
    tmp_path: Path,
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", TERMINAL + LOOP, str(tmp_path), "polling"]
    with subprocess.Popen(
        command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.close(theirs)
        os.close(ours)  # the window is closed
        try:
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (129, b"stop 1 True\nthe end\n")


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.poll() == NOTHING
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_old_handlers_come_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        with pytest.raises(KeyboardInterrupt), StopSignals() as signals:  # noqa: PT012
            signal.raise_signal(signal.SIGUSR1)
            assert signals.poll() == Request(save=True, stop=None)
            assert signals.poll() == NOTHING
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(number) for number in numbers] == handlers
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_save_asked_for_before_training_is_answered_once_and_one_after_it_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with saves_held():
        signal.raise_signal(signal.SIGUSR1)
        with saves_held(), StopSignals() as signals:
            assert signals.poll() == Request(save=True, stop=None)
            assert signals.poll() == NOTHING
        with StopSignals() as signals:
            assert signals.poll() == NOTHING
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_wish_in_the_launchers_folder_is_answered_once(tmp_path: Path) -> None:
    first, second = (StopSignals(launch_folder=str(tmp_path)) for _ in range(2))
    ask_to_save(str(tmp_path))
    assert [each.poll().save for each in (first, second, first)] == [True, False, False]
    assert list(tmp_path.iterdir()) == []


def test_outside_the_main_thread_the_trigger_file_works_and_handlers_stay(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "SAVE").touch()
    seen: list[object] = []

    def work() -> None:
        with StopSignals(tmp_path) as signals:
            seen.extend([signals.poll(), signals.poll(), signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [Request(save=True, stop=None), NOTHING, before]


def test_without_a_folder_and_in_one_that_isnt_there_nothing_is_asked(tmp_path: Path) -> None:
    assert StopSignals().poll() == NOTHING
    assert StopSignals(tmp_path / "absent").poll() == NOTHING


def test_a_trigger_that_cant_be_removed_is_answered_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "SAVE").mkdir()  # unlink refuses folders, also for root
    signals = StopSignals(tmp_path)
    assert signals.poll() == Request(save=True, stop=None)
    assert signals.poll() == NOTHING
    assert "can't be removed" in caplog.text
