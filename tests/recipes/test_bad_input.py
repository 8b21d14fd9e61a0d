"""Bad input: one message that says where, what was expected, what was found, and no debris."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.runs import RECIPES, legato, write_config
from tests.helpers.tiny import build_tokenizer, write_model

Case = Callable[[Path, Path], list[str]]


def no_model(folder: Path, model: Path) -> list[str]:
    return ["model=nowhere/at/all/folder"]


def model_without_weights(folder: Path, model: Path) -> list[str]:
    bare = folder / "bare"
    shutil.copytree(model, bare)
    (bare / "model.safetensors").unlink()
    return [f"model={bare}"]


def broken_header(folder: Path, model: Path) -> list[str]:
    broken = folder / "broken"
    shutil.copytree(model, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    return [f"model={broken}"]


def truncated_weights(folder: Path, model: Path) -> list[str]:
    broken = folder / "truncated"
    shutil.copytree(model, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(3000)
    return [f"model={broken}"]


def broken_line(folder: Path, model: Path) -> list[str]:
    data = folder / "broken.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", \n')
    return [f"datasets.0.path={data}"]


def unknown_format(folder: Path, model: Path) -> list[str]:
    return ["datasets.0.type=alpacca"]


def wrong_columns(folder: Path, model: Path) -> list[str]:
    return ["datasets.0.columns={prompt: question}"]


def empty_data(folder: Path, model: Path) -> list[str]:
    data = folder / "empty.jsonl"
    data.write_text("")
    return [f"datasets.0.path={data}"]


def no_data(folder: Path, model: Path) -> list[str]:
    return ["datasets.0.path=absent.jsonl"]


def template_that_drops_the_answer(folder: Path, model: Path) -> list[str]:
    template = folder / "bad.jinja"
    template.write_text(
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}"
    )
    return [f"chat_template={template}"]


def too_long(folder: Path, model: Path) -> list[str]:
    return ["max_seq_len=100000"]


def all_rows_too_long(folder: Path, model: Path) -> list[str]:
    return ["max_seq_len=8"]


def output_is_a_file(folder: Path, model: Path) -> list[str]:
    (folder / "occupied").write_text("")
    return [f"output_dir={folder / 'occupied'}"]


def deep_row(folder: Path, model: Path) -> list[str]:
    data = folder / "deep.jsonl"
    data.write_text('{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}\n")
    return [f"datasets.0.path={data}"]


def template_that_overflows(folder: Path, model: Path) -> list[str]:
    template = folder / "endless.jinja"
    template.write_text("{% for i in range(10 ** 9) %}{% endfor %}")
    return [f"chat_template={template}"]


def fewer_tokens_than_the_tokenizer_knows(folder: Path, model: Path) -> list[str]:
    narrow = write_model(folder / "narrow", vocab_size=259)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["mugs"])
    tokenizer.save_pretrained(narrow)
    return [f"model={narrow}"]


def metrics_are_a_folder(folder: Path, model: Path) -> list[str]:
    (folder / "out" / "metrics.jsonl").mkdir(parents=True)
    return []


def metrics_are_a_pipe(folder: Path, model: Path) -> list[str]:
    (folder / "out").mkdir()
    os.mkfifo(folder / "out" / "metrics.jsonl")
    return []


def config_lies_in_output_dir(folder: Path, model: Path) -> list[str]:
    return [f"output_dir={folder}"]


def lock_is_a_folder(folder: Path, model: Path) -> list[str]:
    (folder / "out" / ".lock").mkdir(parents=True)
    return []


def unknown_key(folder: Path, model: Path) -> list[str]:
    return ["sav_every_n_train_steps=3"]


def torchrun_option(folder: Path, model: Path) -> list[str]:
    return ["--nproc_per_node=2"]


CASES: list[tuple[Case, int, list[str]]] = [
    (no_model, 2, ["nowhere/at/all/folder"]),
    (model_without_weights, 1, ["bare", "weights"]),
    (broken_header, 1, ["model.safetensors"]),
    (truncated_weights, 1, ["model.safetensors"]),
    (broken_line, 1, ["broken.jsonl:2"]),
    (unknown_format, 2, ["datasets.0.type", "alpaca"]),
    (wrong_columns, 1, ["question", "completion"]),
    (empty_data, 1, ["empty.jsonl"]),
    (no_data, 2, ["absent.jsonl", "no such file"]),
    (template_that_drops_the_answer, 1, ["template"]),
    (too_long, 2, ["max_seq_len", "512"]),
    (all_rows_too_long, 1, ["max_seq_len", "8"]),
    (output_is_a_file, 2, ["occupied"]),
    (deep_row, 1, ["deep.jsonl:1", "more than 100 levels"]),
    (template_that_overflows, 1, ["orders.jsonl:1", "refuses", "OverflowError"]),
    (
        fewer_tokens_than_the_tokenizer_knows,
        1,
        ["orders.jsonl:1", "'mugs' (id 259)", "the model has 259"],
    ),
    (metrics_are_a_folder, 2, ["out/metrics.jsonl is a folder"]),
    (metrics_are_a_pipe, 2, ["out/metrics.jsonl is a pipe", "rename or remove it"]),
    (config_lies_in_output_dir, 2, ["/run.yaml is your own file", "another output_dir"]),
    (lock_is_a_folder, 1, ["out/.lock is a folder", "Move it away"]),
    (unknown_key, 2, ["save_every_n_train_steps"]),
    (torchrun_option, 2, ["2 processes", "_finetune_distributed"]),
]


VERBS = (["run"], ["validate", "--full"])


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below, to the byte; its lock excepted, which names the latest process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("case", "code", "words"), CASES, ids=[case.__name__ for case, *_ in CASES]
)
def test_bad_input_is_one_message_before_step_1_and_leaves_nothing(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    case: Case,
    code: int,
    words: list[str],
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    arguments = case(tmp_path, tiny_model_dir)
    before = sorted(tmp_path.glob("**/*"))
    assert legato("run", "--config", config, *arguments) == code
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert "Traceback" not in message
    assert all(word in message for word in words), message
    assert sorted(tmp_path.glob("**/*")) == before


@pytest.mark.parametrize(
    "case", [metrics_are_a_folder, config_lies_in_output_dir, lock_is_a_folder]
)
def test_validate_says_of_output_dir_what_a_run_says(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=RECIPES[0])
    arguments = ["--config", config, *case(tmp_path, tiny_model_dir)]
    ends = [(legato(*verb, *arguments), capsys.readouterr().err) for verb in VERBS]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_disk_with_no_room_for_one_checkpoint_is_one_message_and_nothing_is_written(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    recipe: str,
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    before = contents(tmp_path)
    ask = os.statvfs

    def nearly_full(path: str | Path) -> os.statvfs_result:
        values = list(ask(path))
        values[1], values[4] = 512, 2  # fragment size in bytes, free fragments
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    assert legato(*verb, "--config", config) == 3
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert "Traceback" not in message
    assert f"{tmp_path / 'out'} has " in message
    assert "free, one checkpoint takes " in message
    assert contents(tmp_path) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "shapes"),
    [(RECIPES[0], ("(272, 32)", "(272, 48)")), (RECIPES[1], ("(4, 32)", "(4, 48)"))],
)
def test_a_checkpoint_of_another_model_is_refused_with_shapes_and_left_as_it_is(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    shapes: tuple[str, str],
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=recipe)
    assert legato("run", "--config", config, "max_steps=1") == 0
    other = write_model(tmp_path / "wide", hidden_size=48)
    before = contents(tmp_path)
    capsys.readouterr()
    arguments = ["max_steps=2", f"model={other}", "--accept-changes"]
    assert legato("run", "--config", config, *arguments) == 1
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    assert all(word in message for word in ("step_1", *shapes)), message
    assert contents(tmp_path) == before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
            "mixtral is a mixture of experts whose file keys aren't the model's",
        ),
        (
            {"model_type": "gemma3", "vision_config": {}},
            "gemma3 also reads images or sound; its file keys aren't the model's",
        ),
    ],
    ids=["experts", "images"],
)
def test_a_model_family_whose_file_keys_differ_is_refused_by_name(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    changes: dict[str, object],
    said: str,
) -> None:
    model = tmp_path / "other"
    shutil.copytree(tiny_model_dir, model)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | changes))
    config = write_config(tmp_path, model=model, recipe=recipe)
    assert legato("run", "--config", config) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_row_that_makes_the_loss_infinite_stops_the_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = write_model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("K")] = float("inf")  # only rows with a K are touched
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert torch.isinf(weights["model.embed_tokens.weight"]).any()
    config = write_config(tmp_path, model=model, recipe=RECIPES[0])
    assert legato("run", "--config", config) == 1
    message = capsys.readouterr().err
    assert "orders.jsonl:" in message
    assert "on_nonfinite=skip" in message
    assert "go on from an earlier step (resume_from_checkpoint=<its folder>" in message
