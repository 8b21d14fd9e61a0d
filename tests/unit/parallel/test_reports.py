"""Which rank failed first, and what a restarted one has to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from legato.errors import CheckpointWriteError, RunFailedError, StopRequested
from legato.parallel.reports import (
    Death,
    RankEnd,
    ask_to_save,
    ask_to_stop,
    clear_end,
    conclude,
    first_failure,
    is_over,
    read_ends,
    write_end,
)


def failed(rank: int, time: float, message: str = "broken") -> RankEnd:
    return RankEnd(rank=rank, how="failed", time=time, exit_code=1, message=message)


def lost(rank: int, time: float) -> RankEnd:
    return RankEnd(rank=rank, how="lost", time=time, exit_code=1, message="lost another rank")


def test_ends_are_read_as_they_were_written(tmp_path: Path) -> None:
    ends = [failed(0, 3.25, "zwei\nZeilen"), lost(1, 4.0), RankEnd(rank=11, how="done", time=5.0)]
    for end in reversed(ends):
        write_end(str(tmp_path), end)
    assert read_ends(str(tmp_path)) == ends
    clear_end(str(tmp_path), 1)
    clear_end(str(tmp_path), 7)
    assert [end.rank for end in read_ends(str(tmp_path))] == [0, 11]


def test_a_restart_has_nothing_to_do_after_a_stop_or_an_error_that_would_come_again(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path)
    assert not is_over(folder)
    write_end(folder, failed(0, 1.0))
    write_end(folder, lost(1, 1.0))
    assert not is_over(folder)
    final = RankEnd(rank=0, how="failed", time=2.0, exit_code=2, is_final=True)
    write_end(folder, final)
    assert is_over(folder)
    clear_end(folder, 0)
    assert not is_over(folder)
    ask_to_stop(folder, 15)
    assert is_over(folder)


def test_what_finds_no_room_is_said_and_ends_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "launch")
    write_end(folder, failed(1, 1.0))
    ask_to_stop(folder, 15)
    ask_to_save(folder)
    assert [text.partition(": [Errno")[0] for text in caplog.messages] == [
        "the launcher isn't told how rank 1 ended",
        "processes that just start aren't told to stop",
        "the processes can't be asked to save",
    ]


@pytest.mark.parametrize(
    ("ends", "deaths", "rank"),
    [
        # The earlier error, whoever noticed it first.
        ([failed(0, 10.2), failed(1, 10.1)], {0: 1, 1: 1}, 1),
        # The echo of an error isn't its cause, even where it came earlier by the clock.
        ([lost(0, 9.9), failed(1, 10.1)], {0: 1, 1: 1}, 1),
        # Killed without a word; the other one heard of it at once, the launcher a moment later.
        ([lost(0, 100.4)], {0: 1, 1: -9}, 1),
        ([failed(0, 100.4, "a queer echo")], {0: 1, 1: -9}, 1),
        # The launcher ends whoever is left, first with SIGTERM, then with SIGKILL.
        ([failed(0, 70.2)], {0: 1, 1: -15}, 0),
        ([failed(0, 70.2)], {0: 1, 1: -9}, 0),
        # Ended by somebody else while it started.
        ([lost(0, 100.4)], {0: 1, 1: -15}, 1),
        # Nobody knows better than the echo.
        ([lost(0, 100.4), lost(1, 100.3)], {0: 1, 1: 1}, 1),
        ([], {0: -15, 1: -15}, 0),
    ],
)
def test_the_first_failure_is_found(ends: list[RankEnd], deaths: dict[int, int], rank: int) -> None:
    seen = {r: Death(exit_code=code, time=100.0) for r, code in deaths.items()}
    found = first_failure(ends, seen)
    assert found is not None
    assert found == (rank, next((end for end in ends if end.rank == rank), None))


def test_without_a_failure_there_is_no_first_one() -> None:
    assert first_failure([RankEnd(rank=0, how="done", time=1.0)], {}) is None


def conclusion(*ends: RankEnd, deaths: dict[int, int] | None = None, **more: Any) -> None:
    seen = {rank: Death(exit_code=code, time=100.0) for rank, code in (deaths or {}).items()}
    facts = {"stopped_by": None, "is_killed_late": False, "has_other_hosts": False}
    conclude(ends, seen, logs=Path("nowhere"), **facts | more)


def test_a_launch_that_is_done_or_was_stopped_says_so_once() -> None:
    stopped = RankEnd(rank=0, how="stopped", time=1.0, exit_code=143)
    conclusion(RankEnd(rank=0, how="done", time=1.0))
    for ends, facts in (
        ([stopped], {}),
        ([stopped], {"stopped_by": 15, "is_killed_late": True}),  # after its save
        ([], {"stopped_by": 15, "deaths": {0: -15}}),
        ([], {"stopped_by": 15, "deaths": {0: -9}}),  # a second Ctrl-C
    ):
        with pytest.raises(StopRequested) as caught:
            conclusion(*ends, **facts)  # type: ignore[arg-type]
        assert caught.value.exit_code == 143


def test_a_last_save_that_is_killed_for_its_slowness_is_a_failed_save() -> None:
    with pytest.raises(CheckpointWriteError, match="longer after SIGTERM than --shutdown-timeout"):
        conclusion(stopped_by=15, is_killed_late=True, deaths={0: -9, 1: -9})
    assert CheckpointWriteError.exit_code == 3


def test_on_several_hosts_the_echo_of_an_error_is_not_taken_for_it() -> None:
    def message(end: RankEnd) -> str:
        with pytest.raises(RunFailedError) as caught:
            conclusion(end, deaths={0: 1}, has_other_hosts=True)
        return str(caught.value)

    assert message(lost(0, 1.0)) == "a rank of another host failed first: lost another rank"
    named = RankEnd(
        rank=0, how="lost", time=1.0, exit_code=1, message="rank 3: OSError: no", lost_rank=3
    )
    assert message(named) == "rank 3 on another host failed first: OSError: no"
