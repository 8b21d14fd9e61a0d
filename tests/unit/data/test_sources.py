"""Rows from files of every kind, and what a person is told about a broken one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from legato.data import json_text
from legato.data.hub import ShardStart, ShardStarts
from legato.data.sources import BadRow, Row, local_files, read_rows
from legato.errors import DataError
from tests.helpers.hub_datasets import dataset_hub

ROWS = [{"text": "a\r\nb"}, {"text": "\u0634\U0001f600"}]


def columns(path: Path | str, split: str | None = None) -> list[dict[str, object]]:
    found = list(read_rows(str(path), split=split))
    assert all(isinstance(row, Row) for row in found), found
    return [row.columns for row in found if isinstance(row, Row)]


def ids(path: Path | str) -> list[str]:
    return [row.sample_id for row in read_rows(str(path))]


def write_jsonl(path: Path, rows: list[dict[str, str]] = ROWS, *, end: str = "\n") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("".join(json.dumps(row) + end for row in rows).encode())
    return path


def test_json_lines_with_a_bom_blank_lines_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert columns(path) == [{"text": "a"}, {"text": "b"}]
    assert ids(path) == ["a.jsonl:1", "a.jsonl:3"]


def test_a_line_separator_inside_a_string_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert columns(path) == [{"text": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps({"version": 1, "data": ROWS}),
        "\n".join(json.dumps(row) for row in ROWS),
    ],
    ids=["a list", "an object that holds a list", "json lines under another name"],
)
def test_a_json_file_may_hold_rows_in_three_ways(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert columns(path) == ROWS
    assert ids(path) == ["a.json:1", "a.json:2"]


def test_csv_with_quotes_line_ends_and_a_bom(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfq,a\r\n"x, ""y""\nz",1\r\nw,2\r\n')
    assert columns(path) == [{"q": 'x, "y"\nz', "a": "1"}, {"q": "w", "a": "2"}]
    assert ids(path) == ["a.csv:2", "a.csv:4"]


def test_csv_with_a_very_long_field(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 300_000 + "\n")
    assert columns(path) == [{"text": "x" * 300_000}]


def test_tab_separated_values(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("q\ta\nx,y\t1\n")
    assert columns(path) == [{"q": "x,y", "a": "1"}]


def test_parquet_and_both_forms_of_arrow(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    with ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert columns(tmp_path / name) == ROWS
        assert ids(tmp_path / name) == [f"{name}:1", f"{name}:2"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv"])
def test_compressed_files(kind: str, tmp_path: Path) -> None:
    between = "\t" if kind == "tsv" else ","
    text = {"jsonl": '{"q": "a", "n": "1"}\n', "json": '[{"q": "a", "n": "1"}]'}
    plain = text.get(kind, f"q{between}n\na{between}1\n").encode()
    (tmp_path / f"b.{kind}.gz").write_bytes(gzip.compress(plain))
    (tmp_path / f"c.{kind}.zst").write_bytes(pa.Codec("zstd").compress(plain, asbytes=True))
    assert columns(tmp_path / f"b.{kind}.gz") == [{"q": "a", "n": "1"}]
    assert columns(tmp_path / f"c.{kind}.zst") == [{"q": "a", "n": "1"}]
    (tmp_path / f"d.{kind}.gz").write_bytes(gzip.compress(plain)[:-9])
    with pytest.raises(DataError, match=rf"d\.{kind}\.gz: can't be read to its end"):
        columns(tmp_path / f"d.{kind}.gz")


def test_a_glob_and_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", ".hidden.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert ids(tmp_path / "*.jsonl") == ["a.jsonl:1", "b.jsonl:1"]
    assert ids(tmp_path) == ["a.jsonl:1", "b.jsonl:1"]


def test_files_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x" / "a.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "y" / "a.jsonl", ROWS[:1])
    assert ids(tmp_path) == ["x/a.jsonl:1", "y/a.jsonl:1"]


@pytest.mark.parametrize(
    ("train", "held_out", "pattern"),
    [
        ("train.jsonl", "test.jsonl", ""),
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl", ""),
        ("rows.jsonl", "test_set.jsonl", ""),
        ("train-00000-of-00001.jsonl", "Validation-00000-of-00001.jsonl", ""),
        ("train/a.jsonl", "test/a.jsonl", ""),
        ("train.jsonl", "test.jsonl", "*.jsonl"),
        ("train/a.jsonl", "dev/a.jsonl", "*/a.jsonl"),
    ],
)
def test_files_to_test_on_must_not_be_read_as_one_heap_with_others(
    train: str, held_out: str, pattern: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / train, [{"text": "train"}])
    write_jsonl(tmp_path / held_out, [{"text": "test"}])
    with pytest.raises(DataError, match=rf"holds {held_out} beside other files\. Name "):
        list(read_rows(str(tmp_path / pattern)))
    assert columns(tmp_path / held_out) == [{"text": "test"}]


def test_words_that_only_look_like_a_split_are_names_like_others(tmp_path: Path) -> None:
    for name in (
        "contest.jsonl",
        "latest-values.jsonl",
        "train/test_questions.jsonl",
        "train/b.jsonl",
    ):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert len(columns(tmp_path)) == 4


def test_a_split_of_a_folder_is_read_through_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text('{"o": {"a": 0, "b": 0}}')
    objects = [{"o": {"a": 1}}, {"o": {"b": 2}}]  # Arrow gives each of them both members
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in objects))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert columns(tmp_path, split="test") == objects
    with pytest.raises(DataError, match=r'Unknown split "dev"'):
        list(read_rows(str(tmp_path), split="dev"))


def bad(path: Path) -> list[tuple[str, str]]:
    return [(r.where, r.reason) for r in read_rows(str(path)) if isinstance(r, BadRow)]


def test_a_broken_line_is_named_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"\n{"text": "\xe9"}\n[1]\n{"text": "c"}\n')
    assert bad(path) == [
        (f"{path}:2", "isn't valid JSON: Expecting ',' delimiter at column 13"),
        (f"{path}:3", "isn't UTF-8: byte 0xE9 at position 11. Save the file as UTF-8."),
        (f"{path}:4", "is of type list, not an object with columns"),
    ]
    good = [row.columns for row in read_rows(str(path)) if isinstance(row, Row)]
    assert good == [{"text": "a"}, {"text": "c"}]


def test_a_row_of_very_many_levels_is_named_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [b'{"text": ' + b"[" * n + b"]" * n + b"}" for n in (98, 99, 100, 9999)]
    path.write_bytes(b"\n".join([*rows, b'{"text": "c"}']))
    told = "holds lists and objects in more than 100 levels; expected a few"
    assert bad(path) == [(f"{path}:3", told), (f"{path}:4", told)]
    assert ids(path) == [f"a.jsonl:{line}" for line in (1, 2, 3, 4, 5)]


def test_lines_that_python_would_read_as_something_else_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    doubled = b'{"text": "a", "more": [{"x": 1, "y": 2, "x": 3}]}'
    path.write_bytes(doubled + b'\n{"text": ' + b"9" * 5000 + b'}\n{"text": "c", "score": NaN}\n')
    assert bad(path) == [
        (f"{path}:1", "has 'x' twice in one object; give it once"),
        (f"{path}:2", "holds a number of more than 4300 digits"),
    ]
    rows = json.dumps([{"text": "a"}]).encode()[:-1] + b", " + doubled + b"]"
    listed = tmp_path / "a.json"
    listed.write_bytes(rows)
    assert bad(listed) == [(f"{listed}: row 2", "has 'x' twice in one object; give it once")]


def test_lines_that_end_in_carriage_returns_alone_are_called_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", end="\r")
    [(where, reason)] = bad(path)
    assert where == f"{path}:1"
    assert reason.startswith("isn't valid JSON: Extra data at column ")
    assert reason.endswith("end in a carriage return alone: save them with line feeds")


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("utf-16-le", "UTF-16 or UTF-32"),
        ("utf-16-be", "UTF-16 or UTF-32"),
        ("utf-32-le", "UTF-16 or UTF-32"),
    ],
)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_another_encoding_is_named(tmp_path: Path, encoding: str, name: str, kind: str) -> None:
    path = tmp_path / f"a{kind}"
    text = "text,more\na,b\n" if kind == ".csv" else '{"text": "a"}\n{"text": "b"}\n'
    path.write_bytes(text.encode(encoding))
    told = f"is {name}, not UTF-8. Save the file as UTF-8."
    if kind == ".jsonl":
        assert bad(path)[0] == (f"{path}:1", told)
    else:
        with pytest.raises(DataError) as caught:
            list(read_rows(str(path)))
        assert str(caught.value) == f"{path}:1: {told}"


def test_table_rows_that_python_has_no_values_for_are_named_and_the_next_one_is_read(
    tmp_path: Path,
) -> None:
    no_text = pa.array([b"a", b"\xe9", b"c", b"d"]).view(pa.string())
    dates = pa.array([0, 0, 2**40, 0], pa.timestamp("s"))
    table = pa.table({"text": no_text, "at": dates})
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.arrow", tmp_path / "a.parquet"):
        found = bad(path)
        assert [where for where, _ in found] == [f"{path}: row 2", f"{path}: row 3"]
        assert all(reason.startswith("holds what can't be read: ") for _, reason in found)
        assert ids(path) == [f"{path.name}:{number}" for number in (1, 2, 3, 4)]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,more,text\n1,2,3\n")
    schema = pa.schema([("text", pa.string()), ("text", pa.string())])
    table = pa.table([pa.array(["a"]), pa.array(["b"])], schema=schema)
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "a.parquet")
    for name, where in (("a.csv", "a.csv:1"), ("a.arrow", "a.arrow"), ("a.parquet", "a.parquet")):
        with pytest.raises(DataError) as caught:
            list(read_rows(str(tmp_path / name)))
        told = f"{tmp_path / where}: two columns are called 'text'. Rename one."
        assert str(caught.value) == told


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
@pytest.mark.parametrize(("suffix", "compression"), [(".gz", "gzip"), (".zst", "zstd")])
def test_damaged_compressed_bytes_are_one_error(
    tmp_path: Path, kind: str, suffix: str, compression: str
) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    text = "".join(f'{{"text": "{number * 7919}"}}\n' for number in range(20_000)).encode()
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write(b"text\n" + text.replace(b'"', b"") if kind == ".csv" else text)
    sound = path.read_bytes()
    middle = len(sound) // 2
    # Whoever wrote zstd without a checksum, as here, can't be told of other letters.
    begun = [sound[:10] + b"\xff" * 4 + sound[14:]] if suffix == ".gz" else []
    for damaged in (sound[:middle], sound[:-1], b"\0" + sound[1:], *begun):
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            list(read_rows(str(path)))
        assert str(caught.value).startswith(f"{path}: can't be read to its end: ")
        assert str(caught.value).endswith(f" -t {path}` tests it.")


def test_a_csv_row_that_cannot_be_used_is_named_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'q,a\n1,2\n1,2,3\n1\n\n"x\n\xe9" z,1\n"x\n\xe9\n\xe9",3\n4,"5"\n')
    assert bad(path) == [
        (f"{path}:3", "has 3 fields; the first line names 2"),
        (f"{path}:4", "has 1 fields; the first line names 2"),
        (f"{path}:6", "isn't valid CSV: ',' expected after '\"'"),
        (f"{path}:9", "isn't UTF-8: byte 0xE9 at position 1. Save the file as UTF-8."),
    ]
    assert ids(path) == [f"a.csv:{line}" for line in (2, 3, 4, 6, 8, 11)]
    good = [row.columns for row in read_rows(str(path)) if isinstance(row, Row)]
    assert good == [{"q": "1", "a": "2"}, {"q": "4", "a": "5"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": 1},\n {"text": }]', r"a\.json:2: isn't valid JSON: .* column 11"),
        ("a.json", b'{"a": [], "b": []}', r"one object with a, b; expected a list of rows"),
        ("a.json", b"[" * 100_000, r"a\.json: holds lists and objects in more than 100"),
        ("a.json", b"3", r"is of type int; expected a list of rows"),
        ("a.json", '[{"text":\n"é"}]'.encode("latin-1"), r"a\.json:2: isn't UTF-8: .* position 2"),
        ("a.json", '[{"text": "e"}]'.encode("utf-16"), r"is UTF-16, not UTF-8"),
        ("a.csv", "q,é\na,b".encode("latin-1"), r"a\.csv:1: isn't UTF-8: byte 0xE9 at position 3"),
        ("a.csv", "q,a\n".encode("utf-16"), r"a\.csv:1: is UTF-16, not UTF-8"),
        (
            "a.csv",
            b'q,a\n1,2\n"x,1\n3,4\n',
            r"\.csv:3: .* unexpected end of data\. A quote",
        ),
        ("a.parquet", b"PAR1 no", r"a\.parquet: can't be read as \.parquet: .* Fetch or make it"),
        ("a.arrow", b"no", r"a\.arrow: can't be read as \.arrow: .* Fetch or make it again\.$"),
        # Not taken for a stream, which would have much more to say.
        ("a.arrow", b"ARROW1\0\0no", r"read as \.arrow: (File is too small|Not an Arrow file)"),
        ("a.parquet.gz", b"", r"compressed table can't be read; .* Unpack it: gunzip \S+\.gz$"),
        ("a.jsonl.gz", b"no", r"a\.jsonl\.gz: can't be read to its end: Not a gzipped file"),
        ("a.txt", b"no", r"a\.txt: unknown kind of file\. Known: \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"orders\.jsonl: no such file or folder \(looked in"):
        read_rows("orders.jsonl")
    with pytest.raises(DataError, match=r"no data file there"):
        list(read_rows(str(tmp_path)))
    with pytest.raises(DataError, match=r"no data file there"):
        list(read_rows(str(tmp_path / "*.jsonl")))
    with pytest.raises(DataError, match=r"split 'train' is for data sets on the hub"):
        read_rows(str(write_jsonl(tmp_path / "a.jsonl")), split="train")


def test_a_hub_name_without_a_network_says_so() -> None:
    with pytest.raises(DataError, match=r"owner/name: .*can't be loaded.*HF_HUB_OFFLINE is set"):
        list(read_rows("owner/name"))


READ = """
import json, sys
from legato.data.hub import ShardStart, ShardStarts
from legato.data.sources import read_rows
for path, split, streaming in json.loads(sys.argv[1]):
    rows = read_rows(path, split=split, streaming=streaming, skip=1)
    print(json.dumps([[row.sample_id, row.where, row.columns] for row in rows]))
