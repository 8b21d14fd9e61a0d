"""``legato ckpt``: look at the checkpoints of a run, check them, and decide what stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.ckpt_keep import kept_because, pin, prune, remove, same_branch, unpin
from legato.cli.ckpt_open import AsJson, RunArgument, StepArgument, is_step, open_run, open_step
from legato.cli.ckpt_show import describe, list_files, metrics_text
from legato.cli.show import show_json, show_pairs, show_table

if TYPE_CHECKING:
    from legato.checkpoint.lifecycle import RunFolder
    from legato.checkpoint.records import StepInfo

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, tidy them.")


@app.command("ls")
def list_steps(run: RunArgument, as_json: AsJson = False) -> None:
    """List a run's checkpoints, and why each of them is kept."""
    folder = open_run(run)
    steps = folder.steps()
    if not steps and not as_json:
        typer.echo(_none_in(run))
        return
    marks = {info.step: _marks(folder, info, steps) for info in steps}
    kept = kept_because(steps)
    if as_json:
        show_json([_facts(i, marks[i.step]) | {"kept": kept.get(i.step)} for i in steps])
        return
    show_table(
        ("step", "size", "age", "kind", "why saved", "metrics", "status", "why kept", ""),
        [_row(info, marks[info.step], kept.get(info.step)) for info in steps],
    )


@app.command("show")
def show_step(step: StepArgument, as_json: AsJson = False) -> None:
    """Show one checkpoint: what it holds, and how its save went."""
    folder, info = open_step(step)
    marks, save = _marks(folder, info, folder.steps()), _save_event(Path(folder.path), info.step)
    if as_json:
        files = info.manifest.files if info.manifest else {}
        sizes = {name: entry.size_bytes for name, entry in files.items()}
        show_json(_facts(info, marks) | {"files": sizes, "save": save})
        return
    show_pairs(list(describe(info, marks=marks, save=save)))
    if listed := list(list_files(info)):
        typer.echo()
        show_pairs(listed)


@app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(metavar="RUN|STEP", help="A run, or one step folder.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint or a run; compare digests."""
    from legato.checkpoint.inspection import find_damage
    from legato.errors import CheckpointTornError
    from legato.report.byte_bar import byte_bar

    one_step = is_step(path)
    if one_step:
        folder, only = open_step(path)
        steps = [only]
    else:
        folder = open_run(path)
        steps = folder.steps()
    damage: dict[int, list[str]] = {}
    total_bytes = sum(info.manifest.size_bytes for info in steps if info.manifest is not None)
    with byte_bar("verifying", total_bytes=total_bytes) as on_read:
        for info in steps:
            problems = (
                find_damage(folder.storage, info.committed(), on_read=on_read)
                if info.is_complete
                else [info.problem or "torn"]
            )
            # A run that goes on prunes what it needs no more.
            if problems and not one_step and not folder.is_taken(info.step):
                continue
            damage[info.step] = problems
    if as_json:
        show_json({str(step): problems for step, problems in damage.items()})
    else:
        for step, problems in damage.items():
            typer.echo(f"step_{step}: {'; '.join(problems) if problems else 'intact'}")
        if not damage:
            typer.echo(_none_in(path))
    bad = [step for step, problems in damage.items() if problems]
    if bad:
        names = ", ".join(f"step_{step}" for step in bad)
        raise CheckpointTornError(f"{names}: damaged; don't use it", path=str(path), steps=bad)


app.command("pin")(pin)
app.command("unpin")(unpin)
app.command("rm")(remove)
app.command("prune")(prune)


@app.command("diff")
def diff(first: StepArgument, second: StepArgument, as_json: AsJson = False) -> None:
    """Compare two checkpoints: tensors, config, metrics."""
    from legato.cli.ckpt_diff import compare_metrics, compare_steps

    (folder, before), (_, after) = open_step(first), open_step(second)
    result = compare_steps(folder.storage, before.path, after.path)
    result["metrics"] = compare_metrics(before.manifest, after.manifest)
    if as_json:
        show_json(result)
        return
    typer.echo(f"{result['num_equal']} tensors equal, {result['num_changed']} changed")
    for place, keys in ((first, result["only_first"]), (second, result["only_second"])):
        if keys:
            typer.echo(f"only in {place}: {len(keys)}, {keys[0]} first")
    if result["largest"]:
        show_table(
            ("moved most", "relative change", "largest change"),
            [
                (row["key"], f"{row['relative']:.3g}", f"{row['largest']:.3g}")
                for row in result["largest"]
            ],
        )
    for name, values in result["metrics"].items():
        typer.echo(f"{name}: {' -> '.join('none' if v is None else f'{v:.4g}' for v in values)}")
    for line in result["config"]:
        typer.echo(line)


def _none_in(path: str | Path) -> str:
    """No checkpoint in a folder, and which folders in it have some."""
    runs = sorted({str(step.parent) for step in Path(path).glob("*/step_*")})
    there = f"; there are some in {', '.join(runs)}" if runs else ""
    return f"{path} holds no checkpoint{there}"


def _marks(folder: RunFolder, info: StepInfo, steps: list[StepInfo]) -> list[str]:
    """What is special about a step: newest, pinned, where links lead, another branch."""
    complete = [step for step in steps if step.manifest is not None]
    marks = []
    for name in ("latest", "best"):
        if (Path(folder.path) / name).resolve() == Path(info.path):
            marks.append(name)
    if info.pinned:
        marks.append("pinned")
    if info.manifest is not None and complete:
        newest = complete[-1].committed()
        if info.step == newest.step and "latest" not in marks:
            marks.append("newest")
        if not same_branch(info.committed(), newest):
            marks.append("another branch")
        if not info.manifest.has_state:
            marks.append("model only")
    return marks


def _facts(info: StepInfo, marks: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": info.step, "path": info.path, "status": info.status}
    facts |= {"problem": info.problem, "marks": marks}
    manifest = info.manifest
    return facts | {
        "kind": manifest.kind if manifest else None,
        "reason": manifest.reason if manifest else None,
        "saved_at": manifest.saved_at if manifest else None,
        "run_id": manifest.run_id if manifest else None,
        "branch": manifest.branch if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "size_bytes": manifest.size_bytes if manifest else None,
    }


def _row(info: StepInfo, marks: list[str], kept: tuple[str, ...] | None) -> tuple[str, ...]:
    from legato.report.start import human_bytes, human_seconds

    note = ", ".join(marks)
    if info.manifest is None:
        return (str(info.step), "", "", "", "", "", info.status, "", info.problem or note)
    manifest = info.manifest
    return (
        str(info.step),
        human_bytes(manifest.size_bytes),
        human_seconds(max(0.0, time.time() - manifest.saved_at)),
        manifest.kind,
        manifest.reason,
        metrics_text(manifest.metrics),
        info.status,
        "" if kept is None else ", ".join(kept) or "goes next",
        note,
    )


def _save_event(run: Path, step: int) -> dict[str, Any] | None:
    """How the save went, from the run's metrics.jsonl; the last one of that step counts.

    None where that isn't recorded: other people's loops have no such file.
    """
    from legato.report.metrics import read_events

    if not (run / "metrics.jsonl").is_file():
        return None
    events = (e for e in read_events(run / "metrics.jsonl") if e["event"] == "save")
    return next((e for e in reversed(list(events)) if e.get("step") == step), None)
