"""Which run, branch and step a start goes on from; what is in its way; what a crash left."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path

import fsspec
import pytest

from legato.checkpoint import Checkpointer, KeepLast
from legato.checkpoint.inspection import inspect
from legato.checkpoint.lifecycle import RunFolder
from legato.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointTornError,
)
from legato.storage import LocalStorage, RemoteStorage
from tests.helpers.faults import StorageWrapper
from tests.helpers.loops import Loop, assert_same


def save_steps(out: Path, *steps: int, **options: object) -> str:
    """A run that saves ``steps`` and returns its id."""
    loop = Loop()
    with Checkpointer(out, **options) as checkpointer:  # type: ignore[arg-type]
        if (found := checkpointer.restore(loop.state)) is not None:
            assert found["step"] < steps[0]
        for step in steps:
            checkpointer.save(loop.run_to(step).state, step=step)
        return checkpointer.run_id


def names(folder: Path) -> list[str]:
    hidden = {"latest", "best", ".lock"}
    return sorted(p.name for p in folder.iterdir() if p.name not in hidden)


def tear(folder: Path) -> None:
    """Cut a file short, as a disk that lied about its sync might."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def test_auto_continues_the_same_run_and_branch(tmp_path: Path) -> None:
    run_id = save_steps(tmp_path / "out", 10, 20)
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 20
        assert (checkpointer.run_id, checkpointer.branch) == (run_id, 0)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 20


def test_an_empty_folder_is_a_fresh_run(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is None
        assert checkpointer.latest() is None
        assert checkpointer.restore(Loop().state) is None


def test_an_earlier_path_with_newer_steps_there_is_refused_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path / "out", 300, 400, 500)
    with pytest.raises(
        CheckpointExistsError, match=r"step_400, step_500, .*from step 300"
    ) as caught:
        Checkpointer(tmp_path / "out", resume=tmp_path / "out" / "step_300")
    assert caught.value.facts["steps"] == [400, 500]
    assert "--start-over" in str(caught.value)
    assert names(tmp_path / "out") == ["step_300", "step_400", "step_500"]


def test_a_new_branch_never_hands_out_the_old_ones_weights(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_id = save_steps(out, 3, 5)
    loop = Loop(lr=0.5)
    with Checkpointer(
        out, resume=out / "step_3", start_over=True, clock=lambda: 1000.0
    ) as checkpointer:
        assert (checkpointer.run_id, checkpointer.branch) == (run_id, 1)
        checkpointer.restore(loop.state)
        loop.optimizer.param_groups[0]["lr"] = 0.5
        committed = checkpointer.save(loop.run_to(5).state, step=5).result()
        assert committed.branch == 1
    assert names(out) == [".old-1000", "step_3", "step_5"]
    assert names(out / ".old-1000") == ["step_5"]
    resumed = Loop()
    with Checkpointer(out) as checkpointer:
        assert (checkpointer.run_id, checkpointer.branch) == (run_id, 1)
        checkpointer.restore(resumed.state)
    assert_same(resumed.tensors(), loop.tensors())


def test_a_new_branch_prunes_only_what_it_wrote_itself(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2, 3)
    save_steps(out, 3, 4, 5, resume=out / "step_2", start_over=True, keep=KeepLast(1))
    assert [n for n in names(out) if n.startswith("step")] == ["step_1", "step_2", "step_5"]


def test_a_start_without_resuming_on_a_used_folder_is_a_new_run(tmp_path: Path) -> None:
    run_id = save_steps(tmp_path / "out", 1, 2)
    with pytest.raises(CheckpointExistsError, match="from the beginning"):
        Checkpointer(tmp_path / "out", resume=False)
    with Checkpointer(tmp_path / "out", resume=False, start_over=True) as checkpointer:
        assert checkpointer.source is None
        assert checkpointer.run_id != run_id
    # Cut short before its first save, the same command starts fresh again and finds nothing.
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is None


def test_the_newest_step_by_path_is_no_new_branch(tmp_path: Path) -> None:
    save_steps(tmp_path / "out", 1, 2)
    with Checkpointer(tmp_path / "out", resume=tmp_path / "out" / "latest") as checkpointer:
        assert checkpointer.source is not None
        assert (checkpointer.source.step, checkpointer.branch) == (2, 0)
        assert checkpointer.source.path == str(tmp_path / "out" / "step_2")


def test_a_step_of_another_folder_is_a_branch_of_its_run(tmp_path: Path) -> None:
    run_id = save_steps(tmp_path / "a", 4)
    with Checkpointer(tmp_path / "b", resume=tmp_path / "a" / "step_4") as checkpointer:
        assert (checkpointer.run_id, checkpointer.branch) == (run_id, 1)
        checkpointer.save(Loop().state, step=5)
    with pytest.raises(CheckpointExistsError, match="step_5"):
        Checkpointer(tmp_path / "b", resume=tmp_path / "a" / "step_4")


def test_a_torn_newest_step_is_skipped_aloud_and_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2)
    tear(out / "step_2")
    loop = Loop()
    with Checkpointer(out, clock=lambda: 1000.0) as checkpointer:
        assert "step 2 is skipped" in caplog.text
        assert "resuming from step 1" in caplog.text
        checkpointer.restore(loop.state)
        assert loop.counter.step == 1
        checkpointer.save(loop.run_to(2).state, step=2).result()
    assert "moving" in caplog.text
    assert names(out) == [".torn-step_2-1000", "step_1", "step_2"]
    with Checkpointer(out) as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 2
    assert names(out) == ["step_1", "step_2"]


