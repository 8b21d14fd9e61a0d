"""Files, aliases and command lines -> one config, or every mistake at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from legato.config.catalog import HUB
from legato.config.load import LoadedConfig, dump_yaml, load_config
from legato.config.schema import CompileConfig, Schedule
from legato.errors import ConfigError

FULL = """\
recipe: full_finetune_single_device
model: some/model
datasets:
  - path: a.jsonl
    type: alpaca
optimizer: {name: adamw, lr: 2e-5}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Loads text as ``my.yaml``, with overrides."""
    monkeypatch.chdir(tmp_path)

    def _load(text: str, *overrides: str) -> LoadedConfig:
        Path("my.yaml").write_text(text, encoding="utf-8")
        return load_config("my.yaml", overrides)

    return _load


def problems(load, text: str, *overrides: str) -> list[str]:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return caught.value.problems


def test_a_short_config_gets_defaults_and_a_place(load) -> None:  # type: ignore[no-untyped-def]
    loaded = load(FULL)
    assert loaded.name == "my"
    config = loaded.config
    assert config.output_dir == "out/my"
    assert config.optimizer.lr == 2e-5
    assert config.max_seq_len == 2048
    assert config.save_every_n_train_steps == 500
    assert config.compile is False
    assert config.datasets[0].path == "a.jsonl"


def test_values_of_text_fields_stay_what_was_typed(load) -> None:  # type: ignore[no-untyped-def]
    text = FULL.replace("some/model", "012").replace("a.jsonl", "1:30").replace("alpaca", "text")
    config = load(text + "output_dir: off\n").config
    assert (config.model, config.datasets[0].path, config.output_dir) == ("012", "1:30", "off")


def test_switches_and_numbers_are_read_by_their_field(load) -> None:  # type: ignore[no-untyped-def]
    config = load(
        FULL + "train_on_inputs: on\nverify_on_load: yes\nsave_at_epoch_end: False\nseed: 007\n"
        "clip_grad_norm: None\nepochs: 3\nbatch_size: '4'\n"
    ).config
    assert (config.train_on_inputs, config.verify_on_load, config.save_at_epoch_end) == (
        True,
        True,
        False,
    )
    assert (config.seed, config.clip_grad_norm, config.epochs, config.batch_size) == (7, None, 3, 4)


def test_interpolation_follows_other_keys(load) -> None:  # type: ignore[no-untyped-def]
    config = load(FULL + "chat_template: ${output_dir}/t.jinja\nbatch_size: ${seed}\nseed: 3\n")
    assert config.config.chat_template == "out/my/t.jinja"
    assert config.config.batch_size == 3


def test_unions_take_their_forms(load) -> None:  # type: ignore[no-untyped-def]
    config = load(
        FULL + "save_every_n_train_steps: {first: 10, factor: 2, max_interval: 500}\n"
        "compile: {mode: reduce-overhead}\nenable_activation_checkpointing: 2\n"
        "log_every_n_steps: 5\nresume_from_checkpoint: False\nloggers: tensorboard\n"
    ).config
    assert config.save_every_n_train_steps == Schedule(first=10, factor=2, max_interval=500)
    assert config.compile == CompileConfig(mode="reduce-overhead")
    assert config.enable_activation_checkpointing == 2
    assert config.log_every_n_steps == 5
    assert config.resume_from_checkpoint is False
    assert config.loggers == ["tensorboard"]


@pytest.mark.parametrize(
    ("typed", "value"),
    [("true", "auto"), ("True", "auto"), ("auto", "auto"), ("false", False), ("out/a", "out/a")],
)
def test_resume_from_checkpoint_forms(load, typed: str, value: object) -> None:  # type: ignore[no-untyped-def]
    assert load(FULL, f"resume_from_checkpoint={typed}").config.resume_from_checkpoint == value


def test_overrides_apply_one_by_one(load) -> None:  # type: ignore[no-untyped-def]
    config = load(
        FULL + "epochs: 3\nval_set_size: 5\n",
        "datasets.0.path=b=c.jsonl",
        "datasets.1.path=d.jsonl",
        "optimizer.lr=1e-4",
        "lr_scheduler.num_warmup_steps=3",
        "save_every_n_train_steps.first=2",
        "save_every_n_train_steps.max_interval=9",
        "~epochs",
        "~val_set_size",
        "compile=True",
    ).config
    assert [d.path for d in config.datasets] == ["b=c.jsonl", "d.jsonl"]
    assert config.datasets[0].type == "alpaca"
    assert (config.optimizer.lr, config.lr_scheduler.num_warmup_steps) == (1e-4, 3)
    assert config.save_every_n_train_steps == Schedule(first=2, max_interval=9)
    assert (config.epochs, config.val_set_size, config.compile) == (1, 0, True)


def test_a_mapping_on_the_command_line_replaces_the_files(load) -> None:  # type: ignore[no-untyped-def]
    text = FULL.replace("type: alpaca", "columns: {prompt: a}").replace("adamw", "sgd")
    config = load(text, "optimizer={lr: 3}", "datasets.0.columns={completion: b}").config
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw", 3.0)
    assert config.datasets[0].columns == {"completion": "b"}


@settings(max_examples=60, deadline=None)
@given(value=st.text(st.characters(codec="utf-8", exclude_characters="$"), min_size=1))
def test_any_text_arrives_as_it_was_typed(value: str) -> None:
    assume(value[0] not in "[{'\"" and value not in ("null", "Null", "NULL", "None", "~", "???"))
    typed = load_config("smollm2/135M_full_single_device", [f"output_dir={value}"])
    assert typed.config.output_dir == value


def test_dataset_on_the_command_line_replaces_the_whole_list(load) -> None:  # type: ignore[no-untyped-def]
    two = FULL.replace("optimizer:", "  - path: b.jsonl\noptimizer:")
    (only,) = load(two, "dataset=c.jsonl", "dataset.columns.prompt=q").config.datasets
    assert (only.path, only.type, only.columns) == ("c.jsonl", None, {"prompt": "q"})
    (only,) = load(two, "dataset.path=d.jsonl", "dataset.type=text").config.datasets
    assert (only.path, only.type) == ("d.jsonl", "text")


def test_dataset_in_a_file_is_a_list_of_one(load) -> None:  # type: ignore[no-untyped-def]
    text = FULL.replace("datasets:\n  - path: a.jsonl\n    type: alpaca", "dataset: a.jsonl")
    assert [d.path for d in load(text).config.datasets] == ["a.jsonl"]
    text = FULL.replace("datasets:\n  - path", "dataset:\n    path")
    assert load(text).config.datasets[0].type == "alpaca"


def test_dataset_may_be_a_list_of_files(load) -> None:  # type: ignore[no-untyped-def]
    listed = "dataset: [a.jsonl, {path: b.jsonl, type: text}]"
    text = FULL.replace("datasets:\n  - path: a.jsonl\n    type: alpaca", listed)
    for loaded in (load(text), load(FULL, "dataset=[a.jsonl, {path: b.jsonl, type: text}]")):
        found = [(dataset.path, dataset.type) for dataset in loaded.config.datasets]
        assert found == [("a.jsonl", None), ("b.jsonl", "text")]


def test_other_spellings_are_taken(load) -> None:  # type: ignore[no-untyped-def]
    text = """\
