"""What lies under a config's names is what the run was trained on, or it says so."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from legato import load_config
from legato.data.stream import StreamLoader
from legato.errors import ResumeError
from legato.parallel.world import World
from legato.recipes.data import build_run_data
from legato.recipes.inputs import check_inputs, judged_by_contents
from legato.train.state import TrainState
from tests.helpers import tiny
from tests.helpers.runs import RECIPES, legato, losses, steps_in, write_config

FULL, LORA = RECIPES


def inputs_of(step: Path) -> dict[str, dict[str, object]]:
    stored = json.loads((step / "state/trainer.json").read_text())["parts"]["trainer"]
    return dict(stored["facts"]["inputs"])


def other_weights(model: Path, data: Path) -> None:
    """The same names and shapes, as another fine-tune of the model has."""
    file = model / "model.safetensors"
    weights = {name: tensor * 1.01 for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def other_config(model: Path, data: Path) -> None:
    """The same shapes computed with otherwise."""
    values = json.loads((model / "config.json").read_text())
    values["rms_norm_eps"] = 1e-3
    (model / "config.json").write_text(json.dumps(values))


def other_template(model: Path, data: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "robot"))


def other_tokenizer(model: Path, data: Path) -> None:
    """Two tokens have changed places."""
    values = json.loads((model / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (model / "tokenizer.json").write_text(json.dumps(values))


def edited_row(model: Path, data: Path) -> None:
    data.write_text(data.read_text().replace("Kyoto", "Tokyo", 1))


def appended_row(model: Path, data: Path) -> None:
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([*rows, rows[0]]))


def inserted_row(model: Path, data: Path) -> None:
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([rows[-1], *rows]))


def digest(entry: dict[str, object]) -> str:
    return str(entry["digest"])[:17]


def begin(folder: Path, recipe: str, **changes: object) -> tuple[list[object], Path, Path]:
    """A run of 5 steps that was ended after step 1: its command, its model and its data."""
    model = tiny.write_model(folder / "model")
    endless = {} if "streaming" in changes else {"epochs": None}
    config = write_config(folder, model=model, recipe=recipe, max_steps=5, **endless, **changes)
    run = ["run", "--config", config]
    assert legato(*run, "stop_after_step=1") == 0
    return run, model, folder / "orders.jsonl"


VERBS = (["run"], ["validate", "--full"])
Swap = Callable[[Path, Path], None]
STREAM = {"streaming": True, "shuffle_buffer_size": 4}

REFUSED: list[tuple[str, Swap, dict[str, object], list[str]]] = [
    (LORA, other_weights, {}, ["base_weights"]),
    (LORA, other_weights, {"quantize_base": "nf4"}, ["base_weights"]),
    (FULL, other_config, {}, ["model_config"]),
    (FULL, other_template, {}, ["chat_template", "datasets.0"]),
    (FULL, other_tokenizer, {"packing": True}, ["tokenizer", "datasets.0"]),
    (LORA, other_tokenizer, STREAM, ["tokenizer", "datasets.0"]),
    (LORA, edited_row, {}, ["datasets.0"]),
    (FULL, appended_row, {}, ["datasets.0"]),
    (FULL, inserted_row, STREAM, ["datasets.0"]),
]


@pytest.mark.parametrize(
    ("recipe", "swap", "changes", "names"),
    REFUSED,
    ids=[f"{recipe[:4]}-{swap.__name__}-{'-'.join(more)}" for recipe, swap, more, _ in REFUSED],
)
def test_what_was_swapped_under_its_name_is_refused_until_it_is_accepted_and_then_recorded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    swap: Swap,
    changes: dict[str, object],
    names: list[str],
) -> None:
    run, model, data = begin(tmp_path, recipe, **changes)
    out = tmp_path / "out"
    swap(model, data)
    capsys.readouterr()
    assert legato(*run) == 2
    message = capsys.readouterr().err
    assert f"error: {out} holds a run that was trained on other things than are there" in message
    listed = [line.split()[0] for line in message.splitlines() if line.startswith("  ")]
    assert listed == names
    assert steps_in(out) == [1]
    assert legato(*run, "--accept-changes", "stop_after_step=2") == 0
    said = capsys.readouterr().err
    assert all(f"changed since the checkpoint, accepted: {name} (" in said for name in names)
    assert legato(*run) == 0  # and from then on nothing has changed
    assert "changed since" not in capsys.readouterr().err
    assert steps_in(out) == [1, 2, 5]
    assert sorted(losses(out)) == [1, 2, 3, 4, 5]


def test_the_message_names_both_bases_and_says_what_accepting_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model, data = begin(tmp_path, LORA)
    [was] = {digest(inputs_of(tmp_path / "out/step_1")["base_weights"])}
    num_bytes = (model / "model.safetensors").stat().st_size
    other_weights(model, data)
    num_bytes_now = (model / "model.safetensors").stat().st_size
    note = json.loads((tmp_path / "out/step_1/legato_base.json").read_text())
    assert note["digest"].startswith(was)
    capsys.readouterr()
    ends = [(legato(*verb, *run[1:]), capsys.readouterr().err) for verb in VERBS]
    assert ends[0] == ends[1]
    code, message = ends[0]
    assert code == 2
    assert f"  base_weights ({model}): was {num_bytes:,} bytes, {was}, now " in message
    assert f"now {num_bytes_now:,} bytes, xxh3_128:" in message
    assert "--accept-changes goes on all the same: the adapter goes on upon weights" in message
    assert "another output_dir (or resume_from_checkpoint=false and --start-over)" in message


def test_what_means_the_same_is_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files copied and laid out otherwise; a stream read at the same place."""
    run, model, data = begin(tmp_path, LORA)
    values = json.loads((model / "config.json").read_text()) | {"transformers_version": "6.0"}
    (model / "config.json").write_text(json.dumps(dict(reversed(values.items()))))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("\n".join(json.dumps(row, indent=None, separators=(",", ":")) for row in rows))
    capsys.readouterr()
    assert legato(*run) == 0
    assert "changed since" not in capsys.readouterr().err


