"""Write docs/config.md and the package's JSON schema from legato.config.schema.

python scripts/generate_config_docs.py            write both
python scripts/generate_config_docs.py --check    exit 1 if one of them isn't current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from legato.config.aliases import ALIASES
from legato.config.catalog import SCHEMA_FILE
from legato.config.explain import Key, schema_keys
from legato.config.rules import CONFLICTS, ONLY_WITH
from legato.config.schema import RunConfig

DOCS_FILE = Path(__file__).parents[1] / "docs" / "config.md"

# The key that opens each part of the page.
PARTS = {
    "recipe": "What is trained, and where it goes",
    "datasets": "Data",
    "batch_size": "Length of the run",
    "optimizer": "The update",
    "lora_rank": "LoRA",
    "save_every_n_train_steps": "Checkpoints",
    "run_val_every_n_steps": "What one sees",
    "compile": "Speed and memory",
    "dp_shard": "Many devices",
}

INTRO = """\
# Every key of a config

Made from `src/legato/config/schema.py` by `scripts/generate_config_docs.py`; a test holds the two
together.

A config is a YAML file. `legato ls` lists the ones that ship with the package, `legato cp` copies
one, and `legato validate my.yaml` finds every mistake at once. On a command line `key=value` sets a
key (dots go deeper: `optimizer.lr=1e-5`, `datasets.0.path=my.jsonl`; everything after the first `=`
is the value) and `'~key'` removes one. `${key}` stands for another key's value.

- A plain word stays what was typed: `012`, `1:30` and `off` are text where text is expected, a
  number or a switch where that is expected. `null`, `None` and an empty value are null.
- An unknown key is an error, and so is one that would be ignored: see
  [below](#keys-that-only-work-together).
- `dataset: FILE`, `dataset.path=` and `dataset.type=` replace the list `datasets` by one entry.
- Other spellings that people know are taken too; they stand in brackets.

*On resume* says what happens when a run goes on with another value: **fixed** is an error, as
the checkpoints hold other tensors; **refuse** is an error that `--accept-changes` makes a warning;
**contents** may name another path to what the run was trained on, as that is
[compared](checkpoints.md#what-is-compared-at-a-resume), and is refuse where something else is
there; **warn** is said and followed; **free** may change at any time. `batch_size` and
`gradient_accumulation_steps` are refused only if their product changes.
"""

TABLE_HEAD = "| key | type | default | on resume | meaning |\n| --- | --- | --- | --- | --- |"


def docs_text() -> str:
    """The whole page."""
    schema = RunConfig.model_json_schema()
    parts = [INTRO]
    for key in schema_keys():
        if key.name in PARTS:
            parts.append(
                f"\n## {PARTS[key.name]}\n\n| key | type | default | on resume | meaning |"
            )
            parts.append("| --- | --- | --- | --- | --- |")
        parts.append(_row(key, schema))
    parts.append(f"\n## Keys that only work together\n\n{_combinations()}")
    return "\n".join(parts) + "\n"


def _row(key: Key, schema: dict[str, Any]) -> str:
    others = [alias for alias, path in ALIASES.items() if path == key.path]
    spelled = f"`{key.name}`" + (f" ({', '.join(f'`{o}`' for o in others)})" if others else "")
    kind = _type(_property(key, schema), schema) + (f" ({key.unit})" if key.unit else "")
    cells = (spelled, kind, _default(key), key.on_resume, str(key.field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _property(key: Key, schema: dict[str, Any]) -> dict[str, Any]:
    name = key.section.__name__
    section = schema if name == "RunConfig" else schema["$defs"][name]
    return section["properties"][key.path[-1]]


def _type(prop: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in prop:
        return "mapping"
    for union in ("anyOf", "oneOf"):
        if union in prop:
            return " or ".join(_type(part, schema) for part in prop[union])
    if "enum" in prop:
        return ", ".join(f"`{value}`" for value in prop["enum"])
    if "const" in prop:
        return f"`{json.dumps(prop['const']).strip(chr(34))}`"
    if prop.get("type") == "array":
        items = prop.get("items", prop.get("prefixItems", [{}])[0] if "prefixItems" in prop else {})
        return f"list of {_type(items, schema)}" if items else "list"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true / false",
        "string": "text",
        "object": "mapping",
        "null": "null",
    }
    return words[prop["type"]]


def _default(key: Key) -> str:
    if key.name == "output_dir":
        return "`out/<config name>`"
    if key.field.is_required():
        return "required"
    default = key.field.get_default()
    if hasattr(default, "model_dump"):
        return "see below"
    return f"`{json.dumps(default)}`".replace('"', "")


def _combinations() -> str:
    lines = ["A key that would be ignored, or that contradicts another, is an error:", ""]
    lines += [f"- {_names(rule.keys)}: {rule.otherwise}." for rule in ONLY_WITH]
    lines += [f"- {_names(conflict.keys)}: {conflict.message}." for conflict in CONFLICTS]
    return "\n".join(lines)


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def schema_text() -> str:
    """JSON schema of a config file for editors, aliases included.

    Nothing is required: a command line may add it. What is set must fit.
    """
    schema = RunConfig.model_json_schema()
    schema["title"] = "Legato run config"
    schema.pop("required")
    schema["$defs"]["OptimizerConfig"].pop("required")
    properties = schema["properties"]
    for name in ("loggers", "roles_to_train", "lora_target_modules", "lora_modules_to_save"):
        described = {key: properties[name].pop(key) for key in ("default", "description")}
        # One name may stand without brackets.
        properties[name] = {"anyOf": [{"type": "string"}, properties[name]]} | described
    for alias, path in ALIASES.items():
        section = schema["$defs"]["OptimizerConfig"] if path[0] == "optimizer" else schema
        target = dict(section["properties"][path[-1]])
        if alias == "dataset":
            target = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/DatasetConfig"}]}
        if alias == "load_in_4bit":
            target = {"type": "boolean"}
        properties[alias] = target | {"description": f"Another spelling of {'.'.join(path)}."}
    return json.dumps(schema, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for path, text in ((DOCS_FILE, docs_text()), (SCHEMA_FILE, schema_text())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{path.name}: {'not current' if '--check' in arguments else 'written'}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
