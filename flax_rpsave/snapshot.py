"""Copies of the owner slices: taken on the devices by compiled programs, read on the host in the background.

`take` runs in the train loop's thread. It dispatches one program (`owner_slices`) for all leaves on a mesh, one more
for each further mesh or single device, and returns; the runtime orders the copies before any later donation of the
same buffers, so the state may be donated at once. On CPU devices it waits for the copies where a leaf may lie in the
memory of a NumPy array, which the caller may change at once. `Snapshot.pieces` runs in
the writer's thread and waits for the copies.

The previous snapshot's arrays are donated to the next program, which writes into their memory: staging memory is
touched for the first time only once. On accelerators they are dropped instead, so that the memory is the user's again
between saves. NumPy, host-memory and sub-byte leaves are copied in the call, by the host.

Under a budget the copies go in groups, those by the host first; a group is taken once the one before is written. What
one output (a slice on each device) or one leaf on the host takes is not divided.

Where replicas are to be compared, the same programs fingerprint the shards of every device; what the host copies, the
host fingerprints, in the call.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from flax_rpsave import _compat, fingerprints, host_memory
from flax_rpsave.leaves import Leaf, without_values
from flax_rpsave.owner_slices import (
    Item,
    Output,
    Program,
    arguments,
    build_programs,
    compiled,
    group_by_budget,
    memory_layouts,
    most_of_a_process,
    own_settings,
)
from flax_rpsave.planner import LeafLayout, LeafPlan, SavePlan

_SUB_BYTE_DTYPES = ("int2", "int4", "float4_e2m1fn")


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
class Snapshot:
    """Owner slices on their way to the host."""

    plan: SavePlan
    _host: list[Piece] = field(repr=False)
    _taken: list[tuple[Program, list[jax.Array]]] = field(repr=False)
    _host_fingerprints: Mapping[int, Mapping[int, int]] = field(repr=False)
    _fingerprints: list[tuple[Program, jax.Array]] = field(repr=False)

    def pieces(self) -> Iterator[Piece]:
        """The chunks that this process saves; waits for each copy. Consumes the snapshot."""
        while self._host:
            yield self._host.pop()
        while self._taken:
            program, arrays = self._taken.pop()
            for output, array in zip(program.outputs, arrays, strict=True):
                yield from _pieces_of(self.plan, program, output, array)

    def fingerprints(self) -> dict[int, dict[int, int]]:
        """Leaf → holder → fingerprint, of the leaves compared with this group, for what this process holds.

        A holder is a device by its id or, of leaves that every process has for itself, the process. Waits.
        """
        found = {leaf: dict(held) for leaf, held in self._host_fingerprints.items()}
        for program, array in self._fingerprints:
            for shard in array.addressable_shards:
                numbers = fingerprints.fetched(np.asarray(shard.data)[0])
                for leaf, number in zip(program.compared, numbers, strict=True):
                    alone = self.plan.leaves[leaf].layout.mesh is None
                    holder = shard.device.process_index if alone else shard.device.id
                    found.setdefault(leaf, {})[holder] = number
        return found

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
      compared: Indices of the leaves whose replicas are fingerprinted.
    """

    def __init__(
        self,
        plan: SavePlan,
        leaves: Sequence[Leaf],
        process: int,
        max_nbytes: int | None = None,
        compared: Collection[int] = (),
    ):
        self.plan = plan
        self._leaves = without_values(leaves)  # no snapshotter keeps a state alive
        self._process = process
        self._shards = [_parts_and_nbytes(leaf.layout) for leaf in plan.leaves]
        self._on_host = [i for i, leaf in enumerate(leaves) if _stays_on_host(leaf.value)]
        self._compared = frozenset(compared)
        programs = build_programs(plan, self._leaves, set(self._on_host), self._compared)
        self._host_nbytes = {i: self._most_on_host(i) for i in self._on_host}
        self._host_groups = self._cut_host_leaves(max_nbytes)
        begun = [sum(self._host_nbytes[i] for i in group) for group in self._host_groups]
        self._groups = group_by_budget(programs, max_nbytes, begun)
        self._host_groups += [[] for _ in self._groups[len(begun) :]]
        for program in itertools.chain(*self._groups):
            program.layouts = memory_layouts(program, [leaf.value for leaf in leaves])

    @property
    def groups(self) -> int:
        """How many groups a save takes: 1, or more where `max_nbytes` is less than the owner slices."""
        return len(self._groups)

    @property
    def largest_copy(self) -> tuple[int, int]:
        """(bytes in one process, index of a leaf in it) of the largest copy that cannot be divided between groups."""
        copies = [(nbytes, i) for i, nbytes in self._host_nbytes.items()]
        for program in itertools.chain(*self._groups):
            devices = most_of_a_process(device.process_index for device in program.mesh.devices.flat)
            copies += [
                (output.nbytes * devices, next(filter(None, output.items))[0].leaf) for output in program.outputs
            ]
        return max(copies, default=(0, 0))

    def compile(self) -> None:
        """Compiles what is not compiled yet, and touches the staging memory where it is kept between saves.

        Safe to call from another thread, ahead of the first save, which waits for what is still under way, but for the
        move of the memory to huge pages.
        """
        kept: list[tuple[int, int]] = []
        for group in self._groups:
            for program in group:
                make_staging, _ = self._executables(program)
                with program.lock, own_settings(program.mesh):
                    if self._keeps_staging(program) and program.staging is None and not program.taken:
                        program.staging = make_staging()
                        kept += _areas(jax.block_until_ready(program.staging))
        host_memory.give_back()  # what the compiler needed
        host_memory.move_to_huge_pages(kept)

    def take(self, arrays: Sequence[Any], group: int) -> Snapshot:
        """Dispatches the copies of one group by devices, and makes those by the host.

        Args:
          arrays: The values of the leaves.
          group: Which one.
        """
        with jax.transfer_guard("allow"):  # the caller's is about what its loop transfers
            return self._take(arrays, group)

    def _take(self, arrays: Sequence[Any], group: int) -> Snapshot:
        taken, taken_fingerprints, awaited = [], [], []
        for program in self._groups[group]:
            may_change = self._may_be_host_memory(program, arrays)  # asked before: the copies take their time
            copies, folded = self._run(program, arrays)
            if may_change:
                awaited += [copies, folded]
            taken.append((program, list(copies)))
            if folded is not None:
                taken_fingerprints.append((program, folded))
            if self._keeps_staging(program):
                program.staging = copies
            elif program.mesh.devices.flat[0].platform != "cpu":
                for array in [*copies, folded] if folded is not None else copies:
                    array.copy_to_host_async()
        host = list(self._host_pieces(arrays, self._host_groups[group]))
        of_host = self._host_fingerprints(arrays) if group == 0 else {}
        jax.block_until_ready(awaited)
        return Snapshot(self.plan, host, taken, of_host, taken_fingerprints)

    def _run(self, program: Program, arrays: Sequence[Any]) -> tuple[list[jax.Array], jax.Array | None]:
        make_staging, copy = self._executables(program)
        with own_settings(program.mesh):
            with program.lock:  # another thread may be about to make it
                staging, program.staging, program.taken = program.staging, None, True
            staging = staging or make_staging()
            shards = arguments(program, arrays)
            try:
                copies, folded = copy(staging, shards)
            except ValueError:
                # Asking every array for its layout is slow, so only a refusal makes us look whether it has changed.
                if (layouts := memory_layouts(program, arrays)) == program.layouts:
                    raise
                with program.lock:
                    program.layouts, program.executables = layouts, None
                copies, folded = self._executables(program)[1](staging, shards)
            return list(copies), folded

    def _may_be_host_memory(self, program: Program, arrays: Sequence[Any]) -> bool:
        """Whether the program may read memory that the caller can write to, as NumPy arrays.

        A CPU device takes aligned NumPy memory as it lies (`device_put`, `jnp.asarray`), and nothing tells such an
        array from others. But its values are there from the beginning: what a step is still computing is no such
        array. One whose shards lie apart is taken for none, which is wrong where one of them comes from an earlier such
        array: to wait for all that might be like that would double how long a call blocks.
        """
        if program.mesh.devices.flat[0].platform != "cpu":
            return False
        return any(
            not _lie_apart(_compat.shard_addresses(arrays[i]), *self._shards[i]) and _compat.is_ready(arrays[i])
            for i in program.leaves
        )

    def _keeps_staging(self, program: Program) -> bool:
        return len(self._groups) == 1 and program.mesh.devices.flat[0].platform == "cpu"

    def _executables(self, program: Program) -> tuple[Any, Any]:
        with program.lock:
            if program.executables is None:
                program.executables = compiled(self.plan, program, self._leaves)
            return program.executables

    def _cut_host_leaves(self, max_nbytes: int | None) -> list[list[int]]:
        """The leaves that the host copies, in groups that fit the budget (or that have one leaf)."""
        groups: list[list[int]] = [[]]
        room = limit = math.inf if max_nbytes is None else max_nbytes
        for i, nbytes in self._host_nbytes.items():
            if nbytes > room and groups[-1]:
                groups.append([])
                room = limit
            groups[-1].append(i)
            room -= nbytes
        return groups

    def _most_on_host(self, i: int) -> int:
        """Bytes of a leaf that a process copies on the host, at most: the same in all, as the groups must be."""
        plan, layout = self.plan.leaves[i], self.plan.leaves[i].layout
        if layout.mesh is None:
            return layout.nbytes
        slices: Counter[int] = Counter()
        for device, process in zip(layout.mesh.device_ids, layout.mesh.processes, strict=True):
            slices[process] += int(np.count_nonzero(plan.owners == layout.place(device)[0]))
        return max(slices.values()) * plan.slice_nbytes

    def _host_pieces(self, arrays: Sequence[Any], members: Sequence[int]) -> Iterator[Piece]:
        """Copies of host values and of slices in host memory beside a device."""
        for i in members:
            plan, value = self.plan.leaves[i], arrays[i]
            if self._process and plan.layout.mesh is None and plan.layout.device is None:
                continue  # every process has such a leaf for itself: process 0 saves its own
            if isinstance(value, np.ndarray):
                if plan.slices:
                    yield Piece(i, (0,) * value.ndim, np.array(value, order="C", copy=True))
                continue
            for shard in value.addressable_shards:
                replica, shard_index = plan.layout.place(shard.device.id)
                for t in np.flatnonzero(plan.owners == replica).tolist():
                    start = plan.start(t)
                    box = tuple(slice(o, o + c) for o, c in zip(start, plan.chunk_shape, strict=True))
                    data = np.array(np.asarray(shard.data)[box], order="C", copy=True)
                    yield Piece(i, _chunk(plan, start, shard_index), data)

    def _host_fingerprints(self, arrays: Sequence[Any]) -> dict[int, dict[int, int]]:
        """Fingerprints of what the host copies, by leaf and holder."""
        found: dict[int, dict[int, int]] = {}
        for i in self._compared.intersection(self._on_host):
            value = arrays[i]
            if self.plan.leaves[i].layout.mesh is None:
                found[i] = {self._process: fingerprints.on_host(np.asarray(value))}
            else:
                held = ((shard.device.id, np.asarray(shard.data)) for shard in value.addressable_shards)
                found[i] = {device: fingerprints.on_host(data) for device, data in held}
        return found


