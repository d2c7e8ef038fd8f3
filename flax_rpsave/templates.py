"""What a train state has in common with the one that was saved before: its names, and what its leaves are.

To work out the paths and names of a state, and to check them, takes longer than all else that a save does in Python in
the loop's thread. The next state has the same ones, where it is the same pytree with leaves of the same types. States
with NNX objects have no template: these are mutable, and walked the NNX way each time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from flax_rpsave.leaves import Leaf, Structure, leaf_of, without_values


@dataclass(frozen=True)
class TakenApart:
    """A state, taken apart for a save.

    Attributes:
      leaves: Its leaves, with a `jax.ShapeDtypeStruct` for each array.
      arrays: The values of those that are arrays, in the same order.
    """

    leaves: list[Leaf]
    arrays: list[Any]


def taken_apart(leaves: Sequence[Leaf]) -> TakenApart:
    """Leaves of `flatten`, for a save."""
    return TakenApart(without_values(leaves), [leaf.value for leaf in leaves if leaf.is_array])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A leaf of the pytree.

    Attributes:
      kind: Its type.
      on_devices: Whether it is a `jax.Array` that is stored as it is.
      at: Which of the leaves it is; None for what is not stored.
      likeness: Of its array, see `likeness`; None where it has none.
      sharding: Of that array, as it was.
    """

    kind: Any
    on_devices: bool = False
    at: int | None = None
    likeness: tuple[Any, ...] | None = None
    sharding: Sharding | None = None


class Template:
    """Takes states apart that are like a given one. Made by `template_of`."""

    def __init__(self, state: Any, leaves: Sequence[Leaf], places: Sequence[int | None]):
        self._leaves = without_values(leaves)
        values, self._treedef = jax.tree_util.tree_flatten(state)
        self._entries = [
            _Entry(type(value)) if at is None else _entry(value, at, leaves[at])
            for value, at in zip(values, places, strict=True)
        ]

    def fill(self, state: Any) -> TakenApart | None:
        """A state taken apart; None where it is unlike the template's, or something is wrong with it."""
        values: list[Any]
        treedef: Any
        try:
            values, treedef = jax.tree_util.tree_flatten(state)
            if treedef != self._treedef:
                return None
        except Exception:  # noqa: BLE001 - keys without an order, comparisons that fail: `flatten` says, or needs none
            return None
        leaves, arrays = list(self._leaves), []
        for value, entry in zip(values, self._entries, strict=True):
            if type(value) is not entry.kind:
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
                    (leaves[entry.at],) = without_values([leaf])
                    continue
                array = leaf.value
            elif value.is_deleted():
                return None
            if not _is_like(array, entry):
                return None
            arrays.append(array)
        return TakenApart(leaves, arrays)


def template_of(state: Any, leaves: Sequence[Leaf], structure: Structure) -> Template | None:
    """The template for states like this one, of which `flatten` made leaves and structure; None with NNX objects."""
    places = structure.places()
    return None if places is None else Template(state, leaves, places)


def likeness(array: Any) -> tuple[Any, ...]:
    """Equal for arrays that are saved by the same program."""
    return array.shape, array.dtype, _canonical(getattr(array, "sharding", None))


def _entry(value: Any, at: int, leaf: Leaf) -> _Entry:
    if not leaf.is_array:
        return _Entry(type(value), at=at)
    sharding = getattr(leaf.value, "sharding", None)
    return _Entry(type(value), leaf.value is value and isinstance(value, jax.Array), at, likeness(leaf.value), sharding)


def _is_like(array: Any, entry: _Entry) -> bool:
    if entry.sharding is None or array.sharding is not entry.sharding:
        return likeness(array) == entry.likeness
    shape, dtype, _ = entry.likeness or ()
    return bool(array.shape == shape and array.dtype == dtype)


@functools.lru_cache(maxsize=4096)
def _canonical(sharding: Sharding | None) -> Any:
    """Equal for shardings that mean the same: jitted functions return P() and P(None) as it comes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts = [part if part != () else None for part in sharding.spec]
    while parts and parts[-1] is None:
        parts.pop()
    return sharding.mesh, tuple(parts), sharding.memory_kind
