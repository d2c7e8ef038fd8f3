"""Who reads what, of several processes: each stored chunk is read once, by one of those that need it.

What is assigned are stored chunks, not the target's slices: a digest covers a whole chunk, and a chunk that two
processes read in part would be fetched twice. The assignment is a pure function of the stored arrays and the target's
shardings, so every process computes the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flax_rpsave.planner import chunk_box

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
