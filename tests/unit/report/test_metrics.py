from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from legato.checkpoint.records import SaveRecord
from legato.report.metrics import EventName, MetricsLog, read_events
from legato.report.start import StartFacts


class ListLogger:
    name = "list"

    def __init__(self, *, fail: bool = False) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.num_closed = 0
        self.fail = fail

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        if self.fail:
            raise ConnectionError("no route")
        self.events.append((event, dict(fields)))

    def close(self) -> None:
        self.num_closed += 1
        if self.fail:
            raise ConnectionError("no route")


def strict_json(line: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} isn't JSON")

    return json.loads(line, parse_constant=refuse)


def test_each_event_is_one_line_of_json_in_the_order_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl", clock=lambda: 12.5)
    log.write("start", model="a\nb", optimizer={"lr": 1e-3, "betas": [0.9, 0.99]}, num_tokens=7)
    log.write("step", step=1, loss=0.5)
    log.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [strict_json(line) for line in lines] == [
        {
            "event": "start",
            "time": 12.5,
            "model": "a\nb",
            "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
            "num_tokens": 7,
        },
        {"event": "step", "time": 12.5, "step": 1, "loss": 0.5},
    ]


def test_numbers_that_arent_finite_are_null_and_named_beside(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=lambda: 0.0)
    log.write("step", step=1, loss=math.nan, grad_norm=math.inf, more={"low": -math.inf}, lr=0.0)
    log.close()
    assert strict_json((tmp_path / "metrics.jsonl").read_text()) == {
        "event": "step",
        "time": 0.0,
        "step": 1,
        "loss": None,
        "loss_text": "nan",
        "grad_norm": None,
        "grad_norm_text": "inf",
        "more": {"low": None, "low_text": "-inf"},
        "lr": 0.0,
    }


def test_a_line_is_there_as_soon_as_it_was_written_even_if_the_process_is_killed(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys; from legato.report.metrics import MetricsLog;"
        "MetricsLog(sys.argv[1]).write('step', step=1); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "metrics.jsonl"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    assert [event["step"] for event in read_events(path)] == [1]


def test_a_resumed_run_adds_to_the_file_and_removes_only_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n'
    path.write_text(whole + '{"event": "step", "st')
    log = MetricsLog(path, clock=lambda: 0.0)
    assert path.read_text() == whole
    log.write("resume", step=1)
    log.close()
    assert path.read_text() == whole + '{"event": "resume", "time": 0.0, "step": 1}\n'


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        (b"my own words", b"my own words\n"),
        (b'{"event": "step", "step": 1}', b'{"event": "step", "step": 1}\n'),
        (b'{"ev', b""),
        (b'{"event": "step", "step": 1', b""),
    ],
)
def test_a_last_line_without_its_end_gets_it_unless_it_is_half_an_event(
    tmp_path: Path, last: bytes, kept: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"first\n" + last)
    log = MetricsLog(path, clock=lambda: 0.0)
    log.write("end", step=1)
    log.close()
    end = b'{"event": "end", "time": 0.0, "step": 1}\n'
    assert path.read_bytes() == b"first\n" + kept + end


def test_readers_leave_out_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step", "step": 1}\n[1]\n\xff\n{"event": "st')
    assert list(read_events(path)) == [{"event": "step", "step": 1}]


def test_loggers_get_the_events_with_their_raw_values(tmp_path: Path) -> None:
    logger = ListLogger()
    log = MetricsLog(tmp_path / "metrics.jsonl", loggers=[logger])
    log.write("step", step=1, loss=math.inf)
    log.close()
    log.close()
    assert logger.events == [("step", {"step": 1, "loss": math.inf})]
    assert logger.num_closed == 1


def test_a_logger_that_fails_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = ListLogger(), ListLogger(fail=True)
    log = MetricsLog(tmp_path / "metrics.jsonl", loggers=[bad, good])
    for step in (1, 2):
        log.write("step", step=step)
    log.close()
    assert len(good.events) == 2
    assert [event["step"] for event in read_events(tmp_path / "metrics.jsonl")] == [1, 2]
    assert caplog.text.count("list gets no more metrics of this run: no route") == 1


def test_closing_survives_a_logger_that_cant_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", loggers=[ListLogger(fail=True)])
    log.close()
    assert "its last metrics may be lost" in caplog.text


def test_a_full_disk_loses_lines_aloud_but_never_the_run_or_half_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the file's size stands for a full disk: the write is cut short, then refused."""
    code = """
import resource, signal, sys
from legato.report.metrics import MetricsLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = MetricsLog(sys.argv[1], clock=lambda: 0.0)
log.write("step", step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (60, -1))
log.write("step", step=2)
log.write("step", step=3)
print(open(sys.argv[1]).read(), end="")
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
log.write("step", step=4)
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert [strict_json(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert done.stdout == '{"event": "step", "time": 0.0, "step": 1}\n'  # while it was full
    assert done.stderr.count("metrics are being lost") == 1


def test_a_file_that_was_deleted_is_begun_anew_once_its_folder_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("step", step=1)
    path.unlink()
    path.parent.rmdir()
    log.write("step", step=2)  # whoever deletes the folder isn't disturbed
    assert not path.parent.exists()
    assert "has gone" not in caplog.text
    path.parent.mkdir()
    log.write("step", step=3)
    path.rename(tmp_path / "moved.jsonl")
    log.write("step", step=4)
    log.write("step", step=5)
    log.close()
    assert [event["step"] for event in read_events(path)] == [4, 5]
    assert [event["step"] for event in read_events(tmp_path / "moved.jsonl")] == [3]
    assert caplog.text.count("has gone: metrics go on in a new file") == 2


def test_a_file_of_another_run_in_its_place_is_let_alone(tmp_path: Path) -> None:
    path, is_ours = tmp_path / "out" / "metrics.jsonl", False
    log = MetricsLog(path, is_ours=lambda: is_ours)
    path.parent.rename(tmp_path / "moved")
    path.parent.mkdir()
    log.write("step", step=1)
    assert not path.exists()
    path.write_text("another's\n")
    log.write("step", step=2)
    assert path.read_text() == "another's\n"
    found = read_events(tmp_path / "moved" / "metrics.jsonl")
    assert [event["step"] for event in found] == [1, 2]
    is_ours = True
    log.write("step", step=3)
    log.close()
    assert [event["step"] for event in read_events(path)] == [3]


def test_a_folder_that_cant_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
        MetricsLog(tmp_path / "file" / "metrics.jsonl")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_values_that_arent_json_are_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.write("start", output_dir=Path(os.sep))
    log.close()


def documented() -> dict[str, set[str]]:
    """Event -> the fields in its table in docs/metrics.md."""
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    sections = text.split("\n### ")[1:]
    return {
        section.split("\n", 1)[0]: {
            field
            for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
            for field in re.findall(r"`(\w+)`", row)
        }
        for section in sections
    }


def test_the_docs_name_every_event_and_the_fields_that_are_written() -> None:
    events = documented()
    assert list(events) == list(get_args(EventName))
    assert events["start"] == {"run_id"} | {field.name for field in fields(StartFacts)}
    assert events["sample"] == {"step", "sample_id", "prompt", "expected", "answer"}
    assert events["save"] == {field.name for field in fields(SaveRecord)}
