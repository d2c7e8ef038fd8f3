"""Stored arrays back into a state: read, verify, fit to the target, place.

Every byte of storage is read once, however many replicas the target has: a leaf is read whole to the host, its chunks
are compared with their digests, and each device gets its shard from that copy. Leaves are read a few at a time, so that
the host never holds a second copy of the state. Several processes read a share of the chunks each, agree that all are
good, and exchange them (`exchange`). The arrays returned can be donated. Where several CPU devices of a process hold
the same part they share one piece of memory, to which nothing else refers; a step that is given such an array as a
donation makes the runtime copy it for each device.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from flax_rpsave import _compat, host_memory
from flax_rpsave.documents import TreeEntry
from flax_rpsave.errors import TreeMismatchError
from flax_rpsave.exchange import exchange
from flax_rpsave.leaves import Leaf, Structure
from flax_rpsave.shares import Chunk, Key, StoredArray, assign
from flax_rpsave.stored import Stored, describe

logger = logging.getLogger("flax_rpsave")

_PYTHON_NUMBERS = (np.dtype(np.float64), np.dtype(np.complex128))  # as which Python's are stored
_PROGRESS_SECS = 10.0  # how often a restore says how far it is


def select(leaves: Sequence[Leaf], skip: Sequence[str], stored: Sequence[str] = ()) -> list[int]:
    """Indices of the leaves that no `skip` pattern matches.

    Args:
      leaves: The target's.
      skip: The patterns.
      stored: Paths of the checkpoint's leaves, which the patterns may name as well.

    Raises:
      TreeMismatchError: A pattern matches nothing.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip must be a list of patterns, got the string {skip!r}")
    patterns = {pattern: _compiled_pattern(pattern) for pattern in skip}
    for pattern, compiled in patterns.items():
        if not any(compiled.fullmatch(path) for path in (*(leaf.label for leaf in leaves), *stored)):
            names = [leaf.label for leaf in leaves]
            alike = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise TreeMismatchError(
                f"skip pattern {pattern!r} matches no leaf of the target or the checkpoint; leaves are named like "
                f"{', '.join(map(repr, alike))}"
            )
    return [i for i, leaf in enumerate(leaves) if not any(c.fullmatch(leaf.label) for c in patterns.values())]


@functools.lru_cache(maxsize=64)
def _compiled_pattern(pattern: str) -> re.Pattern[str]:
    """`*` stands for anything within a key, `**` for anything."""
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts), re.DOTALL)


