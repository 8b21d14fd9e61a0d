"""Power cuts: whatever wasn't synced is gone, and still nothing acknowledged is lost."""

from __future__ import annotations

import copy
import threading

import pytest

from legato.checkpoint import Checkpointer, KeepLast
from legato.storage import MemoryStorage
from tests.helpers.faults import LossyStorage, Operation, RecordingStorage, StorageWrapper
from tests.helpers.loops import Loop, assert_same

pytestmark = pytest.mark.crash


class PowerCut(Exception):
    """The machine stops before the next operation."""


class CutStorage(StorageWrapper):
    """Takes pictures of a `LossyStorage` before each operation: the disk at that instant."""

    def __init__(self, inner: LossyStorage) -> None:
        super().__init__(inner)
        self.pictures: list[tuple[Operation, LossyStorage, int]] = []
        self.acknowledged = 0

    def before(self, operation: Operation, number: int, half: object) -> None:
        assert isinstance(self.inner, LossyStorage)
        self.pictures.append((operation, _copied(self.inner), self.acknowledged))


def _copied(disk: LossyStorage) -> LossyStorage:
    lock, disk._lock = disk._lock, None  # type: ignore[assignment]
    try:
        twin = copy.deepcopy(disk)
    finally:
        disk._lock = lock
    twin._lock = threading.RLock()
    # Keyed by identity: the copies have other identities.
    twin._durable_bytes = {id(file): (file, data) for file, data in twin._durable_bytes.values()}
    twin._durable_names = {
        id(folder): (folder, names) for folder, names in twin._durable_names.values()
    }
    return twin


@pytest.mark.parametrize("names_survive", [False, True])
@pytest.mark.parametrize("prune", ["delete", "move"])
def test_a_power_cut_at_any_operation_loses_nothing_acknowledged(
    names_survive: bool, prune: str
) -> None:
    states = [Loop().run_to(step) for step in (1, 2, 3)]
    disk = LossyStorage()
    disk.make_folder("/disk")
    disk.settle()
    storage = CutStorage(disk)
    with Checkpointer(
        "/disk/out",
        storage=storage,
        keep=KeepLast(1),
        prune=prune,  # type: ignore[arg-type]
        keep_last_n_states=1,
    ) as checkpointer:
        for loop in states:
            checkpointer.save(loop.state, step=loop.counter.step).result()
            storage.acknowledged = loop.counter.step
    assert len(storage.pictures) > 60
    for k, (operation, picture, acknowledged) in enumerate(storage.pictures, start=1):
        picture.power_loss(names_survive=names_survive)
        resumed = Loop()
        with Checkpointer("/disk/out", storage=picture, verify_on_load=True) as checkpointer:
            restored = checkpointer.restore(resumed.state)
            step = 0 if restored is None else restored["step"]
            assert step >= acknowledged, (k, operation)
            if step:
                assert_same(resumed.tensors(), states[step - 1].tensors())
            checkpointer.save(resumed.run_to(9).state, step=9).result()


def test_every_file_is_synced_before_the_rename_and_the_parent_after_it() -> None:
    storage = RecordingStorage(MemoryStorage())
    loop = Loop().run_to(1)
    with Checkpointer("/out", storage=storage, config_yaml="a: 1") as checkpointer:
        checkpointer.save(loop.state, step=1).result()
    operations = storage.operations
    (commit,) = [i for i, op in enumerate(operations) if op.name == "rename"]
    temporary = operations[commit].source
    assert temporary is not None
    assert operations[commit].path == "/out/step_1"
    written = [(i, op.path) for i, op in enumerate(operations) if op.name.startswith("write")]
    assert len({path for _, path in written}) == 5
    for i, path in written:
        syncs = [j for j, op in enumerate(operations) if (op.name, op.path) == ("sync_file", path)]
        assert syncs, path
        assert i < syncs[-1] < commit, path
    folder_syncs = {op.path: i for i, op in enumerate(operations) if op.name == "sync_folder"}
    last_write = max(i for i, _ in written)
    assert last_write < folder_syncs[f"{temporary}/state"] < commit
    assert last_write < folder_syncs[temporary] < commit
    assert operations[commit + 1].name == "sync_folder"
    assert operations[commit + 1].path == "/out"
    # The manifest is the last file that is written.
    assert written[-1][1] == f"{temporary}/manifest.json"


def test_what_pruning_moves_is_there_after_a_power_cut() -> None:
    for prune in ("move", "delete"):
        disk = LossyStorage()
        disk.make_folder("/disk")
        disk.settle()
        with Checkpointer("/disk/out", storage=disk, keep=KeepLast(1), prune=prune) as checkpointer:
            loop = Loop()
            checkpointer.save(loop.run_to(1).state, step=1).result()
            mine = "/disk/out/step_1/notes.txt"
            disk.write_bytes(mine, b"mine")
            disk.sync_file(mine)
            disk.sync_folder("/disk/out/step_1")
            checkpointer.save(loop.run_to(2).state, step=2).result()
        disk.power_loss()
        moved = disk.list_folder("/disk/out/.pruned/step_1")
        assert "notes.txt" in moved, prune
        assert ("manifest.json" in moved) == (prune == "move")


def test_a_pruned_step_is_durably_renamed_before_anything_in_it_goes() -> None:
    storage = RecordingStorage(MemoryStorage())
    loop = Loop()
    with Checkpointer("/out", storage=storage, keep=KeepLast(1)) as checkpointer:
        for _ in range(2):
            checkpointer.save(loop.state, step=loop.step()).result()
    names = [(op.name, op.path, op.source) for op in storage.operations]
    (commit,) = [
        i for i, (name, path, _) in enumerate(names) if (name, path) == ("rename", "/out/step_2")
    ]
    (trash,) = [
        i
        for i, (name, _, source) in enumerate(names)
        if name == "rename" and source == "/out/step_1"
    ]
    first_removal = min(i for i, (name, _, _) in enumerate(names) if name == "remove_file")
    assert commit < trash < first_removal
    assert ("sync_folder", "/out", None) in names[trash:first_removal]
