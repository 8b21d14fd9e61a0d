"""Rows of every format as conversations, and the messages about rows that don't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legato.data.examples import Message
from legato.data.formats import FORMATS, check_columns, convert_row, detect_format
from legato.data.sources import Row
from legato.errors import DataError


def convert(kind: str, columns: dict[str, Any], **mapping: str) -> list[tuple[Any, str]] | str:
    made = convert_row(Row("a:1", "data/a:1", columns), kind, mapping)
    if made.segments:
        return [(segment.is_trained, segment.text) for segment in made.segments]
    return made.text if made.text is not None else [(m.role, m.content) for m in made.messages]


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [
        (
            "alpaca",
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            [("user", "Add.\n\n1 2"), ("assistant", "3")],
        ),
        (
            "alpaca",
            {"instruction": "Hi", "input": None, "output": "Ho", "system": "Be brief."},
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho")],
        ),
        (
            "alpaca",
            {"instruction": "B?", "output": "b", "history": [["A?", "a"]]},
            [("user", "A?"), ("assistant", "a"), ("user", "B?"), ("assistant", "b")],
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, " you"]}]},
            [("user", "Hi you")],
        ),
        (
            "messages",
            {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi", "train": None}]},
            [("system", "Be brief."), ("user", "Hi")],
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Ho"},
                ],
                "system": "Be brief.",
                "tools": "[]",
            },
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho")],
        ),
        (
            "prompt_completion",
            {"prompt": "2 mugs", "completion": {"item": "mugs", "city": "K\u00f8benhavn"}},
            [("user", "2 mugs"), ("assistant", '{"item": "mugs", "city": "K\u00f8benhavn"}')],
        ),
        (
            "prompt_completion",
            {
                "prompt": [{"role": "user", "content": "Hi"}],
                "completion": [{"role": "assistant", "content": "Ho"}],
            },
            [("user", "Hi"), ("assistant", "Ho")],
        ),
        (
            "segments",
            {"segments": [{"label": False, "text": "<s>Hi\n"}, {"label": True, "text": "Ho"}]},
            [(False, "<s>Hi\n"), (True, "Ho")],
        ),
        ("text", {"text": " a\r\n\0"}, " a\r\n\0"),
    ],
)
def test_rows_become_conversations(
    kind: str, columns: dict[str, Any], expected: list[tuple[str, str]] | str
) -> None:
    assert convert(kind, columns) == expected
    assert detect_format(columns, where="a:1")[0] == kind


def test_columns_are_mapped_ours_to_the_files() -> None:
    row = {"question": "1+1", "answer": "2", "prompt": "not this one"}
    assert convert("prompt_completion", row, prompt="question", completion="answer") == [
        ("user", "1+1"),
        ("assistant", "2"),
    ]


def test_a_conversations_column_may_hold_messages_and_the_other_way_round() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert detect_format({"conversations": messages}, where="a:1") == (
        "messages",
        {"messages": "conversations"},
    )
    turns = [{"from": "human", "value": "Hi"}]
    assert detect_format({"messages": turns}, where="a:1") == (
        "sharegpt",
        {"conversations": "messages"},
    )


def test_weights_and_reasoning_of_messages_are_kept() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Hi", "name": None},
            {"role": "assistant", "content": "A", "weight": 0, "tool_calls": None},
            {"role": "assistant", "content": "B", "loss_weight": 1.0, "thinking": "Hm."},
        ]
    }
    made = convert_row(Row("a:1", "a:1", row), "messages", {})
    assert made.messages == (
        Message("user", "Hi"),
        Message("assistant", "A", is_trained=False),
        Message("assistant", "B", is_trained=True, reasoning="Hm."),
    )
    assert made.messages[2].for_template() == {
        "role": "assistant",
        "content": "B",
        "reasoning_content": "Hm.",
    }


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_turn_of_sharegpt_keeps_its_reasoning(key: str) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "A", key: "Hm."}]
    made = convert_row(Row("a:1", "a:1", {"conversations": turns}), "sharegpt", {})
    assert made.messages[1] == Message("assistant", "A", reasoning="Hm.")


def test_a_prompt_of_messages_is_not_trained_even_where_it_holds_answers() -> None:
    row = {
        "prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
        "completion": [{"role": "assistant", "content": "Ha"}],
    }
    made = convert_row(Row("a:1", "a:1", row), "prompt_completion", {})
    assert [message.is_prompt for message in made.messages] == [True, True, False]
    assert [message.is_trained for message in made.messages] == [None, None, None]


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("alpaca", {"instruction": "a", "output": None}, "output is null; expected text"),
        ("alpaca", {"instruction": 3, "output": "a"}, "instruction is of type int; expected text"),
        ("alpaca", {"instruction": "a"}, "no column 'output'; there are 'instruction'"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["x"]}, "entry 1 isn't a pair"),
        ("messages", {"messages": []}, "expected a list of at least one message"),
        ("messages", {"messages": ["a"]}, "message 1 is of type str, not an object"),
        (
            "messages",
            {"messages": [{"role": "bot"}]},
            "unknown role 'bot'. Known: system",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": None}]},
            "message 1: content is null",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 1: a part of type 'image'; only text can be trained on",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "message 1: a tool call isn't an object with a name",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]},
            "message 1: only the assistant calls tools, this is a message of user",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}], "tools": "[{"},
            "tools isn't valid JSON: Expecting property name",
        ),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "tools": [{"name": "f"}]},
            "tools: rows of alpaca can't call them; messages and sharegpt can",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a", "weight": 0.5}]},
            "weight 0.5; 0 (not trained) and 1 (trained) are known",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a", "weight": 1, "loss_weight": 0}]},
            "message 1: weight 1 and loss_weight 0; give one",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "\ud83d"}]},
            "half of a surrogate pair",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "message 1: tool call isn't valid JSON",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "alien", "value": "a"}]},
            "turn 1: unknown role 'alien'. Known: human",
        ),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "turn 1 isn't an object with from"),
        (
            "sharegpt",
            {"conversations": [], "tools": "[{}]"},
            "tools: entry 1 isn't an object with a name",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a", "thinking": "Hm."}]},
            "message 1: only the assistant reasons, this is a message of user",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "reasoning": "a", "thinking": "b"}]},
            "message 1: several of reasoning_content, reasoning, thinking, and they differ",
        ),
        ("prompt_completion", {"prompt": "a", "completion": None}, "completion is null"),
        ("segments", {"segments": []}, "segments: expected a list of at least one segment"),
        (
            "segments",
            {"segments": [{"text": "a"}]},
            "segment 1 isn't an object with text and label",
        ),
        ("segments", {"segments": [{"label": True}]}, "segment 1: text is null; expected text"),
        (
            "messages",
            {"messages": [{"role": "tool", "content": "1", "tool_call_id": 7}]},
            "message 1: the id of a tool call is 7; expected text",
        ),
        ("text", {"text": 3}, "text is of type int; expected text"),
        (
            "messages",
            {"messages": [{"role": "system", "content": "a"}], "system": "b"},
            "a system column beside a message of system; give one",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
            "a system column beside a message of system; give one",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": "a", "train": False}]},
            "message 1: train isn't read; weight: 0 or 1 says whether a turn is trained",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]},
            "message 1: function_call isn't read; tool_calls holds the calls of a turn",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "gpt", "value": "a", "tool_calls": [{"name": "f"}]}]},
            "turn 1: tool_calls isn't read; a turn from function_call holds the calls",
        ),
        ("alpaca", {"instruction": "a", "output": "b", "history": 5}, "history is of type int"),
        (
            "sharegpt",
            {"conversations": [{"from": ["human"], "value": "a"}]},
            "conversations: turn 1: from is of type list; expected text",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "[" * 5000 + "]" * 5000}]},
            "message 1: tool call holds lists and objects in more than 100 levels",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}], "tools": "[" * 200 + "]" * 200},
            "tools holds lists and objects in more than 100 levels",
        ),
        (
            "messages",
            {"messages": [], "tools": '[{"name": "f", "name": "g"}]'},
            "tools has 'name' twice in one object; give it once",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}], "tools": '[{"name": "f", "x": NaN}]'},
            "holds NaN or an infinite number, which JSON doesn't have",
        ),
        (
            "prompt_completion",
            {"prompt": "a", "completion": {"sum": float("inf")}},
            "completion holds NaN or an infinite number, which JSON doesn't have",
        ),
        ("text", {"text": "ab\ud83d"}, "half of a surrogate pair ('\\ud83d') at position 3"),
    ],
)
def test_a_row_that_does_not_fit_says_where_and_why(
    kind: str, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        convert(kind, columns)
    assert str(caught.value).startswith("data/a:1: ")
    assert message in str(caught.value)


def test_a_format_that_cannot_be_told_lists_the_columns_and_the_formats() -> None:
    with pytest.raises(DataError) as caught:
        detect_format({"question": "a", "answer": "b"}, where="gsm8k.jsonl:1")
    assert str(caught.value) == (
        "gsm8k.jsonl:1: can't tell the format from the columns 'question', 'answer'. The formats "
        "need alpaca: instruction, output; messages: messages; sharegpt: conversations; "
        "prompt_completion: prompt, completion; segments: segments; text: text. Set type, and map "
        "the columns, for example: "
        "type: prompt_completion, columns: {prompt: question, completion: answer}"
    )


@pytest.mark.parametrize("found", [None, [], "[]"])
def test_a_conversation_that_tells_no_format_is_shown(found: object) -> None:
    with pytest.raises(DataError) as caught:
        detect_format({"messages": found, "id": 1}, where="a.parquet: row 1")
    shown = f"from the columns 'messages', 'id' (messages is {json.dumps(found)} in this row). The"
    assert shown in str(caught.value)


@pytest.mark.parametrize("others", [["prompt"], ["messages"], []])
def test_preference_pairs_are_told_from_other_rows_and_refused_as_what_they_are(
    others: list[str],
) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    row = dict.fromkeys(others, turns) | {"chosen": "Yes.", "rejected": "No."}
    with pytest.raises(DataError) as caught:
        detect_format(row, where="pairs.jsonl:1")
    columns = ", ".join(repr(name) for name in row)
    assert str(caught.value) == (
        f"pairs.jsonl:1: preference pairs ({columns}): training on what is chosen over what is "
        "rejected is not in this version of Legato. To train on the chosen answers alone: "
        "type: prompt_completion, columns: {completion: chosen}"
    )
    # What the message says to do works, without the type too.
    mapped = row | {"completion": "Yes."}
    if others == ["prompt"]:
        assert detect_format(mapped, where="a:1") == ("prompt_completion", {})
        assert convert("prompt_completion", row, completion="chosen") == [
            ("user", "Hi"),
            ("assistant", "Yes."),
        ]


@pytest.mark.parametrize(
    ("kind", "mapping", "message"),
    [
        ("alpacca", {}, "unknown format 'alpacca'. Known: alpaca, messages, sharegpt"),
        (
            "prompt_completion",
            {"promt": "question"},
            "columns.promt: a prompt_completion row has no 'promt'. "
            "It has prompt, completion, system",
        ),
        (
            "prompt_completion",
            {"prompt": "questoin", "completion": "answer"},
            "no column 'questoin'; there are 'question', 'answer'. Did you mean 'question'? "
            "Map it: columns: {prompt: <name in the file>}",
        ),
        (
            "prompt_completion",
            {"prompt": "question", "completion": "answer", "system": "sys"},
            "no column 'sys'; there are",
        ),
    ],
)
def test_a_mapping_that_does_not_fit_names_what_is_there(
    kind: str, mapping: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        check_columns(kind, mapping, {"question": "a", "answer": "b"}, where="a.jsonl:1")
    assert message in str(caught.value)


def test_the_formats_are_those_of_the_config() -> None:
    from legato.config.schema import DatasetConfig

    schema = DatasetConfig.model_json_schema()["properties"]["type"]
    assert f'"{next(iter(FORMATS))}"' in json.dumps(schema)
    assert set(FORMATS) == {c for each in schema["anyOf"] for c in each.get("enum", [])}


def test_real_sharegpt_rows_convert(shared_data: Path) -> None:
    rows = json.loads((shared_data / "glaive_toolcall_en_demo.json").read_text("utf-8"))
    calls = 0
    for row in rows:
        made = convert_row(Row("a:1", "a:1", row), "sharegpt", {})
        assert [tool["function"] for tool in made.tools] == json.loads(row["tools"])
        for message, turn in zip(made.messages, row["conversations"], strict=True):
            if turn["from"] == "function_call":
                (call,) = message.tool_calls
                assert {"name": call.name, "arguments": call.arguments} == json.loads(turn["value"])
                calls += 1
            else:
                assert message.content == turn["value"]
    assert calls == 211
