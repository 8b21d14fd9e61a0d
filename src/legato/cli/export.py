"""``legato export``: a model for tools that don't read Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.answering import refuse_damaged
from legato.cli.errors import naming

app = typer.Typer(no_args_is_help=True, help="Write a model in another tool's format.")


@app.callback()
def _export() -> None:
    """Keep `gguf` a word of its own: other formats may follow."""


@app.command("gguf")
def gguf(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A step folder of full training, or what `legato merge` made."
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to make, such as my-model.gguf.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="bf16, f16 or f32; the folder's own where absent."),
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="llama.cpp's convert_hf_to_gguf.py; looked for on the PATH if absent.",
        ),
    ] = None,
) -> None:
    """Write one GGUF file for llama.cpp, read it back and compare."""
    from legato.cli.logs import show_log
    from legato.export import export_gguf

    show_log()
    refuse_damaged(folder, leaves=True)
    with naming(output):
        made = export_gguf(folder, output=output, dtype=dtype, converter=converter)
    compared = (
        "its tokens, stop token and chat template are the folder's, its logits weren't compared"
        if made.difference is None
        else f"its logits differ by {made.difference:.1e} of their size from the folder's"
    )
    typer.echo(f"{made.path} is written by {made.written_by}; {compared}")
