"""The compiled programs that copy owner slices on the devices: what each copies, and how it is compiled.

A program is a `shard_map` in which every device copies the slices that the plan gave it. All devices run the same
code, so what differs between them comes from tables indexed by `axis_index`: in *round* k each replica takes its k-th
slice of a group of equal leaves (a `switch` over the leaf, a `dynamic_slice` at its start), and slices that are whole
small shards are *packed*: each replica's are flattened into one vector. Where each process has one device of a mesh, it
runs a program on that device alone, for one replica: without tables it compiles several times as fast. Nothing is
copied that need not be: the outputs hold 1/R of the state, but for what idle replicas copy in the last round of a
group. Bits are copied, not numbers: XLA may compute with short floats in a longer type, which changes NaNs. Programs
are compiled and called under settings of their own (`own_settings`), so the ambient mesh and the debugging flags of the
train loop do not matter.

Where replicas are to be compared, every device also takes a fingerprint of each of its shards, in the same program.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_rpsave import fingerprints
from flax_rpsave.leaves import Leaf
from flax_rpsave.planner import SavePlan, as_named_sharding

_PACK_NBYTES = 4 << 20  # whole shards up to this size are packed, into vectors of about this size
_PROGRAM_LEAVES = 512  # compile time grows faster than the number of leaves in a program


@dataclass(frozen=True)
class Item:
    """A slice within an output: which leaf, which slice of its shard, where in a packed vector."""

    leaf: int
    t: int
    offset: int = 0


@dataclass(frozen=True)
class Output:
    """One output array of a program: for each replica the items that its device copies.

    An item list holds one slice, or (packed) several whole shards. An empty list: the replica copies something that
    nobody reads.
    """

    shape: tuple[int, ...]
    dtype: Any
    packed: bool
    items: tuple[tuple[Item, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass
class Program:
    """The outputs taken from the leaves of one mesh (or one device: a mesh of one) with one set of replica axes.

    Of the leaves in `compared` every device takes a fingerprint as well.

    Attributes:
      mesh: The devices that run it: those of the leaves, the first replicas, or this process's only device; its axes
        are those of the leaves' mesh, some of them shorter.
      replica_axes: The axes along which its replicas lie; none where it runs on one replica.
      replica: Which one, where it runs on this process's only device alone.
      leaves: Indices in the plan.
    """

    mesh: Mesh
    replica_axes: tuple[str, ...]
    replica: int | None
    leaves: tuple[int, ...]
    outputs: tuple[Output, ...]
    compared: tuple[int, ...] = ()
    layouts: tuple[Layout | None, ...] = ()
    staging: list[jax.Array] | None = None
    taken: bool = False
    executables: tuple[Any, Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def own_settings(mesh: Mesh) -> Iterator[None]:
    """Keeps what the caller's thread has set from changing what a program computes, refuses or runs on.

    The ambient mesh must be the program's own; 64-bit arrays may come from an `enable_x64` block that has ended, and
    uninitialised staging memory or a state with NaNs is no bug to stop at.
    """
    with (
        jax.set_mesh(mesh),
        jax.enable_x64(True),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def build_programs(
    plan: SavePlan, leaves: Sequence[Leaf], on_host: set[int], compared: Collection[int] = ()
) -> list[Program]:
    """The programs that this process takes part in, for all leaves that are not `on_host`.

    Those that are `compared` are fingerprinted on every device that holds a shard.
    """
    by_place: dict[tuple[Mesh, tuple[str, ...], bool], list[int]] = {}
    for i, leaf in enumerate(plan.leaves):
        # Of a leaf that every process has for itself, process 0 saves its own.
        saved = leaf.layout.mesh is not None or leaf.layout.device is not None or jax.process_index() == 0
        if i not in on_host and leaf.slices and (saved or i in compared):
            mesh = _named(leaves[i].value).mesh
            assert isinstance(mesh, Mesh)
            by_place.setdefault((mesh, leaf.layout.replica_axes, saved), []).append(i)
    programs: list[Program] = []
    for (mesh, axes, saved), members in by_place.items():
        members.sort(key=lambda i: (plan.leaves[i].layout.shape, plan.leaves[i].layout.dtype.name))
        to_compare = [i for i in members if i in compared]
        if not saved:
            programs += _cut_programs(plan, mesh, axes, [], to_compare)
        elif axes and not any(plan.leaves[i].owners.any() for i in members):
            # The other replicas would only copy for nothing.
            programs += _cut_programs(plan, _first_replicas(mesh, axes), (), members, [])
            programs += _cut_programs(plan, mesh, axes, [], to_compare)
        else:
            programs += _cut_programs(plan, mesh, axes, members, to_compare)
    return programs


def _cut_programs(
    plan: SavePlan, mesh: Mesh, axes: tuple[str, ...], saved: Sequence[int], compared: Sequence[int]
) -> Iterator[Program]:
    """Programs of at most `_PROGRAM_LEAVES` leaves, all of which are saved, or none."""
    members, wanted = saved or compared, set(compared)
    if not members or not mesh.local_devices:
        return
    replicas, replica = math.prod(mesh.shape[a] for a in axes), None
    layout = plan.leaves[members[0]].layout
    if mesh.size > 1 and layout.mesh is not None and most_of_a_process(layout.mesh.processes) == 1:
        (device,) = mesh.local_devices
        mesh, axes = Mesh(np.array(device, ndmin=mesh.devices.ndim), mesh.axis_names), ()
        replica, _ = layout.place(device.id)
    for k in range(0, len(members), _PROGRAM_LEAVES):
        part = members[k : k + _PROGRAM_LEAVES]
        outputs = _outputs(plan, part, replicas) if saved else []
        yield Program(mesh, axes, replica, tuple(part), tuple(outputs), tuple(i for i in part if i in wanted))


def _named(value: Any) -> NamedSharding:
    """The sharding over a mesh; for what lies on a single device (or anywhere) a mesh of one."""
    sharding = value.sharding
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        device = next(iter(sharding.device_set)) if sharding is not None else jax.local_devices()[0]
        return NamedSharding(_mesh_of_one(device), PartitionSpec())
    return as_named_sharding(sharding, tuple(value.shape))


@functools.cache
def _mesh_of_one(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]), ("device",))


def _first_replicas(mesh: Mesh, replica_axes: tuple[str, ...]) -> Mesh:
    """The part of a mesh that holds replica 0 of each shard."""
    first = tuple(slice(0, 1) if axis in replica_axes else slice(None) for axis in mesh.axis_names)
    return Mesh(mesh.devices[first], mesh.axis_names)


def _outputs(plan: SavePlan, members: Sequence[int], replicas: int) -> list[Output]:
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
            items = tuple((Item(*queue[k]),) if k < len(queue) else () for queue in queues)
            outputs.append(Output(chunk, dtype, False, items))
    for dtype, group in packs.items():
        vectors = [_cut_queue(plan, queue) for queue in _queues(plan, [(i, 0) for i in group], replicas)]
        for k in range(max(map(len, vectors))):
            packed = [_packed(plan, vector[k] if k < len(vector) else ()) for vector in vectors]
            length = max(length for length, _ in packed)
            outputs.append(Output((length,), dtype, True, tuple(items for _, items in packed)))
    return outputs


def _packed(plan: SavePlan, slices: Sequence[tuple[int, int]]) -> tuple[int, tuple[Item, ...]]:
    """(elements, items) of a vector that holds these slices one after the other."""
    length, items = 0, []
    for i, t in slices:
        items.append(Item(i, t, length))
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


def group_by_budget(programs: Sequence[Program], max_nbytes: int | None, begun: Sequence[int]) -> list[list[Program]]:
    """Programs, cut where needed, in groups whose staging memory fits the budget (or that have one output).

    The groups are the same in every process: those of a mesh of several take the same outputs in the same order.

    Args:
      programs: The programs.
      max_nbytes: The budget in bytes a process; None sets none: all programs are one group.
      begun: Bytes that each of the first groups, at least one, holds already. The programs go on in the last of these.
    """
    if max_nbytes is None:
        return [list(programs)]
    groups: list[list[Program]] = [[] for _ in begun]
    room = max_nbytes - begun[-1]
    for program in programs:
        copies = most_of_a_process(device.process_index for device in program.mesh.devices.flat)
        part: Program | None = None  # what of this program is in the last group
        left = list(program.compared)  # each is fingerprinted with the first of its slices
        batches: list[tuple[Output, ...]] = [(output,) for output in program.outputs]
        for outputs in batches or [()]:
            nbytes = sum(output.nbytes for output in outputs) * copies
            leaves = {item.leaf for output in outputs for items in output.items for item in items} or set(left)
            if nbytes > room and room < max_nbytes:
                groups.append([])
                room, part = max_nbytes, None
            room -= nbytes
            if part is None:
                part = Program(program.mesh, program.replica_axes, program.replica, (), ())
                groups[-1].append(part)
            part.outputs = (*part.outputs, *outputs)
            part.leaves = tuple(sorted(leaves.union(part.leaves)))
            part.compared = (*part.compared, *(i for i in left if i in leaves))
            left = [i for i in left if i not in leaves]
    return groups


def most_of_a_process(processes: Iterable[int]) -> int:
    """Of devices, each told by its process, how many the process has that has most of them."""
    return max(Counter(processes).values())


def memory_layouts(program: Program, arrays: Sequence[Any]) -> tuple[Layout | None, ...]:
    """The memory layout of each of the program's leaves; None for the usual one."""
    layouts = []
    for i in program.leaves:
        layout: Any = arrays[i].format.layout
        usual = layout is None or tuple(layout.major_to_minor) == tuple(range(len(arrays[i].shape)))
        layouts.append(None if usual else layout)
    return tuple(layouts)


