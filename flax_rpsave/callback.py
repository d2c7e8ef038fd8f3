"""The callback: when to save, what to resume from, and what to tell the loop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from flax_rpsave import commit, data_state, documents
from flax_rpsave.agreement import Group, stand_aside
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory, explained, open_directory
from flax_rpsave.errors import (
    ConfigError,
    RPSaveError,
    SaveError,
    StepOrderError,
)
from flax_rpsave.leaves import check_outside_of_tracing
from flax_rpsave.preemption import PreemptionWatch
from flax_rpsave.resuming import Resumer, Wanted, as_step, check_resume_allowed, initial
from flax_rpsave.saver import Saver
from flax_rpsave.store import SPAWN, new_context
from flax_rpsave.writer import SaveStats, fail_if_exiting, forget

logger = logging.getLogger("flax_rpsave")


class CheckpointCallback:
    """Saves a train loop's state every N steps, while it goes on, and resumes from the newest step.

    Args:
      config: A `CheckpointConfig`, or a mapping with its keys.
      data: Anything with `get_state()` and `set_state()` (a grain iterator, say), whose position is saved and restored
        with the state. `False`: data state in a checkpoint is passed over.
      on_commit: Called with each commit's `SaveStats`, on the background thread, where nothing of the callback may be
        called that waits for that thread: no save, `wait`, `close` or `resume`.

    Raises:
      ConfigError: The configuration is wrong, or the directory cannot be written.

    Example:
      >>> config = CheckpointConfig.from_yaml("config.yaml")
      >>> with CheckpointCallback(config, data=train_iter) as checkpoint:
      ...     state, step = checkpoint.resume(state)
      ...     while step < num_steps and not checkpoint.should_stop:
      ...         state, metrics = train_step(state, next(train_iter))
      ...         step += 1
      ...         checkpoint(step, state, metrics=metrics)
      ...     checkpoint(step, state, force=True)
    """

    def __init__(
        self,
        config: CheckpointConfig | Mapping[str, Any],
        *,
        data: Any = None,
        on_commit: Callable[[SaveStats], None] | None = None,
    ):
        self.config = config if isinstance(config, CheckpointConfig) else CheckpointConfig.from_mapping(config)
        if data is not None and data is not False and not (hasattr(data, "get_state") and hasattr(data, "set_state")):
            raise TypeError(
                f"data must have get_state() and set_state(), or be False; got {type(data).__qualname__}"
                + (": pass the iterator that the loop takes its batches from" if hasattr(data, "__iter__") else "")
            )
        self.extra: Any = None
        self._data = data
        self._seen: int | None = None  # the step of the last call, or the one resumed from
        self._saved: int | None = None  # committed or in flight by this run
        self._resumed = False
        self._existing: set[int] = set()  # committed by others before this run, as of its beginning
        self._closed = False
        self._pid = os.getpid()
        self._calling = threading.Lock()
        self._should_stop = False
        self._watch = PreemptionWatch(None)
        if not self.config.enabled:
            stand_aside()
            return
        group = Group(self.config.commit_timeout_secs)
        with group.left_on_error("its callback could not be made"):
            self._root = open_directory(self.config.directory, new_context())
            self._saver = saver = Saver(self.config, group, self._root, on_commit)
            self._resumer = Resumer(self._root, self.config, group, saver.nonce, data, saver.writer.damaged)
            _check_writable(self._root, saver.nonce)
            if self.config.save_on_preemption:
                self._watch = PreemptionWatch(self.config.preemption_signals)

    @property
    def should_stop(self) -> bool:
        """Whether a preemption signal came and the state was saved for it: the loop should end."""
        return self._should_stop

    @property
    def stats(self) -> SaveStats | None:
        """What the last committed save did; None before the first."""
        return self._saver.writer.stats if self.config.enabled else None

    def all_steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(commit.committed_steps(self._root)) if self.config.enabled else []

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.all_steps(), default=None)

    def __call__(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        extra: Any = None,
        force: bool = False,
    ) -> bool:
        """Saves the state if it is due. The state may be donated as soon as this returns.

        Args:
          step: Number of completed updates. Steps may be skipped: a save is due where a multiple of
            `save_interval_steps` was reached or crossed since the last call.
          state: The train state after `step` updates.
          metrics: Numbers or 0-d arrays by name, which are fetched in the background.
          extra: Anything small that JSON can hold; `checkpoint.extra` after a resume (tuples are lists then).
          force: Whether to save in any case. A step that this run has saved is not saved again.

        Returns:
          Whether a save began.

        Raises:
          StepOrderError: The step goes backwards, or exists in the directory already.
          SaveError: The state cannot be saved, or the save before failed (with `on_error: raise`); or another thread is
            calling. With several processes, a save that is due has begun all the same.
          RPSaveError: This is inside a function that is being traced, inside `on_commit`, or in a forked child.
        """
        begun = time.perf_counter()
        check_outside_of_tracing("the callback")
        with self._in_one_thread(f"step {step}"):
            return self._call(begun, step, state, metrics, extra, force)

    def _call(
        self, begun: float, step: Any, state: Any, metrics: Mapping[str, Any] | None, extra: Any, force: bool
    ) -> bool:
        step = as_step(step)
        if self._closed:
            raise SaveError(f"step {step}: the callback is closed")
        if not self.config.enabled:
            return False
        self._saver.writer.check_thread()
        # Every process must ask equally often: before what may raise in one, after what on_commit does in process 0.
        told_to_stop = self._watch.poll()
        if self._seen is None and not self._resumed:
            self._check_fresh_start(step)
        previous = step - 1 if self._seen is None else self._seen
        if step < previous:
            raise StepOrderError(
                f"step {step} lies before step {previous}, of the last call: steps must not go backwards"
            )
        interval = self.config.save_interval_steps
        preempted = told_to_stop and not self._should_stop
        due = step // interval > previous // interval or force or preempted
        alone = self._saver.group.processes == 1
        waited = self._wait_for_save_before(step) if due and not (alone and step == self._saved) else 0.0
        failed = self._take_error(step)
        # Several processes must begin the same saves, whichever of them hears first that one has failed, and whichever
        # cannot begin: there a call that raises is over all the same. Alone, what was due is left to the next call,
        # before which the cause may be mended.
        if alone and failed is not None:
            raise failed
        if not alone:
            self._pass(step, preempted)
        began = due and step != self._saved
        if began:
            try:
                self._save(step, state, begun, waited, metrics, extra)
            except Exception as error:
                if failed is not None:
                    error.add_note(f"besides, {failed}")
                raise
        elif due:
            logger.info("step %d is saved already, or being saved; not saved again", step)
        if alone:
            self._pass(step, preempted)
        if failed is not None:
            raise failed
        return began

    def resume(
        self,
        state: Any,
        *,
        step: int | None = None,
        init: Callable[[], Any] | None = None,
        skip: Sequence[str] = (),
        rewind: bool = False,
    ) -> tuple[Any, int]:
        """The newest committed step that verifies, put into the form of `state`.

        Args:
          state: The target: structure, shapes, dtypes, shardings. Leaves may be arrays or `jax.ShapeDtypeStruct`s with
            shardings. NNX objects are updated in place.
          step: Takes this step and no other.
          init: Makes the state where there is no checkpoint, for a `state` of `ShapeDtypeStruct`s.
          skip: Patterns of leaf paths that keep the target's values, such as "opt_state/**" (`*`: within one key);
            leaves that only the checkpoint has are passed over by them.
          rewind: With `step`: move newer steps aside, under names that are no steps.

        Where this raises, `data` and NNX objects may have been set already: make them anew before another try.

        Returns:
          (state, step); (state, 0) where there is no checkpoint.

        Raises:
          NoCheckpointError: There is none and one is required, or not this step.
          TreeMismatchError: What is stored does not fit the target.
          CorruptCheckpointError: There are steps, and none of them verifies.
          DataStateError: Data state in the checkpoint without `data` here, or the other way.
          SaveError: A save before failed; or, of several processes, one does not do the same (`CommitTimeoutError`: in
            time).
          ConfigError: `resume: never`, and there are steps; or the processes do not share the directory.
          RPSaveError: This is inside a function that is being traced, inside `on_commit`, or in a forked child.
        """
        if self._closed:
            raise SaveError("the callback is closed: make a new one to resume")
        check_outside_of_tracing("resume")
        if not self.config.enabled:
            return (initial(state, init), 0)
        with self._in_one_thread("resume"):
            self.wait()
            wanted = Wanted(state, init, skip, step, rewind)
            found = self._resumer.resume(wanted, begun=self._seen is not None, resumed=self._resumed)
        self.extra = found.extra
        self._resumed = True
        self._existing = {s for s in found.steps if s <= found.step} if step is not None else set(found.steps)
        self._seen = found.step
        self._saved = found.step if found.steps else None
        self._saver.compile_ahead(found.state)
        return found.state, found.step

    def wait(self) -> None:
        """Waits until the save under way is committed.

        Raises:
          SaveError: It failed (with `on_error: raise`).
          RPSaveError: This is inside `on_commit`, or in a forked child.
        """
        if self.config.enabled:
            self._check_process("wait")
            self._saver.writer.check_thread()
            self._saver.writer.wait()
            self._report_error(self._seen)

    def close(self) -> None:
        """Waits for the save under way and ends. Called by leaving the `with` block.

        Raises:
          SaveError: The last save failed, whatever `on_error` says.
          RPSaveError: This is inside `on_commit`.
        """
        self._close("its callback was closed")

    def _close(self, why: str) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child has nothing to end
            return
        if self.config.enabled:
            self._saver.writer.check_thread()
        self._closed = True
        self._watch.close()
        if self.config.enabled:
            self._saver.writer.wait()
            forget(self._saver.writer)
            self._saver.group.leave(why)
            if (error := self._saver.writer.take_error(logged_too=True)) is not None:
                fail_if_exiting(error)
                raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(f"its loop ended with {type(error).__name__}: {error}")
        except SaveError as failed:
            error.add_note(f"besides, a checkpoint was not saved: {failed}")

    @contextlib.contextmanager
    def _in_one_thread(self, what: str) -> Iterator[None]:
        """Refuses a call while another thread is in one: saves would mix what both hand over."""
        self._check_process(what)
        if not self._calling.acquire(blocking=False):
            raise SaveError(f"{what}: another thread is calling this callback; call it from one thread only")
        try:
            yield
        finally:
            self._calling.release()

    def _check_process(self, what: str) -> None:
        """Refuses a forked child: what it would save, the parent would find in the place of its own."""
        if self.config.enabled and os.getpid() != self._pid:
            raise RPSaveError(
                f"{what}: this callback was made by pid {self._pid}, of which this process is a fork: {SPAWN}"
            )

    def _pass(self, step: int, preempted: bool) -> None:
        """The next call goes on from this step."""
        self._seen = step
        if preempted:
            logger.warning("preempted (%s): step %d is being saved, should_stop is set", self._watch.reason, step)
            self._should_stop = True

    def _wait_for_save_before(self, step: int) -> float:
        waited = self._saver.writer.wait()
        if waited > 1e-3:
            logger.info("step %d waited %.3f s for the save before", step, waited)
        return waited

    def _save(
        self, step: int, state: Any, begun: float, waited: float, metrics: Mapping[str, Any] | None, extra: Any
    ) -> None:
        with self._saver.writer.announced(step):
            final = self._root / str(step)
            damaged = self._saver.writer.damaged.get(step)
            if step in self._existing and damaged is None:
                raise StepOrderError(f"step {step} exists in {self._root} already and is not overwritten")
            self._saver.save(
                state,
                step=step,
                begun=begun + waited,
                waited_secs=waited,
                final=final,
                item=self.config.item or "default",
                data_state=data_state.encode(self._data),
                metrics=_taken(metrics or {}),
                extra=_checked_json(extra),
                replaces=damaged,
            )
        self._saved = step
        logger.debug("step %d: snapshot taken in %.1f ms", step, (time.perf_counter() - begun - waited) * 1e3)
        if not self.config.async_save:
            self._saver.writer.wait()
            self._report_error(step)

    def _report_error(self, step: int | None) -> None:
        """Raises or logs the error of the last save, once."""
        if (error := self._take_error(step)) is not None:
            raise error

    def _take_error(self, step: int | None) -> SaveError | None:
        """The error of the last save, once, for the caller to raise; None where it is to be logged, and is."""
        if (error := self._saver.writer.take_error()) is None:
            return None
        self._saved = None
        if self.config.on_error == "raise":
            return error
        logger.error("at step %s: %s; training goes on (on_error: log)", step, error)
        self._saver.writer.keep_logged(error)
        return None

    def _check_fresh_start(self, step: int) -> None:
        steps = commit.committed_steps(self._root)
        check_resume_allowed(self.config, self._root, steps)
        if not steps:
            commit.check_unprefixed(self._root)
        self._existing = set(steps)
        ahead = [s for s in self._existing if s >= step]
        if ahead:
            raise StepOrderError(
                f"{self._root} has steps up to {max(ahead)}, and this run, which did not resume, is at step "
                f"{step}: its steps would be lost among them. Call resume(), or set another directory."
            )


def _check_writable(root: Directory, nonce: str) -> None:
    with explained(f"checkpoint.directory {root} cannot be written", ConfigError):
        root.make()
        probe = f".rpsave-probe-{nonce}"
        root.write(probe, b"")
        root.remove(probe)


def _taken(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics as they are now: device arrays on their way to the host, host arrays copied."""
    if not isinstance(metrics, Mapping):
        raise SaveError(f"metrics must be a mapping of names to numbers, got {type(metrics).__qualname__}")
    taken: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, jax.core.Tracer):
            raise SaveError(f"metric {name!r} is a tracer, which has no value; pass what the traced function returns")
        if isinstance(value, jax.Array) and not value.is_deleted():
            with jax.transfer_guard("allow"):
                value.copy_to_host_async()
        taken[str(name)] = value.copy() if isinstance(value, np.ndarray) else value
    return taken


def _checked_json(extra: Any) -> Any:
    try:
        return json.loads(documents.exact_json(extra))
    except (TypeError, ValueError) as error:
        raise SaveError(f"extra must be something that JSON can hold: {error}") from error
