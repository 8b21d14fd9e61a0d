"""``metrics.jsonl``: one JSON object a line, one event an object. docs/metrics.md lists the events.

The file is only added to. A run that goes on after a crash may write a step a second time: the
``resume`` event before it names the step it went on from, and later lines replace earlier ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

_BEGINNING = b'{"event": "'  # of every line
logger = logging.getLogger(__name__)

EventName = Literal[
    "start", "resume", "step", "eval", "sample", "save", "save_failed", "stop", "end"
]


class Logger(Protocol):
    """Somebody else's place for metrics, fed with the same events."""

    name: str

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take over one event; ``fields`` as given to :meth:`MetricsLog.write`."""

    def close(self) -> None:
        """Send what is left."""


class MetricsLog:
    """Appends events to a file and hands them on to loggers.

    Metrics never end a run: a line that can't be written and a logger that fails are said once, as
    a warning, and left out.

    Args:
        path: The file; made with its folder when absent. Of a last line without its end, an event
            that a crash cut short is removed; any other gets its end.
        loggers: Who else gets every event.
        is_ours: Whether the folder still is the run's own. Only then a file that was deleted or
            moved is begun anew: another run may have the place of its folder by now.
        clock: Seconds since the epoch, for the field ``time``.

    Raises:
        OSError: The file can't be opened for writing.

    Example:
        >>> log = MetricsLog("metrics.jsonl", clock=lambda: 0.0)
        >>> log.write("eval", step=3, eval_loss=float("nan"))
        >>> log.close()
        >>> Path("metrics.jsonl").read_text().splitlines()[-1]
        '{"event": "eval", "time": 0.0, "step": 3, "eval_loss": null, "eval_loss_text": "nan"}'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        loggers: Sequence[Logger] = (),
        is_ours: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._is_ours = is_ours
        self._clock = clock
        self._loggers = list(loggers)
        self._is_failure_said = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, event: EventName, **fields: Any) -> None:
        """Append one event.

        Args:
            event: Its name.
            **fields: JSON values. A float that isn't finite becomes null, and a second field with
                ``_text`` after its name says which: ``"nan"``, ``"inf"`` or ``"-inf"``.

        Raises:
            TypeError: A field isn't a JSON value.
        """
        record = {"event": event, "time": self._clock()} | _json_fields(fields)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._append(line)
        for each in list(self._loggers):
            try:
                each.log(event, fields)
            except Exception as error:  # somebody else's service, any error of it
                self._loggers.remove(each)
                logger.warning("%s gets no more metrics of this run: %s", each.name, error)

    def close(self) -> None:
        """Close the file and the loggers; a second call does nothing."""
        self._file.close()
        loggers, self._loggers = self._loggers, []
        for each in loggers:
            try:
                each.close()
            except Exception as error:
                logger.warning(
                    "%s: closing failed, its last metrics may be lost: %s", each.name, error
                )

    def _open(self) -> None:
        # Unbuffered: a line is with the operating system when write() returns.
        self._file = self.path.open("r+b" if self.path.exists() else "x+b", buffering=0)
        content = self._file.read()
        self._end = len(content) - len(_cut_short(content))
        self._file.truncate(self._end)
        if self._end and content[self._end - 1 : self._end] != b"\n":
            self._file.seek(self._end)
            self._end += self._file.write(b"\n") or 0

    def _follow(self) -> None:
        """Go on in a new file where ours was deleted or moved, once its folder is there again."""
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                return
        except FileNotFoundError:
            if not self.path.parent.is_dir():  # whoever writes checkpoints makes it, and locks it
                return
        if not self._is_ours():
            return
        logger.warning("%s has gone: metrics go on in a new file, without those before", self.path)
        gone = self._file
        self._open()
        gone.close()

    def _append(self, line: bytes) -> None:
        try:
            self._follow()
            self._file.seek(self._end)
            if self._file.write(line) != len(line):
                raise OSError("the line was written in part: is the disk full?")
        except OSError as error:
            self._drop_part()
            if not self._is_failure_said:
                self._is_failure_said = True
                logger.warning("%s: metrics are being lost: %s", self.path, error)
        else:
            self._end += len(line)
            self._is_failure_said = False

    def _drop_part(self) -> None:
        """Cut what a failed write may have left; the next line begins at the same place anyway."""
        try:
            self._file.truncate(self._end)
        except OSError:
            logger.debug("%s can't be cut to its last whole line", self.path)


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a ``metrics.jsonl``, also of one that is being written.

    Args:
        path: The file.

    Yields:
        dict[str, Any]: One event after another; a line that isn't a whole JSON object is left out.
    """
    with Path(path).open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _cut_short(content: bytes) -> bytes:
    """The event at the end of which only the beginning was written; empty: there is none."""
    last = content[content.rfind(b"\n") + 1 :]
    if last[: len(_BEGINNING)] != _BEGINNING[: len(last)]:  # somebody else's
        return b""
    try:
        json.loads(last)
    except ValueError:
        return last
    return b""


def _json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` without NaN and infinities, which aren't JSON."""
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            result[name] = None
            result[f"{name}_text"] = str(float(value))
        elif isinstance(value, Mapping):
            result[name] = _json_fields(value)
        else:
            result[name] = value
    return result
