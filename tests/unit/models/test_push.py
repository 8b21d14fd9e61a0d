from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from legato.cli.main import main
from legato.errors import ModelError, ModelNotFoundError, UsageError
from legato.models.push import plan_push
from tests.helpers.adapters import write_adapter
from tests.helpers.hub_uploads import UploadHub, upload_hub

LEGATO = [sys.executable, "-c", "import sys; from legato.cli.main import main; sys.exit(main())"]


@pytest.fixture
def step(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A step folder: a model, and what belongs to this machine."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "step_7"))
    manifest = {"step": 7, "metrics": {"eval_loss": 1.23456}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run.yaml").write_text(f"output_dir: {tmp_path}\n")
    (folder / "state").mkdir()
    (folder / "state" / "trainer.json").write_text("{}")
    return folder


def as_sent(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def metadata(card: str) -> dict[str, object]:
    facts = yaml.safe_load(card.split("---")[1])
    assert isinstance(facts, dict)
    return facts


def test_what_loads_the_model_goes_and_what_belongs_to_the_run_stays(step: Path) -> None:
    plan = plan_push(step, "me/mine")
    assert sorted(plan.files) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    sent = b"".join(as_sent(content) for content in plan.files.values())
    assert str(step.parent).encode() not in sent
    assert plan.sizes()["model.safetensors"] == (step / "model.safetensors").stat().st_size


def test_the_card_says_what_it_is_and_how_to_load_it(step: Path) -> None:
    card = plan_push(step, "me/mine", base_model="org/base", licence="apache-2.0").card
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "license": "apache-2.0",
        "tags": ["legato"],
    }
    assert "# mine\n" in card
    assert "A fine-tune of [org/base](https://huggingface.co/org/base), trained" in card
    assert "(7 steps, eval_loss 1.235)" in card
    assert 'AutoModelForCausalLM.from_pretrained("me/mine")' in card
    assert "license" not in metadata(plan_push(step, "me/mine").card)


@pytest.mark.parametrize("manifest", ["{", "[]", '{"step": 7, "metrics": [1]}', '{"step": "7"}'])
def test_a_manifest_of_somebody_elses_says_nothing(step: Path, manifest: str) -> None:
    (step / "manifest.json").write_text(manifest)
    assert b"trained with Legato." in as_sent(plan_push(step, "me/mine").files["README.md"])


def test_a_card_that_lies_in_the_folder_is_kept(step: Path) -> None:
    (step / "README.md").write_text("mine")
    assert plan_push(step, "me/mine").card == "mine"


def test_a_path_of_this_machine_leaves_the_config(step: Path) -> None:
    config = json.loads((step / "config.json").read_text()) | {"_name_or_path": str(step)}
    (step / "config.json").write_text(json.dumps(config))
    sent = json.loads(as_sent(plan_push(step, "me/mine").files["config.json"]))
    del config["_name_or_path"]
    assert sent == config


def test_an_adapter_names_its_base_by_the_hubs_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_model_dir, tmp_path / "adapter")
    with pytest.raises(ModelError, match="nobody else could load the adapter") as caught:
        plan_push(adapter, "me/mine")
    assert caught.value.base == str(tiny_model_dir)  # type: ignore[attr-defined]

    plan = plan_push(adapter, "me/mine", base_model="org/base")
    assert sorted(plan.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(as_sent(plan.files["adapter_config.json"]))
    expected = json.loads((adapter / "adapter_config.json").read_text())
    assert config == expected | {"base_model_name_or_path": "org/base"}
    assert metadata(plan.card)["library_name"] == "peft"
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/mine")' in plan.card

    base = json.loads((adapter / "legato_base.json").read_text())
    base |= {"hub_id": "org/known", "revision": "abc"}
    (adapter / "legato_base.json").write_text(json.dumps(base))
    config = json.loads(as_sent(plan_push(adapter, "me/mine").files["adapter_config.json"]))
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/known", "abc")


@pytest.mark.parametrize("hub_id", ["mine", "me/mine/too", "me/mi ne", "/mine", "me/--"])
def test_a_name_that_the_hub_wouldnt_take_is_refused(step: Path, hub_id: str) -> None:
    with pytest.raises(UsageError, match="isn't a hub id"):
        plan_push(step, hub_id)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        plan_push(tmp_path, "me/mine")


def test_a_dry_run_shows_files_and_card_and_sends_nothing(
    step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(step), "me/mine", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown
    assert "# mine" in shown
    assert "nothing was sent" in shown


def push(hub: UploadHub, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """By a process of its own: the hub's client reads its settings once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder.parent / "hf-home"),
        "HF_TOKEN": "hf_secret",
    }
    command = [*LEGATO, "push", str(folder), "me/mine", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_hub_gets_every_file_in_one_commit(step: Path) -> None:
    with upload_hub() as hub:
        done = push(hub, step, "--private", "--revision", "v2")
    assert done.returncode == 0, done.stderr
    assert f"{step} is at" in done.stdout
    expected = {name: as_sent(c) for name, c in plan_push(step, "me/mine").files.items()}
    assert hub.files == expected
    assert hub.branches == ["v2"]
    assert hub.tokens == {"Bearer hf_secret"}
    [created] = hub.created
    assert (created["organization"], created["name"]) == ("me", "mine")
    assert created.get("private", created.get("visibility")) in (True, "private")


def test_a_hub_that_refuses_is_one_message_with_the_remedy(step: Path) -> None:
    with upload_hub(refuses=True) as hub:
        done = push(hub, step)
    assert done.returncode == 1
    assert "error: me/mine: the hub didn't take it" in done.stderr
    assert "Is HF_TOKEN a token that may write there?" in done.stderr
    assert "Traceback" not in done.stderr