recipe: lora_finetune_single_device
model_name_or_path: m
dataset: a.jsonl
max_length: 100
per_device_train_batch_size: 2
num_train_epochs: 3
learning_rate: 1e-4
max_grad_norm: 0.5
lora_r: 4
load_in_4bit: false
save_steps: 7
save_total_limit: 2
val_set_size: 3
eval_steps: 5
report_to: [wandb]
torch_compile: true
gradient_checkpointing: true
"""
    config = load(text).config
    assert config.model == "m"
    assert (config.max_seq_len, config.batch_size, config.epochs) == (100, 2, 3)
    assert (config.optimizer.lr, config.clip_grad_norm, config.lora_rank) == (1e-4, 0.5, 4)
    assert (config.quantize_base, config.save_every_n_train_steps) == ("none", 7)
    assert (config.keep_last_n_checkpoints, config.run_val_every_n_steps) == (2, 5)
    assert (config.loggers, config.compile) == (["wandb"], True)
    assert config.enable_activation_checkpointing is True


def test_a_command_line_may_spell_a_key_otherwise_than_the_file(load) -> None:  # type: ignore[no-untyped-def]
    config = load(FULL + "save_every_n_train_steps: 3\n", "save_steps=4", "learning_rate=1").config
    assert (config.save_every_n_train_steps, config.optimizer.lr) == (4, 1.0)


def test_a_malformed_reference_on_the_command_line_is_told(load) -> None:  # type: ignore[no-untyped-def]
    (told,) = problems(load, FULL, "output_dir=${oops")
    assert told.startswith("command line: output_dir=${oops: no viable alternative at input")


def test_both_spellings_in_one_layer_are_an_error(load) -> None:  # type: ignore[no-untyped-def]
    text = FULL + "learning_rate: 1\nsave_steps: 2\nsave_every_n_steps: 3\n"
    assert problems(load, text) == [
        "my.yaml:7: learning_rate: optimizer.lr is set as well; keep one",
        "my.yaml:8: save_steps: save_every_n_steps is set as well; keep one",
    ]
    assert problems(
        load, FULL, "epochs=1", "num_train_epochs=2", "dataset=x", "datasets.0.type=text"
    ) == [
        "command line: num_train_epochs=2: epochs is set as well; keep one",
        "command line: datasets.0.type=text: dataset is set as well; keep one",
    ]


def test_every_mistake_is_told_at_once_with_its_place(load) -> None:  # type: ignore[no-untyped-def]
    text = """\
