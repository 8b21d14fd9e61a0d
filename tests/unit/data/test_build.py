"""From files to samples: limits, counts, what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from legato.data import ChatFormatter, DatasetSpec, TokenizedData, build_data, split_validation
from legato.data.sources import BadRow, read_rows
from legato.errors import ConfigError, DataError
from tests.helpers import tiny

# A prompt of p bytes and an answer of a make 20 + p + a tokens, the stop included.


def write(path: Path, *pairs: tuple[object, object]) -> str:
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in pairs]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def build(path: str, *, max_seq_len: int = 512, **options: str) -> TokenizedData:
    formatter = ChatFormatter(tiny.build_tokenizer())
    return build_data(
        [DatasetSpec(path)],
        formatter=formatter,
        max_seq_len=max_seq_len,
        **options,  # type: ignore[arg-type]
    )


def test_samples_know_their_tokens_mask_and_place(tmp_path: Path) -> None:
    data = build(write(tmp_path / "a.jsonl", ("Hi", "Ho"), ("Hi", "")))
    tokenizer = tiny.build_tokenizer()
    assert len(data) == 2
    assert data[0].sample_id == "a.jsonl:1"
    assert data[1].sample_id == "a.jsonl:2"
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>"
    ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert data[0].input_ids.tolist() == ids
    assert data[0].input_ids.dtype == np.int32
    assert data[0].trained.tolist() == [False] * (len(ids) - 3) + [True] * 3
    assert data.lengths.tolist() == [len(ids), len(ids) - 2]
    assert (data.num_tokens, data.num_loss_tokens) == (2 * len(ids) - 2, 3 + 1)


def test_the_report_says_what_became_of_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ("Hi", "Ho"), ("Hi", "x" * 90), ("Hi", ""))
    data = build(path, max_seq_len=60)
    assert data.report.lines() == [
        f"{path}: prompt_completion (detected from its columns), 3 rows, 2 samples, 46 tokens, "
        "9% of them trained",
        f"{path}: trained turns that are empty, so that only the stop token is trained: "
        "1 (a.jsonl:3)",
        f"{path}: longer than max_seq_len, dropped: 1 (a.jsonl:2)",
        f"warning: {path}: 1 of 3 samples longer than max_seq_len, dropped; max_seq_len is 60",
    ]


def test_columns_and_keys_of_turns_that_nobody_reads_are_named_once(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Hi", "name": "Ann"}
    rows = [
        {"messages": [turn, {"role": "assistant", "content": "Ho", "weight": 1}], "id": 1},
        {"messages": [turn, {"role": "assistant", "content": "Ha", "refusal": None}], "tools": []},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    report = build(str(path)).report
    assert report.lines()[1:] == [f"{path}: columns not read: id, messages[].name"]
    assert report.datasets[0].unread == ["id", "messages[].name"]


def test_a_long_sample_is_dropped_cut_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ("Hi", "Ho"), ("Hi", "x" * 90))
    assert build(path, max_seq_len=60).lengths.tolist() == [24]
    cut = build(path, max_seq_len=60, excess_length="truncate")
    assert cut.lengths.tolist() == [24, 60]
    assert cut.report.datasets[0].counts == {"longer than max_seq_len, cut": 1}
    assert cut.report.warnings == (
        f"warning: {path}: 1 of 2 samples longer than max_seq_len, cut; max_seq_len is 60",
    )
    with pytest.raises(DataError, match=r"/a\.jsonl:2: 112 tokens, and max_seq_len is 60\. Raise"):
        build(path, max_seq_len=60, excess_length="error")


def test_cutting_every_stop_token_off_is_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ("Hi", "x" * 90), ("Hi", "y" * 90))
    assert build(path, max_seq_len=60, excess_length="truncate").report.warnings == (
        f"warning: {path}: 2 of 2 samples longer than max_seq_len, cut; max_seq_len is 60",
        f"warning: {path}: NO STOP TOKEN is trained in any of 2 samples, so that a model learns no "
        "end of an answer from them; max_seq_len is 60",
    )


def test_a_prompt_that_fills_the_row_leaves_nothing_to_train_and_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ("Hi", "Ho"), ("x" * 90, "Ho"), ("Hi", "Ho"))
    data = build(path, max_seq_len=60, excess_length="truncate")
    assert [data.sample_id(i) for i in range(len(data))] == ["a.jsonl:1", "a.jsonl:3"]
    assert data.report.datasets[0].counts["without a trained token, dropped"] == 1
    assert data.report.warnings == (
        f"warning: {path}: 1 of 3 samples without a trained token, dropped; max_seq_len is 60",
        f"warning: {path}: 1 of 3 samples longer than max_seq_len, cut; max_seq_len is 60",
    )


def test_data_sets_are_read_in_order_and_their_rows_told_apart(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", ("Hi", "Ho"), ("Hi", "Ho"))
    second = write(tmp_path / "b.jsonl", ("Hi", "Ho"))
    data = build_data(
        [DatasetSpec(first, weight=2), DatasetSpec(second, type="prompt_completion")],
        formatter=ChatFormatter(tiny.build_tokenizer()),
        max_seq_len=512,
    )
    assert data.rows.tolist() == [0, 1, 2]
    assert data.datasets.tolist() == [0, 0, 1]
    assert data.weights == (2, 1.0)
    assert data[2].sample_id == "b.jsonl:1"
    assert [r.detected for r in data.report.datasets] == [True, False]


def test_rows_of_two_data_sets_never_share_an_id(tmp_path: Path) -> None:
    for folder in ("a/x", "b/x", "c"):
        (tmp_path / folder).mkdir(parents=True)
    names = ("a/x/train.jsonl", "b/x/train.jsonl", "c/train.jsonl", "c/other.jsonl")
    specs = [DatasetSpec(write(tmp_path / name, ("Hi", "Ho"))) for name in names]
    formatter = ChatFormatter(tiny.build_tokenizer())
    data = build_data(specs, formatter=formatter, max_seq_len=512)
    assert [data.sample_id(i) for i in range(len(data))] == [
        "a/x/train.jsonl:1",
        "b/x/train.jsonl:1",
        "c/train.jsonl:1",
        "other.jsonl:1",
    ]
    again = build_data([specs[0], specs[0]], formatter=formatter, max_seq_len=512)
    assert [again.sample_id(i) for i in (0, 1)] == ["train.jsonl:1"] * 2  # one row, read twice


def test_a_data_set_is_told_from_others_by_its_tokens_mask_and_order(tmp_path: Path) -> None:
    rows = [("Hi", "Ho"), ("Hi", "Hello")]
    first, second = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", rows[0])
    formatter = ChatFormatter(tiny.build_tokenizer())

    def digests(*paths: str, formatter: ChatFormatter = formatter) -> list[str | None]:
        specs = [DatasetSpec(path) for path in paths]
        data = build_data(specs, formatter=formatter, max_seq_len=512)
        return [each.digest for each in data.report.datasets]

    a, b = digests(first, second)
    # Wherever it stands among others, and however its file is called.
    assert digests(second, first) == [b, a]
    assert digests(write(tmp_path / "c.jsonl", *rows)) == [a]
    data = build(second)
    assert data.lengths.dtype == np.int64
    columns = data.lengths.tobytes() + data.tokens.tobytes() + data.trained.tobytes()
    assert b == f"xxh3_128:{xxh3_128_hexdigest(columns)}"
    others = [
        *digests(write(tmp_path / "c.jsonl", *reversed(rows))),
        *digests(write(tmp_path / "c.jsonl", rows[0], ("Hi", "Hallo"))),
        *digests(write(tmp_path / "c.jsonl", *rows, rows[0])),
        *digests(first, formatter=ChatFormatter(tiny.build_tokenizer(), train_on_inputs=True)),
    ]
    assert len({a, *others}) == 5


def test_one_untrained_sample_in_a_hundred_is_no_warning(tmp_path: Path) -> None:
    pairs = [("Hi", "Ho")] * 99 + [("x" * 90, "Ho")]
    data = build(write(tmp_path / "a.jsonl", *pairs), max_seq_len=60, excess_length="truncate")
    assert len(data) == 99
    assert data.report.warnings == ()


def test_nothing_left_to_train_on_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[("x" * 90, "Ho")] * 64)
    with pytest.raises(DataError) as caught:
        build(path, max_seq_len=60, excess_length="truncate")
    assert str(caught.value) == (
        f"{path}: nothing left to train on of 64 rows: longer than max_seq_len, cut: 64; "
        "without a trained token, dropped: 64. max_seq_len is 60."
    )


def test_rows_of_which_none_can_be_read_are_not_blamed_on_the_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(DataError) as caught:
        build(path, on_bad_row="skip")
    assert "nothing left to train on of 2 rows: " in str(caught.value)
    assert str(caught.value).endswith(" whether type and columns are those of these rows.")
    assert "max_seq_len" not in str(caught.value)


def test_rows_of_which_no_turn_is_trained_are_not_blamed_on_the_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "weight": 0}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError) as caught:
        build(path, max_seq_len=60)
    assert str(caught.value) == (
        f"{path}: nothing left to train on of 1 row: without a trained token, dropped: 1. "
        "Trained are the turns that roles_to_train and turns_to_train name, but for those of "
        "weight 0, and with train_on_inputs: true the others too."
    )


def test_a_column_without_a_name_is_named_among_those_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pandas.csv"
    path.write_text(",prompt,completion\n0,Hi,Ho\n")
    assert build(path).report.lines()[-1] == f"{path}: columns not read: ''"


def test_an_empty_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no rows"):
        build(write(tmp_path / "a.jsonl"))


def test_a_broken_line_is_an_error_with_its_place_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"prompt": "Hi", "completion": "Ho"})
    path.write_text(f"{good}\n{{broken\n" + json.dumps({"prompt": "Hi"}) + f"\n{good}\n")
    with pytest.raises(
        DataError,
        match=rf"^{path}:2: isn't valid JSON: .* at column 2\. Of 4 rows read, 2 can't be used "
        r"\(a.jsonl:2, a.jsonl:3\)\. Mend them, or leave such rows out with on_bad_row: skip$",
    ):
        build(str(path))
    data = build(str(path), on_bad_row="skip")
    assert [data.sample_id(i) for i in range(len(data))] == ["a.jsonl:1", "a.jsonl:4"]
    assert data.rows.tolist() == [0, 3]
    assert data.report.datasets[0].counts == {"bad rows, skipped": 2}
    assert data.report.datasets[0].examples == {"bad rows, skipped": ["a.jsonl:2", "a.jsonl:3"]}
    (warning,) = data.report.warnings
    assert warning.startswith(f"warning: {path}: 2 of 4 rows are bad rows, skipped. The first: ")
    assert ":2: isn't valid JSON" in warning


def test_the_error_of_a_bad_row_offers_the_key_and_counts_the_others_that_are_near(
    tmp_path: Path,
) -> None:
    good, bad = json.dumps({"text": "Hi"}), json.dumps({"text": 3})
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([good, bad, good]))
    with pytest.raises(
        DataError,
        match=r"a.jsonl:2: text is of type int; expected text\. "
        "Mend the row, or leave such rows out with on_bad_row: skip$",
    ):
        build(str(path))
    # In the order of the file, whatever is wrong with them.
    control = json.dumps({"text": "<|im_end|>"})
    path.write_text("\n".join([good, control, bad, "{", control]))
    with pytest.raises(
        DataError, match=r"a.jsonl:2: text holds the control token .* 4 can't .*:2, a.jsonl:3, a.j"
    ):
        build(str(path))
    # Behind the first 250 rows, 5,000 more are looked at, and not a file of any length.
    path.write_text("\n".join([bad] * 4 + [good] * 6_000 + [bad]))
    with pytest.raises(DataError, match=r"Of 5,250 rows read, 4 can't be used .*:3, \.{3}\)"):
        build(str(path))


def test_rows_that_are_all_bad_are_an_error_that_shows_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ("<|im_end|>", "Ho"), ("Hi", "<|im_end|>"))
    with pytest.raises(
        DataError, match=r"of 2 rows: bad rows, skipped: 2\. The first: .*message 1"
    ):
        build(path, on_bad_row="skip")


def test_a_mapping_without_a_type_still_detects_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "Hi", "answer": {"a": 1}}))
    spec = DatasetSpec(str(path), columns={"prompt": "question", "completion": "answer"})
    data = build_data([spec], formatter=ChatFormatter(tiny.build_tokenizer()), max_seq_len=512)
    assert data.report.datasets[0].type == "prompt_completion"
    text = tiny.build_tokenizer().decode(data[0].input_ids[data[0].trained])
    assert text == '{"a": 1}<|im_end|>'


@pytest.mark.parametrize(
    "text",
    [
        *("", "  \n", "\0", "\u200b", "a\r\nb", "\ufeffa", "x" * 300),
        *("\u202eabc", "\u0634\u0643\u0631\u0627 abc"),  # right to left
        *("\U0001f600", "\U0001f468\u200d\U0001f469"),  # an emoji, and one of several characters
    ],
)
def test_odd_texts_are_trained_as_they_are(tmp_path: Path, text: str) -> None:
    data = build(write(tmp_path / "a.jsonl", ("Hi", text), (text, "Ho")))
    for sample, prompt, answer in ((data[0], "Hi", text), (data[1], text, "Ho")):
        decode = tiny.build_tokenizer().decode
        assert decode(sample.input_ids[sample.trained]) == answer + "<|im_end|>"
        assert decode(sample.input_ids[~sample.trained]) == (
            f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("line", [1, 9_000, 17_000])
def test_a_broken_line_of_a_large_file_is_found_wherever_it_is(tmp_path: Path, line: int) -> None:
    good = json.dumps({"prompt": "How many? " * 20, "completion": "7" * 20}) + "\n"
    lines = [good] * 17_000
    lines[line - 1] = good[:-4] + "\n"
    path = tmp_path / "large.jsonl"
    path.write_text("".join(lines))
    assert path.stat().st_size > 4_000_000
    broken = [row for row in read_rows(str(path)) if isinstance(row, BadRow)]
    assert [row.where for row in broken] == [f"{path}:{line}"]
    assert broken[0].reason.startswith("isn't valid JSON: Unterminated string")


def test_options_that_mean_nothing_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_data(
            [DatasetSpec("a.jsonl", weight=0)],
            formatter=ChatFormatter(tiny.build_tokenizer()),
            max_seq_len=1,
            excess_length="cut",
            on_bad_row="ignore",
        )
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "a.jsonl", "max_seq_len", "excess_length", "on_bad_row",
    ]  # fmt: skip


def test_held_out_rows_are_drawn_by_seed_and_keep_their_order(tmp_path: Path) -> None:
    data = build(write(tmp_path / "a.jsonl", *[(str(i), "Ho") for i in range(20)]))
    train, val = split_validation(data, val_set_size=0.2, seed=1)
    assert (len(train), len(val)) == (16, 4)
    names = {data.sample_id(i) for i in range(20)}
    assert {s.sample_id(i) for s in (train, val) for i in range(len(s))} == names
    assert val.rows.tolist() == sorted(val.rows.tolist())
    assert split_validation(data, val_set_size=4, seed=1)[1].rows.tolist() == val.rows.tolist()
    assert split_validation(data, val_set_size=4, seed=2)[1].rows.tolist() != val.rows.tolist()
    for size in (20, 0, 0.001):
        with pytest.raises(
            ConfigError, match=r"^val_set_size: .*, as the config has it, holds .* 0 for"
        ):
            split_validation(data, val_set_size=size, seed=1)


def test_samples_of_one_row_are_never_on_both_sides(tmp_path: Path) -> None:
    template = tiny.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}] * 2
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(10)))
    data = build_data(
        [DatasetSpec(str(path), weight=2)],
        formatter=ChatFormatter(tiny.build_tokenizer(template)),
        max_seq_len=512,
    )
    assert len(data) == 20
    assert [data.sample_id(i) for i in (0, 1, 2)] == ["a.jsonl:1#2", "a.jsonl:1#4", "a.jsonl:2#2"]
    train, val = split_validation(data, val_set_size=5, seed=0)
    assert (len(train), len(val)) == (10, 10)
    assert set(train.rows.tolist()).isdisjoint(val.rows.tolist())
    assert (train.weights, val.weights) == ((2,), (1.0,))
