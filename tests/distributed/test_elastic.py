"""Ranks that die and are restarted, and runs that go on with another number of ranks."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from legato.report.metrics import read_events
from tests.helpers.launches import Launched, free_port, killed_in_a_save
from tests.helpers.runs import (
    assert_same_tensors,
    legato,
    losses,
    steps_in,
    tensors,
    write_config,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPES = ("full_finetune_distributed", "lora_finetune_distributed")


# The first attempt moves aside what an undisturbed run has left; no other one starts over.
ANEW = ("--start-over", "resume_from_checkpoint=false")

# Attempt -> rank, verb of the storage, path, and whether the step was committed before it.
KILLS_IN_A_SAVE = {
    2: (0, "make_folder", "step_60[.]tmp-[^/]*$", False),  # open
    3: (1, "write_at", "step_63[.]tmp-.*/model", False),
    4: (0, "create_file", "step_66[.]tmp-.*/state/", False),  # half open
    5: (1, "sync_file", "step_69[.]tmp-.*/model", False),
    6: (0, "write_at", "step_72[.]tmp-.*/state/", False),
    7: (1, "write_at", "step_75[.]tmp-.*/state/", False),
    8: (0, "rename", "step_78[.]tmp-[^/]*$", False),  # just before the commit
    9: (0, "link", "step_81$", True),  # just after it
}


@pytest.mark.crash
def test_ten_kills_two_in_training_and_one_in_each_phase_of_a_save_do_not_change_the_result(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_distributed",
        epochs=None,
        max_steps=87,
        save_every_n_train_steps=3,
        keep_last_n_checkpoints=2,
        lr_scheduler={"name": "linear"},
    )
    whole = Launched(config, output_dir=tmp_path / "whole")
    whole.succeed()
    in_a_save = {attempt: where for attempt, (*where, _) in KILLS_IN_A_SAVE.items()}
    killed = killed_in_a_save(tmp_path / "site", in_a_save)
    run = Launched(config, "--max-restarts=10", environment=killed)
    for rank, step in ((0, 10), (1, 20)):
        run.wait_for_step(step)
        run.send(signal.SIGKILL, rank=rank)
        run.wait_until(lambda rank=rank: len(resumed_from(run)) == rank + 1, "the restart")
    run.succeed()
    # No more than a save's distance and what was in flight is trained twice.
    in_training, in_saves = resumed_from(run)[:2], resumed_from(run)[2:]
    assert all(step % 3 == 0 for step in in_training)
    assert in_training[0] >= 6
    assert in_training[1] >= 15
    assert in_saves == [57, 60, 63, 66, 69, 72, 75, 81]
    assert losses(run.output_dir) == losses(whole.output_dir)
    assert_same_tensors(run.output_dir / "step_87", whole.output_dir / "step_87")
    assert steps_in(run.output_dir) == [84, 87]
    assert not list(run.output_dir.glob(".*step_*"))


def undisturbed(run: Launched) -> dict[int, float]:
    """Let it come to its end; the losses, whose file goes out of the way of the next run's."""
    run.succeed()
    found = losses(run.output_dir)
    (run.output_dir / "metrics.jsonl").unlink()
    return found


def resumed_from(run: Launched) -> list[int]:
    """The steps that the attempts went on from, in their order."""
    return [event["step"] for event in events(run) if event["event"] == "resume"]  # type: ignore[misc]


def events(run: Launched) -> list[dict[str, object]]:
    path = run.output_dir / "metrics.jsonl"
    return list(read_events(path)) if path.exists() else []


def test_a_restart_does_not_start_over_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="lora_finetune_distributed",
        epochs=None,
        max_steps=3,
    )
    Launched(config).succeed()
    anew = ("max_steps=30", "save_every_n_train_steps=5", "resume_from_checkpoint=false")
    run = Launched(config, *anew, "--start-over", "--max-restarts=1")
    run.wait_until(lambda: 10 in steps_in(run.output_dir), "step 10")
    run.send(signal.SIGKILL, rank=0)
    run.succeed()
    assert steps_in(run.output_dir) == [5, 10, 15, 20, 25, 30]
    [archived] = run.output_dir.glob(".old-*")
    assert steps_in(archived) == [3]
    [resumed] = [event for event in events(run) if event["event"] == "resume"]
    assert resumed["step"] >= 10  # type: ignore[operator]


