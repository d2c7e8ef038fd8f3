"""A train state as a list of named leaves, and back.

Any pytree is taken; NNX objects inside it (`nnx.Module`, `nnx.Optimizer`, `nnx.Rngs`, `nnx.Variable`) are
walked the NNX way, so that a Variable reached twice is stored once. An `nnx.State` is a value, not an object: its
leaves are its own, even where its Variables are those of a module (an EMA that starts as `nnx.state(model)` is stored
under its own names from the first save on). Paths and names are those that Orbax gives the same object: the keys joined
by `.`, an NNX Variable's value under `….value`.

Empty containers are leaves too: stock Orbax needs an entry for each, or it reports another tree structure.
Values that are no data (functions) are not stored; they are logged, and come from the target on restore.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from etils import epy

from flax_rpsave import _compat
from flax_rpsave.errors import RPSaveError, SaveError, UnsupportedLeafError

with epy.lazy_imports():  # half a second, for states with its objects alone
    from flax import nnx

logger = logging.getLogger("flax_rpsave")

SEQUENCE_KEY: Final = 1
"""Orbax's `key_type` of a position in a list or tuple."""
DICT_KEY: Final = 2
"""Orbax's `key_type` of a dict key, a dataclass field or a named-tuple field."""

# What zarr3 has no data type for (TensorStore 0.1.86), beside everything that is not a number.
_UNSTORABLE_DTYPES: Final = frozenset(
    {"uint2", "uint4", "int1", "uint1", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"}
)
_nnx_kinds: dict[type, bool] = {}
_EMPTY_KINDS: Final[dict[type, str]] = {type(None): "None", dict: "Dict", list: "List", tuple: "Tuple"}


@dataclass(frozen=True)
class Leaf:
    """One leaf of a state.

    Attributes:
      path: The keys that lead to it, as text.
      key_types: For each key `SEQUENCE_KEY` or `DICT_KEY`.
      kind: What it is, in Orbax's words: "jax.Array", "np.ndarray", "scalar", "string", or an empty node: "None",
        "Dict", "List", "Tuple".
      value: A `jax.Array` or `jax.ShapeDtypeStruct` ("jax.Array"; of a typed PRNG key its uint32 key data), a NumPy
        array ("np.ndarray", "scalar"), a `str` ("string"), or the empty node itself.
      key_impl: The implementation's name ("threefry2x32") of a typed PRNG key, else None.
      original: The leaf as it stands in the state.
    """

    path: tuple[str, ...]
    key_types: tuple[int, ...]
    kind: str
    value: Any
    key_impl: str | None = None
    original: Any = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The name under which the array is stored."""
        return ".".join(self.path)

    @property
    def label(self) -> str:
        """The path for messages, `/` between the keys."""
        return "/".join(self.path) or "(the root)"

    @property
    def is_array(self) -> bool:
        """Whether it has an array on disk."""
        return self.kind in ("jax.Array", "np.ndarray", "scalar")


def without_values(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The leaves with a `jax.ShapeDtypeStruct` for each array: what documents need, and no memory."""
    described = functools.cache(lambda shape, dtype, sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
    found = []
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, (jax.Array, np.ndarray)):
            sharding = value.sharding if isinstance(value, jax.Array) else None
            value = described(value.shape, value.dtype, sharding)
        found.append(Leaf(leaf.path, leaf.key_types, leaf.kind, value, leaf.key_impl))
    return found


class Structure:
    """What `flatten` took apart: makes the same state again from other values."""

    def __init__(self, treedef: Any, values: list[Any]):
        self._treedef = treedef
        self._values = values  # of the outer pytree: leaves, NNX objects, `nnx.State`s
        self._nodes: list[Any] = []
        self._variables: list[tuple[Any, Any]] = []  # (path, Variable or array attribute) over all NNX objects
        self._slots: list[tuple[str, int, int]] = []  # of each leaf: where it belongs, and its index there

    @property
    def has_nnx(self) -> bool:
        """Whether there are NNX objects or `nnx.State`s in it."""
        return any(map(_is_nnx, self._values))

    def places(self) -> list[int | None]:
        """For each leaf of the pytree, as `jax.tree.leaves` has them, which `Leaf` it is, or None if it is not stored.

        Of a state without NNX objects.
        """
        stored = {position: i for i, (_, position, _) in enumerate(self._slots)}
        return [stored.get(k) for k, value in enumerate(self._values) if not _is_empty_node(value)]

    def rebuild(self, values: Mapping[int, Any]) -> Any:
        """The state with leaf i replaced by `values[i]`; leaves not named keep what they have.

        NNX objects and `nnx.State`s are updated in place, all at once.
        """
        changes: dict[str, dict[int, dict[int, Any]]] = {"tree": {}, "state": {}, "nnx": {}}
        for i, value in values.items():
            where, at, part = self._slots[i]
            changes[where].setdefault(at, {})[part] = value
        tree_values = list(self._values)
        for at, parts in changes["tree"].items():
            tree_values[at] = parts[0]
        for at, parts in changes["state"].items():
            tree_values[at].update(_replace_leaves(tree_values[at], parts))
        updates = []
        for at, parts in changes["nnx"].items():
            path, old = self._variables[at]
            if isinstance(old, nnx.Variable):
                updates.append((path, old.replace(_replace_leaves(old.get_raw_value(), parts))))
            else:
                updates.append((path, parts[0]))
        if updates:
            nnx.update(self._nodes, nnx.from_flat_state(updates))
        return self._treedef.unflatten(tree_values)


def flatten(state: Any) -> tuple[list[Leaf], Structure]:
    """Takes a state apart.

    Args:
      state: Any pytree, NNX object or container of them. Leaves may be `jax.ShapeDtypeStruct`s.

    Returns:
      Its leaves in a fixed order, and the structure to put them together again.

    Raises:
      UnsupportedLeafError: A leaf cannot be stored, or two leaves would get the same name.
      SaveError: An array was deleted (donated) already.
    """
    try:
        flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=_stops)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"the state has a container whose keys cannot be sorted: {error}. Use keys of one type in each dict."
        ) from error
    structure = Structure(treedef, [value for _, value in flat])
    leaves: list[Leaf] = []
    transient: list[str] = []

    def add(where: str, at: int, part: int, path: tuple[str, ...], key_types: tuple[int, ...], value: Any) -> None:
        if (leaf := leaf_of(path, key_types, value)) is not None:
            leaves.append(leaf)
            structure._slots.append((where, at, part))

    def add_all(where: str, at: int, prefix: tuple[str, ...], prefix_types: tuple[int, ...], value: Any) -> None:
        """Adds the leaves of an `nnx.State`, or of what a Variable holds."""
        if isinstance(value, jax.Array):
            add(where, at, 0, prefix, prefix_types, value)
            return
        for part, (keys, leaf_value) in enumerate(_flat_in_state(value)):
            sub_path, sub_types = _path_of(keys)
            if isinstance(leaf_value, nnx.Variable):
                transient.append("/".join(prefix + sub_path))
            else:
                add(where, at, part, prefix + sub_path, prefix_types + sub_types, leaf_value)

    prefixes = []
    for position, (keys, value) in enumerate(flat):
        if not _is_nnx(value):
            add("tree", position, 0, *_path_of(keys), value)
        elif isinstance(value, nnx.State):
            add_all("state", position, *_path_of(keys), value)
        else:
            structure._nodes.append(value)
            prefixes.append(_path_of(keys))
    if structure._nodes:
        structure._variables = list(nnx.to_flat_state(nnx.split(structure._nodes)[1]))
    for index, (nnx_path, value) in enumerate(structure._variables):
        prefix, prefix_types = prefixes[nnx_path[0]]
        path = (*prefix, *map(str, nnx_path[1:]))
        key_types = (*prefix_types, *[DICT_KEY] * (len(nnx_path) - 1))
        if _is_transient(value):
            transient.append("/".join(path))
        elif isinstance(value, nnx.Variable):
            add_all("nnx", index, (*path, "value"), (*key_types, DICT_KEY), value.get_raw_value())
        else:
            add_all("nnx", index, path, key_types, value)
    if transient:
        _log_once(f"left out, since they are not part of the train state: {', '.join(sorted(transient))}")
    _check_names(leaves)
    return leaves, structure


