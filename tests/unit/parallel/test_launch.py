"""torchrun's options among ours."""

from __future__ import annotations

import sys

import pytest

from legato.errors import UsageError
from legato.parallel.launch import is_asked_for, plan_launch, split_options


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        (
            ["full_finetune_distributed", "--nproc_per_node", "2", "epochs=1"],
            ["--nproc-per-node=2"],
            ["full_finetune_distributed", "epochs=1"],
        ),
        (
            ["--nnodes=2", "--rdzv-endpoint", "a:1", "--standalone", "x", "~y"],
            ["--nnodes=2", "--rdzv-endpoint=a:1", "--standalone"],
            ["x", "~y"],
        ),
        (
            ["--rdzv_conf", "timeout=9,last=1", "-r", "3"],
            ["--rdzv-conf=timeout=9,last=1", "--redirects=3"],
            [],
        ),
        (["--unknown=1", "a=--nnodes", "-x"], [], ["--unknown=1", "a=--nnodes", "-x"]),
    ],
)
def test_options_are_told_from_other_words(
    words: list[str], options: list[str], rest: list[str]
) -> None:
    assert split_options(words) == (options, rest)


def test_every_option_of_torchrun_is_taken_or_refused_with_a_reason() -> None:
    from torch.distributed.run import get_args_parser

    # What to run, and how, is ours to say.
    ours = {"--help", "--module", "--no-python", "--run-path", "--logs-specs"}
    taken, refused = set(), set()
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            if not name.startswith("--") or name.replace("_", "-") in ours:
                continue
            try:
                assert split_options([name, "1"])[0]
                taken.add(name)
            except UsageError:
                refused.add(name.replace("_", "-"))
    assert {"--nnodes", "--rdzv-conf", "--rdzv_conf", "--max_restarts"} <= taken
    assert refused == {"--signals-to-handle", "--start-method"}


def test_torch_is_not_imported_to_tell_options_apart() -> None:
    import subprocess

    code = (
        "import sys; from legato.parallel.launch import split_options; split_options(['--tee=1']);"
        "import legato.parallel.placement; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_on_one_host_a_free_port_is_taken() -> None:
    plan = plan_launch(["--nproc-per-node=3"], ["run"])
    assert plan.num_processes == 3
    assert plan.arguments.standalone
    named = plan_launch(["--nproc-per-node=3", "--master-port=29501"], ["run"])
    assert not named.arguments.standalone
    several = plan_launch(["--nproc-per-node=3", "--nnodes=2"], ["run"])
    assert not several.arguments.standalone
    assert (several.num_processes, several.num_hosts) == (6, 2)


def test_a_range_of_hosts_is_refused_however_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^--nnodes=1:4: a range isn't taken: .* Give one number"):
        plan_launch(["--nnodes=1:4"], ["run"])
    assert plan_launch(["--nnodes=2:2"], ["run"]).num_hosts == 2
    monkeypatch.setenv("PET_NNODES", "2:3")
    with pytest.raises(UsageError, match="--nnodes=2:3"):
        plan_launch([], ["run"])


def test_a_last_save_gets_ten_minutes_and_its_patience_unless_told_otherwise() -> None:
    def seconds(*options: str) -> int:
        plan = plan_launch(["--nnodes=1", *options], ["run"], patience_seconds=30.5)
        return int(plan.arguments.shutdown_timeout)

    assert seconds() == 631
    assert seconds("--shutdown-timeout=9") == 9


def test_the_processes_get_the_words_as_they_are() -> None:
    plan = plan_launch(["--nnodes=1"], ["run", "--config", "a b", "x=--y", "~z"])
    assert plan.arguments.module
    assert plan.arguments.training_script == "legato"
    assert plan.arguments.training_script_args == ["run", "--config", "a b", "x=--y", "~z"]


def test_variables_of_torchrun_ask_for_a_launch_too() -> None:
    assert is_asked_for(["--nnodes=1"], {})
    assert is_asked_for([], {"PET_NNODES": "2"})
    assert not is_asked_for([], {"PATH": "/bin"})
