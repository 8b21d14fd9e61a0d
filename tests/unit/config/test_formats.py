"""Keys that a format of rows doesn't read: held against what the rows really become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legato.config.formats import UNREAD, unread_keys
from legato.config.load import validate
from legato.data import ChatFormatter, DatasetSpec, build_data
from legato.data.formats import FORMATS
from legato.errors import DataError
from tests.helpers import tiny
from tests.unit.config.test_rules import BASE

TURNS = [("user", "Hi"), ("assistant", "Ho"), ("user", "<|im_end|>"), ("assistant", "Hum")]
ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "<|im_end|>", "output": "Hum", "history": [["Hi", "Ho"]]},
    "messages": {"messages": [{"role": role, "content": text} for role, text in TURNS]},
    "sharegpt": {"conversations": [{"from": role, "value": text} for role, text in TURNS]},
    "prompt_completion": {
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": [{"role": role, "content": text} for role, text in TURNS[1:]],
    },
    "segments": {
        "segments": [{"text": "Hi", "label": False}, {"text": "Ho<|im_end|>", "label": True}]
    },
    "text": {"text": "Hi <|im_end|>"},
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ mood }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ mood }}\n{% endif %}"
)
CHANGES: dict[str, Any] = {
    "roles_to_train": ["user", "assistant"],
    "turns_to_train": "last",
    "chat_template_kwargs": {"mood": "!"},
    "train_on_inputs": True,
    "special_tokens_in_text": "error",
}


def samples(path: Path, **options: Any) -> object:
    options = {"special_tokens_in_text": "allow", "chat_template_kwargs": {}} | options
    formatter = ChatFormatter(
        tiny.build_tokenizer(),
        template=str(path.with_name("t.jinja")),
        template_kwargs=options.pop("chat_template_kwargs"),
        **options,
    )
    try:
        data = build_data([DatasetSpec(str(path))], formatter=formatter, max_seq_len=512)
    except DataError as error:
        return type(error)
    return data.tokens.tolist(), data.trained.tolist()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_key_is_refused_exactly_where_it_changes_no_sample(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[kind]))
    path.with_name("t.jinja").write_text(TEMPLATE)
    plain = samples(path)
    unread = {key for key in CHANGES if samples(path, **{key: CHANGES[key]}) == plain}
    assert unread == {key for rule in UNREAD if kind in rule.formats for key in rule.keys}
    typed = BASE | {"datasets": [{"path": "a", "type": kind}]}
    for key, value in CHANGES.items():
        _, problems = validate(typed | {key: value})
        assert [each.path for each in problems] == ([(key,)] if key in unread else [])


def test_every_key_of_the_table_is_tried() -> None:
    assert {key for rule in UNREAD for key in rule.keys} == CHANGES.keys()


def test_a_key_that_one_data_set_reads_is_taken() -> None:
    text = {"path": "a", "type": "text"}
    for others in (
        {"datasets": [text, {"path": "b", "type": "messages"}]},
        {"datasets": [text], "eval_datasets": [{"path": "b", "type": "alpaca"}]},
        {"datasets": [text, {"path": "b"}]},
    ):
        assert validate(BASE | others | {"turns_to_train": "last"})[1] == []


def test_what_only_the_rows_tell_is_refused_when_they_are_read() -> None:
    config, _ = validate(BASE | {"turns_to_train": "last", "train_on_inputs": False})
    assert config is not None
    assert unread_keys(config, formats=["text", "segments"]) == [
        "turns_to_train: segments and plain text have no turns: a segment says itself whether it "
        "is trained, and plain text is trained from end to end; and the rows are segments and "
        "text. Leave it out"
    ]
    assert unread_keys(config, formats=["text", "alpaca"]) == []
    assert unread_keys(config, formats=["unknown"]) == []
