"""Copies of the owner slices: taken on the devices by compiled programs, read on the host in the background.

`take` runs in the train loop's thread. It dispatches one program for all leaves on a mesh (one more for each further
mesh or single device) and returns; the runtime orders the copies before any later donation of the same buffers, so the
state may be donated at once. `Snapshot.pieces` runs in the writer's thread and waits for the copies.

A program is a `shard_map` in which every device copies the slices that the plan gave it. All devices run the same
code, so what differs between them comes from tables indexed by `axis_index`: in *round* k each replica takes its k-th
slice of a group of equal leaves (a `switch` over the leaf, a `dynamic_slice` at its start), and slices that are whole
small shards are *packed*: each replica's are flattened into one vector. Nothing is copied that need not be: the outputs
hold 1/R of the state, but for what idle replicas copy in the last round of a group.

The previous snapshot's arrays are donated to the next program, which writes into their memory: staging memory is
touched for the first time only once. On accelerators they are dropped instead, so that the memory is the user's again
between saves. NumPy, host-memory and sub-byte leaves are copied in the call.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_rpsave.leaves import Leaf
from flax_rpsave.planner import LeafPlan, MeshLayout, SavePlan, as_named_sharding

_PACK_NBYTES = 4 << 20  # whole shards up to this size are packed, into vectors of about this size
_SUB_BYTE_DTYPES = ("int2", "int4", "float4_e2m1fn")
_PROGRAM_LEAVES = 512  # compile time grows faster than the number of leaves in a program


@dataclass(frozen=True)
class Piece:
    """One chunk, on the host.

    Attributes:
      leaf: Index of its leaf.
      chunk: Its index in the leaf's chunk grid.
      data: The values, C-contiguous or a view of the staging memory, without padding.
    """

    leaf: int
    chunk: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class _Item:
    """A slice within an output: which leaf, which slice of its shard, where in a packed vector."""

    leaf: int
    t: int
    offset: int = 0


@dataclass(frozen=True)
class _Output:
    """One output array of a program: for each replica the items that its device copies.

    An item list holds one slice, or (packed) several whole shards. An empty list: the replica copies something that
    nobody reads.
    """

    shape: tuple[int, ...]
    dtype: Any
    packed: bool
    items: tuple[tuple[_Item, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass
class _Program:
    """The outputs taken from the leaves of one mesh (or one device) with one set of replica axes."""

    mesh: Mesh | None
    device: Any
    replica_axes: tuple[str, ...]
    leaves: tuple[int, ...]
    outputs: tuple[_Output, ...]
    staging: list[jax.Array] | None = None
    executable: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Staging bytes on one device."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Snapshot:
    """Owner slices on their way to the host."""

    plan: SavePlan
    _host: tuple[Piece, ...]
    _taken: list[tuple[_Program, list[jax.Array]]] = field(repr=False)

    def pieces(self) -> Iterator[Piece]:
        """The chunks that this process saves; waits for each copy. Consumes the snapshot."""
        yield from self._host
        while self._taken:
            program, arrays = self._taken.pop()
            for output, array in zip(program.outputs, arrays, strict=True):
                yield from _pieces_of(self.plan, program, output, array)

    def wait(self) -> None:
        """Returns once the copies on the devices are done."""
        jax.block_until_ready([arrays for _, arrays in self._taken])


class Snapshotter:
    """Takes snapshots of states of one structure; keeps programs and staging memory between them.

    Args:
      plan: The plan of the state.
      leaves: Leaves of the state; may be abstract. Those without an array are ignored.
      process: This process's index.
      max_nbytes: Bytes of staging memory that this process may hold; None for what the state needs.
    """

    def __init__(self, plan: SavePlan, leaves: Sequence[Leaf], process: int, max_nbytes: int | None = None):
        self.plan = plan
        self._leaves = [leaf.without_values() for leaf in leaves]  # no snapshotter keeps a state alive
        self._process = process
        self._on_host = [i for i, leaf in enumerate(leaves) if _stays_on_host(leaf.value)]
        programs = _programs(plan, self._leaves, set(self._on_host))
        self._groups = _by_budget(programs, max_nbytes)

    @property
    def groups(self) -> int:
        """How many groups a save takes: 1, or more where `max_nbytes` is less than the owner slices."""
        return max(1, len(self._groups))

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory that this process holds while a group is saved."""
        return max((sum(map(_local_nbytes, group)) for group in self._groups), default=0)

    def compile(self) -> None:
        """Compiles what is not compiled yet. Safe to call from another thread, ahead of the first save."""
        for group in self._groups:
            for program in group:
                self._executable(program)

    def take(self, leaves: Sequence[Leaf], group: int) -> Snapshot:
        """Dispatches the copies of one group; the first group has the host values too."""
        taken = []
        for program in self._groups[group] if self._groups else []:
            executable = self._executable(program)
            staging, program.staging = program.staging, None
            arrays = executable(staging if staging is not None else _new_staging(program), _arguments(program, leaves))
            if _platform(program) != "cpu":
                for array in arrays:
                    array.copy_to_host_async()
            elif len(self._groups) == 1:
                program.staging = arrays
            taken.append((program, list(arrays)))
        host = tuple(self._host_pieces(leaves)) if group == 0 else ()
        return Snapshot(self.plan, host, taken)

    def _executable(self, program: _Program) -> Any:
        with program.lock:
            if program.executable is None:
                program.executable = _lower(self.plan, program, self._leaves).compile()
            return program.executable

    def _host_pieces(self, leaves: Sequence[Leaf]) -> Iterator[Piece]:
        """Copies of the host values (process 0 saves them) and of slices in host memory beside a device."""
        for i in self._on_host:
            plan, value = self.plan.leaves[i], leaves[i].value
            if isinstance(value, np.ndarray):
                if self._process == 0 and plan.slices:
                    yield Piece(i, (0,) * value.ndim, np.array(value, order="C", copy=True))
                continue
            for shard in value.addressable_shards:
                replica, shard_index = _place(plan, shard.device.id)
                mine = [t for t, owner in enumerate(plan.owners) if owner == replica]
                data = np.array(shard.data, order="C", copy=True) if mine else None
                for t in mine:
                    assert data is not None
                    box = [slice(o, o + c) for o, c in zip(plan.start(t), plan.chunk_shape, strict=True)]
                    piece = _piece(plan, _Item(i, t), shard_index, data, packed=False)
                    yield Piece(i, piece.chunk, data[tuple(box)])


