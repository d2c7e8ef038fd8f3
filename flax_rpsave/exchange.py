"""Reading a checkpoint with several processes: each stored chunk is read once, by one of those that need it.

What is assigned are stored chunks, not the target's slices: a digest covers a whole chunk, and a chunk that two
processes read in part would be fetched twice. The assignment is a pure function of the stored arrays and the target's
shardings, so every process computes the same. After all have read and verified their share, the chunks that others
need go over the interconnect, in rounds of bounded size: one all-gather of bytes over one device a process.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_rpsave import host_memory
from flax_rpsave.planner import chunk_box

_ROUND_NBYTES = 8 << 20  # what each process contributes to a round, at most

Box = tuple[slice, ...]
Key = tuple[str, tuple[int, ...]]
"""An array's name, and a chunk's index in its grid."""


@dataclass(frozen=True)
class Chunk:
    """A stored chunk that several processes, or this one, need.

    Attributes:
      name: Of its array.
      index: In the array's chunk grid.
      box: The part of the array that it holds.
      reader: The process that reads it.
      takers: The processes that need it, the reader among them.
      nbytes: Bytes of the values in `box`.
    """

    name: str
    index: tuple[int, ...]
    box: Box
    reader: int
    takers: Set[int]
    nbytes: int

    @property
    def key(self) -> Key:
        """What it is told by."""
        return self.name, self.index

    @property
    def shared(self) -> bool:
        """Whether another process than the reader needs it."""
        return len(self.takers) > 1


@dataclass(frozen=True)
class StoredArray:
    """What the assignment must know of an array: shape, chunk shape, dtype."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]


def assign(
    arrays: Mapping[str, StoredArray], shardings: Mapping[str, jax.sharding.Sharding | None], processes: int
) -> dict[str, list[Chunk]]:
    """Who reads which chunk.

    Args:
      arrays: The stored arrays, by name.
      shardings: The target's sharding of each; None for values that every process has for itself.
      processes: How many there are.

    Returns:
      For each array the chunks that somebody needs, each with its reader; readers are balanced by bytes.
    """
    load = [0] * processes
    result: dict[str, list[Chunk]] = {}
    for name, array in arrays.items():
        needs = _boxes_by_process(shardings[name], array.shape, processes)
        result[name] = []
        for index, box in chunk_boxes(array.shape, array.chunk_shape):
            takers = frozenset(p for p, part in enumerate(needs) if part is None or any(_overlap(box, b) for b in part))
            if not takers:
                continue
            nbytes = math.prod(s.stop - s.start for s in box) * array.dtype.itemsize
            reader = min(takers, key=lambda p: (load[p], p))
            load[reader] += nbytes
            result[name].append(Chunk(name, index, box, reader, takers, nbytes))
    return result