recipe: full_finetune_single_device
sav_every_n_train_steps: 3
epochs: two
dtype: bf61
datasets:
  - path: x.json
    typ: alpaca
optimizer: {name: adamw, lr: -1}
keep_last_n_checkpoints: 0
device: gpu
compile: {scop: block}
seed: ${nowhere}
loggers: [tensorbord]
"""
    assert problems(load, text, "batch_size=x", "lr=3", "save_steps.first=0", "a") == [
        "my.yaml:2: sav_every_n_train_steps: unknown key. Did you mean save_every_n_train_steps?",
        "my.yaml:3: epochs: expected a whole number, found 'two'",
        "my.yaml:4: dtype: expected 'bf16' or 'fp32', found 'bf61'. Did you mean bf16?",
        "my.yaml:7: datasets.0.typ: unknown key. Did you mean type?",
        "my.yaml:8: optimizer.lr: expected a number above 0, found '-1'",
        "my.yaml:9: keep_last_n_checkpoints: expected a number of at least 1, found '0'",
        "my.yaml:10: device: expected auto (cuda, else mps, else cpu), cpu, cuda, cuda:<n> or mps, "
        "found 'gpu'",
        "my.yaml:11: compile.scop: unknown key. Did you mean scope?",
        "my.yaml:12: seed: Interpolation key 'nowhere' not found",
        "my.yaml:13: loggers.0: expected 'tensorboard', 'wandb', 'mlflow' or 'trackio', "
        "found 'tensorbord'. Did you mean tensorboard?",
        "command line: a: expected key=value or ~key",
        "my.yaml: model: missing (Hub id, model folder or step folder; a relative path starts at "
        "the current folder)",
        "command line: batch_size: expected a whole number, found 'x'",
        "command line: save_steps.first (save_every_n_train_steps.first): expected a number of at "
        "least 1, found '0'",
        "command line: save_steps.max_interval (save_every_n_train_steps.max_interval): missing "
        "(Intervals stop growing here)",
        "command line: lr: unknown key. Did you mean optimizer.lr?",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("base_model: x", "base_model: unknown key. Legato's key is `model`"),
        ("bf16: true", "bf16: unknown key. Legato's key is `dtype`, bf16 or fp32"),
        (
            "warmup_steps: 3",
            "warmup_steps: unknown key. Legato's key is "
            "`lr_scheduler.num_warmup_steps`",
        ),
        (
            "num_warmup_steps: 3",
            "num_warmup_steps: unknown key. Did you mean "
            "lr_scheduler.num_warmup_steps?",
        ),
        ("xyzzy: 3", "xyzzy: unknown key"),
        ("epochs: 1.5", "epochs: expected a whole number, found '1.5'"),
        ("epochs: [1]", "epochs: expected a whole number, found ['1']"),
        ("packing: maybe", "packing: expected true or false, found 'maybe'"),
        ("model: null", "model: expected text, found null"),
        ("chat_template: ''", "chat_template: expected text that isn't empty, found ''"),
        ("lr_scheduler: cosine", "lr_scheduler: expected a mapping, found 'cosine'"),
        (
            "val_set_size: 1.5",
            "val_set_size: expected a share below 1 or a whole number of rows, "
            "found '1.5'",
        ),
        ("clip_grad_norm: .inf", "clip_grad_norm: expected a number, found '.inf'"),
        ("clip_grad_norm: inf", "clip_grad_norm: expected a finite number, found 'inf'"),
        ("lora_target_modules: {}", "lora_target_modules: expected a list, found {}"),
        ("dp_shard: some", "dp_shard: expected 'all', found 'some'"),
        (
            "save_every_n_train_steps: 0",
            "save_every_n_train_steps: expected a number of at least 1, found "
            "'0'",
        ),
        (
            "save_every_n_train_steps: often",
            "save_every_n_train_steps: expected a whole number, found "
            "'often'",
        ),
        ("eval_datasets: x.json", "eval_datasets: expected a list, found 'x.json'"),
        (
            "optimizer: {name: adafactor, lr: 1}",
            "optimizer.name: expected 'adamw', 'adamw_8bit', 'adam' or 'sgd', found 'adafactor'. "
            "Adafactor keeps sums over whole rows",
        ),
        (
            "metric_for_best_model: loss",
            "metric_for_best_model: expected 'eval_loss' or 'train_loss', found 'loss'. "
            "Legato's name is eval_loss",
        ),
        (
            "metric_for_best_model: eval_los",
            "metric_for_best_model: expected 'eval_loss' or 'train_loss', found 'eval_los'. "
            "Did you mean eval_loss?",
        ),
        ("output_dir: ${oops", "output_dir: not a reference to a key: no viable alternative"),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_message(load, line: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    key = line.split(":")[0]
    text = "".join(
        kept for kept in FULL.splitlines(keepends=True) if not kept.startswith(f"{key}:")
    )
    (told,) = problems(load, text + line + "\n")
    assert f": {problem}" in told
    assert told.startswith("my.yaml:")


def test_a_mapping_that_should_be_one_says_what_it_looks_like(load) -> None:  # type: ignore[no-untyped-def]
    (told,) = problems(load, FULL, "optimizer=torch.optim.AdamW")
    assert told == (
        "command line: optimizer: expected a mapping such as {name: adamw, lr: 2e-5}, "
        "found 'torch.optim.AdamW'"
    )


def test_torchtunes_components_are_told_legatos_keys(load) -> None:  # type: ignore[no-untyped-def]
    text = """\
