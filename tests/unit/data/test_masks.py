"""The definition of a mask against random conversations and against real rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from legato.data import ChatFormatter, DatasetSpec, Message, Sample, build_data
from legato.data.bare import STRADDLING
from legato.data.chat import RETOKENIZED
from legato.data.samples import Tally
from tests.unit.data.shapes import SHAPES, example, formatter

TEXT = st.text(
    st.one_of(
        st.sampled_from("ab \n\r\t.\0\u200b\u0634\U0001f600\u2028"),
        st.sampled_from("HeloUserAssistant:<>[]|/"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
)
# What each template writes of an answer, up to the stop.
WRITTEN: dict[str, Callable[[str], str]] = {
    "chatml": lambda answer: answer,
    "llama2": lambda answer: f" {answer.strip()} ",
    "llama3": lambda answer: answer.strip(),
    "mistral": lambda answer: f" {answer.strip()}",
    "gemma": lambda answer: answer.strip(),
    "qwen": lambda answer: "<think>\n\n</think>\n\n" + answer.lstrip("\n"),
    "glm": lambda answer: f"\n{answer}",
    "phi": lambda answer: answer,
    "deepseek": lambda answer: answer,
}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    turns = draw(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
    pairs = [(Message("user", user), Message("assistant", answer)) for user, answer in turns]
    system = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    return (*system, *(message for pair in pairs for message in pair))


@pytest.mark.parametrize("name", sorted(SHAPES))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(messages=conversations())
def test_prompt_and_trained_text_and_stop_are_what_was_tokenized(
    name: str, messages: tuple[Message, ...]
) -> None:
    """For every answer: inference's prompt, then what is trained, are the sample's ids."""
    if name == "gemma" and messages[0].role == "system":
        messages = messages[1:]
    tokenizer = SHAPES[name].tokenizer()
    made, tally = formatter(name, special_tokens_in_text="allow"), Tally()
    (samples,) = made.format([example(*messages)], tally=tally)
    found = {(*prompt, *trained) for sample in samples for prompt, trained in _answers(sample)}
    borders = {prompt for sample in samples for prompt, _ in _answers(sample)}
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    assert sum(len(_answers(sample)) for sample in samples) == len(answers)
    stops = [tokenizer.convert_ids_to_tokens(stop) for stop in made.stop_ids]
    merged = 0
    for i in answers:
        prompt = tokenizer.apply_chat_template(
            [m.for_template() for m in messages[:i]], tokenize=False, add_generation_prompt=True
        )
        text = prompt + WRITTEN[name](messages[i].content)
        whole = [_ids(tokenizer, text + stop) for stop in stops]
        assert found.intersection(whole)
        merged += _ids(tokenizer, prompt) not in borders
    # Where the tokenizer cuts the end of the prompt otherwise once an answer follows: said.
    assert merged == sum(tally.counts.get(each, 0) for each in (STRADDLING, RETOKENIZED))


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answers(sample: Sample) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids before it, its own ids through the stop) of each run of trained tokens."""
    ids, trained = sample.input_ids.tolist(), [*sample.trained.tolist(), False]
    starts = [t for t in range(1, len(trained)) if trained[t] and not trained[t - 1]]
    ends = [t for t in range(1, len(trained)) if trained[t - 1] and not trained[t]]
    return [
        (tuple(ids[:start]), tuple(ids[start:end])) for start, end in zip(starts, ends, strict=True)
    ]


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
    assert not {STRADDLING, RETOKENIZED} & data.report.datasets[0].counts.keys()
