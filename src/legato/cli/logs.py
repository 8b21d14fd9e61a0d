"""What Legato logs, as a person at a terminal reads it."""

from __future__ import annotations

import logging
import sys

_NAME = "legato"


def choose_level(*, debug: bool) -> None:
    """Say for the whole command which lines its log has; with ``debug`` the debug lines too."""
    logging.getLogger(_NAME).setLevel(logging.DEBUG if debug else logging.INFO)


def is_debugging() -> bool:
    """Whether ``--debug`` was given."""
    return logging.getLogger(_NAME).isEnabledFor(logging.DEBUG)


def show_log() -> None:
    """Write the log to standard error: plain lines, warnings marked as such."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger(_NAME)
    logger.handlers = [handler]
    logger.propagate = False
    # Libraries' warnings stay visible, in the same form.
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"
