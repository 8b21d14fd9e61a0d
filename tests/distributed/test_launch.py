"""``legato run`` as a launcher: options, messages, logs; and other launchers than it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from legato.report.metrics import read_events
from tests.helpers.faults import no_file_larger_than
from tests.helpers.launches import Launched, free_port
from tests.helpers.runs import legato, losses, steps_in, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def config_in(folder: Path, model: Path, **changes: object) -> Path:
    values = {"recipe": "full_finetune_distributed", "max_steps": 2} | changes
    return write_config(folder, model=model, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Launched:
    """A run of two steps on two ranks, by the launcher."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tmp").mkdir()
    config = config_in(folder, tiny_model_dir)
    run = Launched(config, environment={"TMPDIR": str(folder / "tmp")})
    run.text = run.succeed()  # type: ignore[attr-defined]
    return run


def test_one_world_is_one_log(whole: Launched) -> None:
    text: str = whole.text  # type: ignore[attr-defined]
    assert text.count("starts from") == 1
    assert text.count("step 1/2") == 1
    assert "2 x cpu" in text
    logs = {path.name: path.read_text() for path in (whole.output_dir / "logs").iterdir()}
    assert sorted(logs) == ["rank_0.log", "rank_1.log"]
    assert logs["rank_1.log"].startswith("--- rank 1 of 2, process ")
    assert steps_in(whole.output_dir) == [2]


