"""Host memory at addresses, and in pages, that devices and disks can use as it lies."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

HUGE_PAGE_NBYTES = 2 << 20  # on x86 and on most ARM machines

_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 and younger; the module mmap does not have it
_MOSTLY = 0.9  # of a huge page
_ALIGNMENT = 64  # what XLA asks of memory that a CPU device is to use without a copy (`kMinAlign` of its runtime)


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


def move_to_huge_pages(areas: Iterable[tuple[int, int]]) -> int:
    """Has the kernel move memory into huge pages, where it can: direct writes from there are faster, and copies to it.

    A request to a disk names a limited number of pieces of memory, and a huge page is one. The values stay as they are,
    whoever uses them meanwhile, and addresses that are in use no more do no harm. Takes as long as a copy, and the
    first touch of the huge pages.

    Args:
      areas: Addresses and lengths. Huge pages that they do not fill for the most part are not asked for.

    Returns:
      How many bytes were moved; 0 where the kernel does not do such a thing.
    """
    covered: Counter[int] = Counter()
    for begin, nbytes in areas:
        at, end = begin, begin + nbytes
        while at < end:
            following = min(end, (at // HUGE_PAGE_NBYTES + 1) * HUGE_PAGE_NBYTES)
            covered[at // HUGE_PAGE_NBYTES] += following - at
            at = following
    full = [page for page, nbytes in covered.items() if nbytes >= _MOSTLY * HUGE_PAGE_NBYTES]
    moved = [_collapse(page * HUGE_PAGE_NBYTES) for page in sorted(full)]
    return sum(moved) * HUGE_PAGE_NBYTES


def _collapse(address: int) -> bool:
    try:
        madvise = ctypes.CDLL(None).madvise
    except AttributeError:  # no such function on this platform
        return False
    return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE_NBYTES), _COLLAPSE) == 0)