def _stays_on_host(value: Any) -> bool:
    """Whether a leaf is copied by the host.

    So are NumPy values, arrays that live in host memory beside a device, and elements of less than a byte, of which a
    program compiled ahead of time reports another memory layout than the arrays have (jax 0.10 to 0.12).
    """
    if isinstance(value, np.ndarray) or value.dtype.name in _SUB_BYTE_DTYPES:
        return True
    sharding = value.sharding
    if sharding is None:
        return False
    device = next(iter(sharding.device_set))
    return sharding.memory_kind is not None and sharding.memory_kind != device.default_memory().kind


def _programs(plan: SavePlan, leaves: Sequence[Leaf], on_host: set[int]) -> list[_Program]:
    by_place: dict[tuple[Mesh | None, Any, tuple[str, ...]], list[int]] = {}
    for i, leaf in enumerate(plan.leaves):
        if i in on_host or not leaf.slices:
            continue
        sharding = leaves[i].value.sharding
        if leaf.layout.mesh is not None:
            leaf_mesh = as_named_sharding(sharding, leaf.layout.shape).mesh
            assert isinstance(leaf_mesh, Mesh)
            by_place.setdefault((leaf_mesh, None, leaf.layout.replica_axes), []).append(i)
        else:
            device = next(iter(sharding.device_set)) if sharding is not None else jax.local_devices()[0]
            if leaf.layout.device is None and jax.process_index() > 0:
                continue  # every process has such a leaf for itself: process 0 saves its own
            by_place.setdefault((None, device, ()), []).append(i)
    programs = []
    for (on_mesh, device, axes), members in by_place.items():
        mesh = on_mesh
        if mesh is not None and axes and not any(plan.leaves[i].owners.any() for i in members):
            mesh, axes = _first_replicas(mesh, axes), ()  # the other replicas would only copy for nothing
        if not (mesh.local_devices if mesh is not None else device.process_index == jax.process_index()):
            continue
        members.sort(key=lambda i: (plan.leaves[i].layout.shape, plan.leaves[i].layout.dtype.name))
        for k in range(0, len(members), _PROGRAM_LEAVES):
            part = members[k : k + _PROGRAM_LEAVES]
            outputs = _outputs(plan, part, math.prod(mesh.shape[a] for a in axes) if mesh is not None else 1)
            programs.append(_Program(mesh, device, axes, tuple(part), tuple(outputs)))
    return programs


