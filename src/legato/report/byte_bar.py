"""A bar that counts bytes, for what takes long on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Less is read in a second or two.
LARGE_BYTES = 1_000_000_000


@contextmanager
def byte_bar(label: str, *, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on standard error how much is done; nothing where that is no terminal, or it is little.

    Args:
        label: What is done, in a word.
        total_bytes: How much there is to do.

    Yields:
        Callable[[int], None]: A function to be told of each further so many bytes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal or total_bytes < LARGE_BYTES:
        yield lambda num_bytes: None
        return
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