def _areas(arrays: Sequence[jax.Array]) -> list[tuple[int, int]]:
    """Addresses and lengths of what this process has of arrays on CPU devices."""
    parts = [shard.data for array in arrays for shard in array.addressable_shards]
    return [(part.unsafe_buffer_pointer(), part.nbytes) for part in parts]


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


def _parts_and_nbytes(layout: LeafLayout) -> tuple[int, int]:
    """How many different shards an array has, and the bytes of each."""
    size = math.prod(layout.shard_shape)
    return math.prod(layout.shape) // max(1, size), size * int(layout.dtype.itemsize)


def _lie_apart(addresses: Sequence[int], parts: int, nbytes: int) -> bool:
    """Whether no C-contiguous array can hold the shards as they lie: replicas at one place, parts one after the other.

    Args:
      addresses: Of two shards, or of one where a process has no more.
      parts: How many different shards the array has.
      nbytes: Of each of them.
    """
    if len(addresses) < 2:
        return False
    if nbytes == 0:
        return True
    parts_between, rest = divmod(abs(addresses[1] - addresses[0]), nbytes)
    return rest != 0 or parts_between >= parts


def _pieces_of(plan: SavePlan, program: Program, output: Output, array: jax.Array) -> Iterator[Piece]:
    """The chunks in one output array, as views of its memory on the CPU."""
    layout = plan.leaves[program.leaves[0]].layout  # all of them have the same replicas
    for shard in array.addressable_shards:
        replica, _ = layout.place(shard.device.id)
        if items := output.items[replica]:
            data: np.ndarray = np.asarray(shard.data)[0].view(output.dtype)
            for item in items:
                yield _piece(plan.leaves[item.leaf], item, shard.device.id, data, output.packed)


def _piece(leaf: LeafPlan, item: Item, device: int, data: np.ndarray, packed: bool) -> Piece:
    start, shape = leaf.start(item.t), leaf.chunk_shape
    chunk = _chunk(leaf, start, leaf.layout.place(device)[1])
    if packed:
        return Piece(item.leaf, chunk, data[item.offset : item.offset + math.prod(shape)].reshape(shape))
    bounds = zip(start, shape, leaf.layout.shard_shape, strict=True)
    return Piece(item.leaf, chunk, data[tuple(slice(max(0, o + c - n), c) for o, c, n in bounds)])


def _chunk(leaf: LeafPlan, start: tuple[int, ...], shard_index: tuple[int, ...]) -> tuple[int, ...]:
    """The index in the chunk grid of the slice of a shard that begins at `start` there."""
    bounds = zip(shard_index, leaf.layout.shard_shape, leaf.chunk_shape, start, strict=True)
    return tuple(s * (n // c) + o // c for s, n, c, o in bounds)