def _first_replicas(mesh: Mesh, replica_axes: tuple[str, ...]) -> Mesh:
    """The part of a mesh that holds replica 0 of each shard."""
    first = tuple(slice(0, 1) if axis in replica_axes else slice(None) for axis in mesh.axis_names)
    return Mesh(mesh.devices[first], mesh.axis_names)


def _outputs(plan: SavePlan, members: Sequence[int], replicas: int) -> list[_Output]:
    """The rounds and packed vectors of some leaves, for the first `replicas` replicas."""
    rounds: dict[Any, list[int]] = {}
    packs: dict[Any, list[int]] = {}
    for i in members:
        leaf = plan.leaves[i]
        if leaf.slices == 1 and leaf.slice_nbytes <= _PACK_NBYTES:
            packs.setdefault(leaf.layout.dtype, []).append(i)
        else:
            rounds.setdefault((leaf.layout.shard_shape, leaf.chunk_shape, leaf.layout.dtype), []).append(i)
    outputs = []
    for (_, chunk, dtype), group in rounds.items():
        queues = _queues(plan, [(i, t) for i in group for t in range(plan.leaves[i].slices)], replicas)
        for k in range(max(map(len, queues))):
            items = tuple((_Item(*queue[k]),) if k < len(queue) else () for queue in queues)
            outputs.append(_Output(chunk, dtype, False, items))
    for dtype, group in packs.items():
        vectors = [_cut_queue(plan, queue) for queue in _queues(plan, [(i, 0) for i in group], replicas)]
        for k in range(max(map(len, vectors))):
            packed = [_packed(plan, vector[k] if k < len(vector) else ()) for vector in vectors]
            length = max(length for length, _ in packed)
            outputs.append(_Output((length,), dtype, True, tuple(items for _, items in packed)))
    return outputs


def _packed(plan: SavePlan, slices: Sequence[tuple[int, int]]) -> tuple[int, tuple[_Item, ...]]:
    """(elements, items) of a vector that holds these slices one after the other."""
    length, items = 0, []
    for i, t in slices:
        items.append(_Item(i, t, length))
        length += math.prod(plan.leaves[i].chunk_shape)
    return length, tuple(items)


def _queues(plan: SavePlan, slices: Sequence[tuple[int, int]], replicas: int) -> list[list[tuple[int, int]]]:
    """For each replica the slices that it owns."""
    queues: list[list[tuple[int, int]]] = [[] for _ in range(replicas)]
    for i, t in slices:
        queues[plan.leaves[i].owners[t]].append((i, t))
    return queues


