"""Begins saves: leaves, plan and snapshot in the caller's thread, then the hand-over to the writer."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flax_rpsave import documents, host_memory
from flax_rpsave.agreement import Group
from flax_rpsave.cleaning import Cleaner
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory
from flax_rpsave.divergence import compared_leaves
from flax_rpsave.documents import DOCUMENT_NAMES
from flax_rpsave.errors import SaveError, UnsupportedLeafError
from flax_rpsave.leaves import Leaf, flatten
from flax_rpsave.planner import layout_of, plan_leaves
from flax_rpsave.snapshot import Snapshotter
from flax_rpsave.templates import Flat, Template, flat_of, likeness, template_of
from flax_rpsave.writer import SaveRequest, SaveStats, Writer

logger = logging.getLogger("flax_rpsave")

_NAME_NBYTES = 255  # of a file, in every common file system


class Saver:
    """Saves states; keeps the compiled snapshot programs of the last structure seen.

    Args:
      config: The configuration.
      group: The processes that save together.
      root: The run's directory, in which retention deletes; None for a save without a run.
      on_commit: Called with each commit's stats, in the background.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        group: Group,
        root: Directory | None,
        on_commit: Callable[[SaveStats], None] | None = None,
    ):
        self.config = config
        self.nonce = secrets.token_hex(4)
        self.group = group
        if self.group.decides:
            documents.load_writers()
        cleaner = Cleaner(root, config) if root is not None and self.group.decides else None
        self.writer = Writer(cleaner, self.group, on_commit)
        self._signature: Any = None
        self._snapshotter: Snapshotter | None = None
        self._template: tuple[Template, Snapshotter] | None = None  # with this snapshotter
        self._warned_of_budget = False

    def save(
        self,
        state: Any,
        *,
        step: int,
        begun: float,
        waited_secs: float,
        final: Directory,
        item: str | None,
        data_state: bytes | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra: Any = None,
        replaces: Directory | None = None,
    ) -> None:
        """Takes the snapshot and begins to write it; returns when the state may be donated.

        Raises:
          SaveError: The state cannot be saved; nothing was written.
        """
        with jax.profiler.TraceAnnotation("rpsave:flatten"):
            flat, snapshotter = self._flatten(step, state)
        run = self.writer.start(
            SaveRequest(
                step=step,
                final=final,
                item=item,
                leaves=flat.leaves,
                plan=snapshotter.plan,
                config=self.config,
                nonce=secrets.token_hex(4),  # a new path for each save: TensorStore caches by path
                run=self.nonce,
                data_state=data_state,
                metrics=metrics or {},
                extra=extra,
                replaces=replaces,
                waited_secs=waited_secs,
                begun=begun,
            )
        )
        aborted: BaseException | None = None
        try:
            with jax.profiler.TraceAnnotation("rpsave:dispatch"):
                for group in range(snapshotter.groups):
                    if group:
                        if not run.wait_written():
                            break
                        host_memory.give_back()  # or the next group's copies may come on top of the last one's
                    run.hand_over(snapshotter.take(flat.arrays, group))
        except BaseException as error:
            aborted = error
            if isinstance(error, Exception):
                raise SaveError(f"step {step}: its snapshot could not be taken: {error}") from error
            raise
        finally:
            run.end_call(aborted, in_background=self.config.async_save)

    def compile_ahead(self, state: Any) -> None:
        """Begins to compile the snapshot programs for states like this one, on a thread of its own."""
        leaves, _ = flatten(state)
        if leaves:
            snapshotter = self._snapshotter_for(leaves)
            threading.Thread(target=_compile, args=(snapshotter,), name="rpsave-compile").start()

    def _flatten(self, step: int, state: Any) -> tuple[Flat, Snapshotter]:
        """The state taken apart, and what takes snapshots of such."""
        if self._template is not None:
            template, snapshotter = self._template
            if (flat := template.flatten(state)) is not None:
                return flat, snapshotter
        leaves, structure = flatten(state)
        if not any(leaf.is_array or leaf.kind == "string" for leaf in leaves):
            raise SaveError(f"step {step}: the state has no array, number or string, so there is nothing to save")
        _check_saveable(leaves, self.config.storage.use_ocdbt)
        before, snapshotter = self._snapshotter, self._snapshotter_for(leaves)
        if snapshotter is before:  # so there are several such states
            new = template_of(state, leaves, structure)
            self._template = None if new is None else (new, snapshotter)
        return flat_of(leaves), snapshotter

    def _snapshotter_for(self, leaves: list[Leaf]) -> Snapshotter:
        arrays = [leaf for leaf in leaves if leaf.is_array]
        signature = [(leaf.name, leaf.kind, likeness(leaf.value)) for leaf in arrays]
        if self._snapshotter is None or signature != self._signature:
            self._snapshotter = self._template = None  # its staging memory goes before the new one's comes
            plan = plan_leaves([layout_of(leaf.name, leaf.value) for leaf in arrays], self.config.replica_parallel)
            budget = self.config.max_staging_gb
            max_nbytes = None if budget is None else int(budget * 1e9)
            check = self.config.replica_parallel.check_divergence is not None
            compared = compared_leaves(plan, self.group.processes) if check else ()
            self._snapshotter = Snapshotter(plan, arrays, self.group.process, max_nbytes, compared)
            self._signature = signature
            if max_nbytes is not None and not self._warned_of_budget:
                self._warn_of_budget(self._snapshotter, arrays, max_nbytes)
        return self._snapshotter

    def _warn_of_budget(self, snapshotter: Snapshotter, arrays: Sequence[Leaf], max_nbytes: int) -> None:
        """Says, once, what a budget for staging memory costs."""
        if snapshotter.groups > 1:
            self._warned_of_budget = True
            own = snapshotter.plan.process_bytes.get(self.group.process, 0)
            logger.warning(
                "max_staging_gb: %s: each save goes in %d groups, and the call waits until all but the last are "
                "written (this process saves %.3g GB)",
                self.config.max_staging_gb, snapshotter.groups, own / 1e9,
            )  # fmt: skip
        needed, largest = snapshotter.largest_copy
        if needed > max_nbytes:
            self._warned_of_budget = True
            logger.warning(
                "max_staging_gb: %s is not kept: what a process copies of leaf %s at once takes %.3g GB, and slices "
                "are not divided. Set it to that at least, or to null",
                self.config.max_staging_gb, arrays[largest].label, needed / 1e9,
            )  # fmt: skip


