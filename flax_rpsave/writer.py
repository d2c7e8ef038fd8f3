"""The save in the background: which thread does what.

The train loop's thread takes the snapshot and hands it over. One thread a save, started by that call, waits for the
copies, writes them, commits the step, deletes what retention no longer keeps, and ends. It is no daemon, so a program
that ends without `close` waits for it, and it needs no executor and no further thread, which cannot be had any more
while the interpreter exits: the helper that writes with it on local disks is started by the call too, and ends with it.
At most one save runs at a time.

What may block: the loop's thread, in `Writer.wait` (the next save, `wait`, `close`) and, where staging memory is
limited, in `SaveRun.wait_written` until the group before is written. The background calls JAX for nothing but waiting
for copies.

Guarantees: an error in the background is kept until it is raised or logged by the loop's thread, once; a save that
failed leaves no visible step; its directory is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import tensorstore as ts

from flax_rpsave import commit, divergence, documents, host_memory, sharing, terms
from flax_rpsave.agreement import Group
from flax_rpsave.blocks import Helper
from flax_rpsave.cleaning import Cleaner
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory, explained
from flax_rpsave.engine import Engine, Written
from flax_rpsave.engines import Engines
from flax_rpsave.errors import RPSaveError, SaveError
from flax_rpsave.leaves import Leaf
from flax_rpsave.planner import SavePlan
from flax_rpsave.snapshot import Snapshot
from flax_rpsave.store import data_key, database, index_key, new_context, open_database

logger = logging.getLogger("flax_rpsave")

_SAVES_PER_GIVE_BACK = 16  # it takes 3 to 40 ms, in the background


@dataclass(frozen=True)
class SaveStats:
    """What one save did.

    Attributes:
      step: The step.
      leaves: Leaves in the state.
      bytes_written: Bytes of array data that this process wrote, padding of edge chunks included.
      blocking_secs: How long the call took, in seconds, without `waited_secs`.
      waited_secs: How long the call first waited for the save before.
      snapshot_secs: How long the background waited for the copies.
      write_secs: The rest of the time until all of this process's chunks were durable.
      commit_secs: From then until the step was visible.
      total_secs: From the beginning of the call until the step was visible.
      engine: What wrote the chunks: "direct" or "tensorstore".
    """

    step: int
    leaves: int
    bytes_written: int
    blocking_secs: float
    waited_secs: float
    snapshot_secs: float
    write_secs: float
    commit_secs: float
    total_secs: float
    engine: str


@dataclass
class SaveRequest:
    """All that the background needs to save one step.

    Attributes:
      final: The step's directory, which does not exist yet; it is made beside it under a temporary name.
      item: The item's name within it, or None where the step's directory is the item.
      leaves: The state's leaves, without their values.
      nonce: Of this save.
      run: Of the run: what it saves can be told from what another saves in the same directory.
      replaces: A damaged step of the same name, to be moved aside first.
    """

    step: int
    final: Directory
    item: str | None
    leaves: Sequence[Leaf]
    plan: SavePlan
    config: CheckpointConfig
    nonce: str
    run: str
    data_state: bytes | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None
    replaces: Directory | None = None
    waited_secs: float = 0.0
    begun_ns: int = field(default_factory=time.time_ns)
    begun: float = field(default_factory=time.perf_counter)


class SaveRun:
    """One save: the request, and the hand-over of its snapshots between the two threads."""

    def __init__(self, request: SaveRequest, group: Group, engines: Engines, on_visible: Callable[[SaveRequest], None]):
        self.request = request
        self._on_visible = on_visible
        self._group = group
        self._engines = engines
        self._channel = group.channel(f"step {request.step}")
        self._temporary: Directory | None = None
        self._snapshots: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._written = threading.Semaphore(0)
        self._call_ended = threading.Event()
        self._blocking_secs: float | None = None
        self.aborted: BaseException | None = None
        self.failed = False

    def hand_over(self, snapshot: Snapshot) -> None:
        """Gives the background a group's snapshot."""
        self._snapshots.put(snapshot)

    def wait_written(self) -> bool:
        """Waits until one more group is written; False where the save has failed."""
        self._written.acquire()
        return not self.failed

    def end_call(self, aborted: BaseException | None = None, *, in_background: bool = True) -> None:
        """The loop's thread is done with the save: no more groups come, and its blocking time is known."""
        self.aborted = aborted
        self._blocking_secs = time.perf_counter() - self.request.begun if in_background else None
        self._snapshots.put(None)
        self._call_ended.set()

    def execute(self, helper: Helper | None) -> SaveStats:
        """Writes and commits; runs in the background, with a helper where one was started."""
        request = self.request
        try:
            with explained(f"step {request.step} was not saved to {request.final}", SaveError):
                return self._execute(helper)
        except BaseException as error:
            self.failed = True
            if (earlier := self.give_up(error)) is not None:
                raise earlier from error
            raise
        finally:
            self._written.release()

    def give_up(self, error: BaseException) -> SaveError | None:
        """Tells the others why the save failed, and removes what was written; returns a failure that came before.

        Process 0 removes the directory as soon as it knows of a failure, so others that still write fail for that.
        """
        earlier = self._channel.give_up(error)
        if self._group.decides and self._temporary is not None:
            with contextlib.suppress(OSError):  # whatever stays is removed by the next run
                commit.give_up(self._temporary, self.request.nonce)
        return earlier

    def _execute(self, helper: Helper | None) -> SaveStats:
        request = self.request
        context = new_context()  # of this save alone: what it keeps of the database is of no use to the next one
        with jax.profiler.TraceAnnotation("rpsave:prepare"):
            temporary = self._prepare()
            item = temporary / request.item if request.item is not None else temporary
            item.make()
            process = self._group.process
            engine = self._engines.make(
                item / f"{commit.PROCESS_DATABASE}{process}" if request.config.storage.use_ocdbt else item,
                request.plan.leaves,
                describe=self._group.decides,
                storage=request.config.storage,
                nbytes=request.plan.process_bytes.get(process, 0),
                helper=helper,
                context=context,
            )
        snapshot_secs = 0.0
        fingerprints: dict[int, dict[int, int]] = {}
        with contextlib.closing(engine):
            for snapshot in self._groups():
                with jax.profiler.TraceAnnotation("rpsave:snapshot"):
                    waiting = time.perf_counter()
                    snapshot.wait()
                    snapshot_secs += time.perf_counter() - waiting
                with jax.profiler.TraceAnnotation("rpsave:write"):
                    engine.write(snapshot.pieces())
                fingerprints.update(snapshot.fingerprints())
                self._written.release()
            with jax.profiler.TraceAnnotation("rpsave:write"):
                written, report = self._finish(engine, fingerprints)
        wrote = time.perf_counter()
        with jax.profiler.TraceAnnotation("rpsave:commit"):
            self._channel.report(report)
            if self._group.decides:
                self._commit(temporary, item, self._channel.collect(report), context)
                self._temporary = None  # committed: whatever goes wrong from here on removes nothing
                committed = time.perf_counter()
                self._on_visible(request)  # before the others hear, so that all see the same steps from then on
                self._channel.decide()
            else:
                self._channel.hear()
                committed = time.perf_counter()
        self._call_ended.wait()
        total = committed - request.begun
        return SaveStats(
            step=request.step,
            leaves=len(request.leaves),
            bytes_written=written.nbytes,
            blocking_secs=total if self._blocking_secs is None else self._blocking_secs,
            waited_secs=request.waited_secs,
            snapshot_secs=snapshot_secs,
            write_secs=wrote - request.begun - snapshot_secs,
            commit_secs=committed - wrote,
            total_secs=total,
            engine=engine.name,
        )

    def _prepare(self) -> Directory:
        """The directory under its temporary name: made by process 0, which tells the others."""
        request = self.request
        own = terms.terms_of(request.plan, request.config, request.item, has_data_state=request.data_state is not None)
        if not self._group.decides:
            word = self._channel.opened()
            sharing.check_prepared(request.final, word["nonce"], self._group.process, word["final"])
            terms.check(self._group.process, own, word["terms"], request.plan)
            return commit.workplace(request.final, word["nonce"])
        if request.replaces is not None and request.replaces.exists():  # else an earlier try has moved it
            commit.move_aside(request.replaces, "damaged", request.nonce)
        self._temporary = commit.workplace(request.final, request.nonce)  # whatever of it is there when this fails
        temporary = commit.prepare(request.final, request.nonce)
        self._warn_of_little_room(temporary)
        self._channel.open({"nonce": request.nonce, "final": str(request.final), "terms": own})
        return temporary

    def _warn_of_little_room(self, temporary: Directory) -> None:
        """No more than a warning: what is compressed needs less, and room may be made meanwhile."""
        free, needed = temporary.free_nbytes(), sum(self.request.plan.process_bytes.values())
        if free is not None and free < needed:
            logger.warning(
                "step %d has %.3f GB, and %.3f GB are free at %s: it will probably not be saved",
                self.request.step, needed / 1e9, free / 1e9, temporary.parent,
            )  # fmt: skip

    def _groups(self) -> Iterator[Snapshot]:
        while (snapshot := self._snapshots.get()) is not None:
            yield snapshot
        if self.aborted is not None:
            raise SaveError(f"the call that took the snapshot failed: {self.aborted}")

    def _finish(self, engine: Engine, fingerprints: divergence.Fingerprints) -> tuple[Written, dict[str, Any]]:
        """Writes what is this process's beside the arrays; returns what was written, and the report of it."""
        request = self.request
        process = self._group.process
        values = {} if request.data_state is None else {data_key(process): documents.seal(request.data_state)}
        index = documents.build_index(
            {**engine.digests, **{key: documents.digest(value) for key, value in values.items()}}, request.nonce
        )
        values[index_key(process)] = index
        report: dict[str, Any] = {"index": documents.digest(index)}
        if request.config.replica_parallel.check_divergence is not None:
            report["replicas"] = divergence.build_report(request.plan, process, self._group.processes, fingerprints)
        return engine.finish(values), report

    def _commit(
        self, temporary: Directory, item: Directory, reports: Sequence[Mapping[str, Any]], context: ts.Context
    ) -> None:
        request = self.request
        if (mode := request.config.replica_parallel.check_divergence) is not None:
            labels = [leaf.label for leaf in request.leaves if leaf.is_array]
            divergence.check(request.plan, [report["replicas"] for report in reports], labels, request.step, mode)
        use_ocdbt = request.config.storage.use_ocdbt
        if use_ocdbt:
            store = commit.merge(item, len(reports), context)
        else:
            store = open_database(database(item, False), context)
        indices = [report["index"] for report in reports]
        commit.check(store, indices)
        plans = {leaf.layout.name: leaf for leaf in request.plan.leaves}
        prefix = f"{request.item}/" if request.item is not None else ""
        metrics = documents.as_numbers(request.metrics)
        files = {
            f"{prefix}{documents.TREE}": documents.build_tree(request.leaves, plans, use_ocdbt),
            f"{prefix}{documents.SHARDINGS}": documents.build_shardings(request.leaves),
            f"{prefix}{documents.ARRAY_METADATAS}/process_0": documents.build_array_metadatas(request.leaves, plans),
            documents.CHECKPOINT: documents.build_checkpoint(
                request.item,
                metrics,
                {
                    "step": request.step,
                    "processes": len(reports),
                    "indices": indices,  # what ties the arrays to the step: another's, of equal shapes, is noticed
                    "run": request.run,
                    "extra": request.extra,
                },
                request.begun_ns,
            ),
        }
        not_always = {
            f"{prefix}{documents.STRINGS}": documents.build_strings(request.leaves),
            documents.METRICS: documents.build_metrics(metrics),
        }
        files |= {name: data for name, data in not_always.items() if data is not None}
        commit.publish(temporary, item, request.final, files, request.nonce)


