"""Host memory at addresses that devices and disks can use as it lies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

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
