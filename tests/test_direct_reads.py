"""Chunks are read past the page cache where that is possible, and whatever stands in the way costs nothing but time."""

import errno
import os
from concurrent.futures import wait
from urllib.parse import unquote

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_rpsave as rps
from flax_rpsave import direct_reads, nodes, store
from flax_rpsave.chunk_bytes import ChunkBytes
from flax_rpsave.direct_file import ALIGNMENT
from flax_rpsave.direct_reads import DirectReads, PlacedChunk
from flax_rpsave.directory import open_directory
from flax_rpsave.documents import digest
from tests.trees import bits, mesh_of, on


def stored(values, chunk_shape):
    """The bytes of a chunk in storage."""
    source = ChunkBytes(values, chunk_shape)
    out = np.empty(source.nbytes, np.uint8)
    source.copy(0, out)
    return out.tobytes()


def read(values, chunk_shape, chunk):
    with DirectReads() as reads:
        futures = reads.start(values, chunk_shape, [chunk])
        wait(futures)
        return [future.result() for future in futures] == [True]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    padding=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    offset=st.integers(0, 3 * ALIGNMENT // 64).map(lambda n: 64 * n),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8, np.complex128, np.bool_]),
    block=st.sampled_from([16, 64, ALIGNMENT, 8 << 20]),
    large=st.booleans(),
)
def test_a_chunk_comes_to_its_place_wherever_it_lies(tmp_path_factory, shape, padding, offset, dtype, block, large):
    """Also one whose array ends within it, a few rows at a time, through the page cache or past it."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, shape).astype(dtype)
    chunk_shape = tuple(n + p for n, p in zip(shape, padding, strict=False))
    path = tmp_path_factory.mktemp("chunk") / "data"
    path.write_bytes(rng.bytes(offset) + stored(values, chunk_shape))
    whole = np.zeros([n + 2 for n in shape], dtype)
    box = tuple(slice(1, n + 1) for n in shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_reads, "BLOCK_NBYTES", block)
        patch.setattr(direct_reads, "_LARGE_NBYTES", 0 if large else 1 << 40)
        assert read(whole, chunk_shape, PlacedChunk(str(path), offset, box, digest(values)))
        assert not read(whole.copy(), chunk_shape, PlacedChunk(str(path), offset, box, digest(values + values + 1)))
    expected = np.zeros_like(whole)
    expected[box] = values
    assert bits(whole) == bits(expected)


def test_what_is_missing_or_cut_off_is_not_read(tmp_path):
    values = np.arange(3000, dtype=np.float32)
    (tmp_path / "data").write_bytes(stored(values, values.shape)[:-4])
    for name in ("data", "nowhere"):
        chunk = PlacedChunk(str(tmp_path / name), 0, (slice(None),), "")
        assert not read(np.empty_like(values), values.shape, chunk)


@pytest.fixture(params=["several chunks", "no digests", "files"])
def saved(request, tmp_path, monkeypatch):
    """A checkpoint by the direct engine, and its state."""
    monkeypatch.setenv("RPSAVE_ENGINE", "direct")
    monkeypatch.setattr(direct_reads, "_LARGE_NBYTES", 0)
    rng = np.random.default_rng(0)
    state = {"a": rng.random((64, 128), np.float32), "b": rng.random(5000, np.float32), "c": np.float32(3)}
    storage = {"checksum": request.param != "no digests", "use_ocdbt": request.param != "files"}
    rps.save(tmp_path / "one", state, config={"storage": storage})
    return tmp_path / "one", state


def same(found, state):
    return {k: bits(v) for k, v in found.items()} == {k: bits(np.asarray(v)) for k, v in state.items()}


def counted(monkeypatch, fault=None):
    """Counts the reads of the process, after a fault that may come first."""
    real, calls = os.preadv, []

    def preadv(descriptor, buffers, offset):
        calls.append(offset)
        if fault is not None:
            buffers = fault(buffers)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(direct_reads.os, "preadv", preadv)
    return calls


def test_load_reads_directly_unless_that_is_forbidden(saved, monkeypatch):
    path, state = saved
    calls = counted(monkeypatch)
    assert same(rps.load(path), state)
    assert calls
    calls.clear()
    monkeypatch.setenv("RPSAVE_ENGINE", "tensorstore")
    assert same(rps.load(path), state)
    assert not calls


def test_each_byte_is_read_once_and_only_of_what_is_loaded(saved, monkeypatch):
    path, state = saved
    real, read = os.preadv, []
    monkeypatch.setattr(direct_reads.os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    replicated = on(mesh_of((8,)))
    found = rps.load(path, subtree="a", sharding=replicated)
    assert bits(found) == bits(jax.device_put(state["a"], replicated))
    assert state["a"].nbytes <= sum(read) <= 1.05 * state["a"].nbytes + ALIGNMENT


def test_reads_that_return_less_are_continued(saved, monkeypatch):
    path, state = saved
    calls = counted(monkeypatch, lambda buffers: [buffers[0][:ALIGNMENT]])
    assert same(rps.load(path), state)
    assert len(calls) > 12


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.EMFILE])
def test_where_direct_reads_are_refused_or_fail_tensorstore_reads(saved, monkeypatch, code):
    path, state = saved

    def fault(buffers):
        raise OSError(code, os.strerror(code))

    assert counted(monkeypatch, fault) == []
    assert same(rps.load(path), state)


def test_more_files_than_are_kept_open_are_read_by_tensorstore(saved, monkeypatch):
    path, state = saved
    monkeypatch.setattr(direct_reads, "_OPEN_FILES", 0)
    assert same(rps.load(path), state)


def test_one_damaged_node_of_many_is_named_and_the_others_are_read(tmp_path):
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": {"max_decoded_node_bytes": 2000}}
    database = ts.KvStore.open(spec).result()
    with ts.Transaction() as transaction:
        for k in range(500):
            database.with_transaction(transaction).write(f"key{k:03}", bytes([k % 256]) * 200).result()
    directory = open_directory(tmp_path, store.new_context())
    faults = []
    whole = list(nodes.walk(directory, store.new_context(), lambda *fault: faults.append(fault)))
    places = {key: place for node in whole for key, place in node.places.items()}
    assert len(whole) > 10
    assert len(places) == 500
    assert not faults
    for key, place in places.items():
        data = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.nbytes]
        assert data == bytes([int(key[3:]) % 256]) * 200
    reader = ts.KvStore.open(directory.kvstore()).result()
    root = ts.ocdbt.dump(reader).result()["versions"][-1]["root"]["location"]
    child = ts.ocdbt.dump(reader, root).result()["entries"][0]["location"]
    _, folder, name, offset, nbytes = str(child).split(":")
    file = unquote(folder) + unquote(name)
    data = bytearray((tmp_path / file).read_bytes())
    data[int(offset) + int(nbytes) // 2] ^= 1
    (tmp_path / file).write_bytes(data)
    left = list(nodes.walk(directory, store.new_context(), lambda *fault: faults.append(fault)))
    assert [name for name, _ in faults] == [file]
    assert 1 < len(left) < len(whole)
