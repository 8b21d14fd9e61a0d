"""The definition of a mask against random conversations and against real rows."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from legato.data import ChatFormatter, DatasetSpec, Message, Sample, build_data
from tests.unit.data.shapes import SHAPES, example, formatter

TEXT = st.text(
    st.one_of(
        st.sampled_from("ab \n\r\t.\0\u200b\u0634\U0001f600\u2028"),
        st.sampled_from("HeloUserAssistant:<>[]|/"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
)
ANSWER = TEXT.map(lambda text: text.lstrip())  # leading white space may merge into the prompt


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    turns = draw(st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=3))
    pairs = [(Message("user", user), Message("assistant", answer)) for user, answer in turns]
    system = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    return (*system, *(message for pair in pairs for message in pair))


@pytest.mark.parametrize("name", sorted(SHAPES))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(messages=conversations())
def test_prompt_and_trained_text_and_stop_are_what_was_tokenized(
    name: str, messages: tuple[Message, ...]
) -> None:
    """For every answer: inference's prompt, then what is trained, is how the sample reads."""
    if name == "gemma" and messages[0].role == "system":
        messages = messages[1:]
    tokenizer = SHAPES[name].tokenizer()
    made = formatter(name, special_tokens_in_text="allow")
    # Texts that hold a control token by chance would decode to the same anyway: nothing to exclude.
    samples = made.format([example(*messages)])[0]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    found = [run for sample in samples for run in _trained_runs(sample, tokenizer)]
    expected = []
    for i in answers:
        prompt = tokenizer.apply_chat_template(
            [m.for_template() for m in messages[:i]], tokenize=False, add_generation_prompt=True
        )
        expected.append((prompt, messages[i].content))
    assert len(found) == len(answers)
    for (before, trained, stop), (prompt, answer) in zip(found, expected, strict=True):
        assert before == tokenizer.decode(
            tokenizer(prompt, add_special_tokens=False)["input_ids"],
            clean_up_tokenization_spaces=False,
        )
        assert trained.strip() == answer.strip()
        assert stop in made.stop_ids


def _trained_runs(sample: Sample, tokenizer: object) -> list[tuple[str, str, int]]:
    """(decoded text before, decoded trained text without the stop, stop id) of each trained run."""
    runs = []
    ids, trained = sample.input_ids.tolist(), [*sample.trained.tolist(), False]
    for t in range(1, len(trained)):
        if trained[t] and not trained[t - 1]:
            start = t
        if trained[t - 1] and not trained[t]:
            decode = tokenizer.decode  # type: ignore[attr-defined]
            before = decode(ids[:start], clean_up_tokenization_spaces=False)
            text = decode(ids[start : t - 1], clean_up_tokenization_spaces=False)
            runs.append((before, text, ids[t - 1]))
    return runs


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("file", "columns", "prompt", "answer"),
    [
        ("alpaca_en_demo.json", {}, None, "output"),
        ("identity.json", {}, None, "output"),
        (
            "gsm8k_test.jsonl",
            {"prompt": "question", "completion": "answer"},
            "question",
            "answer",
        ),
        (
            "TruthfulQA.csv",
            {"prompt": "Question", "completion": "Best Answer"},
            "Question",
            "Best Answer",
        ),
    ],
)
def test_real_rows_train_the_answer_and_its_stop_and_nothing_else(
    shared_data: Path,
    smollm2_dir: Path,
    tmp_path: Path,
    file: str,
    columns: dict[str, str],
    prompt: str | None,
    answer: str,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    made = ChatFormatter(tokenizer)
    data = build_data(
        [DatasetSpec(str(shared_data / file), columns=columns)], formatter=made, max_seq_len=8192
    )
    kind = "csv" if file.endswith(".csv") else "json"
    options = {"encoding": "utf-8-sig"} if kind == "csv" else {}
    rows = datasets.load_dataset(
        kind,
        data_files=str(shared_data / file),
        split="train",
        cache_dir=str(tmp_path),
        **options,
    )
    assert len(data) == len(rows) > 0
    for i, row in enumerate(rows):
        sample = data[i]
        ids = sample.input_ids[sample.trained].tolist()
        assert tokenizer.decode(ids) == row[answer] + "<|im_end|>"
        assert sample.trained[: -len(ids)].sum() == 0
    assert [line for line in data.report.lines() if "begin inside" in line] == []
