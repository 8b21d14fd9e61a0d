"""The face: what is saved comes back bit for bit, and nothing else is ever visible."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from legato.checkpoint import (
    Checkpointer,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    ModelPart,
    OptimizerPart,
    RngPart,
)
from legato.checkpoint import saver as saver_module
from legato.checkpoint.manifest import Manifest
from legato.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
)
from legato.storage import LocalStorage, MemoryStorage
from tests.helpers.faults import SlowStorage
from tests.helpers.loops import Counter, Loop, assert_same, build_model


def step_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("step_"))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_a_restored_loop_goes_on_bit_for_bit(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    loop = Loop(optimizer, **options).run_to(3)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(loop.state, step=3)
    expected = [loop.tensors(), loop.run_to(5).tensors()]

    resumed = Loop(optimizer, **options)
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.restore(resumed.state) == {"step": 3, "notes": []}
    assert_same(resumed.tensors(), expected[0])
    assert_same(resumed.run_to(5).tensors(), expected[1])


def test_training_goes_on_while_three_saves_in_a_row_are_written(tmp_path: Path) -> None:
    slow = SlowStorage(LocalStorage(), seconds_per_operation=0.02, only=("sync_file",))
    loop, expected = Loop(), {}
    with Checkpointer(tmp_path / "out", storage=slow) as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            expected[step] = loop.tensors()
            pending = checkpointer.save(loop.state, step=step)
            assert not pending.done
            # Every tensor and scalar changes right after save() returned.
            with torch.no_grad():
                for tensor in [*loop.model.state_dict().values()]:
                    tensor.add_(100)
                for state in loop.optimizer.state.values():
                    for value in state.values():
                        value.add_(100)
            loop.counter.notes.append("changed after the save")
            loop.optimizer.param_groups[0]["lr"] *= 2
    for step in (1, 2, 3):
        resumed = Loop()
        with Checkpointer(
            tmp_path / f"elsewhere_{step}", resume=tmp_path / "out" / f"step_{step}"
        ) as checkpointer:
            state = checkpointer.restore(resumed.state)
        assert_same(resumed.tensors(), expected[step])
        assert state == {"step": step, "notes": ["changed after the save"] * (step - 1)}
        assert resumed.optimizer.param_groups[0]["lr"] == 0.01 * 2 ** (step - 1)


def test_the_weights_are_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    loop = Loop().run_to(2)
    with Checkpointer(tmp_path / "out", config_name="tiny", config_yaml="lr: 1\n") as checkpointer:
        committed = checkpointer.save(loop.state, step=2).result()
    found = load_file(Path(committed.path) / "model.safetensors")
    assert_same(found, dict(loop.model.state_dict()))
    moments = load_file(Path(committed.path) / "state/optimizer-00001-of-00001.safetensors")
    assert_same(
        {key: moments[key] for key in moments},
        {key: value for key, value in loop.tensors().items() if not key.startswith("model/")},
    )
    assert (Path(committed.path) / "tiny.yaml").read_text() == "lr: 1\n"
    assert os.readlink(tmp_path / "out" / "latest") == "step_2"
    manifest = json.loads((Path(committed.path) / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [
        "model.safetensors",
        "state/optimizer-00001-of-00001.safetensors",
        "state/trainer.json",
        "tiny.yaml",
    ]


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    loop = Loop().run_to(1)
    with Checkpointer(tmp_path / "out", max_file_bytes=200) as checkpointer:
        folder = Path(checkpointer.save(loop.state, step=1).result().path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {key: load_file(folder / name)[key] for key, name in index.items()}
    assert_same(found, dict(loop.model.state_dict()))
    resumed = Loop()
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore(resumed.state)
    assert_same(resumed.tensors(), loop.tensors())


def test_masters_are_kept_exactly_and_the_model_file_holds_them_rounded(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Linear, nn.Parameter, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 5, bias=False)
        master = nn.Parameter(torch.rand(5, 3))
        model.weight = nn.Parameter(master.detach().to(torch.bfloat16))
        optimizer = torch.optim.AdamW([master], lr=1e-5)
        part = ModelPart(
            tensors={"weight": model.weight},
            file_dtype=torch.bfloat16,
            masters={"weight": master},
            files={"config.json": b"{}"},
        )
        return model, master, optimizer, {
            "model": part,
            "optimizer": OptimizerPart(optimizer, {"weight": master}),
            "trainer": Counter(1),
        }  # fmt: skip

    model, master, optimizer, state = build(0)
    master.grad = torch.rand(5, 3)
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(master)
    with Checkpointer(tmp_path / "out") as checkpointer:
        pending = checkpointer.save(state, step=1)
        expected, live = master.detach().clone(), model.weight.detach().clone()
        master.data.add_(1)
        folder = Path(pending.result().path)
        # The master and two moments of 15 elements, and a step count: the bf16 weight isn't staged.
        assert pending.staged_bytes == 3 * 15 * 4 + 4
    stored = load_file(folder / "model.safetensors")["weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, live)
    assert (folder / "config.json").read_bytes() == b"{}"

    model, master, optimizer, state = build(1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore(state)
    assert torch.equal(master, expected)
    assert torch.equal(model.weight, live)
    moments = optimizer.state[master]
    assert moments["exp_avg"].dtype == torch.float32
    assert moments["step"].item() == 1


def test_an_adapter_folder_has_its_own_names_and_keys(tmp_path: Path) -> None:
    tensors = {"lora_a.weight": nn.Parameter(torch.rand(2, 3))}
    part = ModelPart(
        tensors=tensors,
        kind="adapter",
        keys={"lora_a.weight": "base_model.model.lora_a.weight"},
        files={"adapter_config.json": b"{}"},
    )
    with Checkpointer(tmp_path / "out", save_only_model=True) as checkpointer:
        folder = Path(checkpointer.save({"model": part}, step=0).result().path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert_same(
        load_file(folder / "adapter_model.safetensors"),
        {"base_model.model.lora_a.weight": tensors["lora_a.weight"].detach()},
    )
    full = {"model": ModelPart(tensors=tensors)}
    with (
        Checkpointer(tmp_path / "out", allow_missing=["optimizer"]) as checkpointer,
        pytest.raises(CheckpointMismatchError, match="holds an adapter, the run trains a model"),
    ):
        checkpointer.restore(full)


class Shown:
    """What a restore showed of itself: how much there is, and what was read of it, in order."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.read: list[int] = []

    @contextmanager
    def __call__(self, *, total_bytes: int) -> Iterator[Callable[[int], None]]:
        self.total_bytes = total_bytes
        yield self.read.append


