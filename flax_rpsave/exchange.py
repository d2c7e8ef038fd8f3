"""Reading a checkpoint with several processes: each stored chunk is read once, by one of those that need it.

What is assigned are stored chunks, not the target's slices: a digest covers a whole chunk, and a chunk that two
processes read in part would be fetched twice. The assignment is a pure function of the stored arrays and the target's
shardings, so every process computes the same. After all have read and verified their share, the chunks that others
need go over the interconnect, in rounds of bounded size: one all-gather of bytes over one device a process.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_rpsave import host_memory
from flax_rpsave.planner import chunk_box

_ROUND_NBYTES = 32 << 20  # what each process contributes to a round, about

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Chunk:
    """A stored chunk that several processes, or this one, need.

    Attributes:
      name: Of its array.
      index: In the array's chunk grid.
      box: The part of the array that it holds.
      reader: The process that reads it.
      shared: Whether another process needs it too.
      nbytes: Bytes of the values in `box`.
    """

    name: str
    index: tuple[int, ...]
    box: Box
    reader: int
    shared: bool
    nbytes: int


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
            takers = [p for p, boxes in enumerate(needs) if boxes is None or any(_overlap(box, b) for b in boxes)]
            if not takers:
                continue
            nbytes = math.prod(s.stop - s.start for s in box) * array.dtype.itemsize
            reader = min(takers, key=lambda p: (load[p], p))
            load[reader] += nbytes
            result[name].append(Chunk(name, index, box, reader, len(takers) > 1, nbytes))
    return result


def chunk_boxes(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Every chunk of a regular grid: its index, and the part of the array that it holds."""
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk_shape, strict=True))):
        yield index, chunk_box(index, shape, chunk_shape)


def exchange(
    arrays: Mapping[str, StoredArray],
    assignment: Mapping[str, Sequence[Chunk]],
    own: dict[tuple[str, tuple[int, ...]], np.ndarray],
    process: int,
    processes: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each array with all chunks that this process needs; every process must call it with the same assignment.

    Args:
      arrays: The stored arrays; they come in this order.
      assignment: Who read which chunk.
      own: Values of the chunks that this process read, by (name, index); emptied on the way.
      process: This process.
      processes: How many there are.

    Yields:
      Name and values of the global shape; parts that this process has no use for are undefined.
    """
    mesh = _process_mesh(processes)
    for names in _rounds(arrays, assignment, processes):
        queues: list[list[Chunk]] = [[] for _ in range(processes)]
        for chunk in itertools.chain.from_iterable(assignment[name] for name in names):
            if chunk.shared:
                queues[chunk.reader].append(chunk)
        size = max(sum(chunk.nbytes for chunk in queue) for queue in queues)
        gathered = None
        if size:
            buffer = np.zeros(size, np.uint8)
            offset = 0
            for chunk in queues[process]:
                buffer[offset : offset + chunk.nbytes] = _as_bytes(own[chunk.name, chunk.index])
                offset += chunk.nbytes
            gathered = _all_gather(buffer, mesh, process)
        places = {}
        for reader, queue in enumerate(queues):
            offset = 0
            for chunk in queue:
                places[chunk.name, chunk.index] = (reader, offset)
                offset += chunk.nbytes
        for name in names:
            values = host_memory.empty(arrays[name].shape, arrays[name].dtype)
            for chunk in assignment[name]:
                key = (chunk.name, chunk.index)
                if key in own:
                    values[chunk.box] = own.pop(key)
                elif chunk.shared and gathered is not None:
                    reader, offset = places[key]
                    part = gathered[reader, offset : offset + chunk.nbytes]
                    values[chunk.box] = part.view(values.dtype).reshape(values[chunk.box].shape)
            yield name, values


def _rounds(
    arrays: Mapping[str, StoredArray], assignment: Mapping[str, Sequence[Chunk]], processes: int
) -> Iterator[list[str]]:
    """Arrays, in order, in groups of which no process contributes much more than a round's bytes."""
    names: list[str] = []
    load = [0] * processes
    for name in arrays:
        names.append(name)
        for chunk in assignment[name]:
            load[chunk.reader] += chunk.nbytes if chunk.shared else 0
        if max(load) >= _ROUND_NBYTES:
            yield names
            names, load = [], [0] * processes
    if names:
        yield names


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


def _as_bytes(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)


def _process_mesh(processes: int) -> Mesh:
    """A mesh of the first device of each process."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[p] for p in range(processes)]), ("process",))


def _all_gather(buffer: np.ndarray, mesh: Mesh, process: int) -> np.ndarray:
    """The buffers of all processes, shape (processes, bytes)."""
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    shard = jax.device_put(buffer[None], mesh.devices.flat[process])
    shape = (mesh.size, buffer.size)
    with jax.set_mesh(mesh):
        spread = jax.make_array_from_single_device_arrays(shape, sharding, [shard])
        gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(spread)
        return np.asarray(gathered.addressable_data(0))
