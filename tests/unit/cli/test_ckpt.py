"""legato ckpt, on folders that the checkpoint engine wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.checkpoint import Checkpointer
from legato.cli.main import main
from legato.report import byte_bar
from legato.storage.local import LocalStorage

CONFIG = """\
recipe: full_finetune_single_device
model: m
output_dir: out
datasets: [{path: a.jsonl}]
optimizer: {lr: 1.0}
val_set_size: 5
keep_last_n_checkpoints: 1
keep_best_n_checkpoints: 1
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps of a model of one weight: 1, 2, 4; the second has the best metric."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2, bias=False)
    with Checkpointer(tmp_path / "out", config_name="my", config_yaml=CONFIG) as checkpointer:
        for step, eval_loss in ((1, 3.0), (2, 1.0), (4, 2.0)):
            with torch.no_grad():
                model.weight.fill_(step)
            metrics = {"eval_loss": eval_loss}
            checkpointer.save({"model": model}, step=step, metrics=metrics).result()
    (tmp_path / "out" / "metrics.jsonl").write_text(
        json.dumps({"event": "save", "step": 2, "blocked_seconds": 0.25, "staged_bytes": 16}) + "\n"
    )
    return Path("out")


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step_*"))


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_looking_at_steps_and_tidying_them_takes_no_torch(run: Path) -> None:
    lines = [
        ["ls", str(run)],
        ["show", str(run / "step_1")],
        ["verify", str(run)],
        ["pin", str(run / "step_1")],
        ["unpin", str(run / "step_1")],
        ["prune", str(run)],
        ["rm", "--yes", str(run / "step_4")],
    ]
    code = (
        "import sys; from legato.cli.main import main; "
        f"codes = [main(['ckpt', *line]) for line in {lines!r}]; "
        "sys.exit(f'{codes}, torch: {\"torch\" in sys.modules}' "
        "if any(codes) or 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert steps_in(run) == ["step_2"]


def test_ls_lists_steps_by_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step_4" / "model.safetensors").write_bytes(b"short")
    assert main(["ckpt", "ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("step", "size", "age", "kind", "why", "saved", "metrics", "status", "why", "kept"),
    ]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "4"]
    assert "eval_loss 1" in lines[2]
    assert "complete" in lines[2]
    assert "torn" in lines[3]
    assert "has 5 bytes" in lines[3]


def test_ls_json_is_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in steps] == [1, 2, 4]
    assert [step["status"] for step in steps] == ["complete"] * 3
    assert steps[1]["metrics"] == {"eval_loss": 1.0}
    assert steps[2]["marks"][0] == "latest"
    assert steps[0]["run_id"] == steps[2]["run_id"]


def test_ls_tells_why_each_step_is_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "pin", str(run / "step_1")]) == 0
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [step["kept"] for step in shown] == [["pinned"], ["best"], ["last", "newest"]]
    assert main(["ckpt", "unpin", str(run / "step_1")]) == 0
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()[1:]
    assert "goes next" in first
    assert "  best" in second
    assert "  last, newest  " in third


def test_ls_of_a_run_without_a_config_says_nothing_of_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": torch.nn.Linear(1, 1)}, step=1)
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["kept"] is None


def test_ls_of_an_empty_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint\n"
    (tmp_path / "my" / "step_3").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    told = f"{tmp_path} holds no checkpoint; there are some in {tmp_path / 'my'}\n"
    assert capsys.readouterr().out == told


def test_show_tells_files_and_how_the_save_went(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "show", str(run / "step_2")]) == 0
    lines = filter(None, capsys.readouterr().out.splitlines())
    shown = dict(line.split("  ", 1) for line in lines)
    shown = {label: text.strip() for label, text in shown.items()}
    assert shown["step"] == "2, complete"
    assert shown["holds"] == "a whole model, with all that a resumed run needs"
    assert shown["saved"].endswith(", reason: its interval of steps")
    assert shown["metrics"] == "eval_loss 1"
    assert shown["training waited"] == "0.25 s"
    assert shown["copied"] == "16 B of memory, by rank 0"
    assert re.fullmatch(r"[\d.]+ k?B", shown["model.safetensors"])
    assert "save" not in shown


