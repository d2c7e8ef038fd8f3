"""Memory that is moved to huge pages keeps its values, and only what fills them is moved."""

import mmap
import pathlib
import re

import jax
import numpy as np
import pytest

import flax_rpsave as rps
from flax_rpsave import host_memory
from flax_rpsave.leaves import flatten
from flax_rpsave.snapshot import Snapshotter
from tests.trees import bits, mesh_of, on

HUGE = host_memory.HUGE_PAGE_NBYTES


@pytest.fixture
def plain():
    """8 MiB in ordinary pages, at an address that a huge page divides."""
    memory = np.frombuffer(mmap.mmap(-1, 5 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    begin = -memory.ctypes.data % HUGE
    part = memory[begin : begin + 4 * HUGE]
    part[:] = np.random.default_rng(0).integers(0, 256, len(part), np.uint8)
    return part


def huge_nbytes():
    """Of this process."""
    return 1024 * int(re.search(r"AnonHugePages:\s+(\d+) kB", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])


def test_values_stay_and_the_pages_are_huge(plain):
    before, values = huge_nbytes(), plain.tobytes()
    address = plain.ctypes.data
    areas = [(address, HUGE // 2), (address + HUGE // 2, HUGE + HUGE // 2), (address + 3 * HUGE, HUGE // 2)]
    moved = host_memory.move_to_huge_pages(areas)
    assert moved in (0, 2 * HUGE)  # 0: the kernel does not do it, or has no free huge page; never the half one
    assert huge_nbytes() - before >= moved
    assert plain.tobytes() == values


def test_addresses_that_are_in_use_no_more_do_no_harm(plain):
    memory = mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory.close()
    assert host_memory.move_to_huge_pages([(address, 2 * HUGE)]) == 0
    assert host_memory.move_to_huge_pages([]) == 0


def test_staging_memory_that_is_kept_is_moved_once_and_snapshots_are_the_same(monkeypatch):
    asked, real = [], host_memory.move_to_huge_pages
    monkeypatch.setattr(host_memory, "move_to_huge_pages", lambda areas: asked.append(list(areas)) or real(areas))
    state = {"w": jax.device_put(np.arange(4 << 20, dtype=np.float32), on(mesh_of((8,))))}
    leaves, _ = flatten(state)
    snapshotter = Snapshotter(rps.plan(state), leaves, 0)
    for _ in range(2):
        snapshotter.compile()
    assert [sum(nbytes for _, nbytes in areas) for areas in asked] == [16 << 20, 0]
    for _ in range(2):
        pieces = list(snapshotter.take([state["w"]], 0).pieces())
        whole = np.concatenate([piece.data for piece in sorted(pieces, key=lambda piece: piece.chunk)])
        assert bits(whole) == bits(jax.device_get(state["w"]))
        del pieces
