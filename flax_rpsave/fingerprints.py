"""Fingerprints of arrays: 64 bits by which replicas that should be equal are compared.

Bits are compared, not numbers: NaNs with other payloads and zeros of either sign differ. Each 32-bit word is mixed with
its position and the mixed words are summed, so a shard is read once, in any order, by every device for itself. The
mixing is one-to-one, so a change within one word (a flipped bit) always changes the fingerprint. It is not linear,
because sums of weighted words cancel: two flipped signs change them by 2³¹ + 2³¹ = 0, whatever odd weights they have.
Two sums over different mixings make it 64 bits, so any other change is missed about once in 2⁶⁴ times. None of this
withstands someone who wants a collision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

_STACKED_NBYTES = 64 << 10  # equal leaves up to this size are folded as one array: fewer loops to compile
_POSITION = 0x9E3779B9
_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x27D4EB2F))  # odd: multiplying is one-to-one


def of_arrays(arrays: Sequence[jax.Array]) -> jax.Array:
    """Fingerprints of arrays, part of a program: shape (arrays, 2), uint32. Equal shapes should lie side by side."""
    rows = []
    for (shape, dtype), alike in itertools.groupby(arrays, lambda array: (array.shape, array.dtype)):
        members = list(alike)
        if np.prod(shape) * dtype.itemsize <= _STACKED_NBYTES:
            rows.append(_folded(jnp.stack(members)))
        else:
            rows += [_folded(array[None]) for array in members]
    return jnp.concatenate(rows)


def on_host(array: np.ndarray) -> int:
    """The fingerprint of an array on the host, of which there is none on a device: another function, but as good."""
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return xxhash.xxh3_64_intdigest(data)


def fetched(folded: Any) -> list[int]:
    """What `of_arrays` gave, as one number an array."""
    pairs = np.asarray(folded).astype(np.uint64)
    fingerprints: list[int] = (pairs[:, 0] << np.uint64(32) | pairs[:, 1]).tolist()
    return fingerprints


@jax.jit  # traced once a shape
def _folded(stack: jax.Array) -> jax.Array:
    """Fingerprints of the arrays that are stacked along the first axis."""
    words = _words(stack)
    first = second = jnp.zeros(stack.shape, jnp.uint32)
    for k, word in enumerate(words):
        mixed = (word ^ _positions(stack.shape, len(words), k)) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint32(16))) * _MIX[1]
        mixed = mixed ^ (mixed >> np.uint32(15))
        again = mixed * _MIX[2]
        first, second = first + mixed, second + (again ^ (again >> np.uint32(13)))
    # One reduction of both: on CPU devices ten times as fast as two, which XLA does not vectorise.
    zero = np.uint32(0)
    sums = jax.lax.reduce((first, second), (zero, zero), _added, tuple(range(1, stack.ndim)))
    return jnp.stack(sums, axis=-1)


def _added(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return a[0] + b[0], a[1] + b[1]


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element as one or more uint32, which have the array's shape."""
    if array.dtype.kind == "c":
        return [*_words(jax.lax.real(array)), *_words(jax.lax.imag(array))]
    if array.dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if array.dtype.itemsize <= 2:
        return [jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)]
    words = jax.lax.bitcast_convert_type(array, jnp.uint32)
    return [words] if array.dtype.itemsize == 4 else [words[..., 0], words[..., 1]]


def _positions(shape: tuple[int, ...], words: int, k: int) -> jax.Array:
    """A number for word k of each element: its position in the array, spread over 32 bits.

    By the indices along the dimensions, so that an array need not be flattened, whatever its memory layout.
    """
    positions = jnp.full(shape, np.uint32(k * _POSITION % 2**32), jnp.uint32)
    stride = words
    for d in reversed(range(1, len(shape))):
        step = np.uint32(stride * _POSITION % 2**32)
        positions = positions + jax.lax.broadcasted_iota(jnp.uint32, shape, d) * step
        stride *= shape[d]
    return positions
