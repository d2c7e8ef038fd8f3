"""A checkpoint that lies in storage: its documents read and checked, its arrays opened, read and verified."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from flax_rpsave import documents, host_memory
from flax_rpsave.directory import Directory, brief
from flax_rpsave.documents import Tree, TreeEntry
from flax_rpsave.errors import CorruptCheckpointError, NoCheckpointError, RPSaveError, StorageError
from flax_rpsave.exchange import Chunk, StoredArray, chunk_boxes
from flax_rpsave.store import (
    OCDBT_MANIFEST,
    chunk_key,
    data_key,
    document_key,
    index_key,
    open_database,
    stored_database,
    within,
)

_Key = TypeVar("_Key")
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
      writers: Which process wrote each chunk and array, by its key; empty where that is not known.
      own: What this package kept in the checkpoint's document.
    """

    directory: Directory
    item: Directory
    tree: Tree
    key_impls: Mapping[str, str]
    strings: Mapping[str, str]
    digests: Mapping[str, str] | None
    writers: Mapping[str, int]
    own: Mapping[str, Any]
    _database: ts.KvStore
    _context: ts.Context

    @property
    def ours(self) -> bool:
        """Whether this package wrote it."""
        return bool(self.own) or self.digests is not None

    def data_state(self, process: int) -> bytes | None:
        """The state of a process's data iterator, or None where none was saved.

        Raises:
          CorruptCheckpointError: It is missing or changed.
        """
        key = data_key(process)
        with Reading(f"{self.item}/{key}"):
            found = self._database.read(key).result()
        expected = (self.digests or {}).get(key)
        if found.state != "value":
            if expected is not None:
                raise CorruptCheckpointError(f"{self.item}/{key} is missing")
            return None
        text = documents.unseal(found.value, f"{self.item}/{key}")
        if expected is not None and documents.digest(found.value) != expected:
            raise CorruptCheckpointError(f"{self.item}/{key} is not what was written with this step")
        return text

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
        base = stored_database(self.item, self.tree.use_ocdbt)
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
            with Reading(f"leaf {'/'.join(entry.path)} of {self.item}"):
                arrays[entry.name] = pending[entry.name].result()
            self._check_document(entry.name, describe(arrays[entry.name]))
        return arrays

    def read(self, arrays: Mapping[str, ts.TensorStore]) -> Iterator[tuple[str, np.ndarray]]:
        """Reads and verifies arrays, a bounded number of bytes ahead.

        Yields:
          Name and values, in the order of `arrays`.

        Raises:
          CorruptCheckpointError: A chunk is missing or changed.
        """
        for name, values, future in _read_ahead((name, array) for name, array in arrays.items()):
            with Reading(f"leaf {name} of {self.item}"):
                future.result()
            self._verify(name, arrays[name], values)
            yield name, values
            del values  # they are the caller's now

    def read_chunks(
        self, arrays: Mapping[str, ts.TensorStore], chunks: Sequence[Chunk]
    ) -> dict[tuple[str, tuple[int, ...]], np.ndarray]:
        """Reads and verifies chunks; returns their values by (name, index).

        Raises:
          CorruptCheckpointError: A chunk is missing or changed.
        """
        values = {}
        for chunk, read, future in _read_ahead((chunk, arrays[chunk.name][chunk.box]) for chunk in chunks):
            self._check_read(chunk.name, chunk.index, read, future)
            values[chunk.name, chunk.index] = read
        return values

    def chunk_faults(
        self, arrays: Mapping[str, ts.TensorStore]
    ) -> Iterator[tuple[str, tuple[int, ...], int, CorruptCheckpointError | None]]:
        """Reads and verifies every chunk of some arrays, and goes on where one is damaged.

        Yields:
          Name, index in the chunk grid, bytes of the values, and what is wrong.
        """
        chunks = (
            ((name, index), array[box]) for name, array in arrays.items() for index, box in chunk_boxes(*_grid(array))
        )
        for (name, index), values, future in _read_ahead(chunks):
            try:
                self._check_read(name, index, values, future)
            except CorruptCheckpointError as error:
                yield name, index, 0, error
            else:
                yield name, index, values.nbytes, None

    def _check_read(self, name: str, index: tuple[int, ...], values: np.ndarray, future: Any) -> None:
        """Waits until a chunk was read, and compares its values with their digest."""
        with Reading(f"leaf {name} of {self.item}"):
            future.result()
        self._check(name, index, values)

    def _verify(self, name: str, array: ts.TensorStore, values: np.ndarray) -> None:
        if self.digests is not None and values.size:
            for index, box in chunk_boxes(*_grid(array)):
                self._check(name, index, values[box])

    def _check_document(self, name: str, found: StoredArray) -> None:
        """Compares what an array's document says with its digest."""
        if self.digests is None:
            return
        expected = self.digests.get(document_key(name))
        if expected is None:
            raise CorruptCheckpointError(f"leaf {name} of {self.item} was not reported as written")
        if expected and documents.array_digest(found.shape, found.dtype.name, found.chunk_shape) != expected:
            raise CorruptCheckpointError(
                f"leaf {name} of {self.item}: its document was changed after it was written; it now says "
                f"{found.dtype.name}{list(found.shape)}"
            )

    def _check(self, name: str, index: tuple[int, ...], values: np.ndarray) -> None:
        """Compares a chunk's values with its digest."""
        if self.digests is None:
            return
        key = chunk_key(name, index)
        expected = self.digests.get(key)
        if expected is None:
            raise CorruptCheckpointError(f"leaf {name} of {self.item}: chunk {key!r} was not reported as written")
        if expected and documents.digest(np.ascontiguousarray(values)) != expected:
            raise CorruptCheckpointError(
                f"leaf {name} of {self.item}: the bytes of chunk {key!r} are not those that were written"
            )