def check_outside_of_tracing(what: str) -> None:
    """Refuses what needs values where a function is traced.

    Raises:
      RPSaveError: This is inside such a function.
    """
    if _compat.is_tracing():
        raise RPSaveError(
            f"{what} was called inside a function that is being traced by jax.jit, jax.grad or another transformation, "
            "where arrays have no values and Python runs once, not at every step. Call it outside of that, with the "
            "arrays that the function returns."
        )


def unflatten_to_dicts(
    paths: Sequence[tuple[str, ...]], key_types: Sequence[tuple[int, ...]], values: Sequence[Any]
) -> Any:
    """Nested dicts and lists from paths: what is returned where there is no target.

    Positions of a sequence that are absent (a partial read) are dropped.
    """
    if list(paths) == [()]:
        return values[0]
    root: dict[Any, Any] = {}
    sequences: list[tuple[dict[Any, Any], Any]] = []
    for path, types, value in zip(paths, key_types, values, strict=True):
        node = root
        for depth, key in enumerate(path[:-1]):
            child = node.setdefault(key, {})
            if types[depth + 1] == SEQUENCE_KEY and not any(n is node and k == key for n, k in sequences[-1:]):
                sequences.append((node, key))
            node = child
        node[path[-1]] = value
    top_is_sequence = bool(key_types) and all(types and types[0] == SEQUENCE_KEY for types in key_types)
    for node, key in reversed(_unique(sequences)):
        node[key] = [node[key][k] for k in sorted(node[key], key=int)]
    return [root[k] for k in sorted(root, key=int)] if top_is_sequence else root


