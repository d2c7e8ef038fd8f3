"""Memory that is moved to huge pages keeps its values, and only what fills them is moved."""

import mmap
import pathlib
import re
import types

import jax
import numpy as np
import pytest

import flax_rpsave as rps
from flax_rpsave import host_memory
from flax_rpsave.leaves import flatten
from flax_rpsave.snapshot import Snapshotter
from tests import faults
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


def huge_nbytes(address):
    """Of the mapping that an address is in."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", pathlib.Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
        begin, end = (int(part, 16) for part in re.match(r"([0-9a-f]+)-([0-9a-f]+)", mapping).groups())
        if begin <= address < end:
            return 1024 * int(re.search(r"AnonHugePages:\s+(\d+) kB", mapping)[1])
    raise AssertionError("there is no such mapping")


def test_values_stay_and_only_pages_that_are_filled_are_asked_for(plain, monkeypatch):
    asked, real = [], host_memory._libc.madvise

    def madvise(address, nbytes, advice):
        asked.append((address.value, nbytes.value))
        return real(address, nbytes, advice)

    monkeypatch.setattr(host_memory, "_libc", types.SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(host_memory, "_huge_pages_are_allowed", lambda: True)
    values, address = plain.tobytes(), plain.ctypes.data
    parts = [(address, HUGE // 2), (address + HUGE // 2, HUGE + HUGE // 2), (address + 3 * HUGE, HUGE // 2)]
    host_memory.move_to_huge_pages(parts)
    assert asked == [(address, 2 * HUGE)]
    assert huge_nbytes(address) in (0, HUGE, 2 * HUGE)  # as many as the kernel had
    assert plain.tobytes() == values


def test_addresses_that_are_in_use_no_more_do_no_harm():
    memory = mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory.close()
    host_memory.move_to_huge_pages([(address, 2 * HUGE)])
    host_memory.move_to_huge_pages([])


def test_who_has_forbidden_huge_pages_gets_none(plain, monkeypatch, tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(host_memory, "_HUGE_PAGES_ALLOWED", tmp_path / "enabled")
    host_memory.move_to_huge_pages([(plain.ctypes.data, len(plain))])
    assert huge_nbytes(plain.ctypes.data) == 0


AFTER_FORK = """
import os, pathlib
from flax_rpsave.host_memory import HUGE_PAGE_NBYTES, aligned_buffer

buffer = aligned_buffer(3 * HUGE_PAGE_NBYTES)
assert buffer.nbytes == 3 * HUGE_PAGE_NBYTES and buffer.ctypes.data % HUGE_PAGE_NBYTES == 0
buffer[:] = 1

def mapped():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    return any(begin <= buffer.ctypes.data < end for begin, end in ranges)

if os.fork() == 0:
    os._exit(mapped())
assert os.wait()[1] == 0
assert mapped() and (buffer == 1).all()
"""


def test_buffers_are_for_disks_and_not_for_forked_processes(tmp_path):
    done = faults.run_python(AFTER_FORK, tmp_path)
    assert done.returncode == 0, done.stderr


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
