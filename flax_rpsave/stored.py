"""A checkpoint that lies in storage: its documents read and checked, its arrays opened, read and verified."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import tensorstore as ts

from flax_rpsave import documents, host_memory
from flax_rpsave.direct_reads import DirectReads, PlacedChunk, can_read_directly
from flax_rpsave.directory import Directory
from flax_rpsave.documents import Tree, TreeEntry
from flax_rpsave.errors import CorruptCheckpointError, RPSaveError, StorageError
from flax_rpsave.items import Documents, read_documents
from flax_rpsave.nodes import Place, file_of, walk
from flax_rpsave.reading import reading
from flax_rpsave.shares import Box, Chunk, Key, StoredArray, chunk_boxes
from flax_rpsave.store import (
    OCDBT_MANIFEST,
    chunk_key,
    count_chunks,
    data_key,
    document_key,
    index_key,
    open_database,
    stored_database,
    within,
)

_Tag = TypeVar("_Tag")
_IN_FLIGHT_NBYTES = 512 << 20
_MANY_CHUNKS, _MANY_NBYTES = 1 << 16, 512 << 20  # from these on, a shape is not just believed
_PLAIN_CODECS = ([{"name": "bytes", "configuration": {"endian": "little"}}], [{"name": "bytes"}])
"""Of arrays whose chunks lie in storage as in the memory of a little-endian machine."""


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

    def check_step(self, step: int) -> None:
        """Checks that it is the step that its name says.

        Raises:
          CorruptCheckpointError: It was saved as another one.
        """
        saved_as = self.own.get("step")
        if self.item != self.directory and saved_as not in (None, step):
            raise CorruptCheckpointError(f"{self.directory} was saved as step {saved_as}: it was copied or renamed")

    def data_state(self, process: int) -> bytes | None:
        """The state of a process's data iterator, or None where none was saved.

        Raises:
          CorruptCheckpointError: It is missing or changed.
        """
        key = data_key(process)
        with reading(f"{self.item}/{key}"):
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
            with reading(f"leaf {'/'.join(entry.path)} of {self.item}"):
                pending[entry.name] = ts.open(spec, open=True, read=True, context=self._context)
        arrays = {}
        for entry in entries:
            with reading(f"leaf {'/'.join(entry.path)} of {self.item}"):
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
        wanted = (_Wanted(name, name, array, tuple(chunk_boxes(*_grid(array)))) for name, array in arrays.items())
        for name, values in self._read_ahead(wanted):
            yield name, values.result()
            del values  # they are the caller's now

    def read_chunks(self, arrays: Mapping[str, ts.TensorStore], chunks: Sequence[Chunk]) -> dict[Key, np.ndarray]:
        """Reads and verifies chunks; returns their values by (name, index).

        Raises:
          CorruptCheckpointError: A chunk is missing or changed.
        """
        wanted = (_chunk(chunk.key, chunk.name, arrays[chunk.name], chunk.index, chunk.box) for chunk in chunks)
        # By TensorStore, whose counters of the processes together show that nothing is read twice.
        return {key: values.result() for key, values in self._read_ahead(wanted, directly=False)}

    def chunk_faults(
        self, arrays: Mapping[str, ts.TensorStore]
    ) -> Iterator[tuple[str, tuple[int, ...], int, CorruptCheckpointError | None]]:
        """Reads and verifies every chunk of some arrays, and goes on where one is damaged.

        Yields:
          Name, index in the chunk grid, bytes of the values, and what is wrong.
        """
        wanted = (
            _chunk((name, index), name, array, index, box)
            for name, array in arrays.items()
            for index, box in chunk_boxes(*_grid(array))
        )
        for (name, index), values in self._read_ahead(wanted):
            try:
                nbytes = values.result().nbytes
            except CorruptCheckpointError as error:
                yield name, index, 0, error
            else:
                yield name, index, nbytes, None

    def _read_ahead(self, wanted: Iterable[_Wanted[_Tag]], *, directly: bool = True) -> Iterator[tuple[_Tag, _Values]]:
        """Begins to read arrays, or parts of them, a bounded number of bytes ahead; yields their keys and values."""
        waiting = iter(wanted)
        ahead: deque[tuple[_Tag, _Values]] = deque()
        nbytes = 0
        with DirectReads() as reads:
            while True:
                while (nbytes < _IN_FLIGHT_NBYTES or not ahead) and (following := next(waiting, None)) is not None:
                    values = _Values(self, following, reads if directly else None)
                    ahead.append((following.key, values))
                    nbytes += values.nbytes
                if not ahead:
                    return
                key, values = ahead.popleft()
                nbytes -= values.nbytes
                yield key, values
                del values

    def place_directly(self, wanted: _Wanted[Any]) -> list[PlacedChunk] | None:
        """Where the chunks lie in files as they are in memory; None where they do not."""
        if not wanted.chunks or not wanted.view.rank or not self._reads_directly:
            return None
        codec: Any = wanted.view.codec
        if codec.to_json().get("codecs") not in _PLAIN_CODECS:
            return None
        nbytes = math.prod(describe(wanted.view).chunk_shape) * wanted.view.dtype.numpy_dtype.itemsize
        placed = []
        for index, box in wanted.chunks:
            key = chunk_key(wanted.name, index)
            place = self._places.get(key) if self.tree.use_ocdbt else file_of(self.item, key)
            if place is None or place.nbytes != nbytes or (self.digests is not None and key not in self.digests):
                return None
            placed.append(
                PlacedChunk(
                    f"{self.item}/{place.file}",
                    place.offset,
                    box,
                    (self.digests or {}).get(key, ""),
                    alone=not self.tree.use_ocdbt,
                )
            )
        return placed

    @functools.cached_property
    def _reads_directly(self) -> bool:
        """Whether chunks that lie in files as they are in memory are to be read from there."""
        return self.tree.use_zarr3 and sys.byteorder == "little" and can_read_directly(self.item)

    @functools.cached_property
    def _places(self) -> Mapping[str, Place | None]:
        """Where the database has values, by key."""
        places: dict[str, Place | None] = {}
        for node in walk(self.item, self._context, lambda *_: None):  # TensorStore says what it cannot reach
            places.update(node.places)
        return places

    def _check_document(self, name: str, found: StoredArray) -> None:
        """Compares what an array's document says with its digest; where there is none, with the chunks there are."""
        expected = "" if self.digests is None else self.digests.get(document_key(name))
        if expected is None:
            raise CorruptCheckpointError(f"leaf {name} of {self.item} was not reported as written")
        if not expected:
            if self.tree.all_chunks_stored:
                self._check_extent(name, found)
        elif documents.array_digest(found.shape, found.dtype.name, found.chunk_shape) != expected:
            raise CorruptCheckpointError(
                f"leaf {name} of {self.item}: its document was changed after it was written; it now says "
                f"{found.dtype.name}{list(found.shape)}"
            )

    def _check_extent(self, name: str, found: StoredArray) -> None:
        """Compares a shape with the number of chunks, where memory or time would end before a missing one is found."""
        chunks = math.prod(-(-n // max(1, c)) for n, c in zip(found.shape, found.chunk_shape, strict=True))
        if chunks <= _MANY_CHUNKS and math.prod(found.shape) * found.dtype.itemsize <= _MANY_NBYTES:
            return
        if (there := count_chunks(self._database, name)) < chunks:
            raise CorruptCheckpointError(
                f"leaf {name} of {self.item}: its document says {list(found.shape)} in {chunks} chunks, but "
                f"{there} are there"
            )

    def check_chunk(self, name: str, index: tuple[int, ...], values: np.ndarray) -> None:
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


@dataclass(frozen=True)
class _Wanted(Generic[_Tag]):
    """An array, or a part of one, that is to be read.

    Attributes:
      key: What the values are yielded with.
      name: The array's.
      view: What to read.
      chunks: The chunks in it: index, and the part of the view that each holds.
    """

    key: _Tag
    name: str
    view: ts.TensorStore
    chunks: tuple[tuple[tuple[int, ...], Box], ...]


def _chunk(key: _Tag, name: str, array: ts.TensorStore, index: tuple[int, ...], box: Box) -> _Wanted[_Tag]:
    """One chunk of an array, as an array of its own."""
    return _Wanted(key, name, array[box], ((index, (slice(None),) * len(box)),))


class _Values:
    """Values on their way to the host: read directly where that is possible, else by TensorStore."""

    def __init__(self, stored: Stored, wanted: _Wanted[Any], reads: DirectReads | None):
        self._stored = stored
        self._wanted = wanted
        shape, dtype = wanted.view.shape, wanted.view.dtype.numpy_dtype
        try:
            self._values = host_memory.empty(shape, dtype)
        except (MemoryError, ValueError) as error:  # ValueError: more than can be addressed
            what = f"{dtype.name}{list(shape)}"
            raise StorageError(f"leaf {wanted.name} of {stored.item}: there is no memory for {what}") from error
        self.nbytes = self._values.nbytes
        self._direct: list[Future[bool]] = []
        self._future: Any = None
        if reads is not None and (placed := stored.place_directly(wanted)) is not None:
            self._direct = reads.start(self._values, describe(wanted.view).chunk_shape, placed)
        else:
            self._begin()

    def _begin(self) -> None:
        view = self._wanted.view
        self._future = ts.array(self._values, dtype=view.dtype, copy=False).write(view)

    def result(self) -> np.ndarray:
        """The values, once they are there and verified.

        Raises:
          CorruptCheckpointError: They are missing or changed.
          StorageError: The storage is at fault.
        """
        name = self._wanted.name
        with reading(f"leaf {name} of {self._stored.item}"):
            # A list: all must have ended before TensorStore writes to the same memory.
            if self._direct and all([future.result() for future in self._direct]):  # noqa: C419
                return self._values
            if self._future is None:
                self._begin()  # it says what is wrong
            self._future.result()
        if self._values.size:
            for index, box in self._wanted.chunks:
                self._stored.check_chunk(name, index, self._values[box])
        return self._values


def _grid(array: ts.TensorStore) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and chunk shape."""
    found = describe(array)
    return found.shape, found.chunk_shape


def describe(array: ts.TensorStore) -> StoredArray:
    """Shape, chunk shape and dtype of an opened array."""
    chunk: Any = array.chunk_layout.write_chunk.shape or ()  # None for rank 0
    return StoredArray(tuple(array.shape), tuple(chunk), array.dtype.numpy_dtype)


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
    return open_checked(read_documents(directory, item), context)


def open_checked(there: Documents, context: ts.Context) -> Stored:
    """Checks documents, and opens what they describe.

    Raises:
      CorruptCheckpointError: One is missing or changed.
    """
    for _, what in there.faults():
        raise CorruptCheckpointError(what)
    stored = open_documents(there, context)
    if there.marker is None and stored.ours:
        raise CorruptCheckpointError(f"{there.directory}/{documents.COMMIT} is missing")
    return stored


def open_documents(there: Documents, context: ts.Context) -> Stored:
    """Opens what documents describe.

    Raises:
      CorruptCheckpointError: One of them makes no sense, or the database is damaged.
      RPSaveError: A later version of this package wrote it, in another format.
    """
    directory, place = there.directory, there.item
    own: dict[str, Any] = {}
    if (checkpoint := there.found.get(documents.CHECKPOINT)) is not None:
        own = documents.parse_checkpoint(checkpoint, f"{directory}/{documents.CHECKPOINT}")["own"]
        if (version := own.get("format", documents.FORMAT_VERSION)) > documents.FORMAT_VERSION:
            raise RPSaveError(
                f"{directory} was written in format {version}, by a later version of flax_rpsave "
                f"({own.get('versions', {}).get('flax_rpsave')}): use that; this one reads format "
                f"{documents.FORMAT_VERSION}"
            )
    text = there.of_item(documents.TREE)
    if text is None:
        raise CorruptCheckpointError(f"{place}/{documents.TREE} is missing")
    tree = documents.parse_tree(text, f"{place}/{documents.TREE}")
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
    with reading(str(place)):
        store = open_database(stored_database(place, tree.use_ocdbt), context)
        digests, writers = _read_digests(store, place, own)
    return Stored(directory, place, tree, impls, strings, digests, writers, own, store, context)


def _read_digests(
    store: ts.KvStore, place: Directory, own: Mapping[str, Any]
) -> tuple[dict[str, str] | None, dict[str, int]]:
    """Digests by key, None where there are none; and which process wrote what lies there."""
    digests: dict[str, str] = {}
    writers: dict[str, int] = {}
    processes = own.get("processes")
    committed = own.get("indices", [])  # none where an older version saved
    for process in itertools.count() if processes is None else range(processes):
        key = index_key(process)
        found = store.read(key).result()
        if found.state != "value":
            if processes is not None:
                raise CorruptCheckpointError(f"{place}: {key} is missing")
            break
        index = documents.parse_index(found.value, f"{place}: {key}")
        if process < len(committed) and documents.digest(found.value) != committed[process]:
            raise CorruptCheckpointError(f"{place}: {key} was not committed with this step: the arrays are another's")
        digests.update(index)
        writers.update(dict.fromkeys(index, process))
    return digests or None, writers
