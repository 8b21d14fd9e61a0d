"""What a path, a data set and a chat template may be called; read by whoever has no torch."""

from __future__ import annotations

import re
from pathlib import Path

FILE_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files."""

COMPRESSIONS = (".gz", ".zst")
"""Endings that may follow them."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""``owner/name`` or ``name`` on the hub, and a subset after a colon: ``openai/gsm8k:main``."""

URL = re.compile(r"[A-Za-z][\w+.-]*://")
"""How an address begins."""

NO_URL = (
    "data is read from files, folders and data sets of the hub (owner/name), not from addresses. "
    "Download it and give the file's path"
)
"""What is said where data is named by one."""

PACKAGED_TEMPLATES = ("alpaca", "chatml")
"""Chat templates that come with Legato."""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs."""


def kind_of_file(path: Path) -> str | None:
    """A file's kind by its suffix, compression aside; None if it isn't a data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FILE_KINDS else None