def _read_ahead(views: Iterable[tuple[_Key, ts.TensorStore]]) -> Iterator[tuple[_Key, np.ndarray, Any]]:
    """Begins to read arrays, or parts of them, a bounded number of bytes ahead.

    Yields:
      Key, values, and the future that is done once the values are there.
    """
    waiting = iter(views)
    ahead: deque[tuple[_Key, np.ndarray, Any]] = deque()
    nbytes = 0
    while True:
        while (nbytes < _IN_FLIGHT_NBYTES or not ahead) and (following := next(waiting, None)) is not None:
            key, view = following
            values = host_memory.empty(view.shape, view.dtype.numpy_dtype)
            ahead.append((key, values, ts.array(values, dtype=view.dtype, copy=False).write(view)))
            nbytes += values.nbytes
        if not ahead:
            return
        key, values, future = ahead.popleft()
        nbytes -= values.nbytes
        yield key, values, future
        del values, future


def _grid(array: ts.TensorStore) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and chunk shape."""
    found = describe(array)
    return found.shape, found.chunk_shape


def describe(array: ts.TensorStore) -> StoredArray:
    """Shape, chunk shape and dtype of an opened array."""
    chunk: Any = array.chunk_layout.write_chunk.shape or ()  # None for rank 0
    return StoredArray(tuple(array.shape), tuple(chunk), array.dtype.numpy_dtype)


@dataclass(frozen=True)
class Documents:
    """The documents of a checkpoint, as they lie there.

    Attributes:
      directory: The step's directory.
      item: The item's directory, which may be the same.
      marker: `commit_success.txt`, or None where there is none.
      found: The others by their path in the step's directory; None for one that is not there.
    """

    directory: Directory
    item: Directory
    marker: bytes | None
    found: Mapping[str, bytes | None]

    def faults(self) -> Iterator[tuple[str, str]]:
        """(name, what is wrong) of each document that is not what was written."""
        if self.marker is not None:
            yield from documents.commit_faults(self.marker, self.found, str(self.directory))

    @property
    def digested(self) -> bool:
        """Whether the marker has digests of the others; that of stock Orbax has none."""
        return self.marker is not None and not documents.is_stock_marker(self.marker)

    def of_item(self, name: str) -> bytes | None:
        """A document of the item."""
        return self.found.get(f"{self.item.name}/{name}" if self.item != self.directory else name)


def read_documents(directory: Directory, item: str | None) -> Documents:
    """Reads the documents of a checkpoint, unchecked.

    Args:
      directory: The step's directory.
      item: Name of the item; None takes the directory itself, `default`, or the only item there is.

    Raises:
      NoCheckpointError: There is no such item, or several and none is named.
      CorruptCheckpointError: There is no item at all.
    """
    place = _find_item(directory, item)
    prefix = f"{place.name}/" if place != directory else ""
    with Reading(str(directory)):
        marker = directory.read(documents.COMMIT)
        found: dict[str, bytes | None] = {
            name: directory.read(name)
            for name in (
                documents.CHECKPOINT,
                *(f"{prefix}{n}" for n in (documents.TREE, documents.SHARDINGS, documents.STRINGS)),
                *(f"{prefix}{documents.ARRAY_METADATAS}/{n}" for n in (place / documents.ARRAY_METADATAS).files()),
            )
        }
    return Documents(directory, place, marker, found)


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
    there = read_documents(directory, item)
    for _, what in there.faults():
        raise CorruptCheckpointError(what)
    stored = open_documents(there, context)
    if there.marker is None and stored.ours:
        raise CorruptCheckpointError(f"{directory}/{documents.COMMIT} is missing")
    return stored


def open_documents(there: Documents, context: ts.Context) -> Stored:
    """Opens what documents describe.

    Raises:
      CorruptCheckpointError: One of them makes no sense, or the database is damaged.
    """
    directory, place = there.directory, there.item
    text = there.of_item(documents.TREE)
    if text is None:
        raise CorruptCheckpointError(f"{place}/{documents.TREE} is missing")
    tree = documents.parse_tree(text, f"{place}/{documents.TREE}")
    own: dict[str, Any] = {}
    if (checkpoint := there.found.get(documents.CHECKPOINT)) is not None:
        own = documents.parse_checkpoint(checkpoint, f"{directory}/{documents.CHECKPOINT}")["own"]
    impls: dict[str, str] = {}
    for name, data in there.found.items():
        if f"{documents.ARRAY_METADATAS}/" in name and data is not None:
            impls.update(documents.parse_key_impls(data, f"{directory}/{name}"))
    strings: dict[str, str] = {}
    if (data := there.of_item(documents.STRINGS)) is not None:
        strings = documents.parse_strings(data, f"{place}/{documents.STRINGS}")
    has_arrays = any(entry.is_array for entry in tree.entries)
    if has_arrays and tree.use_ocdbt and OCDBT_MANIFEST not in place.files():
        raise CorruptCheckpointError(f"{place}/{OCDBT_MANIFEST} is missing")
    with Reading(str(place)):
        store = open_database(stored_database(place, tree.use_ocdbt), context)
        digests, writers = _read_digests(store, place, own)
    return Stored(directory, place, tree, impls, strings, digests, writers, own, store, context)


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


def _read_digests(
    store: ts.KvStore, place: Directory, own: Mapping[str, Any]
) -> tuple[dict[str, str] | None, dict[str, int]]:
    """Digests by key, None where there are none; and which process wrote what lies there."""
    digests: dict[str, str] = {}
    writers: dict[str, int] = {}
    processes = own.get("processes")
    for process in itertools.count() if processes is None else range(processes):
        key = index_key(process)
        found = store.read(key).result()
        if found.state != "value":
            if processes is not None:
                raise CorruptCheckpointError(f"{place}: {key} is missing")
            break
        index = documents.parse_index(found.value, f"{place}/{key}")
        digests.update(index)
        writers.update(dict.fromkeys(index, process))
    return digests or None, writers


class Reading:
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
