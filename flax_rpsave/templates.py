"""What a train state has in common with the one that was saved before: its names, and what its leaves are.

To work out the paths and names of a state, and to check them, takes longer than all else that a save does in Python in
the loop's thread. The next state has the same ones, where it is the same pytree, with the same keys, of leaves of the
same types.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flax_rpsave.leaves import Leaf, Structure, leaf_of, without_values


@dataclass(frozen=True)
class Flat:
    """A state, taken apart for a save.

    Attributes:
      leaves: Its leaves, with a `jax.ShapeDtypeStruct` for each array.
      arrays: The values of those that are arrays, in the same order.
    """

    leaves: list[Leaf]
    arrays: list[Any]


def flat_of(leaves: Sequence[Leaf]) -> Flat:
    """What `leaves.flatten` found, for a save."""
    return Flat(without_values(leaves), [leaf.value for leaf in leaves if leaf.is_array])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A leaf of the pytree.

    Attributes:
      keys: Its key path.
      kind: Its type.
      at: Which of the leaves it is; None for what is not stored.
      on_devices: Whether it is a `jax.Array` that is stored as it is.
      likeness: Of its array; None where it has none.
    """

    keys: tuple[Any, ...]
    kind: Any
    at: int | None
    on_devices: bool
    likeness: tuple[Any, ...] | None


class Template:
    """Takes states apart that are like a given one, of which it keeps keys and static data. Made by `template_of`."""

    def __init__(self, treedef: Any, entries: Sequence[_Entry], leaves: Sequence[Leaf]):
        self._treedef = treedef
        self._entries = entries
        self._leaves = without_values(leaves)

    def flatten(self, state: Any) -> Flat | None:
        """A state taken apart; None where it is unlike the template's, or an array of it was deleted.

        Raises:
          UnsupportedLeafError, SaveError: See `leaves.flatten`.
        """
        treedef: Any
        try:
            flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        except (TypeError, ValueError):  # keys without an order: `leaves.flatten` says so
            return None
        if treedef != self._treedef:
            return None
        leaves, arrays = list(self._leaves), []
        for (keys, value), entry in zip(flat, self._entries, strict=True):
            if type(value) is not entry.kind or keys != entry.keys or not _are_plain(keys):
                return None
            if entry.at is None:
                continue
            array = value
            if not entry.on_devices:
                known = leaves[entry.at]
                leaf = leaf_of(known.path, known.key_types, value)
                if leaf is None or (leaf.kind, leaf.key_impl) != (known.kind, known.key_impl):
                    return None
                if not leaf.is_array:
                    leaves[entry.at] = leaf
                    continue
                array = leaf.value
            elif value.is_deleted():
                return None
            if likeness(array) != entry.likeness:
                return None
            arrays.append(array)
        return Flat(leaves, arrays)


def template_of(state: Any, leaves: Sequence[Leaf], structure: Structure) -> Template | None:
    """The template for states like this one, of which `leaves.flatten` made leaves and structure.

    None where states that compare equal may differ: with NNX objects, which are mutable and walked the NNX way each
    time; with keys that may be equal to others and have other names (`True` and `1`); with static data that cannot be
    hashed, such as arrays, whose comparison would have to wait for a device.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    if structure.has_nnx or not all(_are_plain(keys) for keys, _ in flat) or not _is_hashable(treedef):
        return None
    entries = []
    for (keys, value), at in zip(flat, structure.places(), strict=True):
        leaf = None if at is None else leaves[at]
        on_devices = leaf is not None and leaf.value is value and isinstance(value, jax.Array)
        like = likeness(leaf.value) if leaf is not None and leaf.is_array else None
        entries.append(_Entry(keys, type(value), at, on_devices, like))
    return Template(treedef, entries, leaves)


def likeness(array: Any) -> tuple[Any, ...]:
    """Equal for arrays that are saved by the same program."""
    return array.shape, array.dtype, _canonical(getattr(array, "sharding", None))


def _are_plain(keys: Sequence[Any]) -> bool:
    """Whether equal keys have equal names."""
    for key in keys:
        kind = type(key)
        if kind is DictKey:
            if type(key.key) not in (str, int):
                return False
        elif kind is GetAttrKey:
            if type(key.name) is not str:
                return False
        elif kind is not SequenceKey and (kind is not FlattenedIndexKey or type(key.key) is not int):
            return False
    return True


def _is_hashable(treedef: Any) -> bool:
    """Whether the static data of all nodes can be hashed, as `jax.jit` asks of it."""
    nodes = [treedef]
    while nodes:
        node = nodes.pop()
        if (data := node.node_data()) is None:
            continue
        kind, static = data
        if kind not in (dict, list, tuple, type(None)):
            try:
                hash(static)
            except TypeError:
                return False
        nodes += node.children()
    return True


@functools.lru_cache(maxsize=4096)
def _canonical(sharding: Sharding | None) -> Any:
    """Equal for shardings that mean the same: jitted functions return P() and P(None) as it comes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts = [part if part != () else None for part in sharding.spec]
    while parts and parts[-1] is None:
        parts.pop()
    return sharding.mesh, tuple(parts), sharding.memory_kind