class Fit:
    """A checkpoint held against a target; made only where it fits. Nothing of the arrays is read yet.

    Args:
      stored: The checkpoint.
      leaves: The target's leaves; may be abstract.
      structure: The target's structure.
      skip: Patterns of leaves that keep the target's values.
      entries: Which of the stored leaves to take; None takes all.
      dtype: What stored floats are cast to; None leaves them.
      sharding: Where arrays go; None puts each where the target has it.

    Raises:
      TreeMismatchError: Structure, shapes or dtypes differ; lists every difference.
      CorruptCheckpointError: A stored array is missing.
    """

    def __init__(
        self,
        stored: Stored,
        leaves: Sequence[Leaf],
        structure: Structure,
        *,
        skip: Sequence[str] = (),
        entries: Sequence[TreeEntry] | None = None,
        dtype: Any = None,
        sharding: jax.sharding.Sharding | None = None,
    ):
        self._stored = stored
        self._structure = structure
        self._dtype = dtype
        self._sharding = sharding
        matching = [_compiled_pattern(pattern) for pattern in skip]
        entries = stored.tree.entries if entries is None else entries
        offered = [
            entry for entry in entries if not any(pattern.fullmatch("/".join(entry.path)) for pattern in matching)
        ]
        by_path = {entry.path: entry for entry in offered}
        wanted = [leaves[i] for i in select(leaves, skip, ["/".join(entry.path) for entry in entries])]
        in_use = [by_path[leaf.path] for leaf in wanted if leaf.path in by_path]
        self._arrays = stored.open_arrays([entry for entry in in_use if entry.is_array])
        problems = []
        for leaf in wanted:
            entry = by_path.get(leaf.path)
            if entry is None:
                problems.append(f"{leaf.label}: missing in the checkpoint, the target expects {_describe(leaf)}")
            elif (problem := _difference(stored, leaf, entry, self._arrays.get(entry.name), dtype)) is not None:
                problems.append(f"{leaf.label}: {problem}")
        expected = {leaf.path for leaf in wanted}
        problems += [
            f"{'/'.join(entry.path)}: in the checkpoint ({entry.kind}), but not in the target"
            for entry in offered
            if entry.path not in expected
        ]
        if problems:
            raise TreeMismatchError(
                f"{stored.directory} does not fit the target, {len(problems)} differences:\n  " + "\n  ".join(problems)
            )
        positions = {leaf.path: i for i, leaf in enumerate(leaves)}
        self._targets = {by_path[leaf.path].name: (positions[leaf.path], leaf) for leaf in wanted if leaf.is_array}
        self._strings = {
            positions[leaf.path]: stored.string(by_path[leaf.path]) for leaf in wanted if leaf.kind == "string"
        }
        self._assignment: dict[str, list[Chunk]] = {}
        self._own: dict[Key, np.ndarray] = {}

    def read_share(self, process: int, processes: int) -> None:
        """Reads and verifies what this process reads for all, where there are several.

        Raises:
          CorruptCheckpointError: A chunk is missing or changed.
        """
        if processes == 1:
            return  # `finish` reads and places leaf by leaf
        placements = {name: self._placement(leaf) for name, (_, leaf) in self._targets.items()}
        self._assignment = assign(self._described(), placements, processes)
        mine = [c for chunks in self._assignment.values() for c in chunks if c.reader == process]
        self._own = self._stored.read_chunks(self._arrays, mine)

    def assignment_digest(self) -> str:
        """Equal in all processes that have come to the same assignment, by which they exchange what they read."""
        seen = hashlib.sha256()
        for name, chunks in self._assignment.items():
            seen.update(repr((name, [(c.index, c.reader, sorted(c.takers)) for c in chunks])).encode())
        return seen.hexdigest()

    def finish(self, process: int = 0, processes: int = 1) -> Any:
        """The target's structure with the stored values; NNX objects are updated in place, once all is read.

        With several processes every one must call it, after all of them have read their share.

        Raises:
          CorruptCheckpointError: Stored bytes are missing or changed (with one process).
        """
        if processes == 1:
            arrays = self._stored.read(self._arrays)
        else:
            arrays = exchange(self._described(), self._assignment, self._own, process, processes)
        with jax.transfer_guard("allow"):  # the caller's is about what its loop transfers
            return self._structure.rebuild({**self._strings, **dict(self._placed(arrays))})

    def _placed(self, arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[int, Any]]:
        """The leaves' values where the target has them, by position; logs how far that is now and then."""
        began = told = time.monotonic()
        for count, (name, array) in enumerate(arrays):
            if (now := time.monotonic()) - told >= _PROGRESS_SECS:
                told = now
                logger.info(
                    "restoring %s: %d of %d arrays in %.0f s",
                    self._stored.directory, count, len(self._arrays), now - began,
                )  # fmt: skip
            position, leaf = self._targets[name]
            yield position, place(cast(array, self._dtype), leaf, self._sharding)

    def _described(self) -> dict[str, StoredArray]:
        return {name: describe(array) for name, array in self._arrays.items()}

    def _placement(self, leaf: Leaf) -> jax.sharding.Sharding | None:
        if self._sharding is not None:
            return self._sharding
        return leaf.value.sharding if leaf.kind == "jax.Array" else None


def _describe(leaf: Leaf) -> str:
    if not leaf.is_array:
        return leaf.kind
    kind = f"key<{leaf.key_impl}> as " if leaf.key_impl else ""
    return f"{kind}{np.dtype(leaf.value.dtype).name}{list(leaf.value.shape)}"


