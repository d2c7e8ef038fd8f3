"""What the machine could do at best with the bytes of a state: memory copies, raw writes, raw reads.

One file, one pass, no format. O_DIRECT goes past the page cache from an aligned buffer; two threads because that is
where the disks that were tried stop getting faster.
"""

import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_BLOCK = 8 << 20
_THREADS = 2

Limits = dict[str, dict[str, float] | None]
"""Name -> `secs` and `cpu_secs`; None where this file system can't (O_DIRECT on tmpfs)."""


def measure(directory: Path, nbytes: int) -> Limits:
    """Measures every limit for `nbytes`, rounded up to whole blocks. Leaves nothing in `directory`."""
    blocks = -(-nbytes // _BLOCK)
    path = directory / "limits.bin"
    limits = _copies(blocks * _BLOCK)
    try:
        for name, threads in (("direct_write_1_thread", 1), ("direct_write", _THREADS)):
            limits[name] = _direct(_write_all, path, blocks, threads, os.O_WRONLY | os.O_CREAT)
            limits["direct_read"] = _direct(_read_all, path, blocks, _THREADS, os.O_RDONLY)
            path.unlink(missing_ok=True)
        limits["buffered_write"] = _timed(lambda: _write_all(path, blocks, 1, os.O_WRONLY | os.O_CREAT))
        _drop(path)
        limits["buffered_read_cold"] = _timed(lambda: _read_all(path, blocks, 1, os.O_RDONLY))
    finally:
        path.unlink(missing_ok=True)
    return limits


def _copies(nbytes: int) -> Limits:
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    copy = functools.partial(np.copyto, target, source)
    return {"memcpy_first_touch": _timed(copy), "memcpy": _timed(copy)}


def _timed(work: Callable[[], object]) -> dict[str, float]:
    cpu_secs, began = time.process_time(), time.perf_counter()
    work()
    return {"secs": time.perf_counter() - began, "cpu_secs": time.process_time() - cpu_secs}


def _direct(
    work: Callable[[Path, int, int, int], None], path: Path, blocks: int, threads: int, flags: int
) -> dict[str, float] | None:
    try:
        return _timed(lambda: work(path, blocks, threads, flags | os.O_DIRECT))
    except OSError:
        return None


def _write_all(path: Path, blocks: int, threads: int, flags: int) -> None:
    """Writes and fsyncs the file. Preallocated: a writer knows its size, and O_DIRECT gains from it."""
    with _opened(path, flags) as descriptor:
        os.posix_fallocate(descriptor, 0, blocks * _BLOCK)
        _in_blocks(lambda buffer, offset: os.pwrite(descriptor, buffer, offset), blocks, threads)
        os.fsync(descriptor)


def _read_all(path: Path, blocks: int, threads: int, flags: int) -> None:
    with _opened(path, flags) as descriptor:
        _in_blocks(lambda buffer, offset: os.preadv(descriptor, [buffer], offset), blocks, threads)


def _in_blocks(transfer: Callable[[mmap.mmap, int], int], blocks: int, threads: int) -> None:
    """Calls `transfer(buffer, offset)` for every block; each thread has an aligned buffer and every n-th block."""

    def share(thread: int) -> None:
        with mmap.mmap(-1, _BLOCK) as buffer:
            buffer.write(np.random.default_rng(thread).bytes(_BLOCK))
            for block in range(thread, blocks, threads):
                if transfer(buffer, block * _BLOCK) != _BLOCK:
                    raise OSError(f"short transfer at block {block}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


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
