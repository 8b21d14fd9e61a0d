"""What ``import legato`` offers, and what it costs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import legato

SOURCE = Path(legato.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_every_public_name_is_there_and_listed_once_in_order() -> None:
    assert legato.__all__ == sorted(set(legato.__all__), key=str)
    for name in legato.__all__:
        assert getattr(legato, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        legato.Chekpointer  # noqa: B018


def test_every_listed_name_of_every_module_exists() -> None:
    checked = 0
    for info in pkgutil.walk_packages(legato.__path__, "legato."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{info.name}.{name}"
            checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import legato", ["torch", "pydantic", "omegaconf", "transformers"]),
        ("import legato.errors", ["torch", "pydantic"]),
        ("import legato.config.load", ["torch", "transformers"]),
        ("import legato.cli.main", ["torch", "pydantic", "omegaconf", "transformers"]),
        ("import legato.storage", ["torch", "transformers"]),
        ("import legato.checkpoint", ["transformers", "peft", "datasets", "omegaconf"]),
    ],
)
def test_a_room_imports_only_what_it_needs(statement: str, absent: list[str]) -> None:
    program = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_there_are_examples_in_docstrings() -> None:
    assert len(WITH_EXAMPLES) >= 10


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_docstrings_give_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