"""


def test_a_name_on_the_hub_a_subset_and_a_split_are_loaded_from_it(tmp_path: Path) -> None:
    """By a process of its own: the hub's clients read their settings once."""
    served = tmp_path / "served"
    for subset, split in (("main", "train"), ("main", "test"), ("other", "train")):
        (served / subset).mkdir(parents=True, exist_ok=True)
        rows = pa.Table.from_pylist([{"q": f"{subset} {split} {i}"} for i in range(3)])
        parquet.write_table(rows, served / subset / f"{split}-00000-of-00001.parquet")
    (served / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_dir: main\n  default: true\n"
        "- config_name: other\n  data_dir: other\n---\n"
    )
    asked = [
        ["owner/name", None, False],
        ["owner/name:main", "test", False],
        ["owner/name:other", None, False],
        ["owner/name:other", None, True],
    ]
    with dataset_hub(served) as hub:
        done = subprocess.run(
            [sys.executable, "-c", READ, json.dumps(asked)],
            env={
                **os.environ,
                "HF_ENDPOINT": hub.endpoint,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path / "hf-home"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [
        ("owner/name", "owner/name (train)", "main train"),
        ("owner/name:main[test]", "owner/name (test)", "main test"),
        ("owner/name:other", "owner/name (train)", "other train"),
        ("owner/name:other", "owner/name (train)", "other train"),
    ]
    assert found == [
        [[f"{name}:{i}", f"{place}: row {i}", {"q": f"{text} {i - 1}"}] for i in (2, 3)]
        for name, place, text in expected
    ]


def test_a_damaged_page_of_a_parquet_file_with_checksums_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([{"text": f"row {i} of many"} for i in range(500)])
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    parquet.write_table(table, path, write_page_checksum=True, **plain)
    damaged = path.read_bytes().replace(b"row 77 of many", b"row 77 of many".swapcase())
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"CRC checksum verification failed.* Fetch or make it"):
        list(read_rows(str(path)))


def test_an_arrow_stream_that_was_cut_between_two_batches_is_not_taken_for_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.Table.from_pylist([{"text": str(i)} for i in range(9)])
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    end = b"\xff\xff\xff\xff\0\0\0\0"
    path.write_bytes(path.read_bytes().removesuffix(end))
    assert [where for where, _ in bad(path)] == [f"{path}: row 10"]
    assert len(list(read_rows(str(path)))) == 10
    assert len(list(read_rows(str(path), skip=8))) == 2


def test_a_link_to_nothing_a_pipe_and_an_address_are_told_and_no_rows_are_lost(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl: is a link to \S+gone\.jsonl, which isn't"):
            list(read_rows(str(path)))
    (tmp_path / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "b.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl: is a pipe .* Write it to a file first"):
            list(read_rows(str(path)))
        with pytest.raises(DataError, match=r"b\.jsonl: is a pipe"):  # nor is it waited for
            local_files(str(path))
    with pytest.raises(DataError, match=r"not from addresses\. Download it and give the file's"):
        read_rows("https://example.org/a.jsonl")


@pytest.fixture(scope="module")
def long_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 1 to 25 in every kind of file, and over two files of a folder."""
    folder = tmp_path_factory.mktemp("long")
    rows = [{"text": str(i)} for i in range(1, 26)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text("\n" + lines)  # a blank line is no row
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    with ipc.new_file(folder / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    with ipc.new_stream(folder / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    (folder / "two").mkdir()
    parquet.write_table(table[:10], folder / "two" / "a.parquet", row_group_size=4)
    (folder / "two" / "b.jsonl").write_text("".join(lines.splitlines(keepends=True)[10:]))
    return folder


SOURCES = ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"]
SOURCES += ["file.arrow", "stream.arrow", "two"]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("skip", [0, 1, 8, 9, 10, 13, 24, 25, 30])
def test_reading_from_a_row_on_gives_the_rows_with_the_names_that_reading_all_gives(
    long_sources: Path, name: str, skip: int
) -> None:
    whole = list(read_rows(str(long_sources / name)))
    assert [row.columns["text"] for row in whole if isinstance(row, Row)] == [
        str(i) for i in range(1, 26)
    ]
    assert list(read_rows(str(long_sources / name), skip=skip)) == whole[skip:]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_streamed_split_gives_the_rows_of_the_loaded_one_and_is_entered_at_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "rows"
    texts = ["0123", "456", "789"]
    folder.mkdir()
    for number, text in enumerate(texts):
        path = folder / f"train-{number}.{kind}"
        rows = [{"text": each} for each in text]
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        else:
            write_jsonl(path, rows)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded = list(read_rows(str(folder), split="train"))
    assert [row.columns["text"] for row in loaded if isinstance(row, Row)] == list("0123456789")
    starts = ShardStarts()
    streamed = read_rows(str(folder), split="train", streaming=True, skip=3, starts=starts)
    assert list(streamed) == loaded[3:]
    found = [starts.before(row) for row in range(10)]
    shards = [ShardStart(0, 0, 3), ShardStart(4, 1, 3), ShardStart(7, 2, 3)]
    assert found == [shards[0]] * 4 + [shards[1]] * 3 + [shards[2]] * 3
    # What comes before the shard, but for the row that says the format, isn't read again.
    if kind == "jsonl":
        write_jsonl(folder / "train-0.jsonl", [{"text": "?"}])
    for skip in (7, 8, 9):
        starts = ShardStarts(shards[2])
        again = read_rows(str(folder), split="train", streaming=True, skip=skip, starts=starts)
        assert list(again) == loaded[skip:]
        assert starts.before(skip) == shards[2]
    # Of another number of shards, none is where it was: it's read past from the beginning.
    (folder / "train-2.jsonl").unlink(missing_ok=True)
    (folder / "train-2.parquet").unlink(missing_ok=True)
    again = read_rows(
        str(folder), split="train", streaming=True, skip=1, starts=ShardStarts(shards[2])
    )
    rest = [row.columns["text"] for row in again if isinstance(row, Row)]
    assert rest == list("456" if kind == "jsonl" else "123456")


def test_reading_past_many_rows_says_how_long_it_takes(
    long_sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(long_sources / "a.csv")
    caplog.set_level("INFO")
    list(read_rows(path, skip=20))
    assert caplog.messages == []  # it was quick
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("legato.data.rows.time.monotonic", lambda: float(next(clock)))
    list(read_rows(path, skip=5))
    assert caplog.messages == [
        f"{path} can't be entered in the middle: 3 of 5 rows read past to where the run goes on, "
        "about 8 s left",
        f"{path}: there after 20 s",
    ]


def test_reading_from_a_row_on_parses_nothing_before_it(
    long_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = json_text.parse_json
    monkeypatch.setattr(
        "legato.data.readers.parse_json", lambda text: parsed.append(text) or parse(text)
    )
    assert len(list(read_rows(str(long_sources / "a.jsonl"), skip=23))) == 2
    assert parsed == ['{"text": "24"}', '{"text": "25"}']
