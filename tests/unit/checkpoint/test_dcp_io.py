"""``dcp.save``, ``dcp.async_save`` and ``dcp.load`` over Hugging Face folders, in one process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from legato.checkpoint.reader import FolderStorageReader
from legato.checkpoint.writer import FolderStorageWriter
from legato.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    ModelNotFoundError,
)
from legato.storage import LocalStorage, MemoryStorage, RemoteStorage
from tests.helpers.faults import FaultyStorage, RecordingStorage

# DCP warns that no process group is there, which is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TREE = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "bf16": torch.arange(5).bfloat16(),
    "fp8": torch.arange(6).float().to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7.0),
    "step": torch.tensor(3, dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
}


def cause(error: CheckpointException) -> BaseException:
    (failure, _), *_ = error.failures.values()
    return failure


def zeros(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(value) for key, value in tree.items()}


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].float(), value.float()), key


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 40])
def test_what_dcp_saves_safetensors_reads_and_dcp_loads(
    tmp_path: Path, max_file_bytes: int
) -> None:
    writer = FolderStorageWriter(tmp_path / "m", max_file_bytes=max_file_bytes)
    dcp.save(TREE, storage_writer=writer)
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "m").glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    assert_bit_equal(found, TREE)
    loaded = zeros(TREE)
    dcp.load(loaded, storage_reader=FolderStorageReader(tmp_path / "m"))
    assert_bit_equal(loaded, TREE)


def test_the_id_that_dcp_is_given_is_the_folder(tmp_path: Path) -> None:
    dcp.save(TREE, checkpoint_id=tmp_path / "m", storage_writer=FolderStorageWriter())
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    loaded = zeros(TREE)
    dcp.load(loaded, checkpoint_id=tmp_path / "m", storage_reader=FolderStorageReader())
    assert_bit_equal(loaded, TREE)


def test_a_saved_model_is_a_hugging_face_folder(tmp_path: Path, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    config = (tiny_model_dir / "config.json").read_bytes()
    writer = FolderStorageWriter(tmp_path / "m", files={"config.json": config})
    dcp.save(weights, storage_writer=writer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_three_background_saves_hold_what_was_there_when_each_began(tmp_path: Path) -> None:
    live = {"w": torch.zeros(4, 4), "step": torch.tensor(0)}
    for number in (1, 2, 3):
        live["w"].fill_(number)
        live["step"].fill_(number)
        future: Any = dcp.async_save(
            live, storage_writer=FolderStorageWriter(tmp_path / f"m{number}"), no_dist=True
        )
        live["w"].fill_(-1)
        live["step"].fill_(-1)
        future.result()
    for number in (1, 2, 3):
        found = safetensors.torch.load_file(tmp_path / f"m{number}" / "model.safetensors")
        assert found["w"].unique().tolist() == [number]
        assert found["step"].item() == number


def test_keys_are_translated_both_ways(tmp_path: Path) -> None:
    keys = {"a": "base_model.model.a.weight"}
    tree = {"a": torch.ones(2, 2)}
    writer = FolderStorageWriter(tmp_path / "m", stem="adapter_model", keys=keys)
    dcp.save(tree, storage_writer=writer)
    found = safetensors.torch.load_file(tmp_path / "m" / "adapter_model.safetensors")
    assert list(found) == ["base_model.model.a.weight"]
    loaded = zeros(tree)
    dcp.load(loaded, storage_reader=FolderStorageReader(tmp_path / "m", keys=keys))
    assert_bit_equal(loaded, tree)


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("mine")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "m"))
    assert isinstance(cause(caught.value), CheckpointExistsError)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("value", [3, 1e-4, None, "text"])
def test_what_is_no_tensor_is_refused_by_name_and_not_pickled(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({**TREE, "lr": value}, storage_writer=FolderStorageWriter(tmp_path / "m"))
    failure = cause(caught.value)
    assert isinstance(failure, CheckpointError)
    assert "lr isn't a tensor" in str(failure)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_cache_is_refused_instead_of_writing_an_empty_folder(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "test_dcp_io"
    dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "a"), planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "b"), planner=planner)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("halfway", [False, True])
def test_a_failure_at_any_operation_leaves_no_folder_and_the_next_save_works(
    tmp_path: Path, halfway: bool
) -> None:
    count = RecordingStorage(LocalStorage())
    dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "count", storage=count))
    commit = [op.name for op in count.operations].index("rename")
    assert commit == len(count.operations) - 2
    for number in range(1, commit + 2):
        folder = tmp_path / f"m{number}"
        storage = FaultyStorage(LocalStorage(), fail_at=number, halfway=halfway)
        storage.error = OSError(errno.EIO, "broken")
        with pytest.raises(CheckpointException, match="broken"):
            dcp.save(TREE, storage_writer=FolderStorageWriter(folder, storage=storage))
        assert not folder.exists()
        dcp.save(TREE, storage_writer=FolderStorageWriter(folder, storage=storage))
        assert_bit_equal(safetensors.torch.load_file(folder / "model.safetensors"), TREE)
        assert not list(tmp_path.glob(f".m{number}.*"))


def test_everything_is_synced_before_the_folder_gets_its_name(tmp_path: Path) -> None:
    storage = RecordingStorage(LocalStorage())
    writer = FolderStorageWriter(
        tmp_path / "m", storage=storage, files={"config.json": b"{}"}, max_file_bytes=40
    )
    dcp.save(TREE, storage_writer=writer)
    names = [op.name for op in storage.operations]
    assert names[-3:] == ["sync_folder", "rename", "sync_folder"]
    for path in {op.path for op in storage.operations if op.name in ("write_at", "write_bytes")}:
        on_path = [op.name for op in storage.operations if op.path == path]
        assert on_path[-1] == "sync_file"
    # Each rank syncs what it wrote before it reports it: rank 0 can't do that for another host.
    before_finish = storage.operations[: names.index("write_bytes")]
    synced = {op.path for op in before_finish if op.name == "sync_file"}
    assert synced == {op.path for op in before_finish if op.name == "write_at"}


def test_a_leftover_of_a_killed_save_does_not_get_into_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / ".m.tmp-dcp"
    leftover.mkdir()
    (leftover / "model-00001-of-00009.safetensors").write_bytes(b"half")
    dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "m"))
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_a_bit_that_nobody_wrote_is_found_before_the_commit(tmp_path: Path) -> None:
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            new_plan.items.pop()
            return new_plan

    with pytest.raises(CheckpointException, match=r"0 of \d+ bytes of"):
        dcp.save(
            {"a": torch.ones(2), "b": torch.ones(2)},
            storage_writer=FolderStorageWriter(tmp_path / "m"),
            planner=Forgetful(),
        )
    assert not (tmp_path / "m").exists()


def test_a_load_is_strict_about_keys_shapes_and_dtypes(tmp_path: Path) -> None:
    dcp.save(TREE, storage_writer=FolderStorageWriter(tmp_path / "m"))

    def load(tree: dict[str, Tensor], **options: Any) -> None:
        dcp.load(tree, storage_reader=FolderStorageReader(tmp_path / "m", **options))

    fewer = zeros(TREE)
    del fewer["matrix"], fewer["flags"]
    with pytest.raises(CheckpointException, match="2 tensors that the state dict lacks") as caught:
        load(fewer)
    assert isinstance(cause(caught.value), CheckpointMismatchError)
    load(fewer, strict=False)
    assert torch.equal(fewer["bf16"], TREE["bf16"])
    with pytest.raises(CheckpointException, match="Missing key"):
        load({**zeros(TREE), "more": torch.zeros(1)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({**zeros(TREE), "matrix": torch.zeros(4, 3)})
    other = {**zeros(TREE), "matrix": torch.zeros(3, 4, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"matrix is torch\.float32"):
        load(other)
    load(other, cast=True)
    assert torch.equal(other["matrix"], TREE["matrix"].bfloat16())


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(zeros(TREE), storage_reader=FolderStorageReader(tmp_path / "absent"))
    assert "absent" in str(caught.value)


def test_a_model_in_memory_works_too(tmp_path: Path) -> None:
    storage = MemoryStorage()
    storage.make_folder("/run")
    dcp.save(TREE, storage_writer=FolderStorageWriter("/run/m", storage=storage))
    loaded = zeros(TREE)
    dcp.load(loaded, storage_reader=FolderStorageReader("/run/m", storage=storage))
    assert_bit_equal(loaded, TREE)
    assert storage.list_folder("/run") == ["m"]


def test_an_object_store_takes_a_save_from_one_process_and_refuses_several() -> None:
    filesystem = fsspec.filesystem("memory")
    storage = RemoteStorage(filesystem)
    try:
        writer = FolderStorageWriter("/run/m", storage=storage, max_file_bytes=40)
        dcp.save(TREE, storage_writer=writer)
        assert "model.safetensors.index.json" in storage.list_folder("/run/m")
        loaded = zeros(TREE)
        dcp.load(loaded, storage_reader=FolderStorageReader("/run/m", storage=storage))
        assert_bit_equal(loaded, TREE)
        several = FolderStorageWriter("/run/n", storage=storage)
        with pytest.raises(CheckpointError, match="several ranks"):
            several.prepare_global_plan([SavePlan([]), SavePlan([])])
    finally:
        filesystem.store.clear()
        filesystem.pseudo_dirs[:] = [""]


def test_a_writer_without_a_folder_says_so() -> None:
    with pytest.raises(CheckpointException, match="give the writer a path"):
        dcp.save(TREE, storage_writer=FolderStorageWriter())
    with pytest.raises(CheckpointException, match="give the reader a path"):
        dcp.load(zeros(TREE), storage_reader=FolderStorageReader())
    assert issubclass(ModelNotFoundError, FileNotFoundError)
