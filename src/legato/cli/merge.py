"""``legato merge``: an adapter and its base become one model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli.answering import TrustRemoteCode, dtype_of, refuse_damaged


def merge(
    folder: Annotated[
        str,
        typer.Argument(metavar="ADAPTER", help="A step folder of LoRA training, or an adapter."),
    ],
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir", metavar="DIR", help="The folder to make. Must be absent or empty."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="bf16, fp16 or fp32; each tensor's in the base if absent."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to merge: cpu, cuda, cuda:N or mps.")
    ] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Fold an adapter into its base and check it, in a new folder.

    Needs 4 bytes of memory a parameter.
    """
    from legato.cli.logs import show_log
    from legato.models.merge import merge_adapter
    from legato.parallel.world import pick_device

    show_log()
    refuse_damaged(folder)
    merged = merge_adapter(
        folder,
        output_dir=output_dir,
        dtype=None if dtype is None else dtype_of(dtype),
        device=pick_device(device),
        trust_remote_code=trust_remote_code,
    )
    typer.echo(
        f"{folder} on {merged.base} is in {merged.path}: {merged.num_parameters:,} parameters. "
        f"The adapter moves the logits by {merged.adapter_effect:.3g}, rounding the merged "
        f"weights by {merged.rounding_error:.3g} (root mean square)."
    )
    if merged.quantize_base != "none":
        typer.echo(
            f"It was trained on the base in {merged.quantize_base}, and is merged into the base in "
            "its files' own precision."
        )
