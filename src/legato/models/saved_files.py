"""The files that transformers writes beside a model's weights, in memory."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def saved_files(thing: Any) -> dict[str, bytes]:
    """What ``thing.save_pretrained`` writes: of a tokenizer or a config, by path in the folder."""
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }


def model_files(model: PreTrainedModel) -> dict[str, bytes]:
    """config.json and generation_config.json, as transformers writes them for this model."""
    files = saved_files(model.config)
    if model.can_generate():
        files |= saved_files(model.generation_config)
    config = json.loads(files["config.json"]) | {"architectures": [type(model).__name__]}
    # Training switches the cache off in the live model; whoever loads the folder wants it on.
    config.pop("use_cache", None)
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return files