def test_a_pin_goes_over_to_the_step_that_is_saved_anew_and_what_was_pinned_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2)
    (out / "step_2" / ".pinned").touch()
    tear(out / "step_2")
    loop = Loop()
    with Checkpointer(out, keep=KeepLast(1), clock=lambda: 1000.0) as checkpointer:
        checkpointer.restore(loop.state)
        for step in (2, 3):
            checkpointer.save(loop.run_to(step).state, step=step).result()
    with Checkpointer(out) as checkpointer:
        assert [(i.step, i.status, i.pinned) for i in checkpointer.steps()] == [
            (2, "complete", True), (3, "complete", False),
        ]  # fmt: skip
    assert names(out) == [".torn-step_2-1000", "step_2", "step_3"]
    assert "keeping the torn checkpoint" in caplog.text


def flip(path: Path, offset: int) -> None:
    """Turn one bit round, as a disk does that rots: the size stays."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


OPTIMIZER = "state/optimizer-00001-of-00001.safetensors"
HEADER, LENGTH, LAST = 20, 0, -1  # where a bit flips


@pytest.mark.parametrize(
    ("name", "offset", "verify"),
    [
        ("model.safetensors", HEADER, False),
        (OPTIMIZER, HEADER, False),
        (OPTIMIZER, LENGTH, False),
        ("model.safetensors", LAST, True),
        (OPTIMIZER, LAST, True),
        ("config.yaml", LAST, True),
    ],
)
def test_a_step_with_a_flipped_bit_is_skipped_aloud_and_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, offset: int, verify: bool
) -> None:
    out = tmp_path / "out"
    run_id = save_steps(out, 1, 2, 3, config_yaml="a: 1")
    flip(out / "step_3" / name, offset)
    loop = Loop()
    with Checkpointer(
        out, verify_on_load=verify, keep=KeepLast(2), clock=lambda: 1000.0
    ) as checkpointer:
        assert "step 3 is skipped" in caplog.text
        assert name in caplog.text
        assert "resuming from step 2" in caplog.text
        assert (checkpointer.run_id, checkpointer.branch) == (run_id, 0)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 2
        checkpointer.restore(loop.state)
        assert_same(loop.tensors(), Loop().run_to(2).tensors())
        checkpointer.save(loop.run_to(3).state, step=3).result()
        assert [info.status for info in checkpointer.steps()] == ["complete", "complete"]
        assert (out / "latest").readlink() == Path("step_3")
    assert names(out) == [".torn-step_3-1000", "step_2", "step_3"]
    with Checkpointer(out, verify_on_load=True) as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 3
    assert names(out) == ["step_2", "step_3"]


@pytest.mark.parametrize("verify", [True, False])
def test_one_damaged_step_after_the_other_is_skipped_but_training_never_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, verify: bool
) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2, 3)
    for step in (2, 3):
        flip(out / f"step_{step}" / "model.safetensors", LAST if verify else HEADER)
    with Checkpointer(out, verify_on_load=verify) as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 1
    for step in (2, 3):
        assert f"step {step} is skipped" in caplog.text
        with pytest.raises(CheckpointTornError, match=rf"step_{step} isn't .*model\.safetensors"):
            Checkpointer(out, resume=out / f"step_{step}", verify_on_load=verify)
    tear(out / "step_1")
    with pytest.raises(CheckpointTornError, match=r"no step to go on from: .*step_1.*step_2"):
        Checkpointer(out, verify_on_load=verify)
    assert names(out) == ["step_1", "step_2", "step_3"]
    with Checkpointer(out, verify_on_load=verify, start_over=True) as checkpointer:
        assert checkpointer.source is None


def test_an_explicit_path_never_falls_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2)
    tear(out / "step_2")
    with pytest.raises(CheckpointTornError, match=r"step_2 isn't a complete checkpoint: .*bytes"):
        Checkpointer(out, resume=out / "step_2")
    with pytest.raises(CheckpointNotFoundError, match="step_7: there is no such folder"):
        Checkpointer(out, resume=out / "step_7")


@pytest.mark.parametrize("lost", ["manifest.json", "model.safetensors", "state/trainer.json"])
def test_a_step_that_lacks_a_file_is_torn(tmp_path: Path, lost: str) -> None:
    save_steps(tmp_path / "out", 1, 2)
    (tmp_path / "out" / "step_2" / lost).unlink()
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 1
        assert [i.status for i in checkpointer.steps()] == ["complete", "torn"]


def test_a_step_whose_state_says_something_else_than_was_saved_is_torn(tmp_path: Path) -> None:
    """Same size, other step: a run that believed it would skip steps, or take some twice."""
    save_steps(tmp_path / "out", 1, 2)
    state = tmp_path / "out" / "step_2" / "state" / "trainer.json"
    content = state.read_text()
    assert content.count("2") > 0
    state.write_text(content.replace("2", "9", 1))
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.source is not None
        assert checkpointer.source.step == 1
        assert "damaged" in str(checkpointer.steps()[-1].problem)


def test_somebodys_own_folder_named_like_a_step_is_moved_aside_but_never_deleted(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    (out / "step_1").mkdir(parents=True)
    (out / "step_1" / "notes.txt").write_text("mine")
    save_steps(out, 1)
    with Checkpointer(out) as checkpointer:
        assert checkpointer.source is not None
    (aside,) = out.glob(".torn-step_1-*")
    assert (aside / "notes.txt").read_text() == "mine"


def test_a_newer_format_and_a_renamed_step_are_refused_and_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_steps(out, 1)
    shutil.copytree(out / "step_1", out / "step_8")
    newer = json.loads((out / "step_1" / "manifest.json").read_text()) | {"format": 2}
    (out / "step_9").mkdir()
    (out / "step_9" / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(
        CheckpointExistsError,
        match=r"step_8, step_9, .*step_8: .*says step 1: was it renamed.*step_9: .*format 2, this ",
    ):
        Checkpointer(out)
    for step, problem in ((8, "was it renamed"), (9, "newer Legato")):
        with pytest.raises(CheckpointTornError, match=problem):
            Checkpointer(tmp_path / "other", resume=out / f"step_{step}")


def test_names_that_only_look_like_steps_are_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("step_9_backup", "step_09", "step_", "step_x", "xstep_9", "checkpoint-9"):
        (out / name).mkdir(parents=True)
    save_steps(out, 1, 2, keep=KeepLast(1))
    assert [n for n in names(out) if n != "step_2"] == [
        "checkpoint-9", "step_", "step_09", "step_9_backup", "step_x", "xstep_9",
    ]  # fmt: skip


def test_somebodys_own_file_is_never_replaced_by_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "latest").write_text("mine")
    save_steps(out, 1, keep=KeepLast(2))
    save_steps(out, 2)
    assert (out / "latest").read_text() == "mine"
    assert "the link 'latest'" in caplog.text
    assert "it isn't a link, so it is left alone" in caplog.text


def test_steps_of_another_run_are_neither_resumed_nor_pruned(tmp_path: Path) -> None:
    """Two runs that took turns in one folder, by hand: the last one's steps are the run's."""
    out = tmp_path / "out"
    save_steps(tmp_path / "foreign", 1, 50)
    own = save_steps(out, 10, 20)
    shutil.copytree(tmp_path / "foreign" / "step_1", out / "step_1")
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        assert checkpointer.run_id == own
        checkpointer.save(Loop().state, step=30)
    assert names(out) == ["step_1", "step_30"]
    shutil.copytree(tmp_path / "foreign" / "step_50", out / "step_50")
    with pytest.raises(
        CheckpointExistsError, match=rf"step_50, .*from step 30.*step_50: .*, and run {own} goes on"
    ):
        Checkpointer(out)


def test_of_several_runs_none_is_chosen_where_nothing_says_which_was_the_last(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    foreign = save_steps(tmp_path / "foreign", 1, 50)
    own = save_steps(out, 10, 20)
    shutil.copytree(tmp_path / "foreign" / "step_50", out / "step_50")
    (out / ".lock").unlink()
    with pytest.raises(CheckpointExistsError, match="the path of its newest step") as caught:
        Checkpointer(out)
    assert f"run {foreign} wrote step_50; run {own} wrote step_10, step_20." in str(caught.value)
    assert caught.value.facts["runs"] == [foreign, own]
    with Checkpointer(out, resume=out / "step_50") as checkpointer:
        assert checkpointer.run_id == foreign
    with Checkpointer(out) as checkpointer:  # it is known again
        assert checkpointer.run_id == foreign


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(Loop().run_to(1).state, step=1)
    assert names(tmp_path / "out") == ["step_1"]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"{tmp_path}/out/.lock: this file system has no locks: two runs on one output_dir wouldn't "
        "be noticed"
    ]


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_steps(out, 1, 2)
    for name in (".step_3.tmp-abc", ".trash-step_1-1000", ".trash-step_1-1000.1"):
        (out / name / "state").mkdir(parents=True)
        (out / name / "state" / "x").write_bytes(b"x")
    (out / "latest.tmp-1-2").symlink_to("step_1")
    (out / "step_2" / "manifest.json.new").write_bytes(b"{")
    (out / ".mine").mkdir()
    (out / "step_3.tmp").mkdir()
    with Checkpointer(out) as checkpointer:
        assert checkpointer.source is not None
    assert names(out) == [".mine", "step_1", "step_2", "step_3.tmp"]
    assert not (out / "step_2" / "manifest.json.new").exists()
    assert (out / "step_1").exists()


def test_the_step_resumed_from_stays_until_a_newer_one_is_committed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_steps(out, 4, 6, keep=KeepLast(2))
    with Checkpointer(out, keep=KeepLast(1)) as checkpointer:
        assert names(out) == ["step_4", "step_6"]
        checkpointer.save(Loop().state, step=7).result()
        assert names(out) == ["step_7"]


def test_on_a_store_a_start_removes_what_its_own_run_left_half_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    filesystem = fsspec.filesystem("memory")
    try:
        store = RemoteStorage(filesystem)
        with Checkpointer("/run", storage=store) as checkpointer:
            for step in (1, 2):
                checkpointer.save(Loop().run_to(step).state, step=step)
        assert caplog.text.count("object stores have no locks") == 1
        folder = RunFolder(store, "/run")
        for step, writer in ((3, checkpointer.run_id), (4, "another")):
            half = folder.reserve(step, run_id=writer, branch=0, saved_at=0.0)
            store.write_bytes(f"{half}/model.safetensors", b"half")
        store.write_bytes("/run/step_5/mine", b"somebody's own")
        store.remove_file("/run/step_1/manifest.json")  # a prune that was cut short
        with Checkpointer("/run", storage=store) as resumed:
            assert resumed.run_id == checkpointer.run_id
            assert store.list_folder("/run") == ["step_2", "step_4", "step_5"]
    finally:
        filesystem.store.clear()
        filesystem.pseudo_dirs[:] = [""]


class UnreadableStorage(StorageWrapper):
    """A disk that answers every read of a part of a file with the same error."""

    def __init__(self, number: int) -> None:
        super().__init__(LocalStorage())
        self.number = number

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        raise OSError(self.number, "as the system says", path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ELOOP])
def test_a_disk_that_lost_a_file_tears_its_step(tmp_path: Path, number: int) -> None:
    save_steps(tmp_path / "out", 1)
    found = inspect(UnreadableStorage(number), str(tmp_path / "out/step_1"))
    assert found.status == "torn"


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    save_steps(tmp_path / "out", 1)
    manifest = tmp_path / "out/step_1/manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    found = inspect(LocalStorage(), str(manifest.parent))
    assert found.status == "torn"
    assert "a pipe is there, no file" in str(found.problem)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
def test_what_cant_be_read_just_now_isnt_taken_for_damaged(tmp_path: Path, number: int) -> None:
    save_steps(tmp_path / "out", 1)
    with pytest.raises(OSError, match="as the system says"):
        inspect(UnreadableStorage(number), str(tmp_path / "out/step_1"))


@pytest.mark.parametrize("target", ["step_2", "nowhere"], ids=["in a circle", "to nothing"])
def test_a_link_that_leads_nowhere_is_a_torn_step_and_makes_room(
    tmp_path: Path, target: str
) -> None:
    out = tmp_path / "out"
    save_steps(out, 1)
    (out / "step_2").symlink_to(target)
    with Checkpointer(out) as checkpointer:
        assert [(info.step, info.status) for info in checkpointer.steps()] == [
            (1, "complete"),
            (2, "torn"),
        ]
        checkpointer.save(Loop().run_to(2).state, step=2).result()
    assert inspect(LocalStorage(), str(out / "step_2")).is_complete
    assert not (out / "step_2").is_symlink()


def test_a_path_that_leaves_no_room_for_a_checkpoint_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    out = tmp_path
    while len(str(out)) < 3900:
        out /= "d" * 90
    assert len(str(out / "metrics.jsonl")) < os.pathconf(tmp_path, "PC_PATH_MAX")
    save_steps(out, 1)
    out /= "e" * (4010 - len(str(out)))
    with pytest.raises(CheckpointError, match="is too long, and its checkpoints' files need 4"):
        Checkpointer(out)
