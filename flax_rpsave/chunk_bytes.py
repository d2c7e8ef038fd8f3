"""A chunk's values as the bytes that storage has of them, any part at a time.

Uncompressed zarr3 stores a chunk's values little-endian in C order; a chunk at the edge of an array has zeros where the
array has ended. Values may lie anywhere in memory, so that what a copy needs is no other than the buffer it goes to.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Bytes are moved as plain numbers: NumPy copies those faster than elements of added types such as bfloat16.
PLAIN = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_SCRATCH_NBYTES = 256 << 10


class ChunkBytes:
    """The bytes of a chunk.

    Args:
      values: The values that the array has, of any strides; native byte order.
      chunk_shape: The chunk's shape, nowhere less than that of the values.

    Attributes:
      nbytes: How many there are, zeros included.
      memory: The bytes of the values, where these lie in memory as in storage; zeros that come after them are left out.
    """

    def __init__(self, values: np.ndarray, chunk_shape: tuple[int, ...]):
        self._values: np.ndarray = values.view(PLAIN[values.itemsize])
        self._chunk_shape = chunk_shape
        self.nbytes = math.prod(chunk_shape) * values.itemsize
        # Where only the first dimension is short, all zeros come after the values; where these are contiguous as well,
        # any part of them is one copy.
        self._padded_within = values.shape[1:] != chunk_shape[1:]
        self.memory: np.ndarray | None = None
        if values.flags.c_contiguous and not self._padded_within:
            self.memory = self._values.reshape(-1).view(np.uint8)

    def copy(self, begin: int, out: np.ndarray) -> None:
        """Copies the bytes from `begin` on to a buffer.

        Args:
          begin: A multiple of the element's size.
          out: Bytes, as many as are wanted, a multiple of the element's size.
        """
        if self.memory is None:
            _copy(self._values, self._chunk_shape, begin, out)
            return
        part = self.memory[begin : begin + len(out)]
        out[: len(part)] = part
        out[len(part) :] = 0

    def digest(self, hasher: Any, begin: int, copied: np.ndarray) -> None:
        """Digests what `copy` has copied, from the values' own memory where it can, without the zeros around them."""
        if self.memory is not None:
            hasher.update(self.memory[begin : begin + len(copied)])
            return
        first, last = self.values_before(begin), self.values_before(begin + len(copied))
        if not self._padded_within:
            hasher.update(copied[: last - first])
            return
        values, scratch = ChunkBytes(self._values, self._values.shape), np.empty(_SCRATCH_NBYTES, np.uint8)
        for at in range(first, last, _SCRATCH_NBYTES):
            part = scratch[: last - at]
            values.copy(at, part)
            hasher.update(part)

    def values_before(self, end: int) -> int:
        """How many of the first `end` bytes are of values, not zeros."""
        count, below, size = 0, int(self._values.nbytes), self.nbytes
        shape: tuple[int, ...] = self._values.shape
        for n, c in zip(shape, self._chunk_shape, strict=True):
            if end >= size or not below:
                break
            below, size = below // n, size // c
            rows, end = divmod(end, size)
            if rows >= n:
                return count + n * below
            count += rows * below
        return count + min(end, below)


def _copy(values: np.ndarray, chunk_shape: tuple[int, ...], begin: int, out: np.ndarray) -> None:
    """Copies bytes of a chunk: whole rows at once, what is before and after them within a row each."""
    if not values.ndim:
        out.view(values.dtype)[:] = values
        return
    row = math.prod(chunk_shape[1:]) * values.itemsize
    end = begin + len(out)
    first, last = -(-begin // row), end // row
    if first > last:
        _copy_within(values, chunk_shape, last, begin - last * row, out)
        return
    head, body = first * row - begin, (last - first) * row
    if head:
        _copy_within(values, chunk_shape, first - 1, row - head, out[:head])
    if body:
        there = values[first:last]
        rows = out[head : head + body].view(values.dtype).reshape(last - first, *chunk_shape[1:])
        if there.shape != rows.shape:
            rows[...] = 0
        rows[tuple(slice(n) for n in there.shape)] = there
    if head + body < len(out):
        _copy_within(values, chunk_shape, last, 0, out[head + body :])


def _copy_within(values: np.ndarray, chunk_shape: tuple[int, ...], row: int, begin: int, out: np.ndarray) -> None:
    if row < len(values):
        _copy(values[row], chunk_shape[1:], begin, out)
    else:
        out[...] = 0