def test_the_start_says_what_the_ranks_read_of_the_model(
    whole: Launched, tiny_model_dir: Path
) -> None:
    size = sum(t.nbytes for t in load_file(tiny_model_dir / "model.safetensors").values())
    start = next(read_events(whole.output_dir / "metrics.jsonl"))
    assert (start["least_bytes_read"], start["most_bytes_read"]) == (size // 2, size // 2)
    text: str = whole.text  # type: ignore[attr-defined]
    assert f"each rank read its part, {size / 2000:.1f} kB" in text


def test_processes_that_slurm_starts_find_each_other(
    tmp_path: Path, tiny_model_dir: Path, whole: Launched
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    port = free_port()
    environments = [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    ]
    runs = [Launched(config, num_processes=0, environment=each) for each in environments]
    for run in runs:
        run.succeed()
    assert losses(tmp_path / "out") == losses(whole.output_dir)


def test_options_may_stand_before_or_after_in_either_spelling_and_in_the_environment(
    tmp_path: Path, tiny_model_dir: Path, whole: Launched
) -> None:
    run = Launched(
        config_in(tmp_path, tiny_model_dir),
        *("--rdzv_backend", "c10d", "--rdzv-endpoint=localhost:0", "--max_restarts", "1"),
        command=(
            *(sys.executable, "-m", "legato", "run", "--nnodes", "1"),
            "full_finetune_distributed",
        ),
        environment={"PET_NPROC_PER_NODE": "2"},
    )
    run.succeed()
    assert losses(run.output_dir) == losses(whole.output_dir)


def test_one_process_of_a_distributed_recipe_is_a_run_like_any_other(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    assert legato("run", "--config", config) == 0
    alone = ["recipe=full_finetune_single_device", f"output_dir={tmp_path / 'alone'}"]
    assert legato("run", "--config", config, *alone) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "alone")


def test_one_launched_process_that_fails_is_heard_and_not_restarted(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """One is launched like many: it has a log, and what is refused once isn't tried again."""
    config = config_in(tmp_path, tiny_model_dir, max_seq_len=2)
    run = Launched(config, "--max-restarts=2", num_processes=1)
    _, output = run.fail()
    assert output.count("nothing left to train on") == 1
    assert "error: rank 0 failed first: " in output
    log = (run.output_dir / "logs" / "rank_0.log").read_text()
    assert log.count("--- rank 0 of 1, process ") == 1


def test_several_processes_of_a_single_device_recipe_are_refused(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path, tiny_model_dir, recipe="lora_finetune_single_device")
    assert legato("run", "--config", config, "--nproc-per-node=2") == 2
    assert "Use recipe: lora_finetune_distributed" in capsys.readouterr().err
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node=2", "-m", "legato", "run")
    _, output = Launched(config, command=command).fail()
    assert "Use recipe: lora_finetune_distributed" in output
    assert not steps_in(tmp_path / "out")


def test_ranks_with_different_configs_are_refused_by_key(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    code, output = Launched(config, "seed=${oc.env:RANK,0}").fail()
    assert code == 2
    assert "seed: 0 on rank 0, 1 on rank 1" in output


def test_more_processes_than_rows_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_in(tmp_path, tiny_model_dir, val_set_size=8)
    code, output = Launched(config, "--max-restarts=2", num_processes=3).fail()
    assert code == 1
    assert output.splitlines()[-1].startswith("error: 3 processes, but only 2 rows to train on")
    assert output.count("3 processes, but") == 1


def test_a_last_save_onto_a_full_disk_ends_with_3_and_the_rank_whose_disk_it_is(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(tmp_path, tiny_model_dir, final_save_patience_seconds=0)
    with no_file_larger_than(50_000):
        code, output = Launched(config).fail()
    assert code == 3, output
    [*_, error, log] = output.splitlines()
    assert error.startswith("error: rank 0 failed first: step 2 could not be saved: ")
    assert "File too large" in error
    assert log == f"Its log: {tmp_path / 'out' / 'logs' / 'rank_0.log'}"
    assert "given up" not in output
    assert steps_in(tmp_path / "out") == []


# What rank 1 alone finds, put into it by a module that Python imports at its start.
ALONE = {
    "a file it may not read": (
        """
import builtins
real = builtins.open
def blind(file, *rest, **more):
    if str(file).endswith("tokenizer_config.json"):
        raise PermissionError(13, "Permission denied", str(file))
    return real(file, *rest, **more)
builtins.open = blind
""",
        "blind",
        ["Permission denied"],
    ),
    "too little memory for the first update": (
        """
import sys, threading, time
def step(self, closure=None):
    import torch
    torch.empty(1 << 50)
def exhaust():
    while not hasattr(sys.modules.get("torch.optim"), "AdamW"):
        time.sleep(0.01)
    sys.modules["torch.optim"].AdamW.step = step
threading.Thread(target=exhaust, daemon=True).start()
""",
        "step",
        ["allocate memory", "A run takes less with a smaller batch_size"],
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_a_rank_that_fails_alone_is_named_and_its_traceback_is_in_its_log(
    tmp_path: Path, tiny_model_dir: Path, what: str
) -> None:
    code, function, messages = ALONE[what]
    site = tmp_path / "site"
    site.mkdir()
    for_rank_1 = textwrap.indent(code, "    ")
    (site / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n{for_rank_1}"
    )
    config = config_in(tmp_path, tiny_model_dir)
    paths = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run = Launched(config, "--debug", environment={"PYTHONPATH": paths})
    run.wait_until(lambda: run.process.poll() is not None or run.workers(), "the start")
    code, output = run.fail()
    assert code == 1
    assert "error: rank 1 failed first: " in output
    assert all(message in output for message in messages)
    assert f"Its log: {run.output_dir / 'logs' / 'rank_1.log'}" in output
    log = (run.output_dir / "logs" / "rank_1.log").read_text()
    assert messages[0] in log
    traceback = log[log.index("Traceback (most recent call last)") :]
    assert f"in {function}\n" in traceback
    assert f"rank 1: {traceback}" in output  # asked for by --debug
    assert not steps_in(run.output_dir)


def test_launchers_that_wait_for_another_host_end_together_when_one_is_told_to(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    port = free_port()
    runs = [
        Launched(
            config,
            *("--nnodes=3", f"--node-rank={number}", f"--master-port={port}"),
            num_processes=1,
            environment={"TMPDIR": str(tmp_path)},
        )
        for number in range(2)
    ]

    def are_waiting() -> bool:
        connections = [psutil.Process(run.process.pid).net_connections(kind="tcp") for run in runs]
        return all(any(port in (*c.laddr, *c.raddr) for c in found) for found in connections)

    runs[0].wait_until(are_waiting, "the store, and the second host there")
    runs[0].send(signal.SIGTERM)  # it serves the store
    (code_0, said_0), (code_1, said_1) = (run.end(within_seconds=30) for run in runs)
    assert (code_0, code_1) == (128 + signal.SIGTERM, 128 + signal.SIGTERM)
    assert "stopped before the hosts had met" in said_0
    assert "another host was stopped while the hosts met" in said_1
    assert not list(tmp_path.glob("legato-launch-*"))


def test_a_port_that_is_in_use_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = Launched(config, f"--master-port={port}").fail()
    assert code == 1
    assert f"error: port {port} is in use" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc-per-node"], "--nproc-per-node: its value is missing"),
        (["--nproc-per-node=many"], "--nproc-per-node=many: expected a number of processes, or"),
        (["--nnodes=many"], "--nnodes=many: expected a number of hosts"),
        (["--nproc-per-node=0"], "expected 1 or more"),
        (["--nnodes=two"], "--nnodes"),
        (["--max-restarts=x"], "argument --max-restarts"),
        (["--nproc-per-node=2", "--start-method=fork"], "aren't forked"),
        (["--nproc-per-node=2", "--signals-to-handle=SIGUSR2"], "leave it out"),
        (["--nprok-per-node=2"], "--nprok-per-node=2: no such option"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    config = config_in(tmp_path, tiny_model_dir)
    assert legato("run", "--config", config, *options) == 2
    assert message in capsys.readouterr().err


def test_a_script_is_not_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "mine.py"
    script.write_text("")
    assert legato("run", script, "--nproc-per-node", 2) == 2
    assert f"torchrun {script}" in capsys.readouterr().err


def test_the_launcher_leaves_nothing_in_the_folder_for_temporary_files(whole: Launched) -> None:
    assert list((whole.output_dir.parent / "tmp").iterdir()) == []