def arguments(program: Program, arrays: Sequence[Any]) -> list[Any]:
    """The program's leaves as arrays on its mesh, or on its only device: the same buffers, or those that it needs."""
    if program.replica is not None:
        return [arrays[i].addressable_data(0) for i in program.leaves]
    arguments = []
    for i in program.leaves:
        value = arrays[i]
        sharding = value.sharding  # asked once: each time makes another object
        if not isinstance(sharding, NamedSharding) or sharding.mesh != program.mesh:
            sharding = NamedSharding(program.mesh, _named(value).spec)
            shards = [shard.data for shard in value.addressable_shards if shard.device in sharding.device_set]
            value = jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
        arguments.append(value)
    return arguments


def _abstract_arguments(program: Program, leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    arguments = []
    for i, layout in zip(program.leaves, program.layouts, strict=True):
        value, named = leaves[i].value, _named(leaves[i].value)
        sharding = NamedSharding(program.mesh, named.spec)
        place: Any = sharding if layout is None else Format(layout, sharding)
        shape = value.shape if program.replica is None else named.shard_shape(value.shape)
        arguments.append(jax.ShapeDtypeStruct(shape, value.dtype, sharding=place))
    return arguments


def _abstract_staging(program: Program) -> list[jax.ShapeDtypeStruct]:
    everywhere = NamedSharding(program.mesh, PartitionSpec(program.mesh.axis_names))
    return [
        jax.ShapeDtypeStruct((program.mesh.size, *output.shape), _bits_dtype(output.dtype), sharding=everywhere)
        for output in program.outputs
    ]


def _bits_dtype(dtype: Any) -> Any:
    """The type under which the bits of elements travel."""
    short_float = dtype.kind in "fV" and dtype.itemsize <= 2
    return np.dtype(f"uint{8 * dtype.itemsize}") if short_float else dtype


def _recipe(plan: SavePlan, program: Program) -> tuple[Any, ...]:
    """What a program does, by argument position: equal recipes share their compiled code.

    For each output (shape, packed, for each replica that runs it its copies), a copy being (argument, start in the
    shard). A replica without items of its own copies those of another.
    """
    position = {i: k for k, i in enumerate(program.leaves)}

    def copies_of(output: Output) -> Iterator[tuple[tuple[int, tuple[int, ...]], ...]]:
        busy = next(filter(None, output.items))
        for items in output.items if program.replica is None else [output.items[program.replica]]:
            yield tuple((position[item.leaf], plan.leaves[item.leaf].start(item.t)) for item in items or busy)

    return tuple((output.shape, output.packed, tuple(copies_of(output))) for output in program.outputs)


def compiled(plan: SavePlan, program: Program, leaves: Sequence[Leaf]) -> tuple[Any, Any]:
    """The executables of a program for leaves like these.

    Returns:
      () → staging memory; and (staging, arguments) → (outputs, fingerprints), which takes its staging memory as a
      donation: the outputs lie in it. Fingerprints have shape (devices, leaves compared, 2); None where there are none.
    """
    specs = tuple(PartitionSpec(*(axes or None for axes in plan.leaves[i].layout.spec)) for i in program.leaves)
    compared = tuple(program.leaves.index(i) for i in program.compared)
    copy = _jitted(program.mesh, program.replica_axes, specs, _recipe(plan, program), compared)
    staging = _abstract_staging(program)

    def empty() -> list[jax.Array]:
        return [jnp.empty(array.shape, array.dtype) for array in staging]

    with own_settings(program.mesh):
        make = jax.jit(empty, out_shardings=[array.sharding for array in staging])
        return make.lower().compile(), copy.lower(staging, _abstract_arguments(program, leaves)).compile()


@functools.lru_cache(maxsize=64)  # a state of 32,768 leaves; each holds what JAX traced and compiled: megabytes
def _jitted(
    mesh: Mesh, replica_axes: tuple[str, ...], specs: tuple[Any, ...], recipe: tuple[Any, ...], compared: Sequence[int]
) -> Any:
    def copy(staging: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        del staging  # donated: its memory takes the outputs
        replica = jax.lax.axis_index(replica_axes) if replica_axes else 0
        leaves = [
            leaf if (bits := _bits_dtype(leaf.dtype)) == leaf.dtype else jax.lax.bitcast_convert_type(leaf, bits)
            for leaf in leaves
        ]
        outputs = [_copied(shape, packed, copies, replica, leaves)[None] for shape, packed, copies in recipe]
        return outputs, fingerprints.of_arrays([leaves[k] for k in compared])[None] if compared else None

    everywhere = PartitionSpec(mesh.axis_names)
    copy = jax.shard_map(copy, mesh=mesh, in_specs=(everywhere, list(specs)), out_specs=everywhere, check_vma=False)
    return jax.jit(copy, donate_argnums=0, keep_unused=True)


def _copied(shape: tuple[int, ...], packed: bool, copies: Any, replica: Any, leaves: Sequence[jax.Array]) -> Any:
    """What a replica puts into one output."""
    if packed:

        def vector(items: Any) -> Any:
            def concatenated() -> jax.Array:
                flat = jnp.concatenate([leaves[argument].ravel() for argument, _ in items])
                return jnp.pad(flat, (0, shape[0] - flat.size))

            return concatenated

        branches = [vector(items) for items in copies]
        return branches[0]() if len(branches) == 1 else jax.lax.switch(replica, branches)
    taken = [items[0] for items in copies]
    window = sorted({argument for argument, _ in taken})
    start = [_of_replica([start[d] for _, start in taken], replica) for d in range(len(shape))]

    def slice_of(leaf: jax.Array) -> Any:
        if leaf.shape == shape:
            return lambda: leaf
        # Clamped at the end of the shard: the edge slice comes with elements before it, which `_pieces_of` trims.
        return lambda: jax.lax.dynamic_slice(leaf, start, shape)

    branches = [slice_of(leaves[argument]) for argument in window]
    if len(branches) == 1:
        return branches[0]()
    return jax.lax.switch(_of_replica([window.index(argument) for argument, _ in taken], replica), branches)


def _of_replica(numbers: Sequence[int], replica: Any) -> Any:
    """The number of this replica, of one for each; a constant where all are equal, which compiles in less time."""
    return np.int32(numbers[0]) if len(set(numbers)) == 1 else jnp.array(numbers, jnp.int32)[replica]
