"""``legato ckpt``: look at the checkpoints of a run, check them, and decide what stays."""

from __future__ import annotations

import datetime as dt
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli.show import show_json, show_table

if TYPE_CHECKING:
    from legato.checkpoint.lifecycle import RunFolder
    from legato.checkpoint.records import Committed, StepInfo

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, tidy them.")

_RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's output_dir.")]
_StepArgument = Annotated[
    Path, typer.Argument(metavar="STEP", help="A step folder, or its link latest or best.")
]
_StepsArgument = Annotated[
    list[Path], typer.Argument(metavar="STEP...", help="Step folders, or links to them.")
]
_STEP = re.compile(r"step_[0-9]+")
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_steps(run: _RunArgument, as_json: _Json = False) -> None:
    """List a run's checkpoints, and why each of them is kept."""
    from legato.cli.ckpt_keep import kept_because

    folder = _open_run(run)
    steps = folder.steps()
    if not steps and not as_json:
        typer.echo(f"{run} holds no checkpoint")
        return
    marks = {info.step: _marks(folder, info, steps) for info in steps}
    kept = kept_because(steps)
    if as_json:
        show_json([_facts(i, marks[i.step]) | {"kept": kept.get(i.step)} for i in steps])
        return
    show_table(
        ("step", "size", "age", "kind", "saved at", "metrics", "status", "kept", ""),
        [_row(info, marks[info.step], kept.get(info.step)) for info in steps],
    )


@app.command("show")
def show_step(step: _StepArgument, as_json: _Json = False) -> None:
    """Show one checkpoint: what it holds, and how its save went."""
    folder, info = _open_step(step)
    facts = _facts(info, _marks(folder, info, folder.steps()))
    facts["files"] = (
        {name: entry.size_bytes for name, entry in info.manifest.files.items()}
        if info.manifest
        else {}
    )
    facts["save"] = _save_event(Path(folder.path), info.step)
    if as_json:
        show_json(facts)
        return
    from legato.report.start import human_bytes

    files, save = facts.pop("files"), facts.pop("save") or {}
    facts["size_bytes"] = human_bytes(facts["size_bytes"] or 0)
    if facts["saved_at"]:
        at = dt.datetime.fromtimestamp(facts["saved_at"])
        facts["saved_at"] = at.isoformat(sep=" ", timespec="seconds")
    rows = [
        (name, _text(value)) for name, value in facts.items() if value not in (None, "", {}, [])
    ]
    rows += [(name, human_bytes(size)) for name, size in files.items()]
    rows += [(name, f"{value:.3g}") for name, value in save.items() if name.endswith("_seconds")]
    rows += [(name, human_bytes(value)) for name, value in save.items() if name.endswith("_bytes")]
    show_table(("", ""), rows)


@app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(metavar="RUN|STEP", help="A run, or one step folder.")],
    as_json: _Json = False,
) -> None:
    """Read every byte of a checkpoint or a run; compare digests."""
    from legato.checkpoint.inspection import find_damage
    from legato.cli.byte_bar import byte_bar
    from legato.errors import CheckpointTornError

    if _is_step(path):
        folder, only = _open_step(path)
        steps = [only]
    else:
        folder = _open_run(path)
        steps = folder.steps()
    damage: dict[int, list[str]] = {}
    total_bytes = sum(info.manifest.size_bytes for info in steps if info.manifest is not None)
    with byte_bar("verifying", total_bytes=total_bytes) as on_read:
        for info in steps:
            damage[info.step] = (
                find_damage(folder.storage, info.committed(), on_read=on_read)
                if info.is_complete
                else [info.problem or "torn"]
            )
    if as_json:
        show_json({str(step): problems for step, problems in damage.items()})
    else:
        for step, problems in damage.items():
            typer.echo(f"step_{step}: {'; '.join(problems) if problems else 'intact'}")
        if not damage:
            typer.echo(f"{path} holds no checkpoint")
    bad = [step for step, problems in damage.items() if problems]
    if bad:
        names = ", ".join(f"step_{step}" for step in bad)
        raise CheckpointTornError(f"{names}: damaged; don't use it", path=str(path), steps=bad)


@app.command("pin")
def pin(steps: _StepsArgument) -> None:
    """Keep a checkpoint whatever the run's keep_ keys say."""
    from legato.checkpoint.manifest import PIN_NAME
    from legato.errors import CheckpointTornError

    for path in steps:
        folder, info = _open_step(path)
        if not info.is_complete:
            raise CheckpointTornError(f"{path}: {info.problem}", path=str(path))
        folder.storage.write_bytes(f"{info.path}/{PIN_NAME}", b"")
        typer.echo(f"step_{info.step} is pinned")


@app.command("unpin")
def unpin(steps: _StepsArgument) -> None:
    """Let the run's keep_ keys decide again."""
    from legato.checkpoint.manifest import PIN_NAME

    for path in steps:
        folder, info = _open_step(path)
        if info.pinned:
            folder.storage.remove_file(f"{info.path}/{PIN_NAME}")
        typer.echo(f"step_{info.step} is not pinned")


@app.command("rm")
def remove(
    steps: _StepsArgument,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Don't ask.")] = False,
) -> None:
    """Delete checkpoints. Not while a run is using their folder, and not pinned ones."""
    from legato.errors import UsageError

    opened = [_open_step(path) for path in steps]
    for _, info in opened:
        if info.pinned:
            raise UsageError(f"{info.path} is pinned. `legato ckpt unpin {info.path}` first")
    names = ", ".join(info.path for _, info in opened)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"this deletes {names}. Add --yes to do it")
        typer.confirm(f"Delete {names}?", abort=True)
    for folder, info in opened:
        with _locked(folder):
            folder.prune(info.step, how="delete", now=time.time())
            _point_to_newest(folder)
        typer.echo(f"deleted {info.path}")


