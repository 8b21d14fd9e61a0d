"""docs/config.md and the JSON schema are what the schema says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from legato.config.aliases import ALIASES
from legato.config.catalog import HUB, SCHEMA_FILE, hub_names
from legato.config.explain import schema_keys

ROOT = Path(__file__).parents[3]


def test_both_are_current() -> None:
    script = ROOT / "scripts" / "generate_config_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), f"run {script.name} anew"


def test_the_page_has_a_row_for_every_key() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    for key in schema_keys():
        assert f"| `{key.name}`" in page
    for alias in ALIASES:
        assert f"`{alias}`" in page


def test_the_json_schema_knows_every_key_and_every_spelling() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    top = {key.name for key in schema_keys() if len(key.path) == 1}
    assert set(schema["properties"]) == top | set(ALIASES)
    assert schema["additionalProperties"] is False
    for name in hub_names():
        written = yaml.safe_load((HUB / f"{name}.yaml").read_text(encoding="utf-8"))
        assert set(written) <= set(schema["properties"])
