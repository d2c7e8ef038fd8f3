"""Host memory at addresses, and in pages, that devices and disks can use as it lies."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

HUGE_PAGE_NBYTES = 2 << 20  # on x86 and on most ARM machines

_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; the module mmap does not have it
_MOSTLY = 0.9  # of a huge page
_HUGE_PAGES_ALLOWED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ALIGNMENT = 64  # what XLA asks of memory that a CPU device is to use without a copy (`kMinAlign` of its runtime)

_libc = ctypes.CDLL(None)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of undefined values, C-contiguous, at an address that 64 divides."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    array: np.ndarray = room[start : start + nbytes].view(dtype).reshape(shape)
    return array


def aligned(values: np.ndarray) -> np.ndarray:
    """The values themselves where they lie contiguous at such an address, else a copy that does."""
    if values.flags.c_contiguous and values.ctypes.data % _ALIGNMENT == 0:
        return values
    copy = empty(values.shape, values.dtype)
    copy[...] = values
    return copy


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Zero bytes in memory that direct reads and writes can use, in huge pages where the kernel has them.

    A request to a disk names a limited number of pieces of memory. A huge page is one of them, so that requests reach
    further. A forked process does not get the memory: the pages that a disk is about to fill must not become its.
    """
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):  # a kernel or platform without it
            memory.madvise(getattr(mmap, advice))
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % HUGE_PAGE_NBYTES
    return room[start : start + nbytes]


def move_to_huge_pages(areas: Iterable[tuple[int, int]]) -> None:
    """Has the kernel move memory that was touched into huge pages, where it can and may.

    Direct writes from there are faster, and copies to it. The values stay as they are, whoever uses them meanwhile, and
    addresses that are in use no more do no harm. Takes as long as a copy, and the first touch of the huge pages.

    Args:
      areas: Addresses and lengths. Huge pages that they do not fill for the most part are not asked for.
    """
    if sys.platform != "linux" or not _huge_pages_are_allowed():
        return
    covered: Counter[int] = Counter()
    for begin, nbytes in areas:
        at, end = begin, begin + nbytes
        while at < end:
            following = min(end, (at // HUGE_PAGE_NBYTES + 1) * HUGE_PAGE_NBYTES)
            covered[at // HUGE_PAGE_NBYTES] += following - at
            at = following
    full = sorted(page for page, nbytes in covered.items() if nbytes >= _MOSTLY * HUGE_PAGE_NBYTES)
    for _, run in itertools.groupby(enumerate(full), lambda place: place[1] - place[0]):
        pages = [page for _, page in run]
        address, nbytes = pages[0] * HUGE_PAGE_NBYTES, len(pages) * HUGE_PAGE_NBYTES
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _COLLAPSE)  # what it refuses stays as it is


def _huge_pages_are_allowed() -> bool:
    """Whether the machine's administrator has not forbidden them."""
    try:
        return "[never]" not in _HUGE_PAGES_ALLOWED.read_text()
    except OSError:  # a kernel without them
        return False


def give_back() -> None:
    """Has malloc give freed memory back to the system, of which it else keeps some for what comes next."""
    with contextlib.suppress(AttributeError):  # a C library without it
        _libc.malloc_trim(ctypes.c_size_t(0))