class Writer:
    """Runs saves one after the other, each on a thread of its own.

    Args:
      cleaner: Of the run's directory; None for a save without one, and in processes other than 0.
      group: The processes that save together.
      on_commit: Called with each commit's stats, in the background of process 0.
    """

    def __init__(
        self,
        cleaner: Cleaner | None,
        group: Group,
        on_commit: Callable[[SaveStats], None] | None = None,
    ):
        self._group = group
        self._engines = Engines()
        self._plan: SavePlan | None = None  # of the last save
        self._saves_since_give_back = 0
        self._begun: SaveRun | None = None  # the save that `announced` is about, once it has its channel
        self.stats: SaveStats | None = None
        self.damaged: dict[int, Directory] = {}
        self._cleaner = cleaner
        self._on_commit = on_commit
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._logged: BaseException | None = None  # of the last save: told by the log alone

    @property
    def running(self) -> bool:
        """Whether a save is under way."""
        # Not `is_alive`: CPython before 3.13 takes a thread for ended whose `join` was interrupted. Nor the event
        # alone: in a forked child no thread of its parent's runs.
        return not self._ended.is_set() and self._thread in threading.enumerate()

    def start(self, request: SaveRequest) -> SaveRun:
        """Begins a save; the one before must have ended."""
        if self.running:
            raise SaveError(f"step {request.step}: another save is under way; call the callback from one thread only")
        self._logged = None
        run = SaveRun(request, self._group, self._engines, self._settle)
        self._begun = run
        helper, thread, ended = None, None, threading.Event()
        _fail_at_exit(self)
        try:
            helper = self._engines.helper(request.final, request.config.storage, f"rpsave-{request.step}-helper")
            thread = threading.Thread(target=self._work, args=(run, helper, ended), name=f"rpsave-{request.step}")
            thread.start()
        except BaseException as error:
            run.end_call(error)  # an interrupt may come when the thread runs already, and waits for snapshots
            if helper is not None and thread not in threading.enumerate():  # else it ends the helper itself
                helper.end()
            if not isinstance(error, RuntimeError):  # the interpreter exits, or the system has no thread left
                raise
            failure = SaveError(f"step {request.step} cannot be saved: {error}")
            fail_if_exiting(failure)
            raise failure from error
        self._thread, self._ended = thread, ended
        return run

    @contextlib.contextmanager
    def announced(self, step: int) -> Iterator[None]:
        """Runs what begins a save; where it fails before the save has begun, the other processes hear why."""
        before = self._thread
        try:
            yield
        except BaseException as error:
            if self._thread is before:  # else the save itself tells them
                (self._begun or self._group.channel(f"step {step}")).give_up(error)
            raise
        finally:
            self._begun = None

    def check_thread(self) -> None:
        """Refuses what waits for a save on the save's own thread, which is that of `on_commit`.

        Raises:
          RPSaveError: This is that thread.
        """
        if threading.current_thread() is self._thread:
            raise RPSaveError(
                "the callback was called inside on_commit, on the thread of the save that it would wait for. The step "
                "that on_commit is told of is committed already; save, wait, close and resume in the loop's thread."
            )

    def wait(self) -> float:
        """Waits for the save under way; returns the seconds that this took."""
        if self._thread is None:
            return 0.0
        begun = time.perf_counter()
        if self.running:
            self._ended.wait()
        self._thread.join()
        return time.perf_counter() - begun

    def take_error(self, *, logged_too: bool = False) -> SaveError | None:
        """The error of the last save that ended, once; `logged_too`: also if `keep_logged` was told of it."""
        if self.running:
            return None
        error, self._error = self._error, None
        if logged_too:
            error, self._logged = error or self._logged, None
        return None if error is None else _raisable(error)

    def keep_logged(self, error: SaveError) -> None:
        """The error of the last save was only logged: unless a later save begins, the program's end raises it."""
        self._logged = error

    def _work(self, run: SaveRun, helper: Helper | None, ended: threading.Event) -> None:
        try:
            with jax.transfer_guard("allow"):  # one that is set for all threads is about the train loop
                self._save(run, helper)
        finally:
            ended.set()
            if helper is not None:
                helper.end()

    def _save(self, run: SaveRun, helper: Helper | None) -> None:
        if self._cleaner is not None:
            self._cleaner.before(run.request.nonce)
        engine_before = self.stats.engine if self.stats is not None else None
        try:
            self.stats = run.execute(helper)
        except BaseException as error:  # noqa: BLE001 - kept for the loop's thread, whatever it is
            if run.aborted is None:  # else the call itself has raised
                self._error = error
                logger.error("step %d was not saved: %s", run.request.step, error)
            return
        self._saves_since_give_back += 1
        # A new plan was compiled, and the next saves do without what that took; of others malloc keeps a little each.
        if run.request.plan is not self._plan or self._saves_since_give_back == _SAVES_PER_GIVE_BACK:
            self._plan, self._saves_since_give_back = run.request.plan, 0
            host_memory.give_back()
        self.damaged.pop(run.request.step, None)  # saved again, and moved aside
        if self._group.decides:
            self._after_commit(run.request, self.stats)
        elif self.stats.engine != engine_before:  # what process 0 says of each commit is of its own engine
            logger.info("step %d: process %d wrote by %s", run.request.step, self._group.process, self.stats.engine)

    def _settle(self, request: SaveRequest) -> None:
        """The step is visible; the other processes do not know it yet."""
        if self._cleaner is not None:
            self._cleaner.hide_unkept(request.step, request.nonce, self.damaged)

    def _after_commit(self, request: SaveRequest, stats: SaveStats) -> None:
        logger.info(
            "step %d committed: %d leaves, %.1f MB in %.2f s (%.2f GB/s) by %s, the loop was blocked for %.1f ms",
            stats.step, stats.leaves, stats.bytes_written / 1e6, stats.total_secs,
            stats.bytes_written / 1e9 / stats.total_secs, stats.engine, stats.blocking_secs * 1e3,
        )  # fmt: skip
        if self._cleaner is not None:
            self._cleaner.delete_hidden(request.step)
        if self._on_commit is not None:
            try:
                self._on_commit(stats)
            except BaseException:  # SystemExit, too, which would end this thread alone
                logger.exception("on_commit failed for step %d; the step is committed", stats.step)


def _raisable(error: BaseException) -> SaveError:
    """The background's error as one for another thread, with the original as its cause."""
    raised = type(error)(*error.args) if isinstance(error, SaveError) else SaveError(f"saving failed: {error!r}")
    raised.__cause__ = error
    return raised


_writers: set[Writer] = set()
_raised_at_exit: list[SaveError] = []


def _fail_at_exit(writer: Writer) -> None:
    """Has the program end with a code that is not 0, should this writer's last error never be raised."""
    _writers.add(writer)


def forget(writer: Writer) -> None:
    """The writer's owner has taken its last error."""
    _writers.discard(writer)


def fail_if_exiting(error: SaveError) -> None:
    """Has the program end with a code that is not 0, where it ends already: what is raised there does not change it."""
    if not threading.main_thread().is_alive():
        _raised_at_exit.append(error)


@atexit.register  # as early as this module is imported, so that it runs after what the program registers later
def _check_errors() -> None:
    for writer in tuple(_writers):  # on_commit may save, too
        writer.wait()  # for a save that such a registered function has begun
    errors = [error for writer in _writers if (error := writer.take_error(logged_too=True)) is not None]
    errors += _raised_at_exit
    if errors:
        for error in errors:
            print(f"flax_rpsave: the last save failed: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