@app.command("prune")
def prune(
    run: _RunArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen.")] = False,
) -> None:
    """Apply the keep_ keys of the run's config now."""
    folder = _open_run(run)
    if dry_run:
        for step, action, _ in _planned(folder):
            typer.echo(f"step_{step.step}: would be {action}")
        return
    with _locked(folder):
        for step, action, act in _planned(folder):
            act()
            typer.echo(f"step_{step.step}: {action}")


def _planned(folder: RunFolder) -> Iterator[tuple[Committed, str, Callable[[], object]]]:
    """Each step of the newest branch, what happens to it and why, and the function that does it."""
    from legato.cli.ckpt_keep import plan_keeping
    from legato.errors import CheckpointNotFoundError

    steps = folder.steps()
    if not any(info.is_complete for info in steps):
        raise CheckpointNotFoundError(
            f"{folder.path} holds no complete checkpoint", path=folder.path
        )
    found = plan_keeping(steps)
    how, plan = found.config.prune, found.plan
    dropping = [i for i in found.steps if i.step in plan.drop_state and i.manifest.has_state]
    if plan.remove or dropping:
        _refuse_damaged(folder, found.steps[-1])
    for step in found.steps:
        why = ", ".join(plan.reasons.get(step.step, ()))
        if step.step in plan.remove:
            action = "moved to .pruned/" if how == "move" else "deleted"
            yield step, action, partial(folder.prune, step.step, how=how, now=time.time())
        elif step in dropping:
            yield step, f"kept without state/ ({why})", partial(folder.drop_state, step)
        else:
            yield step, f"kept ({why})", lambda: None


def _refuse_damaged(folder: RunFolder, newest: Committed) -> None:
    """Read the newest step, which stands in for all that go: a disk may have spoilt it since."""
    from legato.checkpoint.inspection import find_damage
    from legato.errors import CheckpointTornError

    if damage := find_damage(folder.storage, newest):
        raise CheckpointTornError(
            f"{damage[0]}: the newest step isn't what was saved, so nothing is deleted. `legato "
            f"ckpt rm {newest.path}` removes it, `legato ckpt verify {folder.path}` checks others.",
            path=newest.path,
            problems=damage,
        )


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock: nothing is deleted under a run that is writing."""
    from legato.checkpoint.lock import OutputDirLock

    lock = OutputDirLock(folder.path)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@app.command("diff")
def diff(first: _StepArgument, second: _StepArgument, as_json: _Json = False) -> None:
    """Compare two checkpoints: tensors, config, metrics."""
    from legato.cli.ckpt_diff import compare_metrics, compare_steps

    (folder, before), (_, after) = _open_step(first), _open_step(second)
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


def _is_step(path: Path) -> bool:
    return bool(_STEP.fullmatch(path.resolve().name)) or (path / "manifest.json").is_file()


def _open_run(path: Path) -> RunFolder:
    from legato.checkpoint.lifecycle import RunFolder
    from legato.errors import CheckpointNotFoundError, UsageError
    from legato.storage.local import LocalStorage

    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path}: no such folder", path=str(path))
    if _is_step(path):
        raise UsageError(
            f"{path} is one step; expected a run's output_dir, {path.resolve().parent}"
        )
    return RunFolder(LocalStorage(), str(path.resolve()))


def _open_step(path: Path) -> tuple[RunFolder, StepInfo]:
    from legato.checkpoint.inspection import inspect
    from legato.checkpoint.lifecycle import RunFolder
    from legato.errors import CheckpointNotFoundError, UsageError
    from legato.storage.local import LocalStorage

    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path}: no such folder", path=str(path))
    if not _is_step(path):
        raise UsageError(f"{path}: expected a step folder such as {path / 'latest'}")
    place = path.resolve()
    storage = LocalStorage()
    return RunFolder(storage, str(place.parent)), inspect(storage, str(place))


def _marks(folder: RunFolder, info: StepInfo, steps: list[StepInfo]) -> list[str]:
    """What is special about a step: newest, pinned, where links lead, another branch."""
    from legato.cli.ckpt_keep import same_branch

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
        _text(manifest.metrics),
        info.status,
        "" if kept is None else ", ".join(kept) or "goes next",
        note,
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if hasattr(value, "items"):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return str(value)


def _save_event(run: Path, step: int) -> dict[str, Any] | None:
    """How the save went, from the run's metrics.jsonl; the last one of that step counts."""
    from legato.report.metrics import read_events

    if not (run / "metrics.jsonl").is_file():
        return None
    events = (e for e in read_events(run / "metrics.jsonl") if e["event"] == "save")
    return next((e for e in reversed(list(events)) if e.get("step") == step), None)


def _point_to_newest(folder: RunFolder) -> None:
    """Mend links that a removal left dangling: ``latest`` leads to the newest, ``best`` goes."""
    complete = [info.step for info in folder.steps() if info.is_complete]
    for name in ("latest", "best"):
        link = Path(folder.path) / name
        if link.is_symlink() and not link.exists():
            if name == "latest" and complete:
                folder.point("latest", complete[-1])
            else:
                link.unlink()
