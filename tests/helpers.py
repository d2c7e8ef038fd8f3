"""What several test files share."""

from __future__ import annotations

import random
import socket

import jax
import numpy as np

from flax_rpsave.leaves import flatten


def bits(value):
    """(dtype, shape, bytes) of an array or number, and the implementation's name of typed PRNG keys."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return (str(jax.random.key_impl(value)), *bits(jax.random.key_data(value)))
    array = np.asarray(value)
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def arrays_of(state):
    """The leaves of a state that are arrays."""
    return [leaf for leaf in flatten(state)[0] if leaf.is_array]


def values_of(state):
    """Their values."""
    return [leaf.value for leaf in arrays_of(state)]


def staging_nbytes(snapshotter):
    """Bytes of staging memory that this process holds while a group is saved."""
    return max(
        (
            sum(output.nbytes * len(program.mesh.local_devices) for program in group for output in program.outputs)
            for group in snapshotter._groups
        ),
        default=0,
    )


def free_port():
    """A port that nobody listens on, below those that the system gives to outgoing connections.

    One of these could be taken by any other test between this and the start of the server that is to have it.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def head(parts, nbytes):
    """The first bytes of parts of memory that lie one behind the other."""
    found = []
    for part in parts:
        found.append(part[:nbytes])
        nbytes -= len(found[-1])
    return [part for part in found if len(part)]


def assert_same_tree(got, expected):
    """Both have the same structure, and equal leaves: type of array or scalar, dtype, shape and every bit."""
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    assert got_tree == expected_tree
    for (path, one), (_, other) in zip(got_leaves, expected_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array), (where, type(one), type(other))
        assert type(one) is type(other) or isinstance(other, jax.Array), (where, type(one), type(other))
        if isinstance(other, (str, bytes)):
            assert one == other, where
        else:
            assert bits(one)[:-1] == bits(other)[:-1], where
            assert bits(one)[-1] == bits(other)[-1], f"{where}: the bits differ"
