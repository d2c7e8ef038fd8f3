"""Chunks read from files of a local disk into arrays, past the page cache, their digests taken in the same pass.

A few threads read at once, each a block at a time into a buffer of its own that O_DIRECT can use, from where the values
go to their place. What the page cache would cost is as much as the reading. Small chunks go through it all the same:
one read of the disk then brings many of them. Whatever goes wrong is only reported as "not read": who reads the same
through TensorStore then learns the reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import xxhash

from flax_rpsave.chunk_bytes import PLAIN
from flax_rpsave.direct_file import (
    ALIGNMENT,
    BLOCK_NBYTES,
    engine_mode,
    is_on_local_disk,
    open_direct,
)
from flax_rpsave.directory import Directory, FileDirectory
from flax_rpsave.host_memory import aligned_buffer

logger = logging.getLogger("flax_rpsave")

_LARGE_NBYTES = 1 << 20  # chunks from this size on are read past the page cache
_THREADS = 4  # a disk is at its fastest with a few requests at once
_OPEN_FILES = 64  # of a process's 1024, where nobody has allowed more


@dataclass(frozen=True)
class PlacedChunk:
    """An uncompressed chunk in a file.

    Attributes:
      path: Of the file.
      offset: Where its bytes begin.
      box: The part of the array that gets its values; the chunk has at least as many along each dimension.
      digest: Of the values; "" for one that is not known.
      alone: Whether the file has nothing else, so that it need not be kept open.
    """

    path: str
    offset: int
    box: tuple[slice, ...]
    digest: str
    alone: bool = False


def can_read_directly(directory: Directory) -> bool:
    """Whether files there are to be read past the page cache: those of local disks, unless RPSAVE_ENGINE forbids it."""
    mode = engine_mode()
    if mode == "tensorstore" or not isinstance(directory, FileDirectory):
        return False
    return mode == "direct" or is_on_local_disk(str(directory))


class DirectReads:
    """Threads that read; end them with `close`, or as a context manager."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="rpsave-read")
        self._own = threading.local()  # each thread's buffer
        self._descriptors: dict[tuple[str, bool], int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads; what they have not begun is not read."""
        self._executor.shutdown(cancel_futures=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def start(
        self, values: np.ndarray, chunk_shape: tuple[int, ...], chunks: Sequence[PlacedChunk]
    ) -> list[Future[bool]]:
        """Begins to read chunks.

        Args:
          values: Gets the values; of rank 1 at least, C-contiguous.
          chunk_shape: Of every chunk.
          chunks: Where they lie.

        Returns:
          Futures: whether the chunks were read and their digests are right.
        """
        plain: np.ndarray = values.view(PLAIN[values.itemsize])
        large = math.prod(chunk_shape) * values.itemsize >= _LARGE_NBYTES
        parts = [[chunk] for chunk in chunks] if large else [list(chunks)]
        return [self._executor.submit(self._read_all, plain, chunk_shape, part, large) for part in parts]

    def _read_all(
        self, values: np.ndarray, chunk_shape: tuple[int, ...], chunks: Sequence[PlacedChunk], direct: bool
    ) -> bool:
        try:
            return all(self._read(values[chunk.box], chunk_shape, chunk, direct) for chunk in chunks)
        except OSError as error:
            logger.debug("direct read refused or failed: %s", error)
            return False

    def _read(self, target: np.ndarray, chunk_shape: tuple[int, ...], chunk: PlacedChunk, direct: bool) -> bool:
        """Reads a chunk."""
        hasher = xxhash.xxh3_64() if chunk.digest else None
        with self._opened(chunk, direct) as descriptor:
            if not self._read_rows(descriptor, target, chunk_shape, chunk.offset, hasher):
                return False
        return hasher is None or hasher.hexdigest() == chunk.digest

    def _read_rows(
        self,
        descriptor: int,
        target: np.ndarray,
        chunk_shape: tuple[int, ...],
        offset: int,
        hasher: xxhash.xxh3_64 | None,
    ) -> bool:
        """Reads a few rows at a time, or parts of one that is more than a block; not those behind the array's end."""
        row = math.prod(chunk_shape[1:]) * target.itemsize
        if row > BLOCK_NBYTES:
            return all(
                self._read_rows(descriptor, target[i], chunk_shape[1:], offset + i * row, hasher)
                for i in range(len(target))
            )
        inner = tuple(slice(n) for n in target.shape[1:])
        step = BLOCK_NBYTES // row
        for first in range(0, len(target), step):
            rows = min(step, len(target) - first)
            data = self._bytes(descriptor, offset + first * row, rows * row)
            if data is None:
                return False
            there = data.view(target.dtype).reshape(rows, *chunk_shape[1:])[(slice(None), *inner)]
            if hasher is not None:
                hasher.update(np.ascontiguousarray(there).data)
            target[first : first + rows] = there
        return True

    def _bytes(self, descriptor: int, offset: int, nbytes: int) -> np.ndarray | None:
        """Some bytes of a file, a block at most, in this thread's buffer; None where the file is shorter."""
        begin = offset // ALIGNMENT * ALIGNMENT
        end = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        buffer: np.ndarray | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = aligned_buffer(BLOCK_NBYTES + 2 * ALIGNMENT)
        done = 0
        while begin + done < offset + nbytes:
            got = os.preadv(descriptor, [buffer[done : end - begin].data], begin + done)
            if not got:
                return None
            done += got
        return buffer[offset - begin : offset - begin + nbytes]

    @contextlib.contextmanager
    def _opened(self, chunk: PlacedChunk, direct: bool) -> Iterator[int]:
        """A descriptor of a chunk's file; one that has more than this chunk stays open."""
        if chunk.alone:
            descriptor = _open(chunk.path, direct)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
            return
        key = (chunk.path, direct)
        with self._opening:
            if key not in self._descriptors:
                if len(self._descriptors) >= _OPEN_FILES:  # TensorStore reads what is in the others
                    raise OSError(f"{chunk.path}: more than {_OPEN_FILES} files")
                self._descriptors[key] = _open(*key)
        yield self._descriptors[key]


def _open(path: str, direct: bool) -> int:
    return open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY)