def test_a_restore_shows_how_far_it_is(tmp_path: Path) -> None:
    loop, shown = Loop().run_to(1), Shown()
    with Checkpointer(tmp_path / "out") as checkpointer:
        folder = Path(checkpointer.save(loop.state, step=1).result().path)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore(Loop().state, progress=shown)
    stored = [t for file in folder.rglob("*.safetensors") for t in load_file(file).values()]
    assert sorted(shown.read) == sorted(tensor.nbytes for tensor in stored)
    assert shown.total_bytes == sum(shown.read)


def test_of_weights_with_masters_a_restore_reads_and_shows_the_masters(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        live = {"w": torch.ones(3, dtype=torch.bfloat16), "frozen": torch.ones(5)}
        masters = {"w": torch.ones(3)}
        part = ModelPart(tensors=live, masters=masters, file_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(list(masters.values()), lr=0.1)
        return {"model": part, "optimizer": OptimizerPart(optimizer, names=masters)}

    shown = Shown()
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(state(), step=1).result()
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore(state(), progress=shown)
    assert sorted(shown.read) == [3 * 4, 5 * 4]
    assert shown.total_bytes == 3 * 4 + 5 * 4


def test_random_states_come_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(1).item()]

    draw()
    loop = Loop().run_to(1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(loop.state | {"rng": RngPart()}, step=1)
        expected = [draw(), draw()]
        checkpointer.save(loop.state | {"rng": RngPart()}, step=2)
        after = draw()
    resumed = Loop()
    with Checkpointer(tmp_path / "a", resume=tmp_path / "out/step_1") as checkpointer:
        checkpointer.restore(resumed.state | {"rng": RngPart()})
    assert [draw(), draw()] == expected
    assert draw() == after
    with Checkpointer(tmp_path / "b", resume=tmp_path / "out/step_2") as checkpointer:
        checkpointer.restore(resumed.state | {"rng": RngPart()})
    assert draw() == after


def test_other_stateful_parts_are_kept_under_their_names(tmp_path: Path) -> None:
    def with_scheduler(loop: Loop) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)
        return loop.state | {"scheduler": scheduler, "facts": {"seed": 3}}

    loop = Loop()
    state = with_scheduler(loop)
    loop.step()
    state["scheduler"].step()
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(state, step=1)
    resumed = with_scheduler(Loop())
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.restore(resumed)
        assert checkpointer.source is not None
        assert checkpointer.read_trainer_state(checkpointer.source) == {"step": 1, "notes": []}
    assert resumed["scheduler"].last_epoch == 1
    assert resumed["optimizer"].param_groups[0]["lr"] == 0.005


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"model": nn.Linear(4, 8), "trainer": s["trainer"]},
            "2 of its keys don't fit: bias, weight are in the model",
        ),
        (
            lambda s: {"model": nn.Sequential(s["model"][0], s["model"][1])},
            r"2 of its keys don't fit: 2\.bias, 2\.weight are on disk, but not in the model",
        ),
        (
            lambda s: {"model": build_model(width=9)},
            r"7 of its tensors don't fit: 0\.weight is \(8, 4\) float32 on disk, \(9, 4\)",
        ),
        (
            lambda s: {"model": s["model"], "trainer": s["trainer"]},
            "holds optimizer state, the run has no optimizer",
        ),
        (lambda s: s | {"more": {"a": 1}}, "more are parts of the run"),
        (lambda s: s | {"rng": RngPart()}, "no random states"),
        (
            lambda s: s | {"model": Loop().model.to(torch.bfloat16), "optimizer": None},
            r"\(8, 4\) float32 on disk, \(8, 4\) bfloat16 in the run",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    loop = Loop().run_to(1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(loop.state, step=1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        state = {k: v for k, v in change(Loop().state).items() if v is not None}
        with pytest.raises(CheckpointMismatchError, match=message):
            checkpointer.restore(state)


def test_parts_and_optimizer_state_that_the_run_lacks_are_named(tmp_path: Path) -> None:
    loop = Loop().run_to(1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save(loop.state | {"scheduler": {"last": 1}}, step=1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        with pytest.raises(CheckpointMismatchError, match="scheduler are parts of the checkpoint"):
            checkpointer.restore(Loop().state)
        fewer = Loop()
        fewer.optimizer = torch.optim.AdamW(fewer.model[0].parameters())
        with pytest.raises(
            CheckpointMismatchError, match=r"4 of its keys .* 1\.bias, .* optimizer"
        ):
            checkpointer.restore(fewer.state | {"scheduler": {}})
    with Checkpointer(tmp_path / "out", allow_missing=["scheduler"]) as checkpointer:
        assert checkpointer.restore(Loop().state) == {"step": 1, "notes": []}


def test_a_model_only_step_resumes_only_when_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop().run_to(2)
    with Checkpointer(tmp_path / "out", save_only_model=True) as checkpointer:
        checkpointer.save(loop.state, step=2)
    resumed = Loop()
    more = {"rng": RngPart(), "scheduler": {"last": 0}}
    for state, named in (
        (resumed.state, ["optimizer"]),
        (resumed.state | more, ["optimizer", "rng", "scheduler"]),
    ):
        for too_few in ([], named[1:], named[:-1]):
            with (
                Checkpointer(tmp_path / "out", allow_missing=too_few) as checkpointer,
                pytest.raises(CheckpointMismatchError, match="save_only_model") as refused,
            ):
                checkpointer.restore(state)
            assert f"allow_missing: [{', '.join(named)}]" in str(refused.value)
        caplog.clear()
        with Checkpointer(tmp_path / "out", allow_missing=named) as checkpointer:
            assert checkpointer.restore(state) == {}
        assert f"holds weights alone: {', '.join(named)} begin anew" in caplog.text
        assert_same(dict(resumed.model.state_dict()), dict(loop.model.state_dict()))
        assert not resumed.optimizer.state


def test_a_step_that_this_branch_committed_is_returned_as_it_is(tmp_path: Path) -> None:
    loop = Loop().run_to(2)
    with Checkpointer(tmp_path / "out", keep=KeepBest(1)) as checkpointer:
        first = checkpointer.save(loop.state, step=2).result()
        before = Path(first.path, "model.safetensors").stat()
        again = checkpointer.save(loop.state, step=2, reason="final").result()
        assert again.path == first.path
        scored = checkpointer.save(loop.state, step=2, metrics={"eval_loss": 1.5}).result()
        assert Path(first.path, "model.safetensors").stat() == before
        assert scored.manifest.metrics == {"eval_loss": 1.5}
    assert os.readlink(tmp_path / "out" / "best") == "step_2"
    with Checkpointer(tmp_path / "out") as checkpointer:
        assert checkpointer.save(loop.state, step=2).result().path == first.path
        assert [r.step for r in checkpointer.poll()] == []


def test_pruning_follows_the_policy_and_spares_what_others_wrote(tmp_path: Path) -> None:
    out = tmp_path / "out"
    loop = Loop()
    with Checkpointer(out, keep=KeepLast(1) | KeepEvery(4) | KeepBest(1)) as checkpointer:
        (out / "step_100_backup").mkdir()
        for step in range(1, 8):
            loop.step()
            metrics = {"eval_loss": abs(step - 2.5)}
            checkpointer.save(loop.state, step=step, metrics=metrics).result()
            if step == 5:
                (out / "step_5" / ".pinned").touch()
    assert step_names(out) == ["step_100_backup", "step_2", "step_4", "step_5", "step_7"]
    assert os.readlink(out / "latest") == "step_7"
    assert os.readlink(out / "best") == "step_2"
    assert [p.name for p in out.iterdir() if ".trash" in p.name or ".tmp" in p.name] == []


def test_pruned_steps_can_be_moved_instead(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(tmp_path / "out", keep=KeepLast(1), prune="move") as checkpointer:
        for _ in range(3):
            checkpointer.save(loop.state, step=loop.step()).result()
    assert step_names(tmp_path / "out") == ["step_3"]
    assert step_names(tmp_path / "out" / ".pruned") == ["step_1", "step_2"]


def test_older_steps_can_lose_their_state_and_stay_models(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(tmp_path / "out", keep_last_n_states=1) as checkpointer:
        for _ in range(3):
            checkpointer.save(loop.state, step=loop.step()).result()
        infos = checkpointer.steps()
    assert [(i.step, i.is_complete, i.manifest and i.manifest.has_state) for i in infos] == [
        (1, True, False),
        (2, True, False),
        (3, True, True),
    ]
    assert not (tmp_path / "out/step_1/state").exists()
    with (
        Checkpointer(
            tmp_path / "b", resume=tmp_path / "out/step_2", verify_on_load=True
        ) as checkpointer,
        pytest.raises(CheckpointMismatchError, match="keep_last_n_states"),
    ):
        checkpointer.restore(Loop().state)


def test_a_first_save_without_optimizer_state_and_later_ones_with_it(tmp_path: Path) -> None:
    loop = Loop()
    with Checkpointer(tmp_path / "out", check_snapshots=True) as checkpointer:
        checkpointer.save(loop.state, step=0)
        checkpointer.save(loop.state, step=loop.step())
        checkpointer.save(loop.state, step=loop.step())
    resumed = Loop()
    with Checkpointer(tmp_path / "b", resume=tmp_path / "out/step_0") as checkpointer:
        checkpointer.restore(resumed.state)
    assert not resumed.optimizer.state


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    ],
)
def test_the_size_is_known_before_the_first_update(tmp_path: Path, make: Any, moments: int) -> None:
    model = nn.Linear(300, 300, bias=False)
    with Checkpointer(tmp_path / "out") as checkpointer:
        size = checkpointer.checkpoint_bytes(
            {"model": model, "optimizer": make(model.parameters())}
        )
    assert size == pytest.approx((1 + moments) * 300 * 300 * 4, rel=0.01)


def test_replacing_a_parameter_replans_instead_of_saving_the_old_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    with Checkpointer(tmp_path / "out") as checkpointer:
        checkpointer.save({"model": model}, step=1).result()
        model.weight = nn.Parameter(torch.full((2, 2), 7.0))
        folder = checkpointer.save({"model": model}, step=2).result().path
        assert load_file(Path(folder) / "model.safetensors")["weight"].tolist() == [[7.0] * 2] * 2
        model.weight.data = torch.full((2, 2), 8.0)
        folder = checkpointer.save({"model": model}, step=3).result().path
        assert load_file(Path(folder) / "model.safetensors")["weight"].tolist() == [[8.0] * 2] * 2


def test_each_save_is_planned_by_what_is_saved_then(tmp_path: Path) -> None:
    loop = Loop().run_to(1)
    tensors = dict(loop.model.state_dict())
    part = ModelPart(tensors=tensors)
    other = dataclasses.replace(part, tensors={f"x.{name}": t for name, t in tensors.items()})
    states = (
        {"model": part},
        {"model": part, "rng": RngPart()},  # stored from the second save on
        {"model": other},
        {"model": part, "rng": RngPart()},
    )
    with Checkpointer(tmp_path / "out") as checkpointer:
        for step, state in enumerate(states, start=1):
            checkpointer.save(state, step=step)
    for step, first in ((1, "0.bias"), (2, "0.bias"), (3, "x.0.bias"), (4, "0.bias")):
        folder = tmp_path / "out" / f"step_{step}"
        assert min(load_file(folder / "model.safetensors")) == first
        has_rng = bool(list(folder.glob("state/rng*")))
        assert has_rng == (step in (2, 4))


def test_due_asks_the_policy_and_the_clock(tmp_path: Path) -> None:
    now = [1000.0]
    policy = EverySteps(10) | EverySeconds(60)
    with Checkpointer(tmp_path / "out", save=policy, clock=lambda: now[0]) as checkpointer:
        assert checkpointer.due(3) is None
        assert checkpointer.due(10) == "interval"
        now[0] += 61
        assert checkpointer.due(11) == "time"
        checkpointer.save(Loop().state, step=11)
        assert checkpointer.due(12) is None
        assert checkpointer.due(12, signalled=True) is None
        now[0] -= 86_400  # somebody set the clock right
        assert checkpointer.due(13) is None
        now[0] += 61
        assert checkpointer.due(14) == "time"


def test_records_tell_times_and_sizes(tmp_path: Path) -> None:
    loop = Loop().run_to(1)
    with Checkpointer(tmp_path / "out") as checkpointer:
        pending = checkpointer.save(loop.state, step=1, reason="epoch")
        assert checkpointer.in_flight == 1
        pending.wait()
        (record,) = checkpointer.poll()
        assert checkpointer.in_flight is None
        files = [path for path in (tmp_path / "out" / "step_1").rglob("*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    assert record.checkpoint_bytes == sum(sizes.values()) - sizes["manifest.json"]
    tensor_bytes = sum(t.numel() * t.element_size() for t in loop.tensors().values())
    assert (record.step, record.reason, record.error) == (1, "epoch", None)
    assert record.staged_bytes == record.written_bytes == tensor_bytes
    assert 0 <= record.waited_seconds <= record.blocked_seconds
    assert 0 < record.staged_seconds <= record.written_seconds <= record.committed_seconds


def test_space_is_checked_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop().run_to(1)

    class Small(LocalStorage):
        free = 0

        def free_bytes(self, path: str) -> int:
            return self.free

    storage = Small()
    with Checkpointer(tmp_path / "out", keep=KeepLast(2), storage=storage) as checkpointer:
        each = checkpointer.checkpoint_bytes(loop.state)
        storage.free = each - 1
        with pytest.raises(CheckpointWriteError, match="one checkpoint takes") as caught:
            checkpointer.check_space(loop.state, 10)
        assert caught.value.facts["needed_bytes"] == each
        storage.free = 3 * each
        assert checkpointer.check_space(loop.state, 10) == 3 * each
        assert not caplog.records
        storage.free = 3 * each - 1
        checkpointer.check_space(loop.state, 10)
        assert "later saves will fail" in caplog.text
    caplog.clear()
    with Checkpointer(
        tmp_path / "moved", keep=KeepLast(2), prune="move", storage=storage
    ) as checkpointer:
        storage.free = 10 * each - 1  # what is moved to .pruned/ stays on the disk
        checkpointer.check_space(loop.state, 10)
        assert "the 10 checkpoints that stay on this disk" in caplog.text


def test_a_long_run_remembers_no_manifests(tmp_path: Path) -> None:
    """Of a large run each is megabytes."""
    loop = Loop()
    with Checkpointer("/out", storage=MemoryStorage()) as checkpointer:
        for _ in range(10):
            checkpointer.save(loop.state, step=loop.step()).wait()
            checkpointer.poll()
        gc.collect()
        assert sum(type(thing) is Manifest for thing in gc.get_objects()) <= 2


def test_a_save_that_takes_very_long_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver_module, "SLOW_SAVE_SECONDS", 0.0)
    slow = SlowStorage(LocalStorage(), seconds_per_operation=0.2, only=("sync_file",))
    with Checkpointer(tmp_path / "out", storage=slow) as checkpointer:
        checkpointer.save(Loop().state, step=1)
        checkpointer.poll()
        checkpointer.poll()
    assert caplog.text.count("step 1 has been under way for") == 1


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="staging is 'later'"):
        Checkpointer(tmp_path / "out", staging="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_save_error is 'ignore'"):
        Checkpointer(tmp_path / "out", on_save_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="config_name is 'a/b'"):
        Checkpointer(tmp_path / "out", config_name="a/b")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"trainer": Counter()}, "no 'model'"),
        ({"model": Counter()}, "no part of a checkpoint"),
        ({"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1)}, r"state\['ema'\] is a Linear"),
        ({"model": nn.Linear(1, 1), "trainer": 5}, "without a state"),
        (
            {"model": nn.Linear(1, 1), "trainer": {"a": [1, {"b": torch.ones(1)}]}},
            r"parts.trainer.a\[1\].b is tensor",
        ),
        (
            {"model": nn.Linear(1, 1), "trainer": {"best": float("inf")}},
            "parts.trainer.best is inf",
        ),
        (
            {"model": nn.Linear(1, 1), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "the optimizer holds 2 tensors without a name",
        ),
        ({"model": ModelPart(tensors={}, files={"a/b": b""})}, "can't hold a further file 'a/b'"),
        ({"model": ModelPart(tensors={}, files={".begun": b""})}, "a further file '.begun'"),
        ({"model": ModelPart(tensors={}, files={".pinned": b""})}, "a further file '.pinned'"),
        (
            {"model": ModelPart(tensors={}, files={"manifest.json": b""})},
            "can't hold a further file",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_an_error_of_save_itself(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with (
        Checkpointer(tmp_path / "out") as checkpointer,
        pytest.raises(CheckpointError, match=message),
    ):
        checkpointer.save(state, step=1)
    assert step_names(tmp_path / "out") == []


def test_closing_twice_and_leaving_by_an_error_keep_the_last_save(tmp_path: Path) -> None:
    loop = Loop()
    slow = SlowStorage(LocalStorage(), seconds_per_operation=0.01)

    def fail() -> None:
        with Checkpointer(tmp_path / "out", storage=slow) as checkpointer:
            checkpointer.save(loop.state, step=loop.step())
            raise RuntimeError("the loop failed")

    with pytest.raises(RuntimeError, match="the loop failed"):
        fail()
    assert step_names(tmp_path / "out") == ["step_1"]
    checkpointer = Checkpointer(tmp_path / "out")
    checkpointer.close()
    checkpointer.close()
