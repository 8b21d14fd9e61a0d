"""What a path, a data set and a chat template may be called; read by whoever has no torch."""

from __future__ import annotations

import re

FILE_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files."""

COMPRESSIONS = (".gz", ".zst")
"""Endings that may follow them."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""``owner/name`` or ``name`` on the hub, and a subset after a colon: ``openai/gsm8k:main``."""

PACKAGED_TEMPLATES = ("alpaca", "chatml")
"""Chat templates that come with Legato."""

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs."""