def _difference(stored: Stored, leaf: Leaf, entry: TreeEntry, array: ts.TensorStore | None, dtype: Any) -> str | None:
    """What keeps a stored leaf from being the target's, or None."""
    if leaf.is_array != entry.is_array or (leaf.kind == "string") != (entry.kind == "string"):
        found = entry.kind if array is None else f"{array.dtype.name}{list(array.shape)}"
        return f"the checkpoint has {found}, the target expects {_describe(leaf)}"
    if array is None:
        return None
    impl = stored.key_impls.get(entry.name)
    have = np.dtype(_cast_dtype(array.dtype.numpy_dtype, dtype))
    want = np.dtype(leaf.value.dtype)
    # A complex number is stored as a 0-d array: Orbax has no complex scalars.
    scalars = "scalar" in (entry.kind, leaf.kind) or (entry.kind == "np.ndarray" and have.kind == "c")
    same_dtype = _family(have) == _family(want) if scalars and not array.rank else have == want
    if tuple(array.shape) == tuple(leaf.value.shape) and same_dtype and impl == leaf.key_impl:
        return None
    kind = f"key<{impl}> as " if impl else ""
    cast_from = "" if have == array.dtype.numpy_dtype else f" ({array.dtype.name} cast as `dtype` says)"
    return f"the checkpoint has {kind}{have.name}{list(array.shape)}{cast_from}, the target expects {_describe(leaf)}"


def _family(dtype: Any) -> str:
    """Which numbers a dtype is for."""
    for family in (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, family):
            return str(family.__name__)
    return str(np.dtype(dtype).name)


def _cast_dtype(have: Any, dtype: Any) -> np.dtype[Any]:
    casts = dtype is not None and jnp.issubdtype(have, np.floating)
    result: np.dtype[Any] = np.dtype(dtype if casts else have)
    return result


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array with floats cast to `dtype`, if one is given."""
    return array.astype(_cast_dtype(array.dtype, dtype), copy=False)


def place(values: np.ndarray, leaf: Leaf, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Values as the target has them: a Python number, a NumPy array, or a `jax.Array` with the target's sharding.

    Args:
      values: The stored values.
      leaf: The target's leaf.
      sharding: Where arrays go in place of the target's; a NumPy leaf becomes a `jax.Array` there.

    Raises:
      TreeMismatchError: A stored scalar does not fit the target's width: it would change, and is no Python number that
        meets an array, which JAX would round likewise.
    """
    target = leaf.original
    if leaf.kind == "scalar" and not isinstance(target, np.generic):
        return type(target)(values.item())  # Python's numbers have no width
    dtype = np.dtype(leaf.value.dtype)
    if values.dtype != dtype:  # scalars of one kind and another width
        narrowed = _narrowed(values, dtype)
        rounds = leaf.kind == "jax.Array" and values.dtype in _PYTHON_NUMBERS
        if narrowed is None or not (rounds or _same(narrowed, values)):
            raise TreeMismatchError(
                f"{leaf.label}: the stored {values.dtype.name} value {values} does not fit into {dtype.name}"
            )
        values = narrowed
    if leaf.kind == "scalar":
        return values[()]
    if leaf.kind == "np.ndarray" and sharding is None:
        return np.asarray(values, dtype=target.dtype, order="C")  # its byte order, too
    if sharding is None and (not isinstance(target, jax.Array) or target.committed):
        sharding = leaf.value.sharding
    array = put(values, sharding, leaf.label)
    if leaf.key_impl is not None:
        return jax.random.wrap_key_data(array, impl=leaf.key_impl)
    return _compat.as_weak(array) if getattr(target, "weak_type", False) else array


