"""A model or an adapter onto the Hugging Face hub: its files, and a card that says what it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import ModelError, UsageError
from legato.models.adapter import ADAPTER_CONFIG, is_adapter
from legato.models.folder import (
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    connection_errors,
    find_model,
    read_config,
    read_object,
    weight_files,
)
from legato.models.lora import BASE_FILE

logger = logging.getLogger(__name__)

CARD = "README.md"


@dataclass(frozen=True)
class PushPlan:
    """What goes onto the hub.

    Attributes:
        hub_id: ``owner/name``.
        folder: Where the files come from.
        files: Name on the hub -> a file here, or bytes that stand in for it.
    """

    hub_id: str
    folder: Path
    files: Mapping[str, Path | bytes]

    @property
    def card(self) -> str:
        """The model card's text."""
        content = self.files[CARD]
        return content.decode() if isinstance(content, bytes) else content.read_text("utf-8")

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def plan_push(
    name_or_path: str | Path,
    hub_id: str,
    *,
    base_model: str | None = None,
    licence: str | None = None,
) -> PushPlan:
    """Choose what goes onto the hub: what loads the model, and nothing else.

    Optimizer state, manifests and the run's config stay here: they hold paths of this machine. An
    adapter's config gets its base's hub id in place of a path. A README.md that lies in the folder
    is the card; else one is written.

    Args:
        name_or_path: A step folder, a merged folder, an adapter, any Hugging Face folder.
        hub_id: ``owner/name``.
        base_model: Hub id of the base, for the card and for an adapter's config; None takes what
            the adapter remembers.
        licence: The hub's name of the licence, for the card.

    Returns:
        The plan; nothing has been sent.

    Raises:
        UsageError: Not a hub id.
        ModelError: Not a model or adapter, or an adapter whose base isn't on the hub; ``.path``.
    """
    _check_hub_id(hub_id)
    if base_model is not None:
        _check_hub_id(base_model)
    folder = find_model(str(name_or_path)).path
    files: dict[str, Path | bytes] = {}
    if is_adapter(folder):
        base_model, config = _adapter_config(folder, base_model)
        files[ADAPTER_CONFIG] = config
        weights = [folder / "adapter_model.safetensors"]
        if not weights[0].is_file():
            raise ModelError(f"{folder}: has no adapter_model.safetensors.", path=str(folder))
    else:
        files["config.json"] = _model_config(folder)
        weights = list(weight_files(folder))
        more = ("model.safetensors.index.json", "generation_config.json")
        weights += [folder / name for name in more if (folder / name).is_file()]
    files |= {file.name: file for file in weights}
    for pattern in (*TOKENIZER_FILES, TEMPLATE_FILES):
        files |= {file.name: file for file in sorted(folder.glob(pattern)) if file.is_file()}
    card = folder / CARD
    files[CARD] = (
        card
        if card.is_file()
        else _write_card(folder, hub_id, base_model=base_model, licence=licence).encode()
    )
    return PushPlan(hub_id, folder, files)


def push(plan: PushPlan, *, private: bool = False, revision: str | None = None) -> str:
    """Send a plan's files as one commit; the repository is made where there is none.

    Args:
        plan: What to send.
        private: Make a new repository private.
        revision: A branch to commit to; None for the main one. The token comes from ``HF_TOKEN``
            or from ``hf auth login``.

    Returns:
        The commit's address.

    Raises:
        ModelError: The hub refused it or can't be reached; ``.path`` is the hub id.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    additions = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in plan.files.items()
    ]
    logger.info("sending %d files to %s", len(additions), plan.hub_id)
    try:
        api.create_repo(plan.hub_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(plan.hub_id, branch=revision, exist_ok=True)
        done = api.create_commit(
            plan.hub_id, additions, commit_message="Upload by legato push", revision=revision
        )
    except connection_errors() as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"{plan.hub_id}: the hub didn't take it ({type(error).__name__}: {text:.300}). "
            "Is HF_TOKEN a token that may write there? What was sent already isn't sent again.",
            path=plan.hub_id,
        ) from error
    return str(done.commit_url)


def _check_hub_id(hub_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        raise UsageError(f"{hub_id}: isn't a hub id ({error})") from error
    if "/" not in hub_id:
        raise UsageError(f"{hub_id}: isn't a hub id. Expected owner/name")


def _adapter_config(folder: Path, base_model: str | None) -> tuple[str, bytes]:
    """The base's hub id, and adapter_config.json with it."""
    config = read_object(folder / ADAPTER_CONFIG)
    known = folder / BASE_FILE
    facts = read_object(known) if known.is_file() else {}
    named = config.get("base_model_name_or_path")
    if base_model is not None:
        config |= {"base_model_name_or_path": base_model, "revision": None}
    elif facts.get("hub_id"):
        config |= {"base_model_name_or_path": facts["hub_id"], "revision": facts.get("revision")}
    elif not named or Path(named).is_absolute() or Path(named).is_dir():
        raise ModelError(
            f"{folder}: its base is {named}, a folder of this machine: nobody else could load the "
            "adapter. Say which hub model it is with --base-model OWNER/NAME, or merge and push "
            f"the whole model: legato merge {folder} --output-dir DIR",
            path=str(folder),
            base=named,
        )
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return str(config["base_model_name_or_path"]), text.encode()


def _model_config(folder: Path) -> Path | bytes:
    config = read_config(folder)
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not Path(name).is_absolute():
        return folder / "config.json"
    del config["_name_or_path"]  # a path of this machine
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _write_card(folder: Path, hub_id: str, *, base_model: str | None, licence: str | None) -> str:
    adapter = is_adapter(folder)
    facts: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model,
        "license": licence,
    }
    head = [f"{key}: {value}" for key, value in facts.items() if value is not None]
    head += ["tags:", "- legato", *(["- lora"] if adapter else [])]
    link = f"[{base_model}](https://huggingface.co/{base_model})"
    if adapter:
        what = f"A LoRA adapter for {link}"
    else:
        what = "A language model" if base_model is None else f"A fine-tune of {link}"
    lines = ["---", *head, "---", "", f"# {hub_id.partition('/')[2]}", ""]
    lines += [f"{what}, trained with Legato{_how_far(folder)}."]
    lines += ["", "```python", *_loading(hub_id, adapter=adapter), "```", ""]
    return "\n".join(lines)


def _how_far(folder: Path) -> str:
    """Steps and metrics, where the folder is a step of a run."""
    try:
        facts = read_object(folder / "manifest.json")
    except ModelError:
        return ""  # there is none, or it is somebody else's
    step, metrics = facts.get("step"), facts.get("metrics")
    if not isinstance(step, int) or not isinstance(metrics, dict):
        return ""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    told = [f"{step} steps", *(f"{name} {value:.4g}" for name, value in numbers.items())]
    return f" ({', '.join(told)})"


def _loading(hub_id: str, *, adapter: bool) -> list[str]:
    model = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    imports = (
        ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
        if adapter
        else ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    )
    return [
        *imports,
        "",
        f'model = {model}.from_pretrained("{hub_id}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{hub_id}")',
    ]
