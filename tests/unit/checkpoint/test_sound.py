from __future__ import annotations

from pathlib import Path

import pytest

from legato.checkpoint.manifest import FileEntry, Kind, Manifest
from legato.checkpoint.sound import check_adapter, check_step
from legato.errors import CheckpointTornError, FolderFormatError

FILES = {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}", "run.yaml": b"a: 1"}


def write_step(folder: Path, kind: Kind = "adapter") -> Path:
    folder.mkdir()
    files = {name: FileEntry.of_bytes(data) for name, data in FILES.items()}
    files["state/optimizer.safetensors"] = FileEntry.of_bytes(b"never read here")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    manifest = Manifest("run", 0, 3, kind, 1767225600.0, files)
    (folder / "manifest.json").write_bytes(manifest.encode())
    return folder


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_sound_adapter_passes_without_its_runs_state(tmp_path: Path) -> None:
    check_adapter(write_step(tmp_path / "step_3"))


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_in_every_file_of_an_adapter(tmp_path: Path, name: str) -> None:
    step = write_step(tmp_path / "step_3")
    flip(step / name)
    with pytest.raises(CheckpointTornError, match=rf"{name}: the bytes from 0 on are damaged: not"):
        check_adapter(step)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step_3")
    (step / "run.yaml").unlink()
    (step / "adapter_config.json").write_bytes(b"{ }")
    with pytest.raises(CheckpointTornError) as caught:
        check_adapter(step)
    assert caught.value.facts["problems"] == [
        f"{step}/adapter_config.json has 3 bytes, not 2",
        f"{step}/run.yaml is absent",
    ]


def test_a_damaged_manifest_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step_3")
    flip(step / "manifest.json")
    with pytest.raises(FolderFormatError, match="not a valid manifest"):
        check_adapter(step)
    (step / "manifest.json").unlink()
    flip(step / "adapter_config.json")
    check_adapter(step)


def test_a_whole_models_weights_arent_read(tmp_path: Path) -> None:
    step = write_step(tmp_path / "step_3", kind="model")
    (step / "adapter_config.json").unlink()
    flip(step / "adapter_model.safetensors")
    check_adapter(step)
    with pytest.raises(CheckpointTornError, match="the bytes from 0 on are damaged"):
        check_step(step)


def test_somebody_elses_manifest_beside_a_model_is_none_of_our_business(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "config.json").write_text("{}")
    check_adapter(tmp_path)
    check_step(tmp_path)


@pytest.mark.parametrize("manifest", [b"", b"{", b"[" * 100_000, b"3", b'{"format": 1}'])
def test_a_damaged_manifest_is_not_taken_for_somebody_elses(
    tmp_path: Path, manifest: bytes
) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(FolderFormatError, match="not a valid manifest"):
        check_step(tmp_path)
