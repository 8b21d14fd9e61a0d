"""Each key declares what it is and what another value does to a resumed run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from legato.config.aliases import ADVICE, ALIASES
from legato.config.explain import Key, key_at, schema_keys
from legato.config.load import validate
from legato.config.schema import RunConfig

# The table of the plan of record, by top-level key.
ON_RESUME = {
    "fixed": """
        recipe dtype master_weights lora_rank lora_target_modules lora_modules_to_save use_dora
    """,
    "refuse": """
        seed datasets val_set_size chat_template_kwargs train_on_inputs
        roles_to_train turns_to_train special_tokens_in_text
        max_seq_len excess_length on_bad_row packing streaming shuffle_buffer_size batch_size
        gradient_accumulation_steps lora_alpha lora_dropout use_rslora quantize_base
        optimizer_in_backward
    """,
    "contents": "model chat_template",
    "warn": """
        eval_datasets attention epochs max_steps max_steps_per_epoch optimizer lr_scheduler
        clip_grad_norm deterministic
    """,
    "free": """
        trust_remote_code device num_workers stop_after_step on_nonfinite save_every_n_train_steps
        save_every_n_seconds save_at_epoch_end keep_last_n_checkpoints keep_last_n_states
        keep_best_n_checkpoints keep_every_n_steps metric_for_best_model greater_is_better prune
        save_only_model resume_from_checkpoint allow_missing verify_on_load
        enable_async_checkpointing staging on_save_error final_save_patience_seconds shared_storage
        run_val_every_n_steps generate_samples log_every_n_steps loggers compile
        enable_activation_checkpointing enable_activation_offloading dp_shard dp_replicate
        reshard_after_forward cpu_offload
    """,
    "-": "output_dir",
}


def test_every_key_has_the_class_of_the_plan() -> None:
    declared: dict[str, set[str]] = {name: set() for name in ON_RESUME}
    for key in schema_keys():
        if len(key.path) == 1:
            declared[key.on_resume].add(key.name)
    assert declared == {name: set(words.split()) for name, words in ON_RESUME.items()}


@pytest.mark.parametrize("key", schema_keys(), ids=lambda key: key.name)
def test_every_key_has_a_class_and_a_doc(key) -> None:  # type: ignore[no-untyped-def]
    assert key.on_resume in ("fixed", "refuse", "contents", "warn", "free", "-")
    assert key.field.description
    assert key.field.description.endswith((".", "absent."))


@pytest.mark.parametrize("key", schema_keys(), ids=lambda key: key.name)
def test_every_count_has_a_unit(key) -> None:  # type: ignore[no-untyped-def]
    counts = ("_steps", "_seconds", "_tokens", "_len", "_size", "epochs", "batch_size", "_epoch")
    if key.path[-1].endswith(counts) and key.path[-1] != "val_set_size":
        assert key.unit is not None


FLOATS = [key for key in schema_keys() if "float" in str(key.field.annotation)]


def test_the_floats_of_a_config_are_all_looked_at() -> None:
    assert {"lora_alpha", "optimizer.betas", "datasets.*.weight"} <= {key.name for key in FLOATS}
    assert len(FLOATS) == 15


@pytest.mark.parametrize("key", FLOATS, ids=lambda key: key.name)
@pytest.mark.parametrize("number", ["inf", "nan", "-inf", math.inf])
def test_no_number_is_infinite_or_nan(key: Key, number: object) -> None:
    value: object = [number, 0.9] if key.path[-1] == "betas" else number
    for part in reversed(key.path):
        value = [value] if part == "*" else {part: value}
    config, problems = validate(value)  # type: ignore[arg-type]
    ours = [p for p in problems if ".".join(map(str, p.path)).startswith(key.path[0])]
    assert config is None
    assert any("expected a finite number" in p.message for p in ours), problems


@pytest.mark.parametrize(("weight", "bound"), [(1e12, "most 1000"), (1e-12, "least 1e-06")])
def test_a_weight_that_repeats_or_leaves_out_everything_is_refused(
    weight: float, bound: str
) -> None:
    _, problems = validate({"datasets": [{"path": "a.jsonl", "weight": weight}]})
    told = [p.message for p in problems if p.path == ("datasets", 0, "weight")]
    assert told == [f"expected a number of at {bound}, found {weight}"]


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("seed", 2**63, "9,223,372,036,854,775,807"),
        ("lora_alpha", 1e300, "1e+06"),
        ("shuffle_buffer_size", 10**22, "2,147,483,647"),
        ("save_every_n_train_steps", 2**31, "2,147,483,647"),
        ("dp_shard", 2**31, "2,147,483,647"),
    ],
)
def test_numbers_that_torch_cannot_take_are_refused(key: str, value: float, bound: str) -> None:
    _, problems = validate({key: value})
    told = [p.message for p in problems if p.path == (key,)]
    assert told == [f"expected a number of at most {bound}, found {value}"]


def test_every_whole_number_of_a_config_has_a_largest_value() -> None:
    def without_maximum(part: object, place: str) -> list[str]:
        items: Iterable[tuple[object, object]] = ()
        if isinstance(part, dict):
            if part.get("type") == "integer" and "maximum" not in part:
                return [place]
            items = part.items()
        elif isinstance(part, list):
            items = enumerate(part)
        return [found for name, each in items for found in without_maximum(each, f"{place}/{name}")]

    assert without_maximum(RunConfig.model_json_schema(), "") == []


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000])
def test_a_number_of_hundreds_of_digits_is_a_problem_of_its_key(text: str) -> None:
    for key in ("batch_size", "lora_rank", "compile", "save_every_n_train_steps", "dp_shard"):
        _, problems = validate({key: text})
        assert [p.path for p in problems if p.message.startswith("expected ")] == [(key,)]


def test_nested_keys_are_found_by_their_place() -> None:
    assert key_at(("datasets", 3, "path")) is not None
    assert key_at(("save_every_n_train_steps", "first")) is not None
    assert key_at(("compile", "mode")) is not None
    assert key_at(("optimizer", "lr")) is not None
    assert key_at(("optimizer", "rate")) is None


def test_other_spellings_lead_to_keys_and_hide_none() -> None:
    keys = {key.path for key in schema_keys()}
    assert set(ALIASES.values()) <= keys
    words = {path[0] for path in keys}
    assert words.isdisjoint(ALIASES)
    assert words.isdisjoint(ADVICE)
    assert set(ALIASES).isdisjoint(ADVICE)
