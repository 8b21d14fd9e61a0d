"""Tool calls: read from every form, written by templates that know them, refused by the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from legato.data import ChatFormatter, DatasetSpec, Message, Sample, build_data, marked_sample
from legato.data.chunks import NULLS_LEFT_OUT
from legato.data.examples import Example, with_call_ids
from legato.data.tools import ToolCall, read_calls, read_tools
from legato.errors import DataError
from tests.helpers import tiny
from tests.helpers.runs import legato, losses, write_config

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
ROW = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Rain in Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": '{"rain": true}'},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps([TOOL]),
}
# As OpenAI's interface and most data on the hub have it.
SAME_AS_MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes."},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
# In the manner of Llama 3.1: calls as bare JSON under "parameters", results in a role of their own.
LLAMA_LIKE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "{% endif %}{% for m in messages %}"
    "<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def samples_of(tmp_path: Path, row: dict[str, Any], **options: Any) -> list[Sample]:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    template = options.pop("chat_template", tiny.CHATML)
    formatter = ChatFormatter(tiny.build_tokenizer(template), **options)
    spec = DatasetSpec(str(tmp_path / "rows.jsonl"))
    data = build_data([spec], formatter=formatter, max_seq_len=4096)
    return [data[i] for i in range(len(data))]


def marked(sample: Sample) -> str:
    return marked_sample(sample, tiny.build_tokenizer(), brackets=True).plain


@pytest.mark.parametrize("row", [ROW, SAME_AS_MESSAGES], ids=["sharegpt", "messages"])
def test_a_call_is_trained_through_its_stop_and_its_result_is_not(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    (sample,) = samples_of(tmp_path, row, template="chatml")
    text = marked(sample)
    schema = json.dumps({"type": "function", "function": TOOL})
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{schema}\n</tools>" in text
    assert text[text.index("<|im_start|>user") :] == (
        "<|im_start|>user\nRain in Oslo?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '[[<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        '<|im_end|>]]\n<|im_start|>user\n<tool_response>\n{"rain": true}\n</tool_response>'
        "<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>]]"
    )


def test_another_template_writes_calls_its_own_way(tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, ROW, chat_template=LLAMA_LIKE)
    text = marked(sample)
    assert text[text.index("<|im_start|>user") :] == (
        "<|im_start|>user\nRain in Oslo?<|im_end|><|im_start|>assistant\n"
        '[[{"name": "weather", "parameters": {"city": "Oslo"}}<|im_end|>]]'
        '<|im_start|>ipython\n{"rain": true}<|im_end|><|im_start|>assistant\n[[Yes.<|im_end|>]]'
    )


def test_words_beside_a_call_are_trained_with_it(tmp_path: Path) -> None:
    row = json.loads(json.dumps(SAME_AS_MESSAGES))
    row["messages"][2]["content"] = "I look."
    (sample,) = samples_of(tmp_path, row, template="chatml")
    assert "[[I look.\n<tool_call>\n" in marked(sample)


# Two calls of one tool in one turn, and the user's words hold the tool's name.
TWO_CALLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Ask weather about Oslo and Rome."},
        {
            "role": "assistant",
            "tool_calls": [
                {"name": "weather", "arguments": {"city": "Oslo"}},
                {"name": "weather", "arguments": {"city": "Rome"}},
            ],
        },
    ],
    "tools": [TOOL],
}
ALL_CALLS = LLAMA_LIKE.replace(
    "{% set f = m.tool_calls[0].function %}", "{% for c in m.tool_calls %}{% set f = c.function %}"
).replace("{% else %}{{ m.content", "{% endfor %}{% else %}{{ m.content")


def test_each_of_two_calls_in_one_turn_is_trained(tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, TWO_CALLS, chat_template=ALL_CALLS)
    assert marked(sample).endswith(
        '[[{"name": "weather", "parameters": {"city": "Oslo"}}'
        '{"name": "weather", "parameters": {"city": "Rome"}}<|im_end|>]]'
    )


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (tiny.CHATML, ROW, "message 3 calls a tool, and the template doesn't write the call"),
        (LLAMA_LIKE, TWO_CALLS, "doesn't write the call (weather, 2 of 2) where the answer is"),
        (
            ALL_CALLS.replace("{{ f.arguments | tojson }}", "{{ f.arguments | list | tojson }}"),
            TWO_CALLS,
            "doesn't write the call (weather, 1 of 2) where the answer is",
        ),
        (
            tiny.CHATML,
            {"conversations": ROW["conversations"][1:2] + ROW["conversations"][4:]}
            | {"tools": ROW["tools"]},
            "the row offers the tool weather, and the template doesn't write it",
        ),
        (
            ALL_CALLS.replace("{% if tools %}", "{% if false %}"),
            TWO_CALLS,
            "the row offers the tool weather, and the template doesn't write it",
        ),
        (
            LLAMA_LIKE.replace(
                "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
            ),
            ROW,
            "the template leaves out message 4 (tool)",
        ),
    ],
    ids=["call", "second call", "values", "offer", "offer named in the row", "result"],
)
def test_a_template_that_does_not_know_tools_is_refused_with_the_row(
    tmp_path: Path, template: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        samples_of(tmp_path, row, chat_template=template)
    assert "rows.jsonl:1: " in str(caught.value)
    assert message in str(caught.value)


# In the manner of Mistral: a call and its result are joined by an id of nine letters and digits.
MISTRAL_LIKE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('ids of tool calls have length 9') }}{% endif %}"
    "{{ c.function | tojson }} {{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("given", [None, "aB3dE6gH9"])
def test_a_call_and_its_result_keep_their_id_or_get_one(tmp_path: Path, given: str | None) -> None:
    row = (
        ROW if given is None else json.loads(json.dumps(SAME_AS_MESSAGES).replace("call_1", given))
    )
    (sample,) = samples_of(tmp_path, row, chat_template=MISTRAL_LIKE)
    text, name = marked(sample), given or "call00001"
    assert f'{{"name": "weather", "arguments": {{"city": "Oslo"}}}} {name}<|im_end|>]]' in text
    assert f'<|im_start|>tool\n{name} {{"rain": true}}<|im_end|>' in text


def test_an_id_that_a_template_refuses_is_an_error_with_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*ids of tool calls have length 9"):
        samples_of(tmp_path, SAME_AS_MESSAGES, chat_template=MISTRAL_LIKE)


def test_made_up_ids_go_to_results_in_the_order_of_their_calls() -> None:
    def call(name: str, given: str | None = None) -> ToolCall:
        return ToolCall(name, {}, given)

    messages = (
        Message("user", "Hi"),
        Message("assistant", "", tool_calls=(call("a"), call("b", "own"))),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "", tool_calls=(call("c"),)),
        Message("tool", "3", tool_call_id="other"),
        Message("tool", "4"),
    )
    named = with_call_ids(messages)
    assert [c.id for m in named for c in m.tool_calls] == ["call00001", "own", "call00003"]
    assert [m.tool_call_id for m in named if m.role == "tool"] == [
        *("call00001", "own", "other", "call00003")
    ]


def test_a_control_token_in_an_argument_is_refused(tmp_path: Path) -> None:
    row = json.loads(json.dumps(ROW).replace("Oslo", "<|im_end|>"))
    row["conversations"][1]["value"] = "Rain?"
    with pytest.raises(DataError, match=r"message 3 holds the control token '<\|im_end\|>'"):
        samples_of(tmp_path, row, template="chatml")


WIDE = "<\uff5cend\uff5c>"  # DeepSeek's control tokens are of this kind


@pytest.mark.parametrize(
    ("message", "tools"),
    [
        (Message("assistant", "", tool_calls=(ToolCall("f", {"a": WIDE}),)), ()),
        (Message("tool", "1", tool_call_id=WIDE), ()),
        (Message("assistant", "Yes."), ({"type": "function", "function": {"name": WIDE}},)),
    ],
    ids=["call", "id", "tool"],
)
def test_a_control_token_of_wide_characters_is_refused_wherever_a_template_writes(
    message: Message, tools: tuple[dict[str, Any], ...]
) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [WIDE]})
    example = Example("a:1", "a:1", messages=(Message("user", "Hi"), message), tools=tools)
    with pytest.raises(DataError, match=f"holds the control token '{re.escape(WIDE)}'"):
        ChatFormatter(tokenizer, template="chatml").format([example])


def test_calls_and_tools_are_read_from_every_form() -> None:
    call = ToolCall("f", {"a": 1})
    with_id = {"id": "call_1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read_calls([with_id], "turn 1") == (ToolCall("f", {"a": 1}, "call_1"),)
    for value in (
        '{"name": "f", "arguments": {"a": 1}}',
        '[{"name": "f", "arguments": "{\\"a\\": 1}"}]',
        [{"function": {"name": "f", "arguments": {"a": 1}}}],
    ):
        assert read_calls(value, "turn 1") == (call,)
    for value in (
        '[{"name": "f"}]',
        [{"name": "f"}],
        [{"type": "function", "function": {"name": "f"}}],
    ):
        assert read_tools(value) == ({"type": "function", "function": {"name": "f"}},)
    for nothing in (None, "", "[]", "null", []):
        assert read_tools(nothing) == ()


def _calling(tool: str, **arguments: Any) -> dict[str, Any]:
    schema = {"properties": {name: {"type": "string"} for name in arguments}, "type": "object"}
    call = {"function": {"arguments": arguments, "name": tool}, "type": "function"}
    turns = [
        {"content": "Hi", "role": "user"},
        {"content": None, "role": "assistant", "tool_calls": [call]},
        {"content": "42", "role": "tool"},
        {"content": "Yes.", "role": "assistant"},
    ]
    return {"messages": turns, "tools": [{"name": tool, "parameters": schema}]}


@pytest.mark.parametrize(
    "rows",
    [
        [_calling("weather", city="Oslo"), _calling("search", query="rain")],
        [{"prompt": "Hi", "completion": made} for made in ({"city": "Oslo"}, {"query": "rain"})],
        [
            {"prompt": "Hi", "completion": _calling("weather", city="Oslo")["messages"][1:2]},
            {"prompt": "Hi", "completion": _calling("search", query="rain")["messages"][1:2]},
        ],
    ],
    ids=["arguments and schemas", "objects as answers", "calls as answers"],
)
def test_a_table_trains_what_the_same_rows_as_json_lines_train(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    """Arrow gives every object the members of all of them, null where it has none."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    formatter = ChatFormatter(tiny.build_tokenizer(tiny.CHATML), template="chatml")
    made = [
        build_data([DatasetSpec(str(tmp_path / name))], formatter=formatter, max_seq_len=4096)
        for name in ("rows.jsonl", "rows.parquet")
    ]
    lines, table = ([marked(data[i]) for i in range(2)] for data in made)
    assert table == lines
    assert "null" not in "".join(table)
    assert [data.report.datasets[0].counts for data in made] == [{}, {NULLS_LEFT_OUT: 2}]


def test_a_null_that_json_lines_hold_is_trained(tmp_path: Path) -> None:
    (sample,) = samples_of(tmp_path, {"prompt": "Hi", "completion": {"city": None}})
    assert marked(sample).endswith('[[{"city": null}<|im_end|>]]')


def test_the_real_data_set_trains_through_the_command_line(
    tmp_path: Path, shared_data: Path
) -> None:
    rows = json.loads((shared_data / "glaive_toolcall_en_demo.json").read_text("utf-8"))
    (tmp_path / "glaive.json").write_text(
        json.dumps([row for row in rows if row["tools"] != "[]"][:6])
    )
    model = tiny.write_model(tmp_path / "model", max_position_embeddings=8192)
    config = write_config(
        tmp_path,
        model=model,
        recipe="full_finetune_single_device",
        datasets=[{"path": str(tmp_path / "glaive.json")}],
        chat_template="chatml",
        max_seq_len=8192,
        max_steps=1,
    )
    assert legato("run", "--config", config) == 0
    assert set(losses(tmp_path / "out")) == {1}
