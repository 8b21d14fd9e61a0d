"""Any number of ranks takes the same rows in the same steps, and gets the same losses."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from legato import recipes
from legato.config.load import load_config
from legato.errors import LegatoError
from tests.helpers import spawn, tiny
from tests.helpers.runs import legato, losses, steps_in, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


# A start costs seconds of imports on every rank, and CI's two cores are shared.
TIMEOUT_SECONDS = 400.0


def train(rank: int, config: str, overrides: tuple[str, ...]) -> int:
    loaded = load_config(config, overrides)
    return recipes.run(loaded.config, config_name=loaded.name, config_yaml=loaded.yaml).last_step


def breaks_on_rank_1(rank: int, config: str, overrides: tuple[str, ...]) -> str:
    """A gradient that isn't finite, made by one rank's row: poisoned weights would be on all."""
    import torch

    from legato.errors import NonFiniteError
    from legato.train import step as step_module

    real = step_module.sum_token_loss

    def poisoned(*arguments: object, **options: object) -> torch.Tensor:
        return real(*arguments, **options) * (float("nan") if rank == 1 else 1.0)  # type: ignore[arg-type]

    step_module.sum_token_loss = poisoned  # type: ignore[assignment]
    try:
        train(rank, config, overrides)
    except NonFiniteError as error:
        return f"{error.step} {sorted(error.sample_ids)}"
    return "trained"


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_names_its_rows(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_distributed",
        batch_size=1,
        gradient_accumulation_steps=1,
    )
    overrides: tuple[str, ...] = (f"output_dir={tmp_path / 'out'}",)
    run = partial(spawn.run, breaks_on_rank_1, 2, str(config), timeout_seconds=TIMEOUT_SECONDS)
    said = run(overrides)
    assert said[0] == said[1]
    assert said[0].startswith("1 ['orders.jsonl:")
    assert said[0].count("orders.jsonl") == 1
    skipped = tmp_path / "skipped"
    overrides = (f"output_dir={skipped}", "on_nonfinite=skip", "max_steps=2")
    assert run(overrides) == ["trained"] * 2
    assert (skipped / "step_2").is_dir()


def stream_on_host(rank: int, config: str, overrides: tuple[str, ...], hosts: list[str]) -> str:
    """Train on this host's own copy of the data; says how it ended."""
    os.chdir(hosts[rank])
    try:
        train(rank, config, overrides)
    except LegatoError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_stream_goes_on_on_two_ranks_and_a_row_broken_on_one_stops_both_with_a_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_single_device",
        streaming=True,
        shuffle_buffer_size=4,
        max_steps=7,
        datasets=[{"path": "orders.jsonl"}],
    )
    hosts = [tmp_path / "host_0", tmp_path / "host_1"]
    lines = tiny.write_orders(tmp_path / "orders.jsonl", num_rows=14).read_text().splitlines()
    # As many bytes: ranks whose files differ in size are refused before step 1.
    for host, last in zip(hosts, (lines[13], "{".ljust(len(lines[13]))), strict=True):
        host.mkdir()
        (host / "orders.jsonl").write_text("\n".join([*lines[:13], last]))
    monkeypatch.chdir(hosts[0])
    whole, here = tmp_path / "whole", tmp_path / "here"
    assert legato("run", "--config", config, f"output_dir={whole}") == 0
    assert legato("run", "--config", config, f"output_dir={here}", "stop_after_step=1") == 0
    # Step 2 is of the second block; step 3 comes to the last one, with the broken row.
    overrides = ("recipe=full_finetune_distributed", f"output_dir={here}")
    said = spawn.run(
        stream_on_host,
        2,
        str(config),
        overrides,
        list(map(str, hosts)),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    assert said[1].startswith("DataError: orders.jsonl:14: isn't valid JSON")
    assert said[0].startswith("PeerLostError: ")
    assert "rank 1: DataError: orders.jsonl:14: isn't valid JSON" in said[0]
    assert steps_in(here) == [1, 2]
    assert losses(here)[2] == pytest.approx(losses(whole)[2], rel=2e-5)


def test_streams_that_differ_between_hosts_stop_both_instead_of_waiting_for_ever(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_config(
        tmp_path,
        model=tiny_model_dir,
        recipe="full_finetune_distributed",
        streaming=True,
        shuffle_buffer_size=4,
        max_steps=7,
        datasets=[{"path": "orders.jsonl"}],
    )
    hosts = [tmp_path / "host_0", tmp_path / "host_1"]
    lines = tiny.write_orders(tmp_path / "orders.jsonl", num_rows=14).read_text().splitlines()
    for host, num_rows in zip(hosts, (14, 13), strict=True):
        host.mkdir()
        rows = "\n".join(lines[:num_rows])
        (host / "orders.jsonl").write_text(rows.ljust(len("\n".join(lines)), "\n"))
    out = tmp_path / "out"
    said = spawn.run(
        stream_on_host,
        2,
        str(config),
        (f"output_dir={out}",),
        list(map(str, hosts)),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    for rank, text in enumerate(said):
        assert text.startswith("DataError: step ")
        assert f"rank {1 - rank} has other rows than rank {rank}" in text
    assert len(steps_in(out)) == 1