model:
  _component_: torchtune.models.llama2.lora_llama2_7b
  lora_attn_modules: [q_proj]
  lora_rank: 8
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: false
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
recipe: full_finetune_single_device
"""
    no = "a config can't name Python code to import"
    assert problems(load, text, "model._component_=x") == [
        f"my.yaml:2: model._component_: {no}; write `model: <hub id or folder>`",
        "my.yaml:3: model.lora_attn_modules: Legato's key is `lora_target_modules`",
        "my.yaml:4: model.lora_rank: Legato's key is `lora_rank`, at the top level",
        f"my.yaml:6: tokenizer._component_: {no}; the tokenizer comes with `model`; its "
        "max_seq_len is the key max_seq_len",
        f"my.yaml:8: dataset._component_: {no}; write `datasets: [{{path: ..., type: alpaca}}]`",
        "my.yaml:9: dataset.packed: Legato's key is `packing`",
        f"my.yaml:11: optimizer._component_: {no}; write `optimizer: {{name: adamw, lr: ...}}`",
        f"my.yaml:14: loss._component_: {no}; Legato always uses the token-mean cross-entropy",
        f"command line: model._component_=x: {no}",
    ]


def test_removing_what_is_not_there_is_an_error(load) -> None:  # type: ignore[no-untyped-def]
    assert problems(load, FULL, "~epoch", "~datasets.4") == [
        "command line: ~epoch: the config has no such key. Did you mean epochs?",
        "command line: ~datasets.4: the config has no such key",
    ]


def test_a_list_entry_too_far_is_an_error(load) -> None:  # type: ignore[no-untyped-def]
    assert problems(load, FULL, "datasets.3.path=x") == [
        "command line: datasets.3.path=x: datasets has 1 entries, numbered from 0"
    ]


def test_a_dataset_without_path_says_so(load) -> None:  # type: ignore[no-untyped-def]
    assert problems(load, FULL, "dataset.type=text") == [
        "command line: dataset.path (datasets.0.path): missing (File, glob, folder or hub name)"
    ]


def test_the_typed_recipe_fills_in_or_must_agree(load) -> None:  # type: ignore[no-untyped-def]
    load(FULL)
    lora = "lora_finetune_single_device"
    with pytest.raises(ConfigError) as caught:
        load_config("my.yaml", recipe=lora)
    assert caught.value.problems == [
        f"my.yaml:1: recipe: the config says full_finetune_single_device, the command line {lora}. "
        f"Leave one of them out, or give recipe={lora}, which takes the place of the config's"
    ]
    Path("my.yaml").write_text(FULL.replace("recipe: full_finetune_single_device\n", ""))
    assert load_config("my.yaml", recipe=lora).config.recipe == lora


def test_the_resolved_config_loads_to_the_same_config(load) -> None:  # type: ignore[no-untyped-def]
    loaded = load(
        FULL
        + "chat_template_kwargs: {think: false, v: '1.0'}\nsplit_off: x\n".replace(
            "split_off: x\n", ""
        ),
        "datasets.0.split='012'",
        "eval_datasets=[{path: e.jsonl}]",
        "compile={dynamic: false}",
    )
    again = load(loaded.yaml)
    assert again.config == loaded.config
    assert again.yaml == loaded.yaml
    assert "lora_rank" not in loaded.yaml


def test_the_resolved_config_asks_for_no_length_that_nobody_asked_for(load) -> None:  # type: ignore[no-untyped-def]
    assert "max_seq_len" not in dump_yaml(load(FULL).config)
    assert "max_seq_len: 100" in dump_yaml(load(FULL, "max_seq_len=100").config)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", "{}"),
        ("rows.csv.gz", "x"),
        ("rows.parquet", "PAR1"),
        ("rows.json", "\ufeff [{}]"),
    ],
)
def test_a_data_file_instead_of_a_config_says_how_a_config_takes_it(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    [told] = caught.value.problems
    assert told.startswith(
        f"{path}: expected a config, found a data file. Name a config and give it the file: "
        f"smollm2/135M_lora_single_device dataset={path}, with model=FOLDER "
    )
    loaded = load_config("smollm2/135M_lora_single_device", [f"dataset={path}", "model=a"])
    assert [each.path for each in loaded.config.datasets] == [str(path)]


def test_a_config_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    packaged = load_config("smollm2/135M_lora_single_device")
    path.write_text(json.dumps(yaml.safe_load(packaged.yaml)))
    assert load_config(str(path)).config == packaged.config


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(HUB.joinpath("smollm2", "135M_lora_single_device.yaml").read_text())
    assert load_config(path).config == load_config(str(path)).config
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file and no such hub config"):
        load_config(tmp_path / "none.yaml")


def test_a_missing_file_names_the_nearest_hub_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("smollm2/135M_ful_single_device")
    assert caught.value.problems == [
        "smollm2/135M_ful_single_device: no such file and no such hub config. Did you mean "
        "smollm2/135M_full_single_device? `legato ls` lists them."
    ]
    with pytest.raises(ConfigError, match="expected a config file, found a folder"):
        load_config(str(tmp_path))


def test_bytes_that_are_not_utf8_are_told_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"model: caf\xe9\n")
    with pytest.raises(ConfigError, match="expected UTF-8 text, found byte 0xe9 at offset 10"):
        load_config(str(path))


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode())
    assert load_config(str(path)).config.model == "some/model"


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys; from legato.config.load import load_config; "
        "load_config('smollm2/135M_full_single_device'); "
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
