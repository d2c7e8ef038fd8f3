"""Stored arrays back into a state: read, verify, fit to the target, place.

Every byte of storage is read once, however many replicas the target has: a leaf is read whole to the host, its chunks
are compared with their digests, and each device gets its shard from that copy. Leaves are read a few at a time, so that
the host never holds a second copy of the state. The arrays returned own their memory: they can be donated.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from flax_rpsave import _compat, documents
from flax_rpsave.documents import Tree, TreeEntry
from flax_rpsave.errors import CorruptCheckpointError, NoCheckpointError, RPSaveError, StorageError, TreeMismatchError
from flax_rpsave.leaves import Leaf, Structure
from flax_rpsave.store import (
    OCDBT_MANIFEST,
    PRIVATE_PREFIX,
    Directory,
    brief,
    chunk_key,
    database,
    document_key,
    open_database,
    within,
)

_IN_FLIGHT_NBYTES = 512 << 20
# TensorStore's status codes that speak of the content; the others (denied, unavailable, …) speak of the storage.
# A database's nodes that were read and make no sense carry none.
_CORRUPT = re.compile(
    r"(?:^|\s)(NOT_FOUND|DATA_LOSS|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE|UNIMPLEMENTED):|Error decoding "
)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that lies in storage, its documents read.

    Attributes:
      directory: The step's directory.
      item: The item's directory, which may be the same.
      tree: Its leaves.
      key_impls: PRNG implementations by leaf name.
      strings: Strings by leaf name.
      digests: Digest of each chunk and array by its key; None where the checkpoint has none.
      own: What this package kept in the checkpoint's document.
    """

    directory: Directory
    item: Directory
    tree: Tree
    key_impls: Mapping[str, str]
    strings: Mapping[str, str]
    digests: Mapping[str, str] | None
    own: Mapping[str, Any]
    _database: ts.KvStore
    _context: ts.Context

    def data_state(self, process: int) -> bytes | None:
        """The state of a process's data iterator, or None where none was saved."""
        key = f"{PRIVATE_PREFIX}process_{process}/data"
        with _Reading(f"{self.item}/{key}"):
            found = self._database.read(key).result()
        return documents.unseal(found.value, f"{self.item}/{key}") if found.state == "value" else None

    def string(self, entry: TreeEntry) -> str:
        """The text of a string leaf.

        Raises:
          CorruptCheckpointError: It is missing.
        """
        if entry.name not in self.strings:
            raise CorruptCheckpointError(f"leaf {'/'.join(entry.path)} of {self.item}: its text is missing")
        return self.strings[entry.name]

    def open_arrays(self, entries: Sequence[TreeEntry]) -> dict[str, ts.TensorStore]:
        """Opens arrays; their shapes and dtypes are then known.

        Raises:
          CorruptCheckpointError: One is missing or unreadable.
        """
        driver = "zarr3" if self.tree.use_zarr3 else "zarr"
        base = database(self.item, self.tree.use_ocdbt)
        pending = {}
        for entry in entries:
            spec: dict[str, Any] = {
                "driver": driver,
                "kvstore": within(base, entry.name),
                "recheck_cached_data": "open",
            }
            if self.tree.all_chunks_stored:
                spec["fill_missing_data_reads"] = False
            pending[entry.name] = ts.open(spec, open=True, read=True, context=self._context)
        arrays = {}
        for entry in entries:
            with _Reading(f"leaf {'/'.join(entry.path)} of {self.item}"):
                arrays[entry.name] = pending[entry.name].result()
            self._verify_document(entry.name, arrays[entry.name])
        return arrays

    def read(self, arrays: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, np.ndarray]]:
        """Reads and verifies arrays, a bounded number of bytes ahead.

        Yields:
          Name and values, in the order of `arrays`.

        Raises:
          CorruptCheckpointError: A chunk is missing or changed.
        """
        waiting = iter(arrays.items())
        ahead: deque[tuple[str, ts.TensorStore, Any]] = deque()
        nbytes = 0

        def nbytes_of(array: ts.TensorStore) -> int:
            return math.prod(array.shape) * int(array.dtype.numpy_dtype.itemsize)

        while True:
            while (nbytes < _IN_FLIGHT_NBYTES or not ahead) and (following := next(waiting, None)) is not None:
                name, array = following
                ahead.append((name, array, array.read()))
                nbytes += nbytes_of(array)
            if not ahead:
                return
            name, array, future = ahead.popleft()
            with _Reading(f"leaf {name} of {self.item}"):
                values = future.result()
            nbytes -= nbytes_of(array)
            del future
            self._verify(name, array, values)
            yield name, values

    def _verify_document(self, name: str, array: ts.TensorStore) -> None:
        if self.digests is None:
            return
        expected = self.digests.get(document_key(name))
        if expected is None:
            raise CorruptCheckpointError(f"leaf {name} of {self.item} was not reported as written")
        found = documents.array_digest(array.shape, array.dtype.numpy_dtype.name, _chunk_shape(array))
        if expected and found != expected:
            raise CorruptCheckpointError(
                f"leaf {name} of {self.item}: its document was changed after it was written; it now says "
                f"{array.dtype.numpy_dtype.name}{list(array.shape)}"
            )

    def _verify(self, name: str, array: ts.TensorStore, values: np.ndarray) -> None:
        if self.digests is None or not values.size:
            return
        chunk = _chunk_shape(array)
        for index in itertools.product(*(range(-(-n // c)) for n, c in zip(values.shape, chunk, strict=True))):
            key = chunk_key(name, index)
            expected = self.digests.get(key)
            if expected is None:
                raise CorruptCheckpointError(f"leaf {name} of {self.item}: chunk {key!r} was not reported as written")
            box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))
            if expected and documents.digest(np.ascontiguousarray(values[box])) != expected:
                raise CorruptCheckpointError(
                    f"leaf {name} of {self.item}: the bytes of chunk {key!r} are not those that were written"
                )


def _chunk_shape(array: ts.TensorStore) -> tuple[int, ...]:
    return tuple(array.chunk_layout.write_chunk.shape or ())  # type: ignore[arg-type]  # None: rank 0


def open_checkpoint(directory: Directory, item: str | None, context: ts.Context) -> Stored:
    """Reads and checks the documents of a checkpoint.

    Args:
      directory: The step's directory.
      item: Name of the item; None takes the directory itself, `default`, or the only item there is.
      context: TensorStore resources.

    Raises:
      NoCheckpointError: There is no such item, or several and none is named.
      CorruptCheckpointError: A document is missing or changed.
    """
    place = _find_item(directory, item)
    prefix = f"{place.name}/" if place != directory else ""
    with _Reading(str(directory)):
        marker = directory.read(documents.COMMIT)
        found: dict[str, bytes | None] = {
            name: directory.read(name)
            for name in (
                documents.CHECKPOINT,
                *(f"{prefix}{n}" for n in (documents.TREE, documents.SHARDINGS, documents.STRINGS)),
                *(f"{prefix}{documents.ARRAY_METADATAS}/{n}" for n in (place / documents.ARRAY_METADATAS).files()),
            )
        }
    if marker is not None:
        documents.check_commit(marker, found, str(directory))
    text = found[f"{prefix}{documents.TREE}"]
    if text is None:
        raise CorruptCheckpointError(f"{place}/{documents.TREE} is missing")
    tree = documents.parse_tree(text, f"{place}/{documents.TREE}")
    own: dict[str, Any] = {}
    if (checkpoint := found[documents.CHECKPOINT]) is not None:
        own = documents.parse_checkpoint(checkpoint, f"{directory}/{documents.CHECKPOINT}")["own"]
    impls: dict[str, str] = {}
    for name, data in found.items():
        if f"{documents.ARRAY_METADATAS}/" in name and data is not None:
            impls.update(documents.parse_key_impls(data, f"{directory}/{name}"))
    strings: dict[str, str] = {}
    if (data := found[f"{prefix}{documents.STRINGS}"]) is not None:
        strings = documents.parse_strings(data, f"{place}/{documents.STRINGS}")
    has_arrays = any(entry.is_array for entry in tree.entries)
    if has_arrays and tree.use_ocdbt and OCDBT_MANIFEST not in place.files():
        raise CorruptCheckpointError(f"{place}/{OCDBT_MANIFEST} is missing")
    with _Reading(str(place)):
        store = open_database(database(place, tree.use_ocdbt), context)
        digests = _read_digests(store, place, own)
    if marker is None and (own or digests is not None):  # stock Orbax writes none on a file system; we always do
        raise CorruptCheckpointError(f"{directory}/{documents.COMMIT} is missing")
    return Stored(directory, place, tree, impls, strings, digests, own, store, context)


def is_checkpoint(directory: Directory) -> bool:
    """Whether a directory is one checkpoint, and not a run's directory of steps."""
    files = directory.files()
    return documents.TREE in files or documents.CHECKPOINT in files


def _find_item(directory: Directory, item: str | None) -> Directory:
    if not directory.exists():
        raise NoCheckpointError(f"{directory} does not exist")
    if item is None and documents.TREE in directory.files():
        return directory
    items = [name for name in directory.children() if documents.TREE in (directory / name).files()]
    if item is not None:
        if item not in directory.children():
            raise NoCheckpointError(f"{directory} has no item {item!r}; it has {items or 'none'}")
        return directory / item
    if "default" in directory.children():
        return directory / "default"
    if len(items) > 1:
        raise NoCheckpointError(f"{directory} has several items, {items}: say which one with `item`")
    if not items:
        raise CorruptCheckpointError(f"{directory} has no {documents.TREE}: it is no checkpoint, or a damaged one")
    return directory / items[0]


def _read_digests(store: ts.KvStore, place: Directory, own: Mapping[str, Any]) -> dict[str, str] | None:
    digests: dict[str, str] = {}
    processes = own.get("processes")
    for process in itertools.count() if processes is None else range(processes):
        key = f"{PRIVATE_PREFIX}process_{process}/index"
        found = store.read(key).result()
        if found.state != "value":
            if processes is not None:
                raise CorruptCheckpointError(f"{place}: {key} is missing")
            break
        digests.update(documents.parse_index(found.value, f"{place}/{key}"))
    return digests or None


class _Reading:
    """Turns what goes wrong while reading into the error that says whether the content or the storage is at fault."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RPSaveError):
            return
        if isinstance(error, OSError):
            raise StorageError(f"{self._what} cannot be read: {error}") from error
        if isinstance(error, (ValueError, NotImplementedError, RuntimeError)):
            wrong = CorruptCheckpointError if _CORRUPT.search(str(error)) else StorageError
            raise wrong(f"{self._what} cannot be read: {brief(error)}") from error


def select(leaves: Sequence[Leaf], skip: Sequence[str]) -> list[int]:
    """Indices of the leaves that no `skip` pattern matches.

    Raises:
      TreeMismatchError: A pattern matches nothing.
    """
    patterns = {pattern: _compiled_pattern(pattern) for pattern in skip}
    for pattern, compiled in patterns.items():
        if not any(compiled.fullmatch(leaf.label) for leaf in leaves):
            raise TreeMismatchError(
                f"skip pattern {pattern!r} matches no leaf of the target; leaves are named like "
                f"{', '.join(repr(leaf.label) for leaf in leaves[:3])}"
            )
    return [i for i, leaf in enumerate(leaves) if not any(c.fullmatch(leaf.label) for c in patterns.values())]


@functools.lru_cache(maxsize=64)
def _compiled_pattern(pattern: str) -> re.Pattern[str]:
    """`*` stands for anything within a key, `**` for anything."""
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts), re.DOTALL)


def restore(
    stored: Stored,
    leaves: Sequence[Leaf],
    structure: Structure,
    *,
    skip: Sequence[str] = (),
    entries: Sequence[TreeEntry] | None = None,
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
) -> Any:
    """The target's structure with the stored values; NNX objects are updated in place, once all is read.

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
      CorruptCheckpointError: Stored bytes are missing or changed.
    """
    wanted = select(leaves, skip)
    matching = [_compiled_pattern(pattern) for pattern in skip]
    offered = [
        e
        for e in (stored.tree.entries if entries is None else entries)
        if not any(p.fullmatch("/".join(e.path)) for p in matching)
    ]
    by_path = {entry.path: entry for entry in offered}
    in_use = [by_path[leaves[i].path] for i in wanted if leaves[i].path in by_path]
    arrays = stored.open_arrays([entry for entry in in_use if entry.is_array])
    problems = []
    for i in wanted:
        leaf, entry = leaves[i], by_path.get(leaves[i].path)
        if entry is None:
            if leaf.is_array or leaf.kind == "string":
                problems.append(f"{leaf.label}: missing in the checkpoint, the target expects {_describe(leaf)}")
        elif (problem := _difference(stored, leaf, entry, arrays.get(entry.name), dtype)) is not None:
            problems.append(f"{leaf.label}: {problem}")
    expected = {leaves[i].path for i in wanted}
    problems += [
        f"{'/'.join(entry.path)}: in the checkpoint ({entry.kind}), but not in the target"
        for entry in offered
        if entry.path not in expected
    ]
    if problems:
        raise TreeMismatchError(
            f"{stored.directory} does not fit the target, {len(problems)} differences:\n  " + "\n  ".join(problems)
        )
    by_name = {by_path[leaves[i].path].name: i for i in wanted if leaves[i].is_array}
    values: dict[int, Any] = {}
    for name, array in stored.read(arrays):
        i = by_name[name]
        values[i] = place(cast(array, dtype), leaves[i], sharding)
    for i in wanted:
        if leaves[i].kind == "string":
            values[i] = stored.string(by_path[leaves[i].path])
    return structure.rebuild(values)


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
    scalars = entry.kind == "scalar" or leaf.kind == "scalar"
    same_dtype = have.kind == want.kind if scalars and not array.rank else have == want
    if tuple(array.shape) == tuple(leaf.value.shape) and same_dtype and impl == leaf.key_impl:
        return None
    kind = f"key<{impl}> as " if impl else ""
    return f"the checkpoint has {kind}{have.name}{list(array.shape)}, the target expects {_describe(leaf)}"


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
      sharding: In place of the target's.

    Raises:
      TreeMismatchError: A stored scalar does not fit the target's width.
    """
    target = leaf.original
    dtype = np.dtype(leaf.value.dtype)
    if values.dtype != dtype:  # scalars of one kind and another width
        narrowed = values.astype(dtype)
        if narrowed.dtype.kind in "iu" and narrowed.astype(values.dtype) != values:
            raise TreeMismatchError(f"{leaf.label}: the stored value {values} does not fit into {dtype.name}")
        values = narrowed
    if leaf.kind == "scalar":
        return values[()] if isinstance(target, np.generic) else type(target)(values.item())
    if leaf.kind == "np.ndarray":
        return np.array(values, dtype=dtype, order="C")
    if sharding is None and (not isinstance(target, jax.Array) or target.committed):
        sharding = leaf.value.sharding
    array = put(values, sharding)
    if leaf.key_impl is not None:
        return jax.random.wrap_key_data(array, impl=leaf.key_impl)
    return _compat.as_weak(array) if getattr(target, "weak_type", False) else array


def put(values: np.ndarray, sharding: jax.sharding.Sharding | None) -> Any:
    """An array that owns its memory. Each device gets its shard from the host's copy; None: uncommitted."""
    if sharding is None:
        return jax.device_put(values, may_alias=False)
    shards = [
        jax.device_put(values[index], jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
                       may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(values.shape).items()
    ]  # fmt: skip
    return jax.make_array_from_single_device_arrays(values.shape, sharding, shards, dtype=values.dtype)