def chunk_boxes(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Every chunk of a regular grid: its index, and the part of the array that it holds."""
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk_shape, strict=True))):
        yield index, chunk_box(index, shape, chunk_shape)


def exchange(
    arrays: Mapping[str, StoredArray],
    assignment: Mapping[str, Sequence[Chunk]],
    own: dict[Key, np.ndarray],
    process: int,
    processes: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each array with all chunks that this process needs; every process must call it with the same assignment.

    Args:
      arrays: The stored arrays; they come in this order.
      assignment: Who read which chunk.
      own: Values of the chunks that this process read, C-contiguous; emptied on the way.
      process: This process.
      processes: How many there are.

    Yields:
      Name and values of the global shape; parts that this process has no use for are undefined.
    """
    queues: list[list[Chunk]] = [[] for _ in range(processes)]
    for chunk in itertools.chain.from_iterable(assignment[name] for name in arrays):
        if chunk.shared:
            queues[chunk.reader].append(chunk)
    rounds = _Rounds([_Stream(queue) for queue in queues], arrays, own, process)
    for name, array in arrays.items():
        values = rounds.received(name, assignment[name])
        for chunk in assignment[name]:
            if (mine := own.pop(chunk.key, None)) is None:
                continue
            if mine.shape == array.shape:  # all of it: needs no copy
                values = mine
            else:
                values = host_memory.empty(array.shape, array.dtype) if values is None else values
                values[chunk.box] = mine
        yield name, host_memory.empty(array.shape, array.dtype) if values is None else values
        del values  # it is the caller's now


@dataclass(frozen=True)
class _Part:
    """Some bytes of a chunk, and where in the buffer of a round they lie."""

    chunk: Chunk
    bytes: slice
    place: slice


class _Stream:
    """The bytes that one process has for others: those of its chunks, one after the other."""

    def __init__(self, chunks: Sequence[Chunk]):
        self.chunks = chunks
        self.stops = list(itertools.accumulate(chunk.nbytes for chunk in chunks))
        self.nbytes = self.stops[-1] if chunks else 0

    def parts(self, begin: int, end: int) -> Iterator[_Part]:
        """What of which chunk lies between two positions of the stream."""
        for i in range(bisect.bisect_right(self.stops, begin), len(self.chunks)):
            chunk = self.chunks[i]
            first = self.stops[i] - chunk.nbytes
            if first >= end:
                return
            start, stop = max(begin, first), min(end, self.stops[i])
            yield _Part(chunk, slice(start - first, stop - first), slice(start - begin, stop - begin))


class _Rounds:
    """Sends and receives, as far as is asked for; all processes ask in the same order."""

    def __init__(
        self,
        streams: Sequence[_Stream],
        arrays: Mapping[str, StoredArray],
        own: Mapping[Key, np.ndarray],
        process: int,
    ):
        self._streams = streams
        self._arrays = arrays
        self._own = own
        self._process = process
        self._done = 0
        longest = max(stream.nbytes for stream in streams)
        self._size = -(-longest // max(1, -(-longest // _ROUND_NBYTES)))  # the same in all rounds: one program
        self._buffer = host_memory.empty((1, self._size), np.uint8)
        self._gather = _AllGather(len(streams), process)
        self._values: dict[str, np.ndarray] = {}
        self._apart: dict[Key, np.ndarray] = {}
        self._needed: dict[str, int] = {}
        for stream in streams:
            for chunk, stop in zip(stream.chunks, stream.stops, strict=True):
                self._needed[chunk.name] = max(self._needed.get(chunk.name, 0), -(-stop // self._size))

    def received(self, name: str, chunks: Iterable[Chunk]) -> np.ndarray | None:
        """An array with the chunks that others read; None where this process needs none of theirs."""
        while self._done < self._needed.get(name, 0):
            self._round()
        values = self._values.pop(name, None)
        for chunk in chunks:
            if values is not None and (apart := self._apart.pop(chunk.key, None)) is not None:
                values[chunk.box] = apart
        return values

    def _round(self) -> None:
        begin, end = self._done * self._size, (self._done + 1) * self._size
        for part in self._streams[self._process].parts(begin, end):
            self._buffer[0, part.place] = _flat(self._own[part.chunk.key])[part.bytes]
        gathered = self._gather(self._buffer)
        for reader, stream in enumerate(self._streams):
            for part in stream.parts(begin, end):
                if reader != self._process and self._process in part.chunk.takers:
                    self._destination(part.chunk)[part.bytes] = gathered[reader, part.place]
        self._done += 1

    def _destination(self, chunk: Chunk) -> np.ndarray:
        """Where the bytes of a chunk go: into the array, where they lie there one after the other."""
        if chunk.name not in self._values:
            array = self._arrays[chunk.name]
            self._values[chunk.name] = host_memory.empty(array.shape, array.dtype)
        box: Any = (*chunk.box, ...)  # which makes a view, of rank 0 too
        place = self._values[chunk.name][box]
        if place.flags.c_contiguous:
            return _flat(place)
        if chunk.key not in self._apart:
            self._apart[chunk.key] = np.empty(place.shape, place.dtype)
        return _flat(self._apart[chunk.key])


@functools.lru_cache(maxsize=4096)
def _boxes_by_process(
    sharding: jax.sharding.Sharding | None, shape: tuple[int, ...], processes: int
) -> list[set[tuple[tuple[int, int], ...]] | None]:
    """For each process the parts of an array that its devices hold; None for all of it."""
    devices: Any = {} if sharding is None else sharding.devices_indices_map(shape)
    if len({device.process_index for device in devices}) <= 1:
        return [None] * processes
    boxes: list[set[tuple[tuple[int, int], ...]] | None] = [set() for _ in range(processes)]
    for device, index in devices.items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        of_process = boxes[device.process_index]
        assert of_process is not None
        of_process.add(bounds)
    return boxes


def _overlap(box: Box, bounds: tuple[tuple[int, int], ...]) -> bool:
    return all(s.start < stop and start < s.stop for s, (start, stop) in zip(box, bounds, strict=True))


def _flat(values: np.ndarray) -> np.ndarray:
    """The bytes of contiguous values, in place."""
    flat: np.ndarray = values.reshape(-1).view(np.uint8)
    return flat


class _AllGather:
    """Bytes of every process to every process, over one device of each."""

    def __init__(self, processes: int, process: int):
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._own = first[process]
        self._mesh = Mesh(np.array([first[p] for p in range(processes)]), ("process",))
        self._gathered = jax.jit(_identity, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    def __call__(self, buffer: np.ndarray) -> np.ndarray:
        """The buffers of all processes, each of shape (1, bytes), as (processes, bytes).

        On return nothing reads the buffer any more.
        """
        sharding = NamedSharding(self._mesh, PartitionSpec("process"))
        shard = jax.device_put(buffer, self._own)
        with jax.set_mesh(self._mesh):
            spread = jax.make_array_from_single_device_arrays((self._mesh.size, buffer.size), sharding, [shard])
            return np.asarray(self._gathered(spread).addressable_data(0))


def _identity(values: jax.Array) -> jax.Array:
    return values
