"""What the machine could do at best with the bytes of a state: memory copies, raw writes, raw reads.

One file, one pass, no format. O_DIRECT goes past the page cache from an aligned buffer in huge pages, which are as good
for it as memory gets; two threads because that is where the disks that were tried stop getting faster.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flax_rpsave.host_memory import aligned_buffer

_BLOCK = 8 << 20
_PAGE = 4096
_THREADS = 2

Limits = dict[str, dict[str, float] | None]
"""Name -> `secs` and `cpu_secs`; None where this file system can't (O_DIRECT on tmpfs)."""


def measure(directory: Path, nbytes: int, processes: int = 1) -> Limits:
    """Measures every limit for `nbytes` (raw writes and reads: rounded up to pages); leaves nothing in `directory`.

    Each way to read has a file of its own, which nobody has read before and, if possible, was written in the same way.
    With several `processes` as many threads also copy at once, each an equal part.
    """
    limits = _copies(nbytes, processes)
    first, second = directory / "limits-1.bin", directory / "limits-2.bin"
    buffers = [_buffer(seed) for seed in range(_THREADS)]
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        limits["buffered_write"] = _timed(lambda: _write_all(first, nbytes, buffers[:1], new))
        limits["direct_write_1_thread"] = _direct(_write_all, first, nbytes, buffers[:1], new)
        limits["direct_write"] = _direct(_write_all, second, nbytes, buffers, new)
        limits["direct_read"] = _direct(_read_all, second, nbytes, buffers, os.O_RDONLY)
        if limits["direct_write_1_thread"] is None:  # whatever a refusal has left
            _write_all(first, nbytes, buffers[:1], new)
        _drop(first)
        limits["buffered_read_cold"] = _timed(lambda: _read_all(first, nbytes, buffers[:1], os.O_RDONLY))
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
    return limits


def _copies(nbytes: int, processes: int) -> Limits:
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    copy = functools.partial(np.copyto, target, source)
    limits: Limits = {"memcpy_first_touch": _timed(copy), "memcpy": _timed(copy)}
    if processes > 1:
        targets, sources = np.array_split(target, processes), np.array_split(source, processes)
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(time.sleep, [0.01] * processes))  # starts the threads
            limits["memcpy_at_once"] = _timed(lambda: list(pool.map(np.copyto, targets, sources)))
    return limits


def _timed(work: Callable[[], object]) -> dict[str, float]:
    cpu_secs, began = time.process_time(), time.perf_counter()
    work()
    return {"secs": time.perf_counter() - began, "cpu_secs": time.process_time() - cpu_secs}


def _buffer(seed: int) -> np.ndarray:
    """An aligned buffer, with bytes that no disk can make less of."""
    buffer = aligned_buffer(_BLOCK)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, _BLOCK, np.uint8)
    return buffer


def _direct(
    work: Callable[[Path, int, Sequence[np.ndarray], int], None],
    path: Path,
    nbytes: int,
    buffers: Sequence[np.ndarray],
    flags: int,
) -> dict[str, float] | None:
    try:
        return _timed(lambda: work(path, nbytes, buffers, flags | os.O_DIRECT))
    except OSError:
        return None


def _write_all(path: Path, nbytes: int, buffers: Sequence[np.ndarray], flags: int) -> None:
    """Writes and fsyncs the file. Preallocated: a writer knows its size, and O_DIRECT gains from it."""
    with _opened(path, flags) as descriptor:
        os.posix_fallocate(descriptor, 0, nbytes)
        _in_blocks(lambda part, offset: os.pwrite(descriptor, part, offset), nbytes, buffers)
        os.fsync(descriptor)


def _read_all(path: Path, nbytes: int, buffers: Sequence[np.ndarray], flags: int) -> None:
    with _opened(path, flags) as descriptor:
        _in_blocks(lambda part, offset: os.preadv(descriptor, [part], offset), nbytes, buffers)


def _in_blocks(transfer: Callable[[memoryview, int], int], nbytes: int, buffers: Sequence[np.ndarray]) -> None:
    """Calls `transfer(buffer, offset)` for every block, the last one cut to pages; a thread for each buffer."""
    end = -(-nbytes // _PAGE) * _PAGE

    def share(thread: int) -> None:
        for offset in range(thread * _BLOCK, end, len(buffers) * _BLOCK):
            part = buffers[thread][: end - offset].data
            if transfer(part, offset) != len(part):
                raise OSError(f"short transfer at byte {offset}")

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(share, range(len(buffers))))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _drop(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
