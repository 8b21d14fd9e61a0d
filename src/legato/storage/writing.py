"""What a disk says that can't be written to, as an error of Legato's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from legato.errors import CheckpointWriteError, LegatoError


@contextmanager
def writing_to(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says against writing in the block into one error; see below.

    Args:
        output_dir: Folder of the run.

    Yields:
        None: the block writes there.

    Raises:
        CheckpointWriteError: The disk is full, read-only, or not this user's; ``.path``. Exit code
            3; the cause is chained.
    """
    try:
        yield
    except LegatoError:
        raise
    except OSError as error:
        place = error.filename or os.fspath(output_dir)
        raise CheckpointWriteError(
            f"output_dir: {os.fspath(output_dir)} can't be written to: {place}: "
            f"{error.strerror or error}. Make room or put its rights in order, or choose another "
            "output_dir.",
            path=os.fspath(output_dir),
        ) from error