def _check_saveable(leaves: Sequence[Leaf], use_ocdbt: bool) -> None:
    for leaf in leaves:
        if isinstance(leaf.original, jax.ShapeDtypeStruct):
            raise UnsupportedLeafError(f"leaf {leaf.label} is a ShapeDtypeStruct: a shape, but no values to save")
        if not use_ocdbt and leaf.is_array and (what := _unlike_files(leaf.name)):
            raise UnsupportedLeafError(
                f"leaf {leaf.label} would be {what}; rename its key, or use the OCDBT format (storage.use_ocdbt: true)"
            )


def _unlike_files(name: str) -> str:
    """What an array of this name would be as a directory of chunk files, where that is no good; empty where it is."""
    parts = name.split("/")
    if parts[0] in DOCUMENT_NAMES:
        return "where a document of the checkpoint is"
    if any(part.endswith(".__lock") for part in parts):
        return "a directory that TensorStore takes for a lock"
    if "\\" in name:
        return "a directory whose backslash TensorStore takes for a slash"
    if any(len(part.encode()) > _NAME_NBYTES for part in parts):
        return f"a directory with a name of more than {_NAME_NBYTES} bytes"
    return ""


def _compile(snapshotter: Snapshotter) -> None:
    try:
        snapshotter.compile()
    except Exception:
        logger.debug("compiling the snapshot ahead of time failed; the first save tries again", exc_info=True)
