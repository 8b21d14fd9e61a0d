"""The face of the checkpoint engine: open, restore, save, poll, close."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from legato.checkpoint.at_exit import close_at_exit
from legato.checkpoint.lifecycle import RunFolder
from legato.checkpoint.manifest import finite_metrics
from legato.checkpoint.opening import Launch, StartOptions, locate
from legato.checkpoint.parts import sort_parts
from legato.checkpoint.plan import MAX_FILE_BYTES, small_files
from legato.checkpoint.policy import (
    EverySteps,
    KeepAll,
    KeepBest,
    KeepPolicy,
    Moment,
    OnSignal,
    SavePolicy,
)
from legato.checkpoint.reading import ReadProgress
from legato.checkpoint.records import Committed, PendingSave, SaveRecord, StepInfo
from legato.checkpoint.restore import read_trainer_json, restore_parts
from legato.checkpoint.retention import KeepRules
from legato.checkpoint.saver import SaveOptions
from legato.checkpoint.session import open_session
from legato.checkpoint.space import check_space, checkpoint_bytes
from legato.errors import CheckpointError
from legato.storage import LocalStorage, Storage


class Checkpointer:
    """Saves a run by step while it trains, and restores it.

    A save blocks training for a copy of this rank's tensors; the rest takes place on a background
    thread. A folder ``step_N`` is complete, or it isn't there: it gets its name by one rename. It
    is a Hugging Face folder (or a PEFT adapter), and ``state/`` in it is for resumed runs.

    Opening takes the lock of ``output_dir``, removes what a crashed process left, and decides which
    step the run goes on from. Collective, as are ``restore``, ``prepare``, ``save``, ``poll``,
    ``due``, ``drain`` and ``close``: every rank calls them at the same step.

    Args:
        output_dir: Folder of the run, or a URL that fsspec knows; made if it is absent.
        save: When a step is to be saved; see `due`.
        keep: Which steps stay; the newest always does.
        config_name: The run's config is written into each step as ``<config_name>.yaml``.
        config_yaml: Its text; None: no such file.
        resume: ``auto``: from the newest complete step, if any; False: from none; a path: from it.
        start_over: Move steps that this run would meet to ``output_dir/.old-<time>/``.
        asynchronous: Write in the background; else ``save`` returns when the step is on disk.
        staging: ``overlap``: on a GPU the copy takes place during the next forward and backward,
            until `wait_staged`; ``blocking``: before ``save`` returns.
        on_save_error: ``continue``: a failed save is logged and tried again; ``raise``: the next
            call raises it.
        final_save_patience_seconds: How long `close` retries a save that failed.
        save_only_model: Write no ``state/``: the steps load, but nothing resumes from them.
        allow_missing: Parts that a restored step may lack: ``optimizer``, ``rng``, ...
        verify_on_load: Compare every byte of the step to resume from with its digest; ``auto``
            skips a damaged one.
        keep_last_n_states: Older kept steps lose their ``state/``; None: none does.
        prune: ``delete`` what isn't kept, or ``move`` it to ``output_dir/.pruned/``.
        best: What the link ``best`` means; None: the `KeepBest` in ``keep``, if there is one.
        storage: Where ``output_dir`` is; None: as it says, with a lock on a disk.
        process_group: The ranks of the run, any backend; None: a single process.
        shared_storage: All ranks see one ``output_dir``; else rank 0's gets all of each step.
        max_file_bytes: Bytes of tensors per file.
        lock_wait_seconds: How long to wait for the lock (an elastic restart: about 30).
        launch_id: Name of what started the ranks; None: nothing that restarts them.
        attempt: How often it restarted them. A restart goes on from the newest step that its own
            launch has seen, whatever ``resume`` and ``start_over`` asked for at the beginning.
        check_snapshots: Compare every snapshot with a slow, synchronous copy. For debugging.
        clock: Gives seconds since 1970.

    Attributes:
        output_dir: Absolute path of the run's folder.
        run_id: Made at the run's first start, inherited by what resumes from it.
        branch: Which continuation of the run this is.
        source: The step to resume from; None: a fresh start.

    Raises:
        OutputDirLockedError: Another run uses ``output_dir``; ``.holder``.
        CheckpointExistsError: Steps are in the way of this run; ``.steps``.
        CheckpointNotFoundError: There is nothing at the path to resume from; ``.path``.
        CheckpointTornError: The step to resume from isn't complete, or is damaged; ``.path``.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        config_name: str = "config",
        config_yaml: str | None = None,
        resume: Literal["auto", False] | str | os.PathLike[str] = "auto",
        start_over: bool = False,
        asynchronous: bool = True,
        staging: Literal["overlap", "blocking"] = "overlap",
        on_save_error: Literal["continue", "raise"] = "continue",
        final_save_patience_seconds: float = 600.0,
        save_only_model: bool = False,
        allow_missing: Collection[str] = (),
        verify_on_load: bool = False,
        keep_last_n_states: int | None = None,
        prune: Literal["delete", "move"] = "delete",
        best: KeepBest | None = None,
        storage: Storage | None = None,
        process_group: dist.ProcessGroup | None = None,
        shared_storage: bool = True,
        max_file_bytes: int = MAX_FILE_BYTES,
        lock_wait_seconds: float = 0.0,
        launch_id: str | None = None,
        attempt: int = 0,
        check_snapshots: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not re.fullmatch(r"[^/\\\0]+", config_name):
            raise CheckpointError(f"config_name is {config_name!r}, not a plain file name")
        self._storage, self.output_dir = locate(output_dir, storage)
        self._folder = RunFolder(self._storage, self.output_dir)
        self._save_policy = save or (EverySteps(500) | OnSignal())
        self._rules = KeepRules(
            keep or KeepAll(), keep_last_n_states=keep_last_n_states, how=prune, best=best
        )
        self._options = SaveOptions(
            asynchronous=asynchronous,
            staging=staging,
            on_save_error=on_save_error,
            save_only_model=save_only_model,
            max_file_bytes=max_file_bytes,
            check_snapshots=check_snapshots,
        )
        self._config = {} if config_yaml is None else {f"{config_name}.yaml": config_yaml.encode()}
        self._final_save_patience_seconds = final_save_patience_seconds
        self._allow_missing = frozenset(allow_missing)
        self._clock = clock
        self._session = open_session(
            self._folder,
            start=StartOptions(
                resume=resume if resume is False or resume == "auto" else locate(resume)[1],
                start_over=start_over,
                verify=verify_on_load,
                lock_wait_seconds=lock_wait_seconds,
                launch=Launch(launch_id, attempt),
            ),
            use_lock=storage is None and isinstance(self._storage, LocalStorage),
            process_group=process_group,
            shared_storage=shared_storage,
            rules=self._rules,
            options=self._options,
            clock=clock,
        )
        self._control, self._saver = self._session.control, self._session.saver
        opening = self._session.opening
        self.run_id, self.branch, self.source = opening.run_id, opening.branch, opening.source
        self._last_save_at = clock()
        self._is_closed = False
        self._cancel_at_exit = close_at_exit(self._close_failing)

    # ---- what is there ---------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Every ``step_N`` in ``output_dir``, by number, read from the disk now."""
        return self._folder.steps()

    def latest(self) -> Committed | None:
        """The newest complete step of this run; None if there is none."""
        complete = [info.committed() for info in self.steps() if info.is_complete]
        return next((found for found in complete[::-1] if found.run_id == self.run_id), None)

    @property
    def holds_output_dir(self) -> bool:
        """On rank 0: whether output_dir still is the folder that this run has locked."""
        return self._session.lock is None or self._session.lock.is_kept()

    @property
    def in_flight(self) -> int | None:
        """The step that is being written, or whose failed snapshot is kept; None: there is none."""
        return self._saver.in_flight

    def read_trainer_state(self, committed: Committed) -> dict[str, Any]:
        """The ``trainer`` part of a step, before any model is built; empty if it holds none."""
        content = read_trainer_json(committed, storage=self._storage)
        return dict(content.get("parts", {}).get("trainer", {}))

    def checkpoint_bytes(self, state: Mapping[str, Any]) -> int:
        """Bytes of one checkpoint of ``state``; before the first update moments are estimated."""
        return checkpoint_bytes(sort_parts(state), with_state=not self._options.save_only_model)

    def check_space(self, state: Mapping[str, Any], planned_saves: int) -> int | None:
        """Collective: hold what that many more saves of ``state`` take against the free space."""
        check = partial(
            check_space,
            self._folder,
            each_bytes=self.checkpoint_bytes(state),
            planned_saves=planned_saves,
            max_kept=self._rules.max_kept,
        )
        free: int | None = self._control.on_main(check, fallback=CheckpointError)
        return free

    # ---- restoring -------------------------------------------------------------------------

    def restore(
        self, state: Mapping[str, Any], *, progress: ReadProgress | None = None
    ) -> dict[str, Any] | None:
        """Collective: fill ``state`` in place from `source`.

        Args:
            state: As for `save`. Keys, shapes and dtypes must be those of the step, both ways.
            progress: Shows how far it is, on any of the ranks; None: nobody.

        Returns:
            The ``trainer`` part's state; None if there is nothing to resume from.

        Raises:
            CheckpointMismatchError: Something doesn't fit; ``.path``, ``.key``.
        """
        if self.source is None:
            return None
        return restore_parts(
            sort_parts(state),
            self.source,
            storage=self._storage,
            rank=self._control.rank,
            allow_missing=self._allow_missing,
            progress=progress,
        )

    # ---- saving ----------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Collective: plan, and allocate what staging needs, so that no save has to.

        The first touch of memory is slow. Best after the first update, or after `restore`: before,
        the optimizer has no state to plan for. Not required.

        Args:
            state: As for `save`.
        """
        self._saver.prepare(partial(sort_parts, state))

    def due(
        self,
        step: int,
        *,
        epoch_end: bool = False,
        new_best: bool = False,
        signalled: bool = False,
    ) -> str | None:
        """Collective if the policy looks at the clock: why to save now, in a word.

        Args:
            step: Optimizer steps completed.
            epoch_end: It is the last one of an epoch.
            new_best: An evaluation at it found a new best metric.
            signalled: Someone asked for a save; the same on every rank.

        Returns:
            The reason; None: there is none.
        """
        seconds = 0.0
        if self._save_policy.needs_clock:
            # A clock that is set back doesn't put the next save off until it has caught up.
            self._last_save_at = min(self._last_save_at, self._clock())
            seconds = float(self._control.broadcast(self._clock() - self._last_save_at))
        return self._save_policy.reason(
            Moment(step, seconds, epoch_end=epoch_end, new_best=new_best, signalled=signalled)
        )

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        reason: str = "interval",
        metrics: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Collective: begin checkpoint ``step``; return as soon as training may go on.

        What happens, in order:
            1. (all ranks, before return) wait for the save before, then stage: copy this rank's
               tensors to host memory. JSON parts are read now. One small message: every rank has.
            2. (all ranks, background) agree on what is written; rank 0 makes
               ``.step_<step>.tmp-...`` and all files; each rank writes its slices, syncs.
            3. (rank 0, background) when all ranks have reported: ``manifest.json``, sync, rename
               to ``step_<step>/``, sync its parent. Then links, then pruning.

        A checkpoint exists from the rename on and not before. A process killed at any earlier
        instant leaves `latest` as it was; the leftover folder is removed at the next start.

        Args:
            state: ``model``: a module or `ModelPart`; ``optimizer``: an optimizer or
                `OptimizerPart`; ``rng``: an `RngPart`; any other name: a part with
                ``state_dict()`` of JSON values, or a dict of them. On a GPU with ``staging:
                overlap`` tensors may change only after `wait_staged`, else from the return on.
            step: Optimizer steps completed, >= 0.
            reason: Why it is saved, for the manifest and the figures.
            metrics: Metrics at this step; those that aren't finite numbers are left out.

        Returns:
            A handle: ``result()`` waits for step 3. This branch's own committed ``step`` is
            returned as it is (only metrics are added to it); nothing is ever overwritten.

        Raises:
            CheckpointError: A part can't be stored.
            PeerLostError: Another rank can't begin the save; ``.rank``. Every rank raises.
            CheckpointWriteError: With ``on_save_error="raise"``: the save before failed.
        """
        if step < 0:
            raise CheckpointError(f"step is {step}; steps are counted from 0")
        self._last_save_at = self._clock()
        with_state = not self._options.save_only_model
        return self._saver.save(
            partial(sort_parts, state),
            small_files=partial(small_files, config=self._config, with_state=with_state),
            step=step,
            reason=reason,
            metrics=finite_metrics(metrics),
        )

    def wait_staged(self) -> None:
        """Call before whatever changes saved tensors: the update, or backward if it updates.

        On a GPU it orders the change behind the copy; the host doesn't wait.
        """
        self._saver.wait_staged()

    def poll(self) -> list[SaveRecord]:
        """Collective: the saves that ended since the last call, committed or failed.

        Call it at every step. While a save is under way on several ranks it costs one 8-byte
        all-reduce; else nothing. A failed save is tried again here every 30 seconds.

        Returns:
            Their figures, in order.

        Raises:
            CheckpointWriteError: With ``on_save_error="raise"``: a save failed.
        """
        return self._saver.poll()

    # ---- the end ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Collective: wait until the last save is on disk, retrying it for the patience given.

        Raises:
            CheckpointWriteError: It can't be written; exit code 3.
        """
        self._saver.drain(patience_seconds=self._final_save_patience_seconds)

    def close(self) -> None:
        """Collective: `drain`, then give back thread, memory and lock. A second call does nothing.

        Raises:
            CheckpointWriteError: The last save can't be written; exit code 3.
        """
        if self._is_closed:
            return
        try:
            self.drain()
        finally:
            self._shut()

    def _close_failing(self) -> CheckpointError | None:
        """On the way out with an error, or at exit: finish what is under way; what was lost."""
        if self._is_closed:
            return None
        try:
            return self._saver.abandon()
        finally:
            self._shut()

    def _shut(self) -> None:
        self._is_closed = True
        self._cancel_at_exit()
        self._session.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_failing()
