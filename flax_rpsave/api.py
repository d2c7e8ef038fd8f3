"""Saving and loading without a loop, and the plan of a save."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts

from flax_rpsave import commit
from flax_rpsave.agreement import Group
from flax_rpsave.config import CheckpointConfig
from flax_rpsave.directory import Directory, explained, open_directory
from flax_rpsave.documents import TreeEntry
from flax_rpsave.errors import (
    CorruptCheckpointError,
    NoCheckpointError,
    SaveError,
    StepOrderError,
    TreeMismatchError,
)
from flax_rpsave.items import is_checkpoint
from flax_rpsave.leaves import check_outside_of_tracing, flatten, unflatten_to_dicts
from flax_rpsave.planner import SavePlan, layout_of, plan_leaves
from flax_rpsave.reading import reading
from flax_rpsave.restore import Fit, cast, put
from flax_rpsave.saver import Saver
from flax_rpsave.store import new_context
from flax_rpsave.stored import Stored, open_checkpoint
from flax_rpsave.writer import forget

_EMPTY: Mapping[str, type] = {"None": type(None), "Dict": dict, "List": list, "Tuple": tuple, "NamedTuple": type(None)}


def plan(state: Any, config: CheckpointConfig | Mapping[str, Any] | None = None) -> SavePlan:
    """Who would save which part of a state; print it.

    Args:
      state: A train state. Leaves may be `jax.ShapeDtypeStruct`s with shardings, also on a `jax.sharding.AbstractMesh`,
        so that a plan for many devices needs none.
      config: Its `replica_parallel:` block is used; None takes the defaults.

    Example:
      >>> print(plan(state))
    """
    leaves = [leaf for leaf in flatten(state)[0] if leaf.is_array]
    return plan_leaves([layout_of(leaf.name, leaf.value) for leaf in leaves], _config(config).replica_parallel)


def save(
    path: str | os.PathLike[str], tree: Any, *, config: CheckpointConfig | Mapping[str, Any] | None = None
) -> None:
    """Saves one checkpoint, as `orbax.checkpoint.StandardCheckpointer` would; returns when it is committed.

    Under `jax.distributed` every process must call it, with the same path: they save together.

    Args:
      path: The checkpoint's directory, which must not exist yet.
      tree: Any state.
      config: Its `storage:` and `replica_parallel:` blocks and `commit_timeout_secs` are used; None takes the defaults.

    Raises:
      StepOrderError: The directory exists.
      SaveError: The state cannot be saved.
      RPSaveError: This is inside a function that is being traced.
    """
    check_outside_of_tracing("save")
    settings = _config(config)
    group = Group(settings.commit_timeout_secs)
    with group.left_on_error("its save could not begin"):
        final = open_directory(path, new_context())
        with explained(f"{final} was not saved", SaveError):
            if final.exists() and not commit.is_leftover(final):
                raise StepOrderError(f"{final} exists already and is not overwritten")
        saver = Saver(settings, group, None)
    try:
        with saver.writer.announced(0):
            saver.save(
                tree,
                step=0,
                begun=time.perf_counter(),
                waited_secs=0.0,
                final=final,
                item=None,
            )
        saver.writer.wait()
    finally:
        forget(saver.writer)
    if (error := saver.writer.take_error()) is not None:
        raise error


def load(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: int | None = None,
    subtree: str | None = None,
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
    item: str | None = None,
) -> Any:
    """Reads a checkpoint, or a part of one. Writes, cleans and locks nothing.

    Args:
      path: One checkpoint, or a run's directory (its newest committed step is taken, or `step`).
      target: A state of the structure that is read: leaves are arrays or `jax.ShapeDtypeStruct`s. None returns nested
        dicts and lists of NumPy arrays.
      step: Which step of a run.
      subtree: Reads only what lies under this path, such as "params" or "params/decoder"; its keys are those below it.
      dtype: What floats are cast to; other leaves keep their dtype.
      sharding: Where every array goes, in place of the target's sharding; the leaves are `jax.Array`s then.
      item: Sub-item of the step's directory, where stock Orbax saved several; None takes the only one, or `default`.

    Raises:
      NoCheckpointError: There is nothing of that name, or several items and none is named.
      TreeMismatchError: There is no such subtree, or it does not fit the target.
      CorruptCheckpointError: Stored bytes are missing or changed.

    Example:
      >>> params = load("/ckpt/run1", subtree="params", dtype=jnp.bfloat16, sharding=on_one_device)
    """
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(f"sharding must be a jax.sharding.Sharding, got {type(sharding).__qualname__}")
    if subtree is not None and not isinstance(subtree, str):
        raise TypeError(f'subtree must be a path such as "params/decoder", got {subtree!r}')
    if dtype is not None and not _is_floating(dtype):
        raise TypeError(
            f"dtype must be a floating-point type such as jnp.bfloat16: only floats are cast, got {dtype!r}"
        )
    context = new_context()
    stored = _open(open_directory(path, context), step, item, context)
    entries = list(stored.tree.entries)
    if subtree is not None:
        entries = _below(stored, tuple(part for part in subtree.split("/") if part))
    if target is not None:
        leaves, structure = flatten(target)
        return Fit(stored, leaves, structure, entries=entries, dtype=dtype, sharding=sharding).finish()
    values: dict[str, Any] = {}
    with jax.transfer_guard("allow"):  # the caller's is about what its loop transfers
        for name, array in stored.read(stored.open_arrays([entry for entry in entries if entry.is_array])):
            values[name] = cast(array, dtype) if sharding is None else put(cast(array, dtype), sharding, name)
    return unflatten_to_dicts(
        [entry.path for entry in entries],
        [entry.key_types for entry in entries],
        [
            values[e.name] if e.is_array else stored.string(e) if e.kind == "string" else _empty(stored, e)
            for e in entries
        ],
    )


def _config(config: CheckpointConfig | Mapping[str, Any] | None) -> CheckpointConfig:
    if config is None:
        return CheckpointConfig(enabled=False)
    return (
        config if isinstance(config, CheckpointConfig) else CheckpointConfig.from_mapping({"enabled": False, **config})
    )


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # no type at all
        return False


def _open(directory: Directory, step: int | None, item: str | None, context: ts.Context) -> Stored:
    """The checkpoint at a path, which may be one or a run's directory."""
    if not directory.exists():
        raise NoCheckpointError(f"{directory} does not exist")
    with reading(str(directory)):
        steps = commit.committed_steps(directory)
        is_one = step is None and is_checkpoint(directory)
    if is_one:
        return open_checkpoint(directory, item, context)
    if step is not None and step not in steps:
        raise NoCheckpointError(f"{directory} has no step {step}; it has {list(steps) or 'none'}")
    if not steps:
        commit.check_unprefixed(directory)
        raise NoCheckpointError(f"{directory} is neither a checkpoint nor a run's directory with committed steps")
    chosen = step if step is not None else max(steps)
    stored = open_checkpoint(directory / steps[chosen], item, context)
    stored.check_step(chosen)
    return stored


def _empty(stored: Stored, entry: TreeEntry) -> Any:
    """The empty node that an entry stands for."""
    if entry.kind not in _EMPTY:
        raise CorruptCheckpointError(
            f"leaf {'/'.join(entry.path)} of {stored.item} is stored as {entry.kind!r}, which cannot be read"
        )
    return _EMPTY[entry.kind]()


def _below(stored: Stored, prefix: tuple[str, ...]) -> list[TreeEntry]:
    """The entries under a path, their paths cut to what is below it."""
    n = len(prefix)
    found = [e for e in stored.tree.entries if e.path[:n] == prefix]
    if not found:
        top = sorted({entry.path[0] for entry in stored.tree.entries if entry.path})
        raise TreeMismatchError(f"{stored.directory} has no subtree {'/'.join(prefix)!r}; at the top it has {top}")
    return [dataclasses.replace(entry, path=entry.path[n:], key_types=entry.key_types[n:]) for entry in found]