def _unique(sequences: list[tuple[dict[Any, Any], Any]]) -> list[tuple[dict[Any, Any], Any]]:
    seen = {(id(node), key): (node, key) for node, key in sequences}
    return list(seen.values())


def _path_of(keys: Sequence[Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    path, types = [], []
    for key in keys:
        if isinstance(key, jax.tree_util.SequenceKey):
            path.append(str(key.idx))
            types.append(SEQUENCE_KEY)
        elif isinstance(key, jax.tree_util.FlattenedIndexKey):
            path.append(str(key.key))
            types.append(SEQUENCE_KEY)
        else:
            path.append(str(key.name if isinstance(key, jax.tree_util.GetAttrKey) else getattr(key, "key", key)))
            types.append(DICT_KEY)
    return tuple(path), tuple(types)


def _is_empty_node(node: Any) -> bool:
    children = jax.tree_util.default_registry.flatten_one_level(node)
    return children is not None and not list(children[0])


def _stops(node: Any) -> bool:
    """Whether flattening the outer pytree ends here."""
    return _is_nnx(node) or _is_empty_node(node)


def _is_nnx(value: Any) -> bool:
    """Whether a value is an NNX object or an `nnx.State`."""
    if "flax.nnx" not in sys.modules:  # nor is there any
        return False
    kind = type(value)
    if kind not in _nnx_kinds:  # asked once a type: NNX's own instance checks are slow
        _nnx_kinds[kind] = isinstance(value, (nnx.Pytree, nnx.Variable, nnx.State))
    return _nnx_kinds[kind]


def _stops_in_state(node: Any) -> bool:
    """Whether flattening an `nnx.State` or a Variable's value ends here."""
    return _is_transient(node) or _is_empty_node(node)


def _is_transient(value: Any) -> bool:
    return isinstance(value, (nnx.Intermediate, nnx.Cache, nnx.Perturbation))


def _flat_in_state(value: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(value, is_leaf=_stops_in_state)[0]


def _replace_leaves(tree: Any, parts: Mapping[int, Any]) -> Any:
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_stops_in_state)
    for part, new in parts.items():
        leaves[part] = new
    return treedef.unflatten(leaves)


def leaf_of(path: tuple[str, ...], key_types: tuple[int, ...], value: Any) -> Leaf | None:
    """The leaf for a value, or None where there is nothing to store."""
    make = functools.partial(Leaf, path, key_types, original=value)
    where = "/".join(path) or "(the root)"
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"leaf {where} is a tracer, which has no values: it is of a function that jax.jit, jax.grad or another "
                "transformation traces, or traced earlier. Pass the array that the function returns, outside of it."
            )
        if isinstance(value, jax.Array) and value.is_deleted():
            raise SaveError(
                f"leaf {where} was deleted: its buffers were donated to a jitted function. "
                "Pass the state that the train step returned, not the one that it consumed."
            )
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return make("jax.Array", *_key_data(value))
        _check_dtype(where, value.dtype)
        return make("jax.Array", value)
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedLeafError(f"leaf {where} is a masked array, whose mask has no place in zarr; store it apart.")
    if isinstance(value, np.ndarray):
        _check_dtype(where, value.dtype)
        return make("np.ndarray", value.astype(value.dtype.newbyteorder("="), copy=False))
    if isinstance(value, (bool, int, float, complex, np.generic)) and not isinstance(value, (str, bytes)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise UnsupportedLeafError(f"leaf {where} is an integer of more than 64 bits; store it as text")
        _check_dtype(where, array.dtype)
        return make("scalar", array)
    if isinstance(value, str):
        if not _is_unicode(value):
            raise UnsupportedLeafError(f"leaf {where} is no Unicode text (an unpaired surrogate): it has no JSON")
        return make("string", value)
    if (children := jax.tree_util.default_registry.flatten_one_level(value)) is not None:
        assert not list(children[0])  # `_stops` lets only empty nodes through
        plain = value is None or (isinstance(value, (dict, list, tuple)) and not hasattr(value, "_fields"))
        kinds = [k for t, k in _EMPTY_KINDS.items() if isinstance(value, t)]
        return make(kinds[0] if plain else "Dict" if isinstance(value, Mapping) else "None", value)
    if callable(value):
        _log_once(f"leaf {where} is a function and is not stored; on restore it comes from the target")
        return None
    raise UnsupportedLeafError(
        f"leaf {where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored; a leaf must "
        "be a JAX or NumPy array, a number, a string or None. Mark it static in its container, or keep it outside."
    )


def _key_data(value: Any) -> tuple[Any, str]:
    """The key data (uint32) of typed keys, or its `ShapeDtypeStruct`, and the name of their implementation."""
    if isinstance(value, jax.Array):
        return jax.random.key_data(value), str(jax.random.key_impl(value))
    impl = ""

    def trace(keys: Any) -> Any:
        nonlocal impl
        impl = str(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(trace, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=value.sharding), impl


def _check_dtype(where: str, dtype: Any) -> None:
    if not _is_storable(dtype):
        raise UnsupportedLeafError(
            f"leaf {where} has dtype {np.dtype(dtype).name}, for which the zarr3 format has no data type. "
            "Store it as another dtype, for instance as its bits (`jax.lax.bitcast_convert_type`)."
        )


@functools.cache  # a dtype's name takes longer than all else that is looked at in a leaf
def _is_storable(dtype: Any) -> bool:
    dtype = np.dtype(dtype)
    custom = dtype.kind == "V" and hasattr(ml_dtypes, dtype.name)
    too_wide = dtype.itemsize > (16 if dtype.kind == "c" else 8)
    return dtype.name not in _UNSTORABLE_DTYPES and (dtype.kind in "biufc" or custom) and not too_wide


def _check_names(leaves: Sequence[Leaf]) -> None:
    by_name: dict[str, Leaf] = {}
    for leaf in leaves:
        other = by_name.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise UnsupportedLeafError(
                f"leaves {list(other.path)} and {list(leaf.path)} would both be stored as {leaf.name!r}; rename a key."
            )
    array_names = {leaf.name for leaf in leaves if leaf.is_array}
    for name in array_names:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) and name != "":
            raise UnsupportedLeafError(f"leaf {name!r} cannot be stored under that name; rename its key.")
        if name.startswith(".rpsave"):
            raise UnsupportedLeafError(f"leaf {name!r}: names that begin with '.rpsave' are kept for this package.")
        for cut in range(1, len(parts)):
            parent, rest = "/".join(parts[:cut]), parts[cut]
            if parent in array_names and rest in ("c", "zarr.json"):
                raise UnsupportedLeafError(
                    f"leaf {name!r} would be stored inside the array of leaf {parent!r}; rename a key."
                )
    for leaf in leaves:
        for key in leaf.path:
            if "\x00" in key:
                raise UnsupportedLeafError(f"leaf {leaf.name!r} has a NUL character in a key; rename it.")
            if not _is_unicode(key):
                raise UnsupportedLeafError(f"leaf {leaf.name!r} has a key that is no Unicode text; rename it.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)
