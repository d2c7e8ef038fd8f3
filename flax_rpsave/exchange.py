"""What several processes have read for each other.

After all have read and verified their share (`shares` says who reads which chunk), the chunks that others need go over
the interconnect, in rounds of bounded size: one all-gather of bytes over one device a process.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_rpsave import host_memory
from flax_rpsave.shares import Chunk, Key, StoredArray

_ROUND_NBYTES = 8 << 20  # what each process contributes to a round, at most
_GATHERED_NBYTES = 256 << 20  # what all of them do, at most: every process gets all of it


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
        most = min(_ROUND_NBYTES, _GATHERED_NBYTES // len(streams))
        self._size = -(-longest // max(1, -(-longest // most)))  # the same in all rounds: one program
        self._buffer = host_memory.empty((1, self._size), np.uint8)
        self._gather = _AllGather(len(streams), process)
        self._values: dict[str, np.ndarray] = {}
        self._apart: dict[Key, np.ndarray] = {}
        self._rounds_until: dict[str, int] = {}  # how many there are until an array is complete
        for stream in streams:
            for chunk, stop in zip(stream.chunks, stream.stops, strict=True):
                rounds = -(-stop // self._size)
                self._rounds_until[chunk.name] = max(self._rounds_until.get(chunk.name, 0), rounds)

    def received(self, name: str, chunks: Iterable[Chunk]) -> np.ndarray | None:
        """An array with the chunks that others read; None where this process needs none of theirs."""
        while self._done < self._rounds_until.get(name, 0):
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
