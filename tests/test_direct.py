"""Direct writes make the same database as TensorStore, whatever the chunks, and do no harm where they are refused."""

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import pathlib
import re
import sys
import tempfile
import threading
import weakref

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import xxhash

import flax_rpsave as rps
from flax_rpsave import blocks, direct, direct_file, engines
from flax_rpsave.blocks import Helper, new_buffers
from flax_rpsave.chunk_bytes import ChunkBytes
from flax_rpsave.config import StorageConfig
from flax_rpsave.direct import DirectEngine
from flax_rpsave.direct_file import ALIGNMENT, DirectFile
from flax_rpsave.directory import FileDirectory
from flax_rpsave.documents import digest
from flax_rpsave.engine import TensorStoreEngine
from flax_rpsave.planner import LeafLayout, LeafPlan, chunk_box
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import MAX_INLINE_NBYTES, database, new_context, open_database
from tests import faults, trees
from tests.helpers import head

DTYPES = [
    "bool", "int2", "int4", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128", "float8_e3m4", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn",
]  # fmt: skip
PROFILE = hypothesis.settings(max_examples=80, deadline=None)


def chunk_shapes():
    """(shape, chunk shape) of an array, up to rank 4; edge chunks are padded along any dimension."""
    dimension = st.tuples(st.integers(0, 12), st.integers(1, 7)).map(lambda d: (d[0], min(d[1], max(1, d[0]))))
    return st.lists(dimension, max_size=4).map(lambda dims: (tuple(n for n, _ in dims), tuple(c for _, c in dims)))


def layouts(array):
    """The same values in other places in memory."""
    wide = np.zeros([2 * n for n in array.shape], array.dtype)
    spread = wide[(..., *[slice(None, None, 2)] * array.ndim)]
    spread[...] = array
    return [array, np.array(array, order="F"), spread]


@PROFILE
@hypothesis.given(chunk_shapes(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2), st.data())
def test_any_part_of_a_chunk_is_what_storage_has_there(shapes, itemsize, layout, data):
    _, chunk_shape = shapes
    shape = tuple(data.draw(st.integers(1, c)) for c in chunk_shape)
    dtype = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64, 16: np.complex128}[itemsize]
    values = layouts(trees.values(shape, dtype))[layout]
    padded = np.zeros(chunk_shape, dtype)
    padded[tuple(slice(n) for n in shape)] = values
    expected = padded.tobytes()
    source, hasher = ChunkBytes(values, chunk_shape), xxhash.xxh3_64()
    assert source.nbytes == len(expected)
    count = len(expected) // itemsize
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    for begin, end in itertools.pairwise(cut * itemsize for cut in cuts):
        out = np.full(end - begin, 0xAA, np.uint8)
        source.copy(begin, out)
        assert out.tobytes() == expected[begin:end]
        source.digest(hasher, begin, out)
    assert hasher.hexdigest() == digest(np.ascontiguousarray(values))


def leaf(name, shape, chunk_shape, dtype):
    """A plan of one leaf whose chunks are all of one process."""
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
    layout = LeafLayout(name, shape, np.dtype(getattr(ml_dtypes, dtype, dtype)), spec=((),) * len(shape))
    return LeafPlan(layout, chunk_shape, grid, np.zeros(math.prod(grid), np.int64))


def pieces_of(plans, layout=0):
    for i, plan in enumerate(plans):
        array = trees.values(plan.layout.shape, plan.layout.dtype, i)
        for index in itertools.product(*map(range, plan.grid)):
            data = array[chunk_box(index, plan.layout.shape, plan.chunk_shape)]
            yield Piece(i, index, layouts(np.asarray(data))[layout])


@contextlib.contextmanager
def direct_engine(root, plans, *, checksum=True, nbytes=0, on_refusal=lambda: None):
    """A direct engine, and the end of its second thread."""
    helper = Helper("helper")
    try:
        engine = DirectEngine(
            FileDirectory(root / "direct"), plans, True, checksum, new_buffers(), helper, on_refusal, nbytes
        )
        with contextlib.closing(engine):
            yield engine
    finally:
        helper.end()


def stored(root):
    """Keys and values of the database in a directory."""
    store = open_database(database(FileDirectory(root), True), new_context())
    return {key: store.read(key).result().value for key in store.list().result()}


