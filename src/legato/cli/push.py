"""``legato push``: a checkpoint onto the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from legato.cli.answering import refuse_damaged


def push(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A step folder, or any other folder with a model or an adapter."
        ),
    ],
    hub_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="owner/name on the hub.")],
    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME", help="Hub id of the base, where the folder doesn't know it."
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="NAME", help="The licence as the hub calls it, such as apache-2.0."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="A branch to commit to.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card; send nothing.")
    ] = False,
) -> None:
    """Send a model to the Hugging Face hub, with a model card.

    All that loads it, as one commit; HF_TOKEN is the account.
    """
    from legato.cli.logs import show_log
    from legato.cli.show import show_table
    from legato.models.push import plan_push
    from legato.models.push import push as send

    show_log()
    refuse_damaged(folder, leaves=True)
    plan = plan_push(folder, hub_id, base_model=base_model, licence=licence)
    if dry_run:
        rows = [(name, f"{size:,}") for name, size in plan.sizes().items()]
        show_table(("file", "bytes"), rows)
        typer.echo(f"\n{plan.card}")
        typer.echo(f"nothing was sent; without --dry-run this goes to {hub_id}")
        return
    typer.echo(f"{folder} is at {send(plan, private=private, revision=revision)}")