def _cut_queue(plan: SavePlan, queue: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """A replica's small slices in vectors of about `_PACK_NBYTES`."""
    vectors: list[list[tuple[int, int]]] = []
    room = 0
    for item in queue:
        nbytes = plan.leaves[item[0]].slice_nbytes
        if nbytes > room:
            vectors.append([])
            room = _PACK_NBYTES
        vectors[-1].append(item)
        room -= nbytes
    return [tuple(vector) for vector in vectors]


def _by_budget(programs: Sequence[_Program], max_nbytes: int | None) -> list[list[_Program]]:
    """Programs, cut where needed, in groups whose staging memory fits the budget (or that have one output)."""
    if max_nbytes is None:
        return [list(programs)] if programs else []
    groups: list[list[_Program]] = []
    room = 0
    for program in programs:
        copies = max(1, _local_nbytes(program) // max(1, program.nbytes))
        for output in program.outputs:
            nbytes = output.nbytes * copies
            leaves = tuple(sorted({item.leaf for items in output.items for item in items}))
            if not groups or nbytes > room:
                groups.append([])
                room = max_nbytes
            room -= nbytes
            place = (program.mesh, program.device, program.replica_axes)
            last = groups[-1][-1] if groups[-1] else None
            if last is not None and (last.mesh, last.device, last.replica_axes) == place:
                last.outputs = (*last.outputs, output)
                last.leaves = tuple(sorted({*last.leaves, *leaves}))
            else:
                groups[-1].append(_Program(*place, leaves, (output,)))
    return groups


def _local_nbytes(program: _Program) -> int:
    if program.mesh is None:
        return program.nbytes
    return program.nbytes * len(program.mesh.local_devices)


def _platform(program: _Program) -> str:
    device = program.device if program.mesh is None else program.mesh.devices.flat[0]
    return str(device.platform)


def _arguments(program: _Program, leaves: Sequence[Leaf]) -> list[Any]:
    arguments = []
    for i in program.leaves:
        value = leaves[i].value
        if program.mesh is not None:
            sharding = as_named_sharding(value.sharding, tuple(value.shape))
            if sharding.mesh != program.mesh:
                sharding = NamedSharding(program.mesh, sharding.spec)
            if sharding is not value.sharding:
                value = _under(value, sharding)
        arguments.append(value)
    return arguments


def _under(value: Any, sharding: NamedSharding) -> Any:
    """The same buffers, or some of them, under another sharding that leaves every shard on its device."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    shards = [shard.data for shard in value.addressable_shards if shard.device in sharding.device_set]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def _staging_shape(program: _Program, output: _Output) -> tuple[tuple[int, ...], Any]:
    if program.mesh is None:
        return (1, *output.shape), SingleDeviceSharding(program.device)
    names = program.mesh.axis_names
    return (program.mesh.size, *output.shape), NamedSharding(program.mesh, PartitionSpec(names))


def _abstract_staging(program: _Program) -> list[Any]:
    shapes = [_staging_shape(program, output) for output in program.outputs]
    return [
        jax.ShapeDtypeStruct(shape, output.dtype, sharding=sharding)
        for output, (shape, sharding) in zip(program.outputs, shapes, strict=True)
    ]


def _new_staging(program: _Program) -> list[jax.Array]:
    """Staging memory for the first snapshot, made on every device by one small program."""
    shapes = [_staging_shape(program, output) for output in program.outputs]
    dtypes = [output.dtype for output in program.outputs]

    def empty() -> list[jax.Array]:
        return [jnp.empty(shape, dtype) for (shape, _), dtype in zip(shapes, dtypes, strict=True)]

    return list(jax.jit(empty, out_shardings=[sharding for _, sharding in shapes])())


def _recipe(plan: SavePlan, program: _Program) -> tuple[Any, ...]:
    """What a program does, by argument position: equal recipes share their compiled code.

    For each output (shape, packed, for each replica its copies), a copy being (argument, start in the shard).
    """
    position = {i: k for k, i in enumerate(program.leaves)}
    return tuple(
        (
            output.shape,
            output.packed,
            tuple(tuple((position[item.leaf], plan.leaves[item.leaf].start(item.t)) for item in items)
                  for items in output.items),
        )
        for output in program.outputs
    )  # fmt: skip


def _lower(plan: SavePlan, program: _Program, leaves: Sequence[Leaf]) -> Any:
    specs = tuple(PartitionSpec(*(axes or None for axes in plan.leaves[i].layout.spec)) for i in program.leaves)
    function = _jitted(program.mesh, program.replica_axes, specs, _recipe(plan, program))
    with jax.set_mesh(program.mesh) if program.mesh is not None else nullcontext():
        return function.lower(_abstract_staging(program), _arguments(program, leaves))


@functools.lru_cache(maxsize=256)
def _jitted(mesh: Mesh | None, replica_axes: tuple[str, ...], specs: tuple[Any, ...], recipe: tuple[Any, ...]) -> Any:
    def copy(staging: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> list[jax.Array]:
        del staging  # donated: its memory takes the outputs
        replica = jax.lax.axis_index(replica_axes) if replica_axes else 0
        return [_copied(shape, packed, copies, replica, leaves)[None] for shape, packed, copies in recipe]

    if mesh is not None:
        everywhere = PartitionSpec(mesh.axis_names)
        copy = jax.shard_map(copy, mesh=mesh, in_specs=(everywhere, list(specs)), out_specs=everywhere, check_vma=False)
    return jax.jit(copy, donate_argnums=0, keep_unused=True)


def _copied(shape: tuple[int, ...], packed: bool, copies: Any, replica: Any, leaves: Sequence[jax.Array]) -> Any:
    """What a replica puts into one output."""
    busy = next(c for c in copies if c)
    if packed:

        def vector(items: Any) -> Any:
            def concatenated() -> jax.Array:
                flat = jnp.concatenate([leaves[argument].ravel() for argument, _ in items])
                return jnp.pad(flat, (0, shape[0] - flat.size))

            return concatenated

        branches = [vector(items or busy) for items in copies]
        return branches[0]() if len(branches) == 1 else jax.lax.switch(replica, branches)
    taken = [(items or busy)[0] for items in copies]
    window = sorted({argument for argument, _ in taken})
    which = jnp.array([window.index(argument) for argument, _ in taken], jnp.int32)[replica]
    start = jnp.array([start for _, start in taken], jnp.int32)[replica]

    def slice_of(leaf: jax.Array) -> Any:
        if leaf.shape == shape:
            return lambda start: leaf
        # Clamped at the end of the shard: the edge slice comes with elements before it, which `_pieces_of` trims.
        return lambda start: jax.lax.dynamic_slice(leaf, [start[d] for d in range(leaf.ndim)], shape)

    branches = [slice_of(leaves[argument]) for argument in window]
    return branches[0](start) if len(branches) == 1 else jax.lax.switch(which, branches, start)


def _pieces_of(plan: SavePlan, program: _Program, output: _Output, array: jax.Array) -> Iterator[Piece]:
    """The chunks in one output array, as views of its memory on the CPU."""
    for shard in array.addressable_shards:
        data: np.ndarray | None = None
        for owner, items in enumerate(output.items):
            for item in items:
                leaf = plan.leaves[item.leaf]
                replica, shard_index = _place(leaf, shard.device.id)
                if replica != owner:
                    break
                data = np.asarray(shard.data)[0] if data is None else data
                yield _piece(leaf, item, shard_index, data, output.packed)


def _piece(leaf: LeafPlan, item: _Item, shard_index: tuple[int, ...], data: np.ndarray, packed: bool) -> Piece:
    chunk_shape, shard_shape = leaf.chunk_shape, leaf.layout.shard_shape
    start = leaf.start(item.t)
    chunk = tuple(
        s * (n // c) + o // c for s, n, c, o in zip(shard_index, shard_shape, chunk_shape, start, strict=True)
    )
    if packed:
        size = math.prod(chunk_shape)
        return Piece(item.leaf, chunk, data[item.offset : item.offset + size].reshape(chunk_shape))
    valid = tuple(slice(max(0, o + c - n), c) for o, c, n in zip(start, chunk_shape, shard_shape, strict=True))
    return Piece(item.leaf, chunk, data[valid])


def _place(leaf: LeafPlan, device: int) -> tuple[int, tuple[int, ...]]:
    """(replica, index of the shard along each dimension) of what a device holds."""
    layout = leaf.layout
    if layout.mesh is None:
        return 0, (0,) * len(layout.shape)
    return _place_in_mesh(layout.mesh, layout.replica_axes, layout.spec, device)


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