@PROFILE
@hypothesis.given(
    st.lists(st.tuples(chunk_shapes(), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    st.integers(0, 2),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 5000, 1 << 30]),
)
def test_the_database_is_the_one_that_tensorstore_writes(leaves, layout, checksum, batches, in_place):
    plans = [leaf(f"leaf.{i}", shape, chunk, dtype) for i, ((shape, chunk), dtype) in enumerate(leaves)]
    values = {".rpsave/process_0/index": b"i" * 300, ".rpsave/process_0/data": b"small"}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "BLOCK_NBYTES", ALIGNMENT)  # so that chunks go on in the next block
        patch.setattr(blocks, "IN_PLACE_NBYTES", in_place)
        root = pathlib.Path(place)
        theirs = TensorStoreEngine(
            FileDirectory(root / "theirs"), plans, True, StorageConfig(checksum=checksum), new_context()
        )
        with direct_engine(root, plans, checksum=checksum, nbytes=20_000_000) as ours:
            for engine in (ours, theirs):
                pieces = list(pieces_of(plans, layout))
                for batch in range(batches):
                    engine.write(iter(pieces[batch::batches]))
            assert ours.finish(values) == theirs.finish(values)
        assert stored(root / "direct") == stored(root / "theirs")
        (file,) = (root / "direct" / "d").iterdir()
        assert file.stat().st_size % ALIGNMENT == 0
        assert file.stat().st_size < 10_000_000  # what was reserved in vain is given back


def test_chunks_of_many_blocks_have_their_digests_and_large_ones_are_written_from_where_they_lie(tmp_path, monkeypatch):
    plans = [leaf("small", (3, 100), (3, 100), "int8"), leaf("large", (70, 1000, 100), (64, 1000, 100), "int32")]
    copied = []
    copy = ChunkBytes.copy
    monkeypatch.setattr(ChunkBytes, "copy", lambda self, *a: copied.append(len(a[1])) or copy(self, *a))
    with direct_engine(tmp_path, plans, nbytes=51_200_000) as engine:
        engine.write(pieces_of(plans))
        digests = dict(engine.digests)
        engine.finish({})
    assert digests == {**digests, **{
        f"{plans[p.leaf].layout.name}/c/{'/'.join(map(str, p.chunk))}": digest(np.ascontiguousarray(p.data))
        for p in pieces_of(plans)
    }}  # fmt: skip
    base = ts.KvStore.open(FileDirectory(tmp_path / "direct").kvstore()).result()
    root = ts.ocdbt.dump(base).result()["versions"][0]["root"]["location"]
    entries = ts.ocdbt.dump(base, root).result()["entries"]
    places = {e["key"]: e["indirect_value"].split(":") for e in entries if "indirect_value" in e}
    assert places[b"large/c/1/0/0"][-1] == "25600000"
    assert sum(copied) < 51_200_000 - 28_000_000 + 8 * ALIGNMENT  # what is not values of `large`, and its ends
    found = stored(tmp_path / "direct")
    for piece in pieces_of(plans):
        key = f"{plans[piece.leaf].layout.name}/c/{'/'.join(map(str, piece.chunk))}".encode()
        assert found[key][: piece.data.nbytes] == piece.data.tobytes()


def watched_pieces_of(plans, refs):
    """The pieces; weak references to their values go to `refs`."""
    for piece in pieces_of(plans):
        refs.append(weakref.ref(piece.data))
        yield piece
        del piece


def test_no_chunk_is_referred_to_once_it_is_written(tmp_path):
    plans = [leaf(str(i), (1000,), (1000,), "float32") for i in range(20)]
    refs = []
    with direct_engine(tmp_path, plans) as engine:
        engine.write(watched_pieces_of(plans, refs))
        assert len(refs) == 20
        assert [ref() for ref in refs] == [None] * 20
        engine.finish({})


def test_small_values_lie_in_the_nodes(tmp_path):
    assert MAX_INLINE_NBYTES == 100
    plans = [leaf("at", (25,), (25,), "float32"), leaf("above", (26,), (26,), "float32")]
    with direct_engine(tmp_path, plans) as engine:
        engine.write(pieces_of(plans))
        engine.finish({})
    base = ts.KvStore.open(FileDirectory(tmp_path / "direct").kvstore()).result()
    root = ts.ocdbt.dump(base).result()["versions"][0]["root"]["location"]
    inline = {entry["key"] for entry in ts.ocdbt.dump(base, root).result()["entries"] if "inline_value" in entry}
    assert inline == {b"at/c/0"}


