"""The snapshot on CUDA: ordered behind the kernels before it, and before the update after it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from legato.checkpoint import Checkpointer, ModelPart
from legato.checkpoint.staging import DEVICE_CLONE_BYTES, Stager

# Far more than a clone on the device may take, so that the copy overlaps.
LARGE = DEVICE_CLONE_BYTES // 4 + 1024


def hold_up_the_device() -> None:
    """About a second of work in the queue: what comes after it runs later than the host thinks."""
    torch.cuda._sleep(2_000_000_000)


def test_a_snapshot_waits_for_the_kernels_that_were_queued_before_it() -> None:
    x = torch.zeros(LARGE, device="cuda")
    stager = Stager({"model/x": x})
    stager.stage().wait()  # the buffers are warm
    hold_up_the_device()
    x.fill_(1)
    snapshot = stager.stage()
    snapshot.wait()
    assert torch.equal(snapshot.value("model/x"), torch.ones(LARGE))
    stager.close()


def test_an_update_after_wait_staged_is_not_in_the_snapshot() -> None:
    x = torch.ones(LARGE, device="cuda", requires_grad=True)
    stager = Stager({"model/x": x})
    for round_number in range(3):
        with torch.no_grad():
            x.fill_(round_number)
        snapshot = stager.stage()
        stager.wait_staged()
        with torch.no_grad():
            x.fill_(-1)
        snapshot.wait()
        assert torch.equal(snapshot.value("model/x"), torch.full((LARGE,), float(round_number)))
    stager.close()


def test_buffers_and_scalars_may_change_as_soon_as_save_returns() -> None:
    weight = torch.ones(LARGE, device="cuda", requires_grad=True)
    running = torch.ones(1000, device="cuda")
    scalar = torch.tensor(1.0, device="cuda")
    stager = Stager({"model/w": weight, "model/running": running, "optimizer/step/w": scalar})
    hold_up_the_device()
    snapshot = stager.stage()
    running.fill_(2)  # a forward pass does this, long before wait_staged
    scalar.fill_(2)
    snapshot.wait()
    assert torch.equal(snapshot.value("model/running"), torch.ones(1000))
    assert snapshot.value("optimizer/step/w").item() == 1.0
    stager.close()


def test_three_saves_while_weights_change_hold_the_weights_of_their_step(tmp_path: Path) -> None:
    weight = torch.zeros(LARGE, device="cuda", requires_grad=True)
    state = {"model": ModelPart({"weight": weight})}
    with Checkpointer(tmp_path, check_snapshots=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.wait_staged()
            with torch.no_grad():
                weight.fill_(step)
            checkpointer.save(state, step=step)
    for step in (1, 2, 3):
        stored = load_file(tmp_path / f"step_{step}" / "model.safetensors")["weight"]
        assert torch.equal(stored, torch.full((LARGE,), float(step)))