@pytest.mark.crash
def test_torchrun_restarts_the_ranks_from_the_newest_checkpoint_too(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="lora_finetune_distributed",
        epochs=None,
        max_steps=40,
        save_every_n_train_steps=4,
    )
    # By itself this launch has no name.
    place = (f"--master-port={free_port()}", "--log-dir=/dev/null", "--max-restarts=1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *place)
    command = (*torchrun, "-m", "legato", "run")
    expected = undisturbed(Launched(config))
    run = Launched(config, *ANEW, command=command)
    run.wait_for_step(10)
    run.send(signal.SIGKILL, rank=1)
    run.succeed()
    [resumed] = resumed_from(run)
    assert resumed >= 4
    assert resumed % 4 == 0
    assert steps_in(run.output_dir) == list(range(4, 41, 4))
    assert losses(run.output_dir) == expected
    [archived] = run.output_dir.glob(".old-*")
    assert_same_tensors(run.output_dir / "step_40", archived / "step_40")


@pytest.mark.crash
def test_launchers_of_two_hosts_restart_together_and_end_together(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="lora_finetune_distributed",
        epochs=None,
        max_steps=100_000,
        save_every_n_train_steps=4,
        keep_last_n_checkpoints=2,
    )
    port = free_port()
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair")
    options = ("--nnodes=2", *place, "--max-restarts=1")
    runs = [Launched(config, *options, num_processes=1) for _ in range(2)]
    runs[0].wait_until(lambda: bool(steps_in(tmp_path / "out")), "a save")
    hosts = {rank: run for run in runs for rank in run.workers()}
    hosts[1].send(signal.SIGKILL, rank=1)
    hosts[0].wait_until(
        lambda: any(event["event"] == "resume" for event in events(hosts[0])), "the restart"
    )
    hosts[0].wait_for_step(max(hosts[0].logged_steps()) + 4)
    hosts[1].send(signal.SIGKILL, rank=1)
    (code_0, said_0), (code_1, said_1) = (hosts[r].end(within_seconds=30) for r in range(2))
    assert (code_0, code_1) == (1, 1)
    assert "error: rank 1 failed first: it was killed by SIGKILL" in said_1
    assert "error: a rank of another host failed first: rank 0 lost another rank" in said_0
    # What was trained twice came out alike.
    seen: dict[object, object] = {}
    for event in events(hosts[0]):
        if event["event"] == "step":
            assert seen.setdefault(event["step"], event["loss"]) == event["loss"]
    attempts = [
        re.findall("attempt ([0-9]+)", (tmp_path / "out" / "logs" / f"rank_{r}.log").read_text())
        for r in range(2)
    ]
    # The agent that is killed a process counts a restart. The other one does only if its own
    # process ends by itself, having lost the other, before the agents' next meeting ends it.
    assert attempts[0] in (["0", "0"], ["0", "1"])
    assert attempts[1] == ["0", "1"]


@pytest.mark.crash
def test_a_killed_rank_that_nobody_restarts_ends_the_run_with_its_name(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_distributed",
        epochs=None,
        max_steps=100_000,
        save_every_n_train_steps=2,
        keep_last_n_checkpoints=1,
    )
    run = Launched(config)
    run.wait_until(lambda: bool(steps_in(run.output_dir)), "a save")
    run.wait_for_step(5)
    run.send(signal.SIGKILL, rank=1)
    code, output = run.end(within_seconds=30)
    assert code == 1
    assert output.splitlines()[-2].startswith(
        "error: rank 1 failed first: it was killed by SIGKILL"
    )
    assert output.splitlines()[-1] == f"Its log: {run.output_dir / 'logs' / 'rank_1.log'}"
    # Rank 0 has noticed by itself; the launcher may end it before its error's last line.
    seen = (run.output_dir / "logs" / "rank_0.log").read_text()
    assert "PeerLostError" in seen or "Connection closed by peer" in seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_number_of_ranks_goes_on_with_the_same_rows_and_losses(
    tmp_path: Path, tiny_model_dir: Path, recipe: str
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=recipe,
        epochs=3,
        batch_size=1,
        gradient_accumulation_steps=2,
        val_set_size=1,  # 9 rows are left: the last step of an epoch has one, and one is evaluated
        run_val_every_n_steps=1,
        **({"lora_dropout": 0.0} if recipe.startswith("lora") else {}),
    )
    whole = Launched(config, output_dir=tmp_path / "whole")
    whole.succeed()
    out = tmp_path / "out"
    # Two processes at first: four rows a step, whoever goes on. 3 leaves one rank without a row.
    for last, world_size in ((2, 2), (4, 1), (6, 3), (8, 4), (9, 2)):
        options = [f"stop_after_step={last}", f"output_dir={out}"]
        if world_size == 1:
            assert legato("run", "--config", config, *options) == 0
        else:
            Launched(config, *options, num_processes=world_size).succeed()
    for event, name, tolerance in (
        ("step", "loss", 1e-5),
        ("step", "grad_norm", 1e-4),
        ("eval", "eval_loss", 1e-5),
        ("step", "num_tokens", 0),
        ("step", "num_loss_tokens", 0),
    ):
        expected = by_step(whole.output_dir, event, name)
        assert list(expected) == list(range(1, 10))
        assert by_step(out, event, name) == pytest.approx(expected, abs=tolerance), name
    shapes = {key: tensor.shape for key, tensor in tensors(whole.output_dir / "step_9").items()}
    assert {key: tensor.shape for key, tensor in tensors(out / "step_9").items()} == shapes


def by_step(output_dir: Path, event: str, name: str) -> dict[int, float]:
    found = read_events(output_dir / "metrics.jsonl")
    return {each["step"]: each[name] for each in found if each["event"] == event}


@pytest.mark.parametrize(
    ("method", "on_two"),
    [
        # Two ranks have a step's four rows at once, and update while they go backward.
        ("full", ["optimizer_in_backward=true", "gradient_accumulation_steps=1"]),
        ("lora", []),
    ],
)
def test_a_single_device_run_goes_on_on_several_ranks_and_back(
    tmp_path: Path, tiny_model_dir: Path, method: str, on_two: list[str]
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe=f"{method}_finetune_single_device",
        epochs=3,
        **({"lora_dropout": 0.0} if method == "lora" else {"clip_grad_norm": None}),
    )
    whole = tmp_path / "whole"
    assert legato("run", "--config", config, f"output_dir={whole}") == 0
    out = tmp_path / "out"
    assert legato("run", "--config", config, "stop_after_step=3") == 0
    on_two = [f"recipe={method}_finetune_distributed", "--accept-changes", *on_two]
    Launched(config, *on_two, "stop_after_step=6").succeed()
    assert legato("run", "--config", config, "--accept-changes") == 0
    assert steps_in(out) == [3, 6, 9]
    assert losses(out) == pytest.approx(losses(whole), abs=1e-5)