# What a file system may do


def state_at(step):
    mesh = jax.make_mesh((8,), ("d",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return {"w": jax.device_put(jnp.full((6001, 100), step, jnp.float32), replicated), "b": jnp.arange(50) + step}


def run(root, **options):
    return rps.CheckpointCallback({"directory": root, "save_interval_steps": 1, **options})


def check(root, step):
    for name, value in state_at(step).items():
        np.testing.assert_array_equal(rps.load(root, step=step)[name], value)


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def refuse_direct_writes(monkeypatch, call, code):
    """Has direct writes, but not those of probes, fail by a call of `os`; returns what is refused, as it comes."""
    real, refused = getattr(os, call), []

    def picky(first, *arguments):
        asked = (
            arguments[0] & os.O_DIRECT and ".probe" not in first
            if call == "open"
            else is_direct(first) and sum(map(len, arguments[0])) > ALIGNMENT  # a probe would not show it
        )
        if asked:
            refused.append(first)
            raise OSError(code, os.strerror(code))
        return real(first, *arguments)

    monkeypatch.setattr(os, call, picky)
    monkeypatch.setattr(engines, "is_on_local_disk", lambda path: True)
    return refused


def is_written_to(link):
    """Whether an entry of /proc/self/fd is a file that was opened for writing."""
    try:
        return fcntl.fcntl(int(link.name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:  # what listed the directory
        return False


@pytest.fixture
def direct_mode(monkeypatch):
    """Direct writes without a probe, also where the tests' directory is not on a local disk."""
    monkeypatch.setenv("RPSAVE_ENGINE", "direct")


@pytest.mark.parametrize("most", [ALIGNMENT, 3 * ALIGNMENT, 1000], ids=["aligned", "several", "unaligned"])
@pytest.mark.usefixtures("direct_mode")
def test_short_writes_are_continued(tmp_path, monkeypatch, most):
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, head(parts, most), at))
    with run(tmp_path) as checkpoint:
        checkpoint(1, state_at(1))
    check(tmp_path, 1)


@pytest.mark.parametrize("call", ["open", "pwritev"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_writes_that_are_refused_go_through_the_page_cache_and_later_saves_through_tensorstore(
    tmp_path, monkeypatch, caplog, call, code
):
    refused = refuse_direct_writes(monkeypatch, call, code)
    caplog.set_level(logging.INFO, "flax_rpsave")
    names = []
    with run(tmp_path) as checkpoint:
        for step in (1, 2):
            checkpoint(step, state_at(step))
            checkpoint.wait()
            names.append(checkpoint.stats.engine)
    assert refused
    assert names == ["direct", "tensorstore"]
    assert "later saves of this run are written by TensorStore" in caplog.text
    check(tmp_path, 1)
    check(tmp_path, 2)


def test_a_file_system_that_refuses_to_open_for_direct_writes_gets_tensorstore(tmp_path, monkeypatch):
    with faults.mounted(tmp_path / "place", "mode=755", kind="ramfs"):
        monkeypatch.setattr(engines, "is_on_local_disk", lambda path: True)
        with run(tmp_path / "place" / "run") as checkpoint:
            checkpoint(1, state_at(1))
            checkpoint.wait()
            assert checkpoint.stats.engine == "tensorstore"
        monkeypatch.setenv("RPSAVE_ENGINE", "direct")  # then the same writes go through the page cache
        with run(tmp_path / "place" / "forced") as checkpoint:
            checkpoint(1, state_at(1))
            checkpoint.wait()
            assert checkpoint.stats.engine == "direct"
        check(tmp_path / "place" / "run", 1)
        check(tmp_path / "place" / "forced", 1)


def test_a_file_system_in_memory_gets_tensorstore(tmp_path):
    with faults.mounted(tmp_path / "place", "size=32m"), run(tmp_path / "place" / "run") as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        assert checkpoint.stats.engine == "tensorstore"


@pytest.mark.usefixtures("direct_mode")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "ftruncate"])
def test_an_error_names_file_and_reason_and_leaves_the_step_before(tmp_path, monkeypatch, call, code):
    real = getattr(os, call)

    def failing(descriptor, *arguments):
        if "/d/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        return real(descriptor, *arguments)

    with run(tmp_path) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            checkpoint(2, state_at(2))
            said = rf"step 2 was not saved to {tmp_path}/2: \[Errno {code}\] {os.strerror(code)}: '.*/d/[0-9a-f]{{32}}'"
            with pytest.raises(rps.SaveError, match=said):
                checkpoint.wait()
        assert checkpoint.all_steps() == [1]
        checkpoint(3, state_at(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rpsave-")]
    written_to = {os.readlink(link) for link in pathlib.Path("/proc/self/fd").iterdir() if is_written_to(link)}
    assert not [name for name in written_to if name.startswith(str(tmp_path))]
    check(tmp_path, 1)
    check(tmp_path, 3)


def test_a_failure_in_one_thread_ends_the_other_that_waits_for_its_digest(tmp_path, monkeypatch):
    copy, other_waits = ChunkBytes.copy, threading.Event()

    def failing(source, begin, out):
        if not begin:
            assert other_waits.wait(30)
            raise MemoryError("first part")
        copy(source, begin, out)

    class Announced(threading.Condition):
        def wait_for(self, *arguments):
            other_waits.set()
            return super().wait_for(*arguments)

    monkeypatch.setattr(ChunkBytes, "copy", failing)
    monkeypatch.setattr(direct, "BLOCK_NBYTES", ALIGNMENT)
    plans = [leaf("two.blocks", (2000,), (2000,), "float32")]
    with direct_engine(tmp_path, plans) as engine:
        engine._writer._digesting = Announced()
        with pytest.raises(MemoryError, match="first part"):
            engine.write(pieces_of(plans))


@pytest.mark.usefixtures("direct_mode")
def test_a_full_disk_is_found_before_anything_is_written_where_room_can_be_reserved(tmp_path, monkeypatch):
    writes = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *arguments: writes.append(arguments) or pwritev(*arguments))
    with faults.mounted(tmp_path / "place", "size=1m"), run(tmp_path / "place" / "run") as checkpoint:
        checkpoint(1, state_at(1))
        with pytest.raises(rps.SaveError, match=r"No space left on device: '.*/d/[0-9a-f]{32}'"):
            checkpoint.wait()
        assert not writes


@pytest.mark.usefixtures("direct_mode")
def test_room_that_cannot_be_reserved_is_no_reason_to_fail(tmp_path, monkeypatch):
    class NoFallocate:
        def fallocate(self, *arguments):
            direct_file.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(direct_file, "_libc", NoFallocate())
    with run(tmp_path) as checkpoint:
        checkpoint(1, state_at(1))
    check(tmp_path, 1)


@pytest.mark.usefixtures("direct_mode")
def test_a_save_in_several_groups_is_one_data_file(tmp_path):
    replicated = state_at(0)["w"].sharding
    state = {f"{i}": jax.device_put(np.arange(80_000 + 8 * i, dtype=np.int32) + i, replicated) for i in range(6)}
    with run(tmp_path, max_staging_gb=1e-3, replica_parallel={"min_slice_bytes": 64}) as checkpoint:
        checkpoint(1, state)
        checkpoint.wait()
        assert checkpoint._saver._snapshotter.groups > 1
        assert checkpoint.stats.engine == "direct"
    for name, value in rps.load(tmp_path, step=1).items():
        np.testing.assert_array_equal(value, state[name])
    assert len(list((tmp_path / "1" / "default" / "ocdbt.process_0" / "d").iterdir())) == 1


# Which engine a save gets


class FileSystem:
    """The system's library, which says that every directory is on a file system of this magic number."""

    def __init__(self, magic):
        self._magic = magic
        self._real = direct_file._libc

    def __getattr__(self, name):
        return getattr(self._real, name)

    def statfs(self, path, buffer):
        word = self._magic.to_bytes(direct_file.ctypes.sizeof(direct_file.ctypes.c_long), sys.byteorder)
        direct_file.ctypes.memmove(buffer, word, len(word))
        return 0


@pytest.mark.parametrize(
    ("magic", "is_local"),
    [
        (0x6969, False),
        (0xFF534D42, False),
        (0x65735546, False),
        (0x0BD00BD0, False),
        (0x01021994, False),
        (0xEF53, True),
    ],
    ids=["nfs", "cifs", "fuse", "lustre", "tmpfs", "ext4"],
)
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_is_not_on_a_disk_of_this_machine_is_written_by_tensorstore_unasked(
    tmp_path, monkeypatch, magic, is_local, use_ocdbt
):
    probed = []
    monkeypatch.setattr(direct_file, "_libc", FileSystem(magic))
    monkeypatch.setattr(engines, "_probe", lambda *arguments: probed.append(arguments) or 1.0)
    with run(tmp_path, storage={"use_ocdbt": use_ocdbt}) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        assert checkpoint.stats.engine == ("direct" if is_local else "tensorstore")
    assert bool(probed) == is_local
    monkeypatch.undo()
    check(tmp_path, 1)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_compresses_is_written_by_tensorstore(tmp_path, monkeypatch, use_ocdbt):
    monkeypatch.setenv("RPSAVE_ENGINE", "direct")
    with run(tmp_path, storage={"compression": "zstd", "use_ocdbt": use_ocdbt}) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        assert checkpoint.stats.engine == "tensorstore"
    check(tmp_path, 1)


ROUND = [True, False]  # a direct measurement, one through the page cache


@pytest.mark.parametrize(
    ("seconds", "expected", "rounds"),
    [
        ([(0.01, 0.01)], "direct", 1),
        ([(0.0125, 0.01)], "direct", 1),  # as exact as such a measurement is
        ([(0.05, 0.01), (0.05, 0.05)], "direct", 2),  # something disturbed the first
        ([(0.05, 0.01)] * 4 + [(0.01, 0.01)], "direct", 5),
        ([(0.06, 0.01)] * 5, "tensorstore", 5),  # in 0.3 s
        ([(0.025, 0.01)] * 9, "tensorstore", 9),
        ([(3.0, 1.0)] * 2, "tensorstore", 2),  # a slow disk is asked twice all the same
        ([(3.0, 1.0), (1.0, 1.0)], "direct", 2),
        ([(math.inf, None)], "tensorstore", 0.5),  # refused
        ([(0.05, 0.01), (math.inf, None)], "tensorstore", 1.5),
    ],
)
def test_a_large_first_save_compares_both_ways_once(tmp_path, monkeypatch, caplog, seconds, expected, rounds):
    caplog.set_level(logging.INFO, "flax_rpsave")
    probed, measured = [], iter(itertools.chain(*seconds))

    def probe(directory, content, direct, *threads):
        probed.append(direct)
        return next(measured)

    monkeypatch.setattr(engines, "is_on_local_disk", lambda path: True)
    monkeypatch.setattr(engines, "_TIMED_NBYTES", 1000)
    monkeypatch.setattr(engines, "_probe", probe)
    with run(tmp_path) as checkpoint:
        for step in (1, 2):
            checkpoint(step, state_at(step))
            checkpoint.wait()
            assert checkpoint.stats.engine == expected
            assert f"step {step} committed: 2 leaves" in caplog.text
            assert f"by {expected}, the loop" in caplog.text
    assert probed == (ROUND * 10)[: int(2 * rounds)]
    said = re.search(r"GB/s by direct writes, .* GB/s through the page cache in round (\d+): (\w+)", caplog.text)
    if rounds % 1:
        assert said is None
    else:
        assert said.groups() == (str(rounds), "direct" if expected == "direct" else "TensorStore")


@pytest.mark.parametrize("nbytes", [ALIGNMENT, direct_file.BLOCK_NBYTES])
def test_the_probe_writes_as_an_engine_does_and_leaves_nothing(tmp_path, monkeypatch, nbytes):
    written = []
    pwritev = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, at: written.append((at, sum(map(len, parts)))) or pwritev(fd, parts, at)
    )
    helper = Helper("helper")
    try:
        content = engines._content(nbytes)
        assert 0 < engines._probe(FileDirectory(tmp_path), content, False, new_buffers(), helper) < math.inf
        assert sorted(written) == [(0, nbytes), (nbytes, nbytes)]
        engines._probe(FileDirectory(tmp_path), content, True, new_buffers(), helper)  # may be refused
    finally:
        helper.end()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_exist_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("RPSAVE_ENGINE", "")  # as if it were not set
    run(tmp_path).close()
    monkeypatch.setenv("RPSAVE_ENGINE", "fast")
    with pytest.raises(rps.ConfigError, match="RPSAVE_ENGINE must be one of auto, direct, tensorstore, got 'fast'"):
        run(tmp_path)


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="file"):
        DirectFile(str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"precious"
