"""Tables: drawn on a terminal, aligned words in a pipe, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import typer


def show_json(value: Any) -> None:
    """Print ``value`` as JSON, in characters that standard output has."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(value, indent=2, ensure_ascii=not is_utf8))


def show_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print labels, and what they say in a column of its own."""
    width = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        typer.echo(f"{label:<{width}}  {text}")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
