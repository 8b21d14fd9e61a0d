"""What Legato logs, as a person at a terminal reads it."""

from __future__ import annotations

import logging
import sys


def show_log(*, debug: bool = False) -> None:
    """Write the log to standard error: plain lines, warnings marked as such.

    Args:
        debug: Show debug lines too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger("legato")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    # Libraries' warnings stay visible, in the same form.
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"
