"""What lies in a run's directory, and what one checkpoint is made of, as its documents say. Needs no device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from flax_rpsave import commit, documents
from flax_rpsave.directory import Directory
from flax_rpsave.errors import CorruptCheckpointError, NoCheckpointError
from flax_rpsave.items import is_checkpoint, read_documents
from flax_rpsave.shares import chunk_boxes
from flax_rpsave.store import chunk_key
from flax_rpsave.stored import Stored, describe, open_checked


@dataclass(frozen=True)
class StepRow:
    """A step in a run's directory.

    Attributes:
      step: Its number; None for a checkpoint that is no step of a run.
      name: The name of its directory.
      state: "committed"; "incomplete": being written, or left by an interrupted save; "abandoned": moved aside by a
        rewind; "damaged", "unfinished": moved aside when its step was saved again; "deleting": what an interrupted
        deletion left; "file": something with a step's name that is no directory, and no step.
      committed_ns: When it was committed, in ns since 1970; None where its document does not say.
      nbytes: Bytes of its files; None where the storage does not tell (object stores).
      metrics: Its metrics.
      ours: Whether this package wrote it.
    """

    step: int | None
    name: str
    state: str
    committed_ns: int | None
    nbytes: int | None
    metrics: Mapping[str, Any]
    ours: bool


@dataclass(frozen=True)
class LeafRow:
    """A leaf as it is stored.

    Attributes:
      path: Its path, `/` between the keys.
      kind: What it is, in Orbax's words: "jax.Array", "np.ndarray", "scalar", "string", or an empty node.
      dtype: The stored dtype, None where there is no array.
      key_impl: The implementation's name of typed PRNG keys.
      shape: The stored shape.
      chunk_shape: The shape of a stored chunk.
      sharding: The sharding at the save, in short.
      nbytes: Bytes of its values.
      chunks: How many chunks they lie in.
      writers: The processes that wrote them; empty where that is not known.
      codecs: What encodes the chunks.
    """

    path: str
    kind: str
    dtype: str | None = None
    key_impl: str | None = None
    shape: tuple[int, ...] | None = None
    chunk_shape: tuple[int, ...] | None = None
    sharding: str | None = None
    nbytes: int = 0
    chunks: int = 0
    writers: tuple[int, ...] = ()
    codecs: tuple[str, ...] = ()


def checkpoints(directory: Directory) -> dict[int | None, Directory]:
    """The committed steps of a run's directory, ascending; or the one checkpoint that a directory is, under its step.

    Raises:
      NoCheckpointError: There is none.
    """
    if not directory.exists():
        raise NoCheckpointError(f"{directory} does not exist")
    number = commit.step_number(directory.name)
    if not is_checkpoint(directory) and documents.COMMIT not in directory.files():
        if steps := commit.committed_steps(directory):
            return {step: directory / name for step, name in steps.items()}
        if number is None or not directory.children() + directory.files() or not commit.is_committed(directory):
            raise NoCheckpointError(f"{directory} is neither a checkpoint nor a run's directory with committed steps")
    elif number is not None and not commit.is_committed(directory):
        raise NoCheckpointError(f"{directory} is not committed: it is being written, or an interrupted save left it")
    return {number: directory}


def list_steps(directory: Directory) -> list[StepRow]:
    """All that a run's directory has of steps, committed and other, ascending.

    Raises:
      NoCheckpointError: There is nothing.
    """
    if not directory.exists():
        raise NoCheckpointError(f"{directory} does not exist")
    if is_checkpoint(directory):
        step, state = commit.state_of(directory) or (None, "committed")
        return [_step_row(directory, step, state)]
    rows = [
        _step_row(directory / name, *found)
        for name in directory.children()
        if (found := commit.state_of(directory / name)) is not None
    ]
    rows += [
        StepRow(step, name, "file", None, None, {}, False)
        for name in directory.files()
        if (step := commit.step_number(name)) is not None
    ]
    if not rows:
        raise NoCheckpointError(f"{directory} has no steps")
    return sorted(rows, key=lambda row: (row.step, row.state != "committed", row.name))


def _step_row(directory: Directory, step: int | None, state: str) -> StepRow:
    found: dict[str, Any] = {"own": {}, "committed_ns": None}
    metrics: dict[str, Any] = {}
    if (data := directory.read(documents.CHECKPOINT)) is not None:
        with contextlib.suppress(CorruptCheckpointError):  # `verify` says so; here its row has no more than its name
            found = documents.parse_checkpoint(data, str(directory))
            metrics = commit.metrics_of(directory, found)
    return StepRow(step, directory.name, state, found["committed_ns"], directory.nbytes(), metrics, bool(found["own"]))


@dataclass(frozen=True)
class Survey:
    """What a checkpoint is made of.

    Attributes:
      directory: The step's directory.
      item: The item's directory.
      step: Its number, if it is a step.
      format: How the arrays lie: "zarr3 in OCDBT", say.
      own: What this package kept in the checkpoint's document; empty for a checkpoint that stock Orbax wrote.
      digests: Whether there are digests to verify it by.
      leaves: Its leaves.
    """

    directory: str
    item: str
    step: int | None
    format: str
    own: Mapping[str, Any]
    digests: bool
    leaves: Sequence[LeafRow]


def survey(directory: Directory, step: int | None, item: str | None, context: ts.Context) -> Survey:
    """Reads the documents of a checkpoint, and those of its arrays, but no values.

    Args:
      directory: The step's directory.
      step: Its number.
      item: Name of the item; None takes the only one.
      context: TensorStore resources.

    Raises:
      NoCheckpointError: There is no such item.
      CorruptCheckpointError: A document is missing or changed.
    """
    there = read_documents(directory, item)
    stored = open_checked(there, context)
    shardings = {}
    if (data := there.of_item(documents.SHARDINGS)) is not None:
        shardings = documents.parse_shardings(data, f"{stored.item}/{documents.SHARDINGS}")
    arrays = stored.open_arrays([entry for entry in stored.tree.entries if entry.is_array])
    rows = []
    for entry in stored.tree.entries:
        row = LeafRow("/".join(entry.path) or "(the root)", entry.kind)
        if entry.is_array:
            row = _array_row(row, entry.name, arrays[entry.name], stored, shardings.get(entry.name))
        rows.append(row)
    layout = f"{'zarr3' if stored.tree.use_zarr3 else 'zarr2'} {'in OCDBT' if stored.tree.use_ocdbt else 'as files'}"
    return Survey(
        str(directory), str(stored.item), step, layout, stored.own, any((stored.digests or {}).values()), rows
    )


def _array_row(row: LeafRow, name: str, array: ts.TensorStore, stored: Stored, sharding: str | None) -> LeafRow:
    found = describe(array)
    keys = [chunk_key(name, index) for index, _ in chunk_boxes(found.shape, found.chunk_shape)]
    return dataclasses.replace(
        row,
        dtype=found.dtype.name,
        key_impl=stored.key_impls.get(name),
        shape=found.shape,
        chunk_shape=found.chunk_shape,
        sharding=sharding,
        nbytes=math.prod(found.shape) * found.dtype.itemsize,
        chunks=len(keys),
        writers=tuple(sorted({stored.writers[key] for key in keys if key in stored.writers})),
        codecs=_codecs(array),
    )


def _codecs(array: ts.TensorStore) -> tuple[str, ...]:
    codec: Any = array.codec
    found = codec.to_json()
    if "codecs" in found:  # zarr3
        return tuple(str(part["name"]) for part in found["codecs"])
    return (str((found.get("compressor") or {"id": "raw"})["id"]),)
