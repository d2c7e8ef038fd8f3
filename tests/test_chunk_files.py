"""Direct writes of arrays that are files make the same files as TensorStore, and do no harm where they are refused."""

import contextlib
import errno
import logging
import os
import pathlib
import tempfile
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import flax_rpsave as rps
from flax_rpsave import chunk_files, direct_file, engines
from flax_rpsave.blocks import Helper, new_buffers
from flax_rpsave.chunk_files import ChunkFilesEngine
from flax_rpsave.config import StorageConfig
from flax_rpsave.direct_file import ALIGNMENT
from flax_rpsave.directory import FileDirectory
from flax_rpsave.engine import TensorStoreEngine
from flax_rpsave.store import new_context
from tests import faults
from tests.helpers import head
from tests.test_direct import (
    DTYPES,
    check,
    chunk_shapes,
    is_written_to,
    leaf,
    pieces_of,
    refuse_direct_writes,
    state_at,
    watched_pieces_of,
)

VALUES = {".rpsave/process_0/index": b"i" * 300, ".rpsave/process_0/data": b"small"}


@contextlib.contextmanager
def files_engine(root, plans, *, checksum=True):
    """An engine, and the end of its second thread."""
    helper = Helper("helper")
    try:
        engine = ChunkFilesEngine(FileDirectory(root), plans, True, checksum, new_buffers(), helper, lambda: None)
        with contextlib.closing(engine):
            yield engine
    finally:
        helper.end()


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(chunk_shapes(), st.sampled_from(DTYPES)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([0, 300, 1 << 20]),
)
def test_the_files_are_those_that_tensorstore_writes(leaves, layout, checksum, batches, direct_nbytes):
    """Also of arrays of rank 0, without elements, of elements of less than a byte, with padded edge chunks."""
    plans = [leaf(f"leaf.{i}", shape, chunk, dtype) for i, ((shape, chunk), dtype) in enumerate(leaves)]
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_files, "BLOCK_NBYTES", ALIGNMENT)  # so that chunks go on in the next block
        patch.setattr(chunk_files, "_DIRECT_NBYTES", direct_nbytes)
        ours, theirs = pathlib.Path(place, "ours"), pathlib.Path(place, "theirs")
        storage = StorageConfig(use_ocdbt=False, checksum=checksum)
        tensorstore = TensorStoreEngine(FileDirectory(theirs), plans, True, storage, new_context())
        with files_engine(ours, plans, checksum=checksum) as direct:
            for engine in (direct, tensorstore):
                pieces = list(pieces_of(plans, layout))
                for batch in range(batches):
                    engine.write(iter(pieces[batch::batches]))
            assert direct.finish(VALUES) == tensorstore.finish(VALUES)
        assert faults.files_in(ours) == faults.files_in(theirs)


def test_a_file_of_many_blocks_is_whole_and_as_long_as_its_chunk(tmp_path):
    plans = [leaf("large", (70, 1000, 100), (64, 1000, 100), "int32")]  # four blocks; the edge chunk has six rows
    with files_engine(tmp_path, plans) as engine:
        engine.write(pieces_of(plans))
        engine.finish({})
    for piece in pieces_of(plans):
        data = tmp_path.joinpath("large", "c", *map(str, piece.chunk)).read_bytes()
        assert data == piece.data.tobytes() + bytes(25_600_000 - piece.data.nbytes)


def test_no_chunk_is_referred_to_and_no_file_open_once_a_batch_is_written(tmp_path):
    plans = [leaf(str(i), (1000,), (1000,), "float32") for i in range(20)]
    refs = []
    with files_engine(tmp_path, plans) as engine:
        engine.write(watched_pieces_of(plans, refs))
        assert len(refs) == 20
        assert [ref() for ref in refs] == [None] * 20
        assert not written_to(tmp_path)
        engine.finish({})


def written_to(root):
    """Files below a directory that are open for writing."""
    names = [os.readlink(link) for link in pathlib.Path("/proc/self/fd").iterdir() if is_written_to(link)]
    return [name for name in names if name.startswith(str(root))]


# What a file system may do


@pytest.fixture
def direct_mode(monkeypatch):
    """Direct writes without a probe, also where the tests' directory is not on a local disk."""
    monkeypatch.setenv("RPSAVE_ENGINE", "direct")
    monkeypatch.setattr(chunk_files, "_DIRECT_NBYTES", ALIGNMENT)


def run(root, **storage):
    return rps.CheckpointCallback(
        {"directory": root, "save_interval_steps": 1, "storage": {"use_ocdbt": False, **storage}}
    )


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("most", [ALIGNMENT, 1000], ids=["aligned", "unaligned"])
@pytest.mark.usefixtures("direct_mode")
def test_short_writes_are_continued(tmp_path, monkeypatch, most, checksum):
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, head(parts, most), at))
    with run(tmp_path, checksum=checksum) as checkpoint:
        checkpoint(1, state_at(1))
    check(tmp_path, 1)


