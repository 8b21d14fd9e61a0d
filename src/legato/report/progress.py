"""The bar of a run on a terminal, or one line per logged step where there is none."""

from __future__ import annotations

import errno
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from legato.report.start import human_bytes, human_seconds

_SHOWN_CHARACTERS = 100
_MORE = "..."


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What one finished optimizer step shows.

    Attributes:
        step: Steps done, from 1.
        loss: Mean loss per trained token of this step.
        learning_rate: The rate that the update used.
        grad_norm: Norm before clipping; None when the step was skipped or nothing was clipped.
        tokens_per_second: Tokens of the step, padding left out, over its seconds.
        memory_bytes: Peak so far: of the device on CUDA, of the process elsewhere.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float
    memory_bytes: int


def facts_line(facts: StepFacts) -> str:
    """Return a step's facts as one line, without the step's number."""
    parts = [f"loss {facts.loss:.4f}", f"lr {facts.learning_rate:.2e}"]
    if facts.grad_norm is not None:
        parts.append(f"grad norm {facts.grad_norm:.2f}")
    parts.append(f"{facts.tokens_per_second:,.0f} tokens/s")
    parts.append(human_bytes(facts.memory_bytes))
    return "  ".join(parts)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but there


class Progress:
    """Shows where a run is; a context manager around the loop.

    On a terminal: two live lines at the bottom (bar and remaining time; the newest step's facts
    and the state of the last save), and whatever is logged goes above them. Elsewhere: one line
    for each logged step. Evaluations and saves leave a line in both.

    Args:
        total_steps: Step at which the run ends.
        first_step: Steps already done when the loop starts (a resumed run's).
        console: Where to write; standard error by default, as the log does.
        clock: Seconds, monotonic; passed in by tests.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._first_step = first_step
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._started_at = clock()
        self._facts: StepFacts | None = None
        self._save_text = ""
        self._live: Live | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Progress:
        self._started_at = self._clock()
        if self._console.is_terminal:
            live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live = self._cleanup.enter_context(live)
            live.refresh()
            # After Live: from now on sys.stderr is rich's proxy, which prints above the bar.
            self._cleanup.enter_context(_log_through_current_streams())
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _without_terminal():
            self._cleanup.close()
        self._live = None

    def step(self, facts: StepFacts, *, log: bool = True) -> None:
        """Show a finished step; ``log`` says whether it gets a line where there is no bar."""
        self._facts = facts
        if self._live is None and log:
            self._print(f"step {facts.step}/{self._total_steps}  {facts_line(facts)}")

    def compiled(self, step: int, *, step_seconds: float, compile_seconds: float) -> None:
        """Show that torch compiled in a step: the first one, or one with another row length.

        Args:
            step: The step.
            step_seconds: How long it took in all.
            compile_seconds: How much of that was compiling.
        """
        self._print(
            f"step {step} took {human_seconds(step_seconds)}, "
            f"{human_seconds(compile_seconds)} of them compiling"
        )

    def evaluated(self, step: int, *, loss: float) -> None:
        """Show an evaluation's mean loss per token."""
        self._print(f"step {step}/{self._total_steps}  eval loss {loss:.4f}")

    def sampled(
        self, step: int, *, sample_id: str, prompt: str, expected: str, answer: str
    ) -> None:
        """Show what the model says to a prompt, a line each for both and for what is expected.

        Args:
            step: Steps done.
            sample_id: Where the prompt comes from.
            prompt: What the model was given; its end is shown.
            expected: What the data goes on with.
            answer: What the model goes on with.
        """
        self._print(f"step {step}/{self._total_steps}  sample {sample_id}")
        self._print(f"  prompt    {one_line(prompt, keep_end=True)}")
        self._print(f"  expected  {one_line(expected)}")
        self._print(f"  answer    {one_line(answer)}")

    def saving(self, step: int) -> None:
        """Show that a save has been staged and is being written."""
        self._save_text = f"writing step_{step}"

    def saved(
        self, step: int, *, size_bytes: int, blocked_seconds: float, committed_seconds: float
    ) -> None:
        """Show that a checkpoint is on disk, and how long training waited for it.

        Args:
            step: Step of the checkpoint.
            size_bytes: Its size, all ranks' files together.
            blocked_seconds: How long ``save`` held training up.
            committed_seconds: From the call of ``save`` until the checkpoint was durable.
        """
        self._save_text = f"saved step_{step}"
        self._print(
            f"step_{step} saved: {human_bytes(size_bytes)} on disk after "
            f"{human_seconds(committed_seconds)}, "
            f"training waited {human_seconds(blocked_seconds)}"
        )

    def save_failed(self, step: int) -> None:
        """Show that a save failed; the cause is logged by whoever knows it."""
        self._save_text = f"step_{step} NOT SAVED"

    def note(self, message: str) -> None:
        """Show something that the user should read, above the bar."""
        self._print(message)

    def _print(self, line: str) -> None:
        with _without_terminal():
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        done = self._first_step if self._facts is None else self._facts.step
        top = Table.grid(padding=(0, 1))
        top.add_row(
            f"step {done}/{self._total_steps}",
            ProgressBar(total=max(self._total_steps, 1), completed=done, width=30),
            remaining_text(
                done_steps=done - self._first_step,
                left_steps=self._total_steps - done,
                elapsed_seconds=self._clock() - self._started_at,
            ),
        )
        facts = "" if self._facts is None else facts_line(self._facts)
        below = "  ".join(part for part in (facts, self._save_text) if part)
        return Group(top, Text(below, no_wrap=True, overflow="ellipsis"))


def one_line(text: str, *, keep_end: bool = False) -> str:
    """Return ``text`` on one line: white space as single spaces, clipped to 100 characters.

    Args:
        text: Any text.
        keep_end: Clip its beginning instead of its end.

    Returns:
        Such as ``...and so on``.
    """
    line = " ".join(text.split())
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    kept = _SHOWN_CHARACTERS - len(_MORE)
    return _MORE + line[-kept:].lstrip() if keep_end else line[:kept].rstrip() + _MORE


def remaining_text(*, done_steps: int, left_steps: int, elapsed_seconds: float) -> str:
    """Return the remaining time in words, estimated from the steps done so far.

    Args:
        done_steps: Steps that this process has done.
        left_steps: Steps that it has still to do.
        elapsed_seconds: Time that the done ones took, with everything between them.

    Returns:
        Such as ``3 min 20 s left``.
    """
    if left_steps <= 0:
        return "done"
    if done_steps <= 0:
        return "first step"
    return human_seconds(elapsed_seconds / done_steps * left_steps) + " left"


@contextmanager
def _without_terminal() -> Iterator[None]:
    """A terminal that was closed ends no run by itself: what it was to show is dropped."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


@contextmanager
def _log_through_current_streams() -> Iterator[None]:
    """Let log handlers that write to the terminal write through ``sys.stderr`` as it is now.

    ``logging.StreamHandler`` keeps the stream that it was made with and would write over the bar.
    """
    terminal = getattr(sys.stderr, "rich_proxied_file", sys.__stderr__)
    moved = []
    for logger in (logging.getLogger(), logging.getLogger("legato")):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                moved.append((handler, handler.setStream(sys.stderr)))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
