"""``legato data``: look at what a config makes of its data, before anything is trained."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.arguments import ConfigOption, ConfigWords
from legato.cli.show import show_json
from legato.words import counted

if TYPE_CHECKING:
    from legato.data.overview import Overview, Repeats
    from legato.data.samples import Sample
    from legato.recipes.data import Samples

app = typer.Typer(no_args_is_help=True, help="Look at the data before training on it.")

_BAR_WIDTH = 40


@app.callback()
def _group() -> None:
    """Look at the data before training on it."""


@app.command("show")
def show(
    words: ConfigWords = None,
    config: ConfigOption = "",
    count: Annotated[
        int,
        typer.Option(
            "-n", metavar="N", help="Samples to show, the first that a run trains on.", min=0
        ),
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show samples, what is trained in them, and what was left out.

    Lengths, duplicates and tokens per slot too.
    """
    import datetime as dt

    from legato.cli.arguments import read_config, take_config
    from legato.cli.validate import told_problems
    from legato.data.overview import build_overview
    from legato.errors import ConfigError

    config, words = take_config(config, words or [], verb="data show")
    loaded = read_config(config, words)
    if problems := told_problems(loaded):
        raise ConfigError(problems)

    from legato.recipes.data import first_samples, read_samples

    run = loaded.config
    samples = read_samples(run, start_date=dt.date.today())
    overview = build_overview(
        samples.train,
        samples.held_out,
        max_seq_len=samples.max_seq_len,
        batch_size=run.batch_size,
        global_batch_size=run.batch_size * run.gradient_accumulation_steps,
        seed=run.seed,
    )
    shown = first_samples(samples, count=count, seed=run.seed)
    if as_json:
        show_json(_facts(samples, overview, shown, streaming=run.streaming))
    else:
        _print(samples, overview, shown, packing=run.packing, streaming=run.streaming)


def _facts(
    samples: Samples, overview: Overview, shown: list[Sample], *, streaming: bool
) -> dict[str, Any]:
    from dataclasses import asdict

    from legato.data.show import decode_runs

    reports = samples.train.report
    held_out = samples.held_out.report if samples.held_out is not None else reports
    return {
        **asdict(overview),
        "first_block_only": streaming,
        "max_seq_len": samples.max_seq_len,
        "notes": list(reports.notes),
        "warnings": list(reports.warnings),
        "datasets": [asdict(report) for report in reports.datasets],
        "eval_datasets": [asdict(r) for r in held_out.datasets if r not in reports.datasets],
        "eval_notes": [note for note in held_out.notes if note not in reports.notes],
        "eval_warnings": [each for each in held_out.warnings if each not in reports.warnings],
        "samples": [
            {
                "sample_id": sample.sample_id,
                "num_tokens": len(sample.input_ids),
                "num_loss_tokens": sample.num_loss_tokens,
                "segments": [asdict(s) for s in decode_runs(sample, samples.tokenizer)],
            }
            for sample in shown
        ],
    }


def _print(
    samples: Samples, overview: Overview, shown: list[Sample], *, packing: bool, streaming: bool
) -> None:
    from rich.console import Console

    from legato.data.show import marked_sample

    # Colours say what is trained; where there are none, brackets do.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    for sample in shown:
        console.print(
            f"--- {sample.sample_id}: {counted(len(sample.input_ids), 'token')}, "
            f"{sample.num_loss_tokens} trained"
        )
        console.print(
            marked_sample(sample, samples.tokenizer, brackets=console.color_system is None)
        )
    if shown:
        console.print()
    if streaming:
        console.print("a stream: this is of its first shuffle_buffer_size rows")
    for line in samples.train.report.lines():
        console.print(line)
    if samples.held_out is not None:
        for line in samples.held_out.report.lines_beyond(samples.train.report):
            console.print(f"evaluation: {line}")
        console.print(f"evaluation: {counted(overview.num_held_out, 'sample')}")
    for line in (
        *_repeat_lines("duplicates", overview.duplicates, "equal to an earlier one"),
        *_repeat_lines("evaluation", overview.leaked, "trained on as well"),
    ):
        console.print(line)
    packed_rows = counted(overview.num_packed_rows, "row")
    console.print(
        f"tokens per slot: {overview.padded_efficiency:.2f} with one sample in a row, "
        f"{overview.packed_efficiency:.2f} packed into {packed_rows} of "
        f"{samples.max_seq_len:,} (packing is {'on' if packing else 'off'})"
    )
    console.print("tokens of a sample:")
    most = max(each.count for each in overview.histogram)
    label = len(str(overview.histogram[-1].last))
    for each in overview.histogram:
        bar = "#" * -(-each.count * _BAR_WIDTH // most)
        span = f"{each.first:>{label}} - {each.last:>{label}}"
        console.print(f"  {span}  {each.count:>9,}  {bar}".rstrip())
    sys.stdout.flush()


def _repeat_lines(what: str, repeats: Repeats, are: str) -> list[str]:
    if repeats.count == 0:
        return []
    named = ", ".join(f"{this} = {other}" for this, other in repeats.examples)
    more = ", ..." if repeats.count > len(repeats.examples) else ""
    return [f"{what}: {counted(repeats.count, 'sample')} {are} ({named}{more})"]