@pytest.mark.parametrize("call", ["open", "pwritev"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_direct_writes_are_refused_no_more_are_tried_and_later_saves_go_through_tensorstore(
    tmp_path, monkeypatch, caplog, call, code
):
    refused = refuse_direct_writes(monkeypatch, call, code)
    monkeypatch.setattr(chunk_files, "_DIRECT_NBYTES", ALIGNMENT)
    caplog.set_level(logging.INFO, "flax_rpsave")
    names = []
    state = {f"{i}": jnp.full((2000,), i, jnp.float32) for i in range(9)}
    with run(tmp_path) as checkpoint:
        for step in (1, 2):
            checkpoint(step, state)
            checkpoint.wait()
            names.append(checkpoint.stats.engine)
    assert 1 <= len(refused) <= 2  # by each thread
    assert names == ["direct", "tensorstore"]
    assert "later saves of this run are written by TensorStore" in caplog.text
    for step in (1, 2):
        found = rps.load(tmp_path, step=step)
        assert [found[f"{i}"].tolist() for i in range(9)] == [[i] * 2000 for i in range(9)]


def test_a_file_system_that_takes_no_direct_writes_gets_tensorstore(tmp_path, monkeypatch):
    with faults.mounted(tmp_path / "place", "size=32m"), run(tmp_path / "place" / "in memory") as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        assert checkpoint.stats.engine == "tensorstore"
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


class FailingSync:
    """The system's library, whose `syncfs` fails."""

    def __init__(self, code):
        self._code = code

    def __getattr__(self, name):
        return getattr(direct_file.ctypes.CDLL(None), name)

    def syncfs(self, descriptor):
        direct_file.ctypes.set_errno(self._code)
        return -1


@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "ftruncate", "syncfs"])
@pytest.mark.usefixtures("direct_mode")
def test_an_error_names_path_and_reason_and_leaves_the_step_before(tmp_path, monkeypatch, call):
    code = errno.ENOSPC
    real = getattr(os, call, None)

    def failing(first, *arguments, **options):
        path = first if isinstance(first, (str, os.PathLike)) else os.readlink(f"/proc/self/fd/{first}")
        if "/w/" in f"{path}/":
            raise OSError(code, os.strerror(code), *([path] if isinstance(first, str) else []))
        return real(first, *arguments, **options)

    with run(tmp_path) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint.wait()
        with monkeypatch.context() as patch:
            if call == "syncfs":
                patch.setattr(direct_file, "_libc", FailingSync(code))
            else:
                patch.setattr(os, call, failing)
            checkpoint(2, state_at(2))
            where = "/default" if call == "syncfs" else "/w(/c(/\\d/0)?)?"
            said = rf"step 2 was not saved to {tmp_path}/2: \[Errno {code}\] {os.strerror(code)}: '.*{where}'"
            with pytest.raises(rps.SaveError, match=said):
                checkpoint.wait()
        assert checkpoint.all_steps() == [1]
        checkpoint(3, state_at(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rpsave-")]
    assert not written_to(tmp_path)
    check(tmp_path, 1)
    check(tmp_path, 3)


@pytest.mark.usefixtures("direct_mode")
def test_a_full_disk_fails_the_save_and_the_next_one_works_when_there_is_room(tmp_path):
    place = tmp_path / "place"
    with faults.mounted(place, "size=1m"), run(place / "run") as checkpoint:
        checkpoint(1, state_at(1))
        with pytest.raises(rps.SaveError, match=r"No space left on device: '.*/default/w/c/\d/0'"):
            checkpoint.wait()
        assert list((place / "run").iterdir()) == []
        faults.remount(place, "size=32m")
        checkpoint(2, state_at(2))
        checkpoint.wait()
        check(place / "run", 2)


@pytest.mark.usefixtures("direct_mode")
def test_all_is_written_before_the_file_system_is_synced(tmp_path, monkeypatch):
    there = []
    sync = chunk_files.sync_file_system

    def noted(descriptor, path):
        there.extend(path.parent.name for path in pathlib.Path(path).rglob("*") if path.is_file())
        assert not written_to(path)
        sync(descriptor, path)

    monkeypatch.setattr(chunk_files, "sync_file_system", noted)
    replicated = state_at(1)["w"].sharding
    with run(tmp_path) as checkpoint:
        checkpoint(1, {"x": jax.device_put(jnp.ones((8, 4)), replicated)})
    assert sorted(there) == ["0", "process_0", "x"]
