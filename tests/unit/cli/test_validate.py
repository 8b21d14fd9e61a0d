"""legato validate, and the words that it and run take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legato.cli.arguments import read_config, split_words
from legato.cli.main import main
from legato.errors import ConfigError, UsageError

NAME = "smollm2/135M_full_single_device"


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("a.jsonl").write_text('{"text": "a"}\n')


def errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["validate", NAME, *words]) == 2
    return capsys.readouterr().err


def test_a_valid_config_says_what_it_does(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["dataset=a.jsonl", f"model={tiny_model_dir}", "max_seq_len=512", "output_dir=out/x"]
    assert main(["validate", NAME, *words]) == 0
    assert capsys.readouterr().out == (
        f"{NAME} is valid: full_finetune_single_device of {tiny_model_dir} on a.jsonl into out/x\n"
        "checked: keys, values, combinations, and that paths are there. Data and model weren't "
        "read: --full does all that a run does before step 1\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        [NAME, "epochs=2"],
        ["--config", NAME, "epochs=2"],
        ["--config", NAME, "full_finetune_single_device", "epochs=2"],
        ["epochs=2", "--config", NAME],
    ],
)
def test_the_config_may_stand_where_it_stands_for_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *words]) == 0
    assert f"{NAME} is valid" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["validate", "data show"])
def test_a_missing_config_is_told_with_the_form(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "epochs=2"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: the config is missing. Say: legato {verb} CONFIG [key=value ...]."
    )


@pytest.mark.parametrize(
    ("words", "typed", "meant"),
    [
        (["epochs", "=", "5"], "epochs = 5", "epochs=5"),
        (["epochs=", "5"], "epochs= 5", "epochs=5"),
        (["epochs", "=5"], "epochs =5", "epochs=5"),
        (["batch_size=2", "optimizer.lr", "=", "1e-4"], "optimizer.lr = 1e-4", "optimizer.lr=1e-4"),
        (["epochs", "="], "epochs =", "epochs="),
    ],
)
def test_spaces_around_the_equals_sign_are_told(words: list[str], typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_words(words)
    assert str(caught.value) == f"{typed}: write {meant}, without spaces around ="


def test_an_empty_value_is_one() -> None:
    assert split_words(["lora_target_modules=", "epochs=2"]) == (
        None,
        ["lora_target_modules=", "epochs=2"],
    )


@pytest.mark.parametrize("name", ["org/name", "smollm3"])
def test_a_hub_model_that_is_not_cached_is_no_mistake_and_said(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model={name}", "datasets=[{path: a.jsonl}, {path: orders}]"]
    assert main(["validate", NAME, *words]) == 0
    nobody = "so it is taken for a name on the hub; nobody has looked there, --full does"
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"model: {name} is no folder here, {nobody}",
        f"datasets.1.path: orders is no file or folder here, {nobody}",
    ]


def test_a_length_over_the_models_limit_is_refused(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model={tiny_model_dir}", "max_seq_len=513"]
    assert errors(words, capsys) == (
        f"error: command line: max_seq_len: 513 is over the limit of {tiny_model_dir}, 512 tokens. "
        "Leave it out or set at most 512\n"
    )
    assert main(["validate", NAME, words[0], "~max_seq_len"]) == 0


def test_everything_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    told = errors(
        [
            "model=./nowhere",
            "datasets.0.path=b.jsonl",
            "datasets.1.path=data/*.json",
            "datasets.2.path=./no_folder",
            "datasets.3.path=org/name",
            "datasets.4.path=file",
            "datasets.5.path=https://example.org/a.jsonl",
            "chat_template=t.jinja",
            "resume_from_checkpoint=out/step_5",
            "output_dir=file/out",
        ],
        capsys,
    )
    assert told.splitlines() == [
        "error: 9 problems",
        "  command line: model: ./nowhere: there is no such folder.",
        f"  command line: datasets.0.path: b.jsonl: no such file or folder; looked for "
        f"{Path.cwd()}/b.jsonl, as relative paths start at the current folder",
        f"  command line: datasets.1.path: no file matches data/*.json; looked for "
        f"{Path.cwd()}/data/*.json, as relative paths start at the current folder",
        f"  command line: datasets.2.path: ./no_folder: no such file or folder; looked for "
        f"{Path.cwd()}/no_folder, as relative paths start at the current folder",
        "  command line: datasets.4.path: file is no file of data. Known: .jsonl, .ndjson, .json, "
        ".csv, .tsv, .parquet, .arrow, also with .gz or .zst",
        "  command line: datasets.5.path: https://example.org/a.jsonl: data is read from files, "
        "folders and data sets of the hub (owner/name), not from addresses. Download it and give "
        "the file's path",
        "  command line: chat_template: t.jinja: expected auto, alpaca, chatml or a file",
        "  command line: resume_from_checkpoint: out/step_5: no such folder",
        f"  command line: output_dir: {Path('file').absolute()} is a file",
    ]


def test_paths_that_lead_nowhere_are_told_beside_wrong_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = errors(["model=./nowhere", "datasets.0.path=b.jsonl", "epochs=x", "max_step=3"], capsys)
    assert [line.split(":")[1].strip() for line in told.splitlines()[1:]] == [
        "epochs",
        "max_step",
        "model",
        "datasets.0.path",
    ]


def test_an_output_dir_without_the_right_to_write_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = Path("locked").absolute()
    locked.mkdir()
    # The system's answer is replaced and not the folder's mode: root may write whatever that says.
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (locked, os.W_OK))
    told = errors(["output_dir=locked/not/yet"], capsys)
    assert told == f"error: command line: output_dir: {locked} can't be written to\n"


def test_a_folder_without_config_json_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    told = errors(["model=empty"], capsys)
    assert told.startswith("error: command line: model: ")
    assert "empty: has no config.json" in told


def test_a_family_that_cannot_be_trained_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("moe").mkdir()
    Path("moe/config.json").write_text('{"model_type": "mixtral", "architectures": ["X"]}')
    assert "model: mixtral is a mixture of experts" in errors(["model=moe"], capsys)


def test_validate_imports_no_torch(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from legato.cli.main import main; "
        f"code = main(['validate', {NAME!r}, 'dataset=a.jsonl', 'model={tiny_model_dir}', "
        "'max_seq_len=100']); "
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys(); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_words_are_a_recipe_and_overrides() -> None:
    assert split_words(["full_finetune_single_device", "a=b", "~c", "d.e=f g"]) == (
        "full_finetune_single_device",
        ["a=b", "~c", "d.e=f g"],
    )
    assert split_words([]) == (None, [])


DASHES = "a key of the config is given without dashes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "b: expected key=value or ~key; the recipe is a already"),
        (["--epochs", "3"], f"--epochs: {DASHES}: epochs=VALUE"),
        (["--epochs=3"], f"--epochs=3: {DASHES}: epochs=3"),
        (["--save-steps=3"], f"--save-steps=3: {DASHES}: save_steps=3"),
        (["--accept-change"], "--accept-change: no such option. Did you mean --accept-changes?"),
        (
            ["--nproc_per_nod=2"],
            "--nproc_per_nod=2: no such option. Did you mean --nproc-per-node?",
        ),
        (["-x"], "-x: no such option. Keys of a config are given as key=value"),
    ],
)
def test_words_that_fit_nowhere_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_words(words)
    assert str(caught.value) == message


def test_a_recipe_must_exist_and_agree() -> None:
    with pytest.raises(UsageError) as caught:
        read_config(NAME, ["full_finetune_single_devise"])
    assert str(caught.value) == (
        "full_finetune_single_devise: no such recipe. Did you mean full_finetune_single_device?"
    )
    with pytest.raises(UsageError, match=r"^epochs: its value is missing: epochs=VALUE$"):
        read_config(NAME, ["epochs"])
    with pytest.raises(ConfigError, match="Leave one of them out"):
        read_config(NAME, ["lora_finetune_single_device"])
    assert read_config(NAME, ["full_finetune_single_device", "epochs=2"]).config.epochs == 2
