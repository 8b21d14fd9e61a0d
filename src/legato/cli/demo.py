"""``legato demo``: a small real model learns something, on a CPU, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where everything that it makes goes.")
    ] = Path("out/demo"),
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Optimizer steps to train for.")
    ] = 24,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A model folder to use; SmolLM2-135M-Instruct is downloaded if absent.",
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--ask", metavar="ORDER", help="Let the demo's newest checkpoint answer an order."
        ),
    ] = None,
) -> None:
    """Teach SmolLM2-135M to turn a plain order into JSON.

    Run it again to go on.
    """
    from rich.console import Console

    from legato.cli.logs import show_log

    show_log()
    from legato.demo import flow

    console = Console(highlight=False, markup=False, soft_wrap=True)
    paths = flow.demo_paths(folder, model=model)
    if question is not None:
        console.print(flow.ask(paths, question))
        return
    flow.run_demo(paths, steps=steps, show=console.print)
