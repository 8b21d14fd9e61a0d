"""Code that the documents show, to run it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]


def section(document: str, title: str) -> str:
    """The text under a heading of ``document``, up to the next one."""
    return re.split(r"^##+ ", document.partition(f" {title}\n")[2], maxsplit=1, flags=re.M)[0]


def format_reader() -> SimpleNamespace:
    """The reader of docs/checkpoints.md: json, struct, numpy and a hash, nothing of ours."""
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", section(text, "Reading a step"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return SimpleNamespace(**names)
