"""What goes with a step that is deleted, and what doesn't."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import fsspec
import pytest

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint.inspection import find_damage, inspect
from legato.checkpoint.lifecycle import RunFolder
from legato.errors import CheckpointExistsError
from legato.storage import LocalStorage, RemoteStorage
from tests.helpers.loops import Loop


def test_what_no_save_wrote_into_a_step_outlives_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, loop = tmp_path / "out", Loop()
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(loop.run_to(step).state, step=step).result()
            (out / f"step_{step}" / "notes.txt").write_text(f"of {step}")
            (out / f"step_{step}" / "eval").mkdir()
            (out / f"step_{step}" / "eval" / "scores.json").write_text("{}")
        # As a crash leaves one that was being deleted.
        shutil.copytree(out / "step_2", out / ".trash-step_2-1000")
        checkpointer.save(loop.run_to(3).state, step=3).result()
    assert (out / ".pruned" / "step_1" / "notes.txt").read_text() == "of 1"
    assert (out / ".pruned" / "step_1" / "eval" / "scores.json").exists()
    assert sorted(p.name for p in (out / ".pruned" / "step_2").iterdir()) == ["eval", "notes.txt"]
    assert f"is in {out}/.pruned/step_2: eval, notes.txt" in caplog.text
    with Checkpointer(out):
        pass
    assert sorted(p.name for p in (out / ".pruned").iterdir()) == ["step_1", "step_2", "step_2.1"]
    assert sorted(p.name for p in out.iterdir()) == [".lock", ".pruned", "latest", "step_3"]


def test_it_outlives_a_step_whose_manifest_is_damaged_too(tmp_path: Path) -> None:
    out, loop = tmp_path / "out", Loop()
    with Checkpointer(out) as checkpointer:
        for step in (1, 2):
            checkpointer.save(loop.run_to(step).state, step=step).result()
    step_2 = out / "step_2"
    (step_2 / "notes.txt").write_text("mine")
    (step_2 / "other.safetensors").write_text("mine too")
    manifest = step_2 / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    again = Loop()
    with Checkpointer(out) as checkpointer:  # goes on from step 1, and saves step 2 anew
        checkpointer.restore(again.state)
        checkpointer.save(again.run_to(2).state, step=2).result()
    with Checkpointer(out):  # clears up
        pass
    assert sorted(p.name for p in out.iterdir()) == [
        ".lock",
        ".pruned",
        "latest",
        "step_1",
        "step_2",
    ]
    kept = out / ".pruned" / "step_2"
    assert (kept / "notes.txt").read_text() == "mine"
    assert (kept / "other.safetensors").read_text() == "mine too"
    assert not (kept / "model.safetensors").exists()


def test_on_a_store_too() -> None:
    storage = RemoteStorage(fsspec.filesystem("memory"))
    with Checkpointer("/deletion", storage=storage, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(Loop().run_to(1).state, step=1).result()
        storage.write_bytes("/deletion/step_1/notes.txt", b"mine")
        checkpointer.save(Loop().run_to(2).state, step=2).result()
    assert storage.read_bytes("/deletion/.pruned/step_1/notes.txt") == b"mine"
    assert storage.list_folder("/deletion") == [".pruned", "step_2"]
    storage.remove_tree("/deletion")


def test_of_a_step_that_somebody_keeps_elsewhere_only_the_link_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(Loop().run_to(1).state, step=1).result()
        (out / "step_1").rename(elsewhere / "step_1")
        (out / "step_1").symlink_to(elsewhere / "step_1")
        assert inspect(LocalStorage(), f"{out}/step_1").is_complete
        (out / ".trash-step_0-1000").symlink_to(elsewhere / "step_1")
        checkpointer.save(Loop().run_to(2).state, step=2).result()
    with Checkpointer(out):
        pass
    assert sorted(p.name for p in out.iterdir()) == [".lock", "latest", "step_2"]
    assert inspect(LocalStorage(), f"{elsewhere}/step_1").is_complete
    assert "could not be" not in caplog.text


def test_two_processes_of_one_run_never_write_into_one_folder(tmp_path: Path) -> None:
    """On hosts whose locks don't reach each other: one of them commits, and it is its own."""
    with Checkpointer(tmp_path / "other") as checkpointer:
        manifest = checkpointer.save(Loop().state, step=1).result().manifest
    first, second = (RunFolder(LocalStorage(), str(tmp_path / "out")) for _ in range(2))
    run = {"run_id": manifest.run_id, "branch": 0}
    folders = [each.reserve(1, **run, saved_at=manifest.saved_at) for each in (first, second)]
    for i, folder in enumerate(folders):
        shutil.copytree(tmp_path / "other" / "step_1", folder, dirs_exist_ok=True)
        Path(folder, "who").write_text(str(i))
    first.commit(folders[0], manifest, now=0.0)
    with pytest.raises(CheckpointExistsError):
        second.commit(
            folders[1], dataclasses.replace(manifest, saved_at=manifest.saved_at + 1), now=0.0
        )
    assert (tmp_path / "out" / "step_1" / "who").read_text() == "0"
    assert find_damage(LocalStorage(), first.steps()[0].committed()) == []