def put(values: np.ndarray, sharding: jax.sharding.Sharding | None, label: str) -> Any:
    """An array that can be donated. Each device gets its shard from the host's copy.

    Args:
      values: The global values, of which those on this process's devices count. Nobody may write to them from here on:
        CPU devices that hold the same part share it.
      sharding: Where they go; None: uncommitted, on the default device.
      label: Of the leaf, for errors.

    Raises:
      TreeMismatchError: The sharding does not fit the shape, or JAX's widest type (without `jax_enable_x64`) does not
        hold the values.
    """
    if sharding is None:
        values = _as_jax_would(values, label)
        return _owned(jax.device_put(values), [values])
    try:
        boxes: Mapping[Any, Any] = sharding.addressable_devices_indices_map(values.shape)
    except (ValueError, IndexError) as error:
        raise TreeMismatchError(
            f"{label}: {values.dtype.name}{list(values.shape)} cannot be placed with {sharding}: {error}"
        ) from error
    # Where this process has none of the devices, JAX still asks for the whole of what all of them hold.
    wanted = list(boxes.values()) or [(slice(None),) * values.ndim]
    parts = {_bounds(box, values.shape): values[(*box, ...)] for box in wanted}
    if boxes:  # nothing else has values that count
        parts = {key: _as_jax_would(part, label) for key, part in parts.items()}
    shared = len(parts) < len(boxes) and _on_cpu(boxes)
    if shared:
        parts = {key: host_memory.aligned(part) for key, part in parts.items()}

    def part(box: Any) -> np.ndarray:
        return parts[_bounds(box, values.shape)]

    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    array = jax.make_array_from_callback(values.shape, sharding, part, dtype=dtype)
    return array if shared else _owned(array, parts.values())


def _bounds(box: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A box in the one form of several that it can have."""
    return tuple(part.indices(n)[:2] for part, n in zip(box, shape, strict=True))


def _owned(array: Any, sources: Iterable[np.ndarray]) -> Any:
    """The array, copied where a CPU device uses a source's memory as it lies.

    No argument keeps JAX (0.10 to 0.12) from doing so with NumPy memory that is aligned, and the first donated step
    would have to copy what it could have taken over.
    """
    if not array.size or not _on_cpu(array.devices()):
        return array
    addresses = {source.ctypes.data for source in sources}
    if any(shard.data.unsafe_buffer_pointer() in addresses for shard in array.addressable_shards):
        return jax.device_put(array, array.sharding if array.committed else None, may_alias=False)
    return array


def _on_cpu(devices: Iterable[Any]) -> bool:
    return any(device.platform == "cpu" for device in devices)


def _narrowed(values: np.ndarray, dtype: Any) -> np.ndarray | None:
    """The values in another width; None where an integer changes, or a finite number becomes infinite."""
    with np.errstate(over="ignore"):
        narrowed = values.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        fits = (narrowed.astype(values.dtype) == values) & ((narrowed < 0) == (values < 0))
    else:
        fits = np.isfinite(narrowed.astype(np.complex128)) | ~np.isfinite(values.astype(np.complex128))
    return narrowed if np.all(fits) else None


def _same(narrowed: np.ndarray, values: np.ndarray) -> bool:
    """Whether values are still what they were in another width."""
    return np.array_equal(narrowed.astype(values.dtype), values, equal_nan=jnp.issubdtype(values.dtype, jnp.inexact))


def _as_jax_would(values: np.ndarray, label: str) -> np.ndarray:
    """64-bit values as 32-bit ones where JAX has no others: exactly, or (single floats) as it converts Python's."""
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    if dtype == values.dtype:
        return values
    narrowed = _narrowed(values, dtype)
    if narrowed is None or (values.ndim and not _same(narrowed, values)):
        or_cast = ", or cast it with dtype=" if _cast_dtype(values.dtype, dtype) == dtype else ""
        raise TreeMismatchError(
            f"{label}: the stored {values.dtype.name} values do not fit into {dtype.name}, the widest of JAX without "
            f"jax_enable_x64; set that, or load to the host (no sharding){or_cast}"
        )
    return narrowed