@pytest.mark.parametrize("has_log", [True, False])
def test_show_says_that_how_the_save_went_is_not_recorded(
    run: Path, capsys: pytest.CaptureFixture[str], has_log: bool
) -> None:
    if not has_log:
        (run / "metrics.jsonl").unlink()
    assert main(["ckpt", "show", str(run / "step_4")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["save", "how it went isn't recorded"] in lines


def test_show_follows_the_link_to_the_latest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(run / "latest"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["save"]) == (4, None)
    assert shown["files"]["model.safetensors"] > 16


def test_verify_reads_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "step_1: intact",
        "step_2: intact",
        "step_4: intact",
    ]
    damage(run / "step_2" / "model.safetensors")
    assert main(["ckpt", "verify", str(run / "step_1")]) == 0
    assert main(["ckpt", "verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert "model.safetensors: the bytes from " in captured.out
    assert captured.err.endswith("error: step_2: damaged; don't use it\n")


def test_a_step_that_is_pruned_while_a_run_is_verified_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = byte_bar.byte_bar

    def prune_first(*words: Any, **options: Any) -> Any:
        shutil.rmtree(run / "step_1")
        return real(*words, **options)

    monkeypatch.setattr(byte_bar, "byte_bar", prune_first)
    assert main(["ckpt", "verify", str(run)]) == 0
    assert capsys.readouterr().out == "step_2: intact\nstep_4: intact\n"


@pytest.mark.parametrize("target", ["step_99", "nowhere"], ids=["in a circle", "to nothing"])
def test_a_step_that_is_a_link_to_nothing_is_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (run / "step_99").symlink_to(target)
    assert main(["ckpt", "verify", str(run)]) == 1
    assert "error: step_99: damaged; don't use it" in capsys.readouterr().err
    assert main(["ckpt", "verify", str(run / "step_99")]) == 1
    said = capsys.readouterr().err
    assert "step_99: expected a folder, found nothing. The newest step there is step_" in said
    assert "there is step_99" not in said


def test_verify_json_maps_steps_to_problems(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"1": [], "2": [], "4": []}


def test_verify_of_much_counts_bytes_on_a_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    assert main(["ckpt", "verify", str(run / "step_4")]) == 0
    assert "verifying" not in capsys.readouterr().err
    monkeypatch.setattr(byte_bar, "LARGE_BYTES", 1)
    assert main(["ckpt", "verify", str(run / "step_4")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "step_4: intact\n"
    assert "verifying" in shown.err
    assert "bytes" in shown.err


def test_a_pinned_step_outlives_rm_and_prune_until_it_is_unpinned(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "pin", str(run / "step_1")]) == 0
    assert main(["ckpt", "rm", "--yes", str(run / "step_1")]) == 2
    assert "is pinned. `legato ckpt unpin" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(run)]) == 0
    assert steps_in(run) == ["step_1", "step_2", "step_4"]
    assert main(["ckpt", "unpin", str(run / "step_1")]) == 0
    assert main(["ckpt", "prune", str(run)]) == 0
    assert steps_in(run) == ["step_2", "step_4"]


def test_prune_says_what_stays_and_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "prune", "--dry-run", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step_1: would be deleted"
    assert lines[1].startswith("step_2: would be kept (")
    assert lines[2].startswith("step_4: would be kept (")
    assert "newest" in lines[2]
    assert steps_in(run) == ["step_1", "step_2", "step_4"]


@pytest.mark.parametrize(
    ("line", "goes", "pruned"),
    [
        ("prune: move", {"action": "move", "kept": []}, "moved to .pruned/"),
        ("keep_last_n_states: 1", {"action": "delete", "kept": []}, "deleted"),
    ],
)
def test_prune_does_what_the_runs_config_says_and_tells_scripts_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, goes: dict[str, Any], pruned: str
) -> None:
    run = tmp_path / "out"
    model = torch.nn.Linear(2, 2, bias=False)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    model(torch.ones(2)).sum().backward()
    state["optimizer"].step()
    with Checkpointer(run, config_name="my", config_yaml=f"{CONFIG}{line}\n") as checkpointer:
        for step, eval_loss in ((1, 3.0), (2, 1.0), (4, 2.0)):
            checkpointer.save(state, step=step, metrics={"eval_loss": eval_loss}).result()
    before, before_it = contents(run), contents(run / "step_1")
    best = "keep" if line == "prune: move" else "drop_state"
    expected = [
        {"step": 1, "path": str(run / "step_1")} | goes,
        {"step": 2, "path": str(run / "step_2"), "action": best, "kept": ["best"]},
        {"step": 4, "path": str(run / "step_4"), "action": "keep", "kept": ["last", "newest"]},
    ]

    assert main(["ckpt", "prune", "--dry-run", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert contents(run) == before
    assert main(["ckpt", "prune", "--dry-run", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"step_1: would be {pruned}\n")

    assert main(["ckpt", "prune", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert steps_in(run) == ["step_2", "step_4"]
    assert (run / "step_2" / "state").is_dir() == (best == "keep")
    assert (run / "step_4" / "state").is_dir()
    pruned_files = contents(run / ".pruned" / "step_1")
    assert pruned_files == (before_it if line == "prune: move" else {})

    again = [fate | {"action": "keep"} for fate in expected[1:]]
    assert main(["ckpt", "prune", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out) == again
    assert main(["ckpt", "verify", str(run)]) == 0
    assert capsys.readouterr().out == "step_2: intact\nstep_4: intact\n"


def test_what_pin_unpin_and_rm_did_is_json_for_scripts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = ({"step": n, "path": str((run / f"step_{n}").resolve())} for n in (1, 4))
    steps = [str(run / "step_1"), str(run / "latest")]
    for words, shown in (
        (["pin", *steps], [step | {"pinned": True} for step in (first, last)]),
        (["unpin", *steps], [step | {"pinned": False} for step in (first, last)]),
        (["rm", "--yes", *steps], [step | {"action": "delete"} for step in (first, last)]),
    ):
        assert main(["ckpt", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == shown
    assert steps_in(run) == ["step_2"]


def test_json_tells_what_was_done_before_an_error(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_tree = LocalStorage.remove_tree

    def fails(storage: LocalStorage, path: str) -> None:
        if "step_2" in path:
            raise PermissionError(13, "no rights", path)
        remove_tree(storage, path)

    monkeypatch.setattr(LocalStorage, "remove_tree", fails)
    steps = [str(run / "step_1"), str(run / "step_2")]
    assert main(["ckpt", "rm", "--yes", "--json", *steps]) != 0
    assert [done["step"] for done in json.loads(capsys.readouterr().out)] == [1]


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_prune_deletes_nothing_for_a_newest_step_that_is_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    damage(run / "step_4" / "model.safetensors")
    assert main(["ckpt", "prune", *words, str(run)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "step_4/model.safetensors: the bytes from " in said.err
    assert "so nothing is deleted. `legato ckpt rm " in said.err
    assert steps_in(run) == ["step_1", "step_2", "step_4"]


def test_rm_asks_first_and_mends_the_link(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "rm", str(run / "step_4")]) == 2
    assert capsys.readouterr().err.endswith("/out/step_4. Add --yes to do it\n")
    assert steps_in(run) == ["step_1", "step_2", "step_4"]
    assert main(["ckpt", "rm", "--yes", str(run / "step_4")]) == 0
    assert steps_in(run) == ["step_1", "step_2"]
    assert (run / "latest").resolve().name == "step_2"


def test_nothing_is_deleted_under_a_run(run: Path) -> None:
    # Locks are per process, so another one must hold it.
    code = (
        "import sys; from legato.checkpoint.lock import OutputDirLock; "
        f"lock = OutputDirLock({str(run)!r}); lock.acquire(); print('held', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert main(["ckpt", "rm", "--yes", str(run / "step_1")]) == 1
        assert main(["ckpt", "prune", str(run)]) == 1
        holder.communicate("")
    assert steps_in(run) == ["step_1", "step_2", "step_4"]


def test_diff_tells_what_moved_and_how_far(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "diff", str(run / "step_1"), str(run / "step_4"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "num_equal": 0,
        "num_changed": 1,
        "only_first": [],
        "only_second": [],
        "largest": [{"key": "weight", "relative": 3.0, "largest": 3.0}],
        "metrics": {"eval_loss": [3.0, 2.0]},
        "config": [],
    }
    config = run / "step_4" / "my.yaml"
    config.write_text(config.read_text().replace("lr: 1.0", "lr: 0.5"))
    assert main(["ckpt", "diff", str(run / "step_1"), str(run / "step_4")]) == 0
    told = capsys.readouterr().out
    assert "eval_loss: 3 -> 2\n" in told
    assert "-optimizer: {lr: 1.0}\n+optimizer: {lr: 0.5}\n" in told
    assert main(["ckpt", "diff", str(run / "step_1"), str(run / "step_1")]) == 0
    assert capsys.readouterr().out == "1 tensors equal, 0 changed\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "nowhere"], "error: nowhere: expected a folder, found nothing\n"),
        (["show", "out"], "error: out: expected a step folder such as out/latest\n"),
        (
            ["show", "out/step_9"],
            "error: out/step_9: expected a folder, found nothing. The newest step there is step_4",
        ),
        (["verify", "my.yaml"], "error: my.yaml: expected a folder, found a file\n"),
        (["prune", "empty"], "empty holds no complete checkpoint\n"),
        (["ls", "out/step_1"], "error: out/step_1 is one step; expected a run's output_dir, "),
    ],
)
def test_a_wrong_place_is_told(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("my.yaml").touch()
    assert main(["ckpt", *words]) in (1, 2)
    assert message in capsys.readouterr().err
