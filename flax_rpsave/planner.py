"""Who saves which slice: a pure function of shapes, dtypes, layouts, shardings and options.

No devices are touched and nobody talks: every process computes the same plan. A leaf's shard is cut into a regular grid
of *owner slices*, each of which becomes one stored chunk, and every slice gets one of the R replicas that hold the
shard as its owner. Invariants (tests/test_planner.py): every element has exactly one owner, the owner holds it, and no
chunk has two writers.

How a shard is cut: into w = min(R, max_replicas, shard bytes ÷ min_slice_bytes) slices, along the most major axis in
the memory layout that splits well, so that a slice is contiguous. An axis that the sharding leaves whole may be cut
unevenly (the edge chunk is stored at full size); on a sharded axis the cut must divide the shard, or a chunk would have
two writers.

Who gets them: leaves of equal shape and sharding form a sequence of slices that is dealt out in rounds of R, so each
replica gets the same bytes; what is left of a sequence goes to the least loaded process, then device.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_rpsave.config import ReplicaParallelConfig
from flax_rpsave.errors import UnsupportedLeafError

_PMAP_AXES = frozenset({"_internal_pmap_axis_name", "_device_put_sharded"})
"""Mesh axes along which `jax.pmap` and `flax.jax_utils.replicate` stack an entry a device."""
_GOOD_BALANCE = (0.99, 0.95)  # mean ÷ largest slice; the first axis that reaches the first of these is taken


@dataclass(frozen=True)
class MeshLayout:
    """A mesh as planning sees it: named axes over numbered devices.

    Attributes:
      axes: (name, size) of each axis.
      device_ids: Ids of the devices, in mesh order.
      processes: The process of each device, in mesh order.
    """

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...]
    processes: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, mesh: Mesh | AbstractMesh) -> MeshLayout:
        """From a JAX mesh. The devices of an abstract one are numbered, each a process of its own."""
        axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
        if isinstance(mesh, AbstractMesh):
            ids = tuple(range(math.prod(size for _, size in axes)))
            return cls(axes, ids, ids)
        devices = mesh.devices.ravel().tolist()
        return cls(axes, tuple(d.id for d in devices), tuple(d.process_index for d in devices))

    def __hash__(self) -> int:
        return self._hash  # of thousands of devices: taken once

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.device_ids, self.processes))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by name."""
        return dict(self.axes)