def test_the_same_things_by_another_path_go_on_and_are_recorded_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = tiny.write_orders(tmp_path / "held_out.jsonl", num_rows=3)
    run, model, data = begin(tmp_path, LORA, eval_datasets=[{"path": str(held_out)}])
    shutil.copytree(model, tmp_path / "mount" / "base")
    (tmp_path / "rows.jsonl").symlink_to(data)
    shutil.copy(model / "chat_template.jinja", tmp_path / "mine.jinja")
    monkeypatch.chdir(tmp_path)
    elsewhere = [
        "model=./mount/base",
        "datasets.0.path=rows.jsonl",
        "eval_datasets.0.path=./held_out.jsonl",
        "chat_template=mine.jinja",
    ]
    capsys.readouterr()
    assert legato(*run, *elsewhere) == 0
    said = capsys.readouterr().err
    assert "changed since" not in said
    assert "evaluation: ./held_out.jsonl: prompt_completion (detected from its columns), 3" in said
    assert sorted(line for line in said.splitlines() if line.endswith("the same contents")) == [
        "chat_template: was auto, now mine.jinja: the same contents",
        f"datasets.0.path: was {data}, now rows.jsonl: the same contents",
        f"eval_datasets.0.path: was {held_out}, now ./held_out.jsonl: the same contents",
        f"model: was {model}, now ./mount/base: the same contents",
    ]
    step = tmp_path / "out/step_5"
    assert inputs_of(step)["tokenizer"]["path"] == "./mount/base"
    adapter = json.loads((step / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "mount/base")


@pytest.mark.parametrize(
    ("recipe", "swap", "key", "names", "effect"),
    [
        (LORA, other_weights, "model", ["base_weights"], "the adapter goes on upon weights"),
        (FULL, other_weights, "model", ["base_weights"], "not from the model that is named now"),
        (FULL, other_config, "model", ["model_config"], "in a model that computes otherwise"),
        (FULL, edited_row, "datasets.0.path", ["datasets.0"], "some rows of this epoch come twice"),
    ],
)
def test_other_things_by_another_path_are_refused_with_both_paths(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    swap: Swap,
    key: str,
    names: list[str],
    effect: str,
) -> None:
    run, model, data = begin(tmp_path, recipe)
    copied = Path(shutil.copytree(model, tmp_path / "other")), tmp_path / "other.jsonl"
    shutil.copy(data, copied[1])
    swap(*copied)
    was, now = (model, copied[0]) if key == "model" else (data, copied[1])
    capsys.readouterr()
    assert legato(*run, f"{key}={now}") == 2
    message = capsys.readouterr().err
    listed = [line for line in message.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == [f"{name}:" for name in names]
    assert all(f": was {was} (" in line and f", now {now} (" in line for line in listed)
    assert effect in message
    assert legato(*run, f"{key}={now}", "--accept-changes", "stop_after_step=2") == 0
    assert "the same contents" not in capsys.readouterr().err


def test_a_stream_by_another_path_goes_on_aloud_if_its_block_and_sizes_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model, data = begin(tmp_path, FULL, **STREAM)
    copy = tmp_path / "copy.jsonl"
    shutil.copy(data, copy)
    run.append(f"datasets.0.path={copy}")
    for swap, changed in [(appended_row, ": was "), (inserted_row, ", before: ")]:
        swap(model, copy)
        capsys.readouterr()
        assert legato(*run) == 2
        assert f"{changed}{data}" in capsys.readouterr().err
        shutil.copy(data, copy)
    assert legato(*run) == 0
    assert (
        f"datasets.0.path: was {data}, now {copy}: the block where training stands and the files' "
        "sizes are the same; no more of a stream is compared" in capsys.readouterr().err
    )


def test_a_stream_that_came_from_the_hub_has_no_sizes_and_its_block_decides(
    tmp_path: Path, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_config(tmp_path, model=tiny_model_dir, recipe=LORA, max_steps=5, **STREAM)
    config, started = load_config(file).config, "2026-01-31"
    data = build_run_data(
        config,
        start_date=date.fromisoformat(started),
        world=World.single("cpu"),
        global_batch_size=4,
    )
    assert isinstance(data.loader, StreamLoader)
    with closing(data.loader), caplog.at_level(logging.WARNING):
        inputs = {**data.inputs, "datasets.0": {"path": "org/orders"}}
        state = TrainState(facts={"start_date": started, "inputs": inputs})
        assert "datasets.0.path" not in judged_by_contents(state)  # no block was recorded
        state.data_place = {"first_row": 0, "digest": data.loader.digest}
        assert "datasets.0.path" in judged_by_contents(state)
        check_inputs(state, config, data, accept=False)
        [line] = caplog.messages
        assert "was org/orders, now " in line
        assert "the block where training stands is the same; no more of a stream" in line
        state.data_place["digest"] = "xxh3_128:0"
        with pytest.raises(ResumeError, match="before: org/orders"):
            check_inputs(state, config, data, accept=False)


def test_a_stream_cannot_grow_inside_the_block_where_training_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model, data = begin(tmp_path, FULL, streaming=True)
    appended_row(model, data)
    capsys.readouterr()
    assert legato(*run) == 2
    message = capsys.readouterr().err
    assert "rows were added inside the block of 10,000 rows where training stands" in message
    assert "a stream can grow only behind it" in message


def test_weights_that_a_step_holds_itself_may_be_others_where_they_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model, data = begin(tmp_path, FULL)
    other_weights(model, data)
    capsys.readouterr()
    assert legato(*run) == 0
    assert "changed since" not in capsys.readouterr().err


def test_a_stream_may_grow_ahead_and_rows_to_evaluate_on_may_change_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tiny.write_orders(tmp_path / "held_out.jsonl", num_rows=3)
    run, model, data = begin(tmp_path, FULL, **STREAM, eval_datasets=[{"path": str(held_out)}])
    before = data.stat().st_size
    appended_row(model, data)
    edited_row(model, held_out)
    capsys.readouterr()
    assert legato(*run) == 0
    said = capsys.readouterr().err
    assert (
        f"changed since the checkpoint: datasets.0 ({data}): was 1 file, {before:,} bytes, "
        f"now 1 file, {data.stat().st_size:,} bytes" in said
    )
    assert f"changed since the checkpoint: eval_datasets.0 ({held_out}): was 3 rows" in said
