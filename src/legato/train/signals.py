"""Signals and the trigger file become one answer per step: save now? stop now?

=============================  ==============================================================
SIGTERM, SIGHUP, first SIGINT  save and stop; a SIGHUP that is ignored (nohup) stays ignored
a second SIGINT                stop at once: KeyboardInterrupt where the program stands
SIGUSR1                        save and go on
a file ``output_dir/SAVE``     save and go on; the file is removed
a wish of the launcher         the same: it has got SIGUSR1, and leaves a file in its own folder
=============================  ==============================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from legato.parallel.handlers import handlers_taken
from legato.parallel.reports import SAVE_FILE
from legato.parallel.terminal import leave_closed_terminal

logger = logging.getLogger(__name__)

TRIGGER_FILE = "SAVE"


@dataclass(frozen=True)
class Request:
    """What was asked for since the last poll.

    Attributes:
        save: A checkpoint of this step is wanted, to go on or before a stop.
        stop: Number of the signal that asks the run to end; None: go on.
    """

    save: bool
    stop: int | None


class StopSignals:
    """Takes the signals while it is open, and gives the old handlers back.

    Outside the main thread Python can't take signals: the trigger file works there, the process's
    own handlers stay.

    On several ranks a signal to any of them, or the file that any of them watches, is one request
    that all of them hear at the same step.

    Args:
        output_dir: Folder watched for the trigger file; None: no trigger file.
        launch_folder: The launcher's, watched for its wish; None: there is no launcher of ours.
        agree: Gives the largest of each number over all ranks; None: there is one rank.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        launch_folder: str | None = None,
        agree: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> None:
        self._triggers: list[Path] = []
        if output_dir is not None:
            self._triggers.append(Path(output_dir, TRIGGER_FILE))
        if launch_folder is not None:
            self._triggers.append(Path(launch_folder, SAVE_FILE))
        self._taken = contextlib.ExitStack()
        self._save = False
        self._stop: int | None = None
        self._agree = agree or list
        self._is_stop_said = False
        self._num_interrupts = 0

    def __enter__(self) -> StopSignals:
        handlers = {
            signal.SIGTERM: self._on_stop,
            signal.SIGHUP: self._on_hangup,
            signal.SIGINT: self._on_interrupt,
            signal.SIGUSR1: self._on_save,
        }
        self._taken.enter_context(handlers_taken(handlers))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken.close()

    def poll(self) -> Request:
        """Collective: take what was asked for. A stop stays asked for, a save is answered once.

        Returns:
            The request of this step boundary.
        """
        taken = [self._take(trigger) for trigger in list(self._triggers)]
        save = any(taken)
        if self._save:
            save, self._save = True, False
        # From here on only what is agreed on counts: this rank may hear a signal at any moment.
        wants_save, stop = map(int, self._agree([float(save), float(self._stop or 0)]))
        if stop and not self._is_stop_said:
            self._is_stop_said = True
            logger.warning(
                "%s: saving a checkpoint, then stopping; a second Ctrl-C stops at once",
                signal.Signals(stop).name,
            )
        return Request(save=bool(wants_save or stop), stop=stop or None)

    def stop_requested(self) -> bool:
        """Collective: whether a stop was asked for; long work between steps then ends early."""
        return bool(self._agree([float(self._stop or 0)])[0])

    # Handlers do next to nothing: they run between any two bytecodes, where logging isn't safe.

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self._stop is None:
            self._stop = number

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._on_stop(number, frame)
        leave_closed_terminal()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._num_interrupts += 1
        if self._num_interrupts > 1:
            raise KeyboardInterrupt
        self._on_stop(number, frame)

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self._save = True

    def _take(self, trigger: Path) -> bool:
        if not trigger.exists():
            return False
        try:
            trigger.unlink()
        except FileNotFoundError:
            return False  # another rank of this host was quicker
        except OSError as error:
            # One that can't be removed would ask again at every step.
            logger.warning(
                "%s can't be removed (%s): it is answered once and not looked at again",
                trigger,
                error,
            )
            self._triggers.remove(trigger)
        return True