@dataclass(frozen=True)
class LeafLayout:
    """All that planning may know of a leaf.

    Attributes:
      name: Its name.
      shape: Global shape.
      dtype: Element type.
      mesh: The mesh of a sharded or replicated leaf; None for one on a single device or on the host.
      spec: For each dimension the mesh axes that shard it.
      device: (id, process) of a leaf on a single device; None for a mesh leaf or a host value.
      major_to_minor: Dimensions in memory order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    mesh: MeshLayout | None = None
    spec: tuple[tuple[str, ...], ...] = ()
    device: tuple[int, int] | None = None
    major_to_minor: tuple[int, ...] = ()

    @functools.cached_property
    def shards(self) -> tuple[int, ...]:
        """Shards along each dimension."""
        if self.mesh is None:
            return (1,) * len(self.shape)
        return tuple(math.prod(self.mesh.sizes[a] for a in axes) for axes in self.spec)

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what one device holds."""
        return tuple(n // s for n, s in zip(self.shape, self.shards, strict=True))

    @functools.cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """Mesh axes that do not shard the leaf, in mesh order: along them lie its replicas."""
        if self.mesh is None:
            return ()
        used = set(itertools.chain.from_iterable(self.spec))
        return tuple(name for name, size in self.mesh.axes if name not in used and size > 1)

    @functools.cached_property
    def replicas(self) -> int:
        """R: how many devices hold the same shard."""
        return math.prod(self.mesh.sizes[a] for a in self.replica_axes) if self.mesh else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize

    def devices_by_replica(self) -> np.ndarray:
        """Positions in the mesh's device list, shape (replicas, shards)."""
        assert self.mesh is not None
        names = [name for name, _ in self.mesh.axes]
        order = [names.index(a) for a in self.replica_axes]
        order += [i for i in range(len(names)) if i not in order]
        positions = np.arange(len(self.mesh.device_ids)).reshape([size for _, size in self.mesh.axes])
        return positions.transpose(order).reshape(self.replicas, -1)

    def place(self, device: int) -> tuple[int, tuple[int, ...]]:
        """(replica, index of the shard along each dimension) of what a device holds."""
        if self.mesh is None:
            return 0, (0,) * len(self.shape)
        return _place_in_mesh(self.mesh, self.replica_axes, self.spec, device)


@functools.lru_cache(maxsize=65536)
def _place_in_mesh(
    mesh: MeshLayout, replica_axes: tuple[str, ...], spec: tuple[tuple[str, ...], ...], device: int
) -> tuple[int, tuple[int, ...]]:
    sizes = [size for _, size in mesh.axes]
    position = np.unravel_index(mesh.device_ids.index(device), sizes)
    at = dict(zip([name for name, _ in mesh.axes], position, strict=True))

    def along(axes: Sequence[str]) -> int:
        index = 0
        for axis in axes:
            index = index * mesh.sizes[axis] + int(at[axis])
        return index

    return along(replica_axes), tuple(along(axes) for axes in spec)


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf is saved.

    Attributes:
      layout: The leaf.
      chunk_shape: Shape of a slice, and of a stored chunk.
      grid: Slices along each dimension of a shard.
      owners: For slice t of a shard (in C order of `grid`), the replica that saves it; shape (slices,).
    """

    layout: LeafLayout
    chunk_shape: tuple[int, ...]
    grid: tuple[int, ...]
    owners: np.ndarray = field(repr=False)

    @property
    def slices(self) -> int:
        """Slices of one shard."""
        return len(self.owners)

    @property
    def writers(self) -> int:
        """Replicas that save a part of each shard."""
        return len(set(self.owners.tolist()))

    @property
    def slice_nbytes(self) -> int:
        """Bytes of a stored chunk, padding included."""
        return math.prod(self.chunk_shape) * self.layout.dtype.itemsize

    def start(self, t: int) -> tuple[int, ...]:
        """Where slice t begins within its shard."""
        begins = []
        for count, size in zip(reversed(self.grid), reversed(self.chunk_shape), strict=True):
            t, index = divmod(t, count)
            begins.append(index * size)
        return tuple(reversed(begins))

    def chunk_box(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the global array that a chunk holds."""
        return chunk_box(index, self.layout.shape, self.chunk_shape)


@dataclass(frozen=True)
class SavePlan:
    """Who saves what. Printing it shows the table.

    Attributes:
      leaves: A plan a leaf.
      device_bytes: Bytes that each device writes, by device id, padding included.
      process_bytes: The same by process; host values belong to process 0.
    """

    leaves: tuple[LeafPlan, ...]
    device_bytes: Mapping[int, int]
    process_bytes: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.layout.nbytes for leaf in self.leaves)

    @functools.cached_property
    def leaf_digests(self) -> list[str]:
        """A short digest of each leaf and its chunks: equal in all processes that see the same state."""
        digests = []
        for leaf in self.leaves:
            layout = leaf.layout
            mesh = layout.mesh and (layout.mesh.axes, layout.mesh.device_ids)
            text = repr((layout.name, layout.shape, layout.dtype.name, layout.spec, leaf.chunk_shape, mesh))
            digests.append(hashlib.sha256(text.encode()).hexdigest()[:12])
        return digests

    @functools.cached_property
    def owners_digest(self) -> str:
        """A digest of who saves what: who saves a slice of a leaf depends on the other leaves, too."""
        return hashlib.sha256(b"".join(leaf.owners.tobytes() for leaf in self.leaves)).hexdigest()

    @property
    def device_balance(self) -> float:
        """Largest ÷ mean bytes over the devices; 1.0 is perfect."""
        return _balance(self.device_bytes)

    @property
    def process_balance(self) -> float:
        """Largest ÷ mean bytes over the processes."""
        return _balance(self.process_bytes)

    def __str__(self) -> str:
        rows = [("leaf", "shape", "dtype", "shard", "replicas", "writers", "slice", "cut", "bytes a writer")]
        for leaf in self.leaves:
            layout = leaf.layout
            cut = ", ".join(f"axis {d} in {g}" for d, g in enumerate(leaf.grid) if g > 1) or "whole"
            a_writer = leaf.slice_nbytes * leaf.slices / max(1, leaf.writers)
            rows.append((
                layout.name or "(the root)", _shape(layout.shape), layout.dtype.name, _shape(layout.shard_shape),
                str(layout.replicas), str(leaf.writers), _shape(leaf.chunk_shape), cut, f"{a_writer:,.0f}",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(
            f"{len(self.leaves)} leaves, {self.nbytes:,} bytes; balance (largest ÷ mean bytes): "
            f"{self.device_balance:.4f} over {len(self.device_bytes)} devices, "
            f"{self.process_balance:.4f} over {len(self.process_bytes)} processes"
        )
        return "\n".join(lines)


def chunk_box(index: tuple[int, ...], shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of an array that a chunk of a regular grid holds, without the padding of the last ones."""
    return tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunk_shape, shape, strict=True))


def plan_leaves(layouts: Sequence[LeafLayout], options: ReplicaParallelConfig) -> SavePlan:
    """Plans a save.

    Args:
      layouts: The leaves.
      options: The `replica_parallel:` block.

    Returns:
      The plan, its leaves in the order of `layouts`.
    """
    loads = _Loads(layouts)
    groups: dict[Any, list[int]] = {}
    cuts = []
    for i, layout in enumerate(layouts):
        grid, chunk = _cut(layout, options)
        cuts.append((grid, chunk))
        key = (layout.mesh, layout.spec, layout.device, layout.shape, layout.dtype.name, grid)
        groups.setdefault(key, []).append(i)

    owners: list[np.ndarray] = [np.zeros(0, np.int64)] * len(layouts)

    def slice_nbytes(i: int) -> int:
        return math.prod(cuts[i][1]) * layouts[i].dtype.itemsize

    def turn(members: list[int]) -> Any:
        """What leaves no choice goes first, then the largest slices."""
        i = members[0]
        return math.prod(cuts[i][0]) * len(members) % layouts[i].replicas != 0, -slice_nbytes(i), layouts[i].name

    for members in sorted(groups.values(), key=turn):
        layout, slices = layouts[members[0]], math.prod(cuts[members[0]][0])
        if options.enable:
            dealt = loads.deal(layout, slices * len(members), slice_nbytes(members[0]))
        else:
            dealt = loads.give_to_first(layout, slices * len(members), slice_nbytes(members[0]))
        for k, i in enumerate(members):
            owners[i] = dealt[k * slices : (k + 1) * slices]
    leaves = tuple(
        LeafPlan(layout, chunk, grid, own) for layout, (grid, chunk), own in zip(layouts, cuts, owners, strict=True)
    )
    return SavePlan(leaves, *loads.totals())


def layout_of(name: str, value: Any) -> LeafLayout:
    """What planning needs to know of an array or a `jax.ShapeDtypeStruct`.

    Raises:
      UnsupportedLeafError: The sharding has `unreduced` axes, whose shards are only parts of a sum, or is that of
        `jax.pmap`, whose leading axis would store the replicas' copies as if they were data.
    """
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    sharding = getattr(value, "sharding", None)
    order = tuple(range(len(shape)))
    if isinstance(value, np.ndarray):
        return LeafLayout(name, shape, dtype, spec=((),) * len(shape), major_to_minor=order)
    if isinstance(value, jax.Array):
        order = tuple(getattr(value, "format").layout.major_to_minor)  # noqa: B009 - not declared in jax's stubs
    if sharding is None:
        return LeafLayout(name, shape, dtype, None, ((),) * len(shape), (0, 0), order)
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        if jax.process_count() > 1:  # each process has its own: process 0 saves it, like a host value
            return LeafLayout(name, shape, dtype, None, ((),) * len(shape), None, order)
        return LeafLayout(name, shape, dtype, None, ((),) * len(shape), (device.id, device.process_index), order)
    named = as_named_sharding(sharding, shape)
    if getattr(named.spec, "unreduced", None):
        raise UnsupportedLeafError(
            f"leaf {name!r} is sharded {named.spec}: its unreduced axes hold parts of a sum, which cannot be stored; "
            "reduce it first."
        )
    if _PMAP_AXES & {str(axis) for axis in named.mesh.axis_names}:
        raise UnsupportedLeafError(
            f"leaf {name!r} of shape {list(shape)} has the layout of jax.pmap: an entry a device along the first axis, "
            "so every replica would be stored as data. Pass one entry (`flax.jax_utils.unreplicate(state)`); what "
            "differs between the devices, put into a jax.jit sharding first."
        )
    parts = [(p,) if isinstance(p, str) else tuple(p) if p else () for p in named.spec]
    spec = tuple(parts + [()] * (len(shape) - len(parts)))
    return LeafLayout(name, shape, dtype, MeshLayout.of(named.mesh), spec, None, order)


@functools.lru_cache(maxsize=4096)
def as_named_sharding(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding as a `NamedSharding`, over a mesh made for it where it is of another kind.

    The made mesh has an axis for each dimension and a last one for the replicas; every device keeps its shard.
    """
    if isinstance(sharding, NamedSharding):
        return sharding
    holders: dict[tuple[int, ...], list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(tuple(s.start or 0 for s in index), []).append(device)
    counts = [len({start[d] for start in holders}) for d in range(len(shape))]
    devices = np.array([holders[start] for start in sorted(holders)]).reshape(*counts, -1)
    names = [f"dim{d}" for d in range(len(shape))]
    return NamedSharding(Mesh(devices, (*names, "replica")), PartitionSpec(*names))


class _Loads:
    """Bytes dealt out so far, by device."""

    def __init__(self, layouts: Sequence[LeafLayout]):
        process_of = dict(layout.device for layout in layouts if layout.device is not None)
        for mesh in {layout.mesh for layout in layouts if layout.mesh is not None}:
            process_of.update(zip(mesh.device_ids, mesh.processes, strict=True))
        self._ids = sorted(process_of)
        self._at = {device: i for i, device in enumerate(self._ids)}
        hosts_values = any(layout.mesh is None and layout.device is None for layout in layouts)
        self._processes = sorted({*process_of.values(), *([0] if hosts_values or not process_of else [])})
        process_at = {process: i for i, process in enumerate(self._processes)}
        self._process_at = np.array([process_at[process_of[i]] for i in self._ids], np.int64)
        self._bytes = np.zeros(len(self._ids), np.int64)
        self._host_bytes = 0
        self._places: dict[Any, np.ndarray] = {}

    def deal(self, layout: LeafLayout, slices: int, nbytes: int) -> np.ndarray:
        """Gives out `slices` slices of `nbytes` each; returns the replica of each, shape (slices,)."""
        if layout.mesh is None:
            return self.give_to_first(layout, slices, nbytes)
        places = self._places_of(layout)
        rounds, left = divmod(slices, layout.replicas)
        owners = np.arange(slices) % layout.replicas
        self._bytes[places.ravel()] += rounds * nbytes
        if left:
            chosen = self._least_loaded(places)[:left]
            owners[slices - left :] = chosen
            self._bytes[places[chosen].ravel()] += nbytes
        return owners

    def give_to_first(self, layout: LeafLayout, slices: int, nbytes: int) -> np.ndarray:
        """Gives all of the slices to replica 0, or to the one device or the host that has the leaf."""
        if layout.mesh is not None:
            self._bytes[self._places_of(layout)[0]] += slices * nbytes
        elif layout.device is not None:
            self._bytes[self._at[layout.device[0]]] += slices * nbytes
        else:
            self._host_bytes += slices * nbytes
        return np.zeros(slices, np.int64)

    def totals(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes by device id and by process."""
        process_bytes = dict(zip(self._processes, self._by_process().tolist(), strict=True))
        return dict(zip(self._ids, self._bytes.tolist(), strict=True)), process_bytes

    def _by_process(self) -> np.ndarray:
        by_process = np.bincount(self._process_at, self._bytes, len(self._processes)).astype(np.int64)
        by_process[0] += self._host_bytes  # where there are any, process 0 is the first
        return by_process

    def _places_of(self, layout: LeafLayout) -> np.ndarray:
        """Positions in the load table, shape (replicas, shards)."""
        assert layout.mesh is not None
        key = (layout.mesh, layout.replica_axes)
        if key not in self._places:
            ids = np.array([self._at[i] for i in layout.mesh.device_ids], np.int64)
            self._places[key] = ids[layout.devices_by_replica()]
        return self._places[key]

    def _least_loaded(self, places: np.ndarray) -> np.ndarray:
        """Replicas in the order in which they should get one more slice of every shard."""
        device_load = self._bytes[places].sum(axis=1)
        processes = self._process_at[places]
        process_load = self._by_process()[processes].sum(axis=1)
        # The n-th best replica of each process comes before the (n+1)-th best of any.
        order = np.lexsort((device_load, process_load, processes[:, 0]))
        first = np.r_[True, processes[order, 0][1:] != processes[order, 0][:-1]]
        starts = np.flatnonzero(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        return np.lexsort((np.arange(len(order)), device_load, process_load, rank))


def _cut(layout: LeafLayout, options: ReplicaParallelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(grid, chunk shape) of a leaf's shards."""
    shard = layout.shard_shape
    ones = (1,) * len(shard)
    nbytes = math.prod(shard) * layout.dtype.itemsize
    if nbytes == 0:
        return tuple(1 if n else 0 for n in shard), tuple(max(1, n) for n in shard)
    w = min(layout.replicas, options.max_replicas or layout.replicas, max(1, nbytes // max(1, options.min_slice_bytes)))
    if not options.enable or w == 1:
        return ones, shard
    return _best_cut(shard, tuple(n > 1 for n in layout.shards), layout.major_to_minor, w)


@functools.lru_cache(maxsize=65536)
def _best_cut(
    shard: tuple[int, ...], sharded: tuple[bool, ...], order: tuple[int, ...], w: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def cut(parts: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        grid, chunk = [], []
        for d, n in enumerate(shard):
            k = min(parts.get(d, 1), n)
            if sharded[d]:
                k = max(g for g in range(1, k + 1) if n % g == 0)
            c = -(-n // k)
            chunk.append(c)
            grid.append(-(-n // c))
        return tuple(grid), tuple(chunk)

    def balance(chunk: tuple[int, ...]) -> float:
        return math.prod(shard) / (math.prod(chunk) * w)

    single = [cut({d: w}) for d in order]
    for good in _GOOD_BALANCE:
        for candidate in single:
            if balance(candidate[1]) >= good:
                return candidate
    several = [
        cut({a: k, b: w // k}) for a, b in itertools.combinations(order, 2) for k in range(2, w // 2 + 1) if w // k > 1
    ]
    usable = [c for c in [cut({}), *single, *several] if math.prod(c[0]) <= w]
    return max(usable, key=lambda c: (round(balance(c[1]), 6), -math.prod(c[0])))


def _balance(nbytes: Mapping[int, int]) -> float:
    total = sum(nbytes.values())
    return max(nbytes.values()) * len(nbytes) / total if total else 1.0


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
