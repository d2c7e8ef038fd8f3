"""States to save, and how to tell that two are the same to the last bit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("data", "model"), first: int = 0) -> Mesh:
    """A mesh over as many devices as it needs, from device number `first` on."""
    devices = jax.devices()[first : first + math.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), names[: len(shape)])


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers of any dtype, no two neighbours alike."""
    n = math.prod(shape)
    numbers = (np.arange(n, dtype=np.int64) * 7919 + seed * 104729) % 251
    if np.dtype(dtype) == np.bool_:
        return (numbers % 2 == 0).reshape(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (numbers - 1j * numbers[::-1]).astype(dtype).reshape(shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return ((numbers - 125) / 64).astype(dtype).reshape(shape)
    info = jnp.iinfo(dtype)
    return (numbers % min(251, int(info.max) + 1)).astype(dtype).reshape(shape)


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and the bytes of an array, so that NaNs and zeros of either sign compare."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        dtype, shape, data = bits(jax.random.key_data(array))
        return f"{jax.random.key_impl(array)} {dtype}", shape, data
    array = np.asarray(array)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def assert_same_tree(found: Any, expected: Any, *, exactly: bool = True) -> None:
    """Both have the same structure and node types, and each pair of leaves the same type, dtype, bits and sharding.

    `exactly`: weakly typed and uncommitted arrays are so in both, which stock Orbax does not heed.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, want), have in pairs:
        where = jax.tree_util.keystr(path)
        if callable(want) or isinstance(want, str):
            assert have == want, where
            continue
        assert bits(have) == bits(want), where
        if isinstance(want, jax.Array):
            assert isinstance(have, jax.Array), where
            assert have.sharding.is_equivalent_to(want.sharding, want.ndim), (where, have.sharding, want.sharding)
            if exactly:
                assert getattr(have, "weak_type", False) == getattr(want, "weak_type", False), where
                assert have.committed == want.committed, where
        else:
            assert type(have) is type(want), where


def abstract(tree: Any) -> Any:
    """The tree with a `jax.ShapeDtypeStruct` for each array."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, tree
    )


def blank(tree: Any) -> Any:
    """A fresh state of the same kind: every array zeros, or keys of another seed; every number 0."""

    def fresh(x: Any) -> Any:
        if isinstance(x, jax.Array):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                data = jnp.zeros_like(jax.random.key_data(x))
                keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
                return jax.device_put(keys, x.sharding) if x.committed else keys
            zeros = jnp.zeros_like(x)
            return jax.device_put(zeros, x.sharding) if x.committed else zeros
        if isinstance(x, np.ndarray):
            return np.zeros_like(x)
        if isinstance(x, (bool, int, float, complex, np.generic)):
            return type(x)(0)
        return x

    return jax.tree.map(fresh, tree)
