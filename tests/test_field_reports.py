"""What public reports say goes wrong, where no other test file is about it; docs/field_reports.md lists all of them."""

import errno
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import threading
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packaging.requirements import Requirement

import flax_rpsave as rps
from flax_rpsave import commit, identity, restore, store
from flax_rpsave.directory import open_directory
from tests import faults
from tests.processes import ended, started

ROOT = pathlib.Path(__file__).parents[1]


def config(root, **keys):
    return {"directory": root, "save_interval_steps": 10, **keys}


def state_at(step):
    return {"w": np.full(4, step, np.float32), "step": step}


def on_all_devices(values):
    mesh = jax.make_mesh((8,), ("data",))
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def names(root):
    return sorted(path.name for path in root.iterdir())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# 1 Replica-parallel writer


def test_leaves_that_divide_by_nothing_are_stored_once_and_come_back(tmp_path):  # field report 1
    shapes = [(), (1,), (7,), (3, 5), (5, 16), (0, 4)]
    state = {str(shape): on_all_devices(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)) for shape in shapes}
    keys = {"replica_parallel": {"min_slice_bytes": 1}}
    rps.save(tmp_path / "c", state, config=keys)
    found = rps.load(tmp_path / "c")
    for name, value in state.items():
        assert found[name].tobytes() == np.asarray(value).tobytes()
    plan = rps.plan(state, keys)
    for leaf in plan.leaves:
        boxes = (
            [leaf.chunk_box(index) for index in itertools.product(*(range(n) for n in leaf.grid))]
            if leaf.slices
            else []
        )
        written = np.zeros(leaf.layout.shape, int)
        for box in boxes:
            written[box] += 1
        assert (written == 1).all()


def test_jax_internals_are_used_in_one_module_only():  # field report 7: the oldest and newest JAX are CI's
    private = re.compile(r"^\s*(?:from|import)\s+(?:jax|orbax\.checkpoint|flax|tensorstore)\.(?:\w+\.)*_", re.MULTILINE)
    found = [path.name for path in (ROOT / "flax_rpsave").glob("*.py") if private.search(path.read_text())]
    assert found == ["_compat.py"]


# 2 Snapshot isolation


@pytest.mark.parametrize("busy", [False, True])
def test_numpy_memory_that_a_device_shares_may_change_right_after_the_call(tmp_path, busy):  # field report 9
    """Also while another leaf is still being computed, for which the copies have to wait."""

    def aligned(value):
        room = np.empty((1 << 20) + 64, np.uint8)
        start = -room.ctypes.data % 64
        return room[start : start + (1 << 20)].view(np.float32), value

    sources = [aligned(k) for k in range(4)]
    slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 40))
    matrix = on_all_devices(np.eye(500, dtype=np.float32))
    jax.block_until_ready(slow(matrix))
    with rps.CheckpointCallback(config(tmp_path, save_interval_steps=1)) as checkpoint:
        for step in (1, 2, 3):
            for source, value in sources:
                source[:] = value + step
            state = {str(value): on_all_devices(source) for source, value in sources}
            shards = [shard.data for shard in state["0"].addressable_shards]
            assert any(shard.unsafe_buffer_pointer() == sources[0][0].ctypes.data for shard in shards)  # else no test
            if busy:
                state["slow"] = slow(matrix)
            checkpoint(step, state)
            for source, _ in sources:
                source[:] = -1
    for step in (1, 2, 3):
        found = rps.load(tmp_path, step=step)
        assert [(found[str(value)] == value + step).all() for _, value in sources] == [True] * 4


# 3 Tree structure


def test_int_keys_are_kept_and_ordered_by_number(tmp_path):  # field report 13
    state = {
        "d": {k: np.full(1, k) for k in (0, 1, 2, 10, 11)},
        "l": nnx.List([nnx.Param(jnp.full(1, k)) for k in range(11)]),
    }
    rps.save(tmp_path / "c", {"d": state["d"], "l": nnx.state(state["l"])})
    target = {
        "d": {k: np.zeros(1, int) for k in state["d"]},
        "l": nnx.state(nnx.List([nnx.Param(jnp.zeros(1, int)) for _ in range(11)])),
    }
    found = rps.load(tmp_path / "c", target)
    assert {k: int(v[0]) for k, v in found["d"].items()} == {k: k for k in (0, 1, 2, 10, 11)}
    assert all(type(k) is int for k in found["d"])
    assert [int(v[0]) for v in jax.tree.leaves(found["l"])] == list(range(11))


# 6 Errors and shutdown


def test_one_chunk_that_fails_among_many_fails_the_save(tmp_path):  # field report 37
    class OneFails:
        def write(self, pieces):
            def failing():
                for number, piece in enumerate(pieces):
                    if number == 2:
                        raise OSError(errno.EIO, "Input/output error")
                    yield piece

            super().write(failing())

    state = {str(k): np.full(100, k) for k in range(4)}
    with rps.CheckpointCallback(config(tmp_path)) as checkpoint:
        with faults.engine(OneFails):
            checkpoint(10, state)
            with pytest.raises(rps.SaveError, match=r"step 10 .*Input/output error"):
                checkpoint.wait()
        assert names(tmp_path) == []
        assert checkpoint(20, state)


# 7 Hangs and many processes


def test_a_process_that_does_not_come_to_the_restore_is_named_in_time(tmp_path):  # field reports 40 and 41
    script = """
    from flax_rpsave import agreement
    agreement._PROGRESS_SECS = 1.0
    checkpoint = rps.CheckpointCallback(dict(directory=sys.argv[1], commit_timeout_secs=3))
    if process == 0:
        try:
            checkpoint.resume({"w": put(np.ones(8, np.float32))})
        except rps.CommitTimeoutError as error:
            say(error)
        open(sys.argv[1] + "/given-up", "w").close()
    else:
        while not os.path.exists(sys.argv[1] + "/given-up"):
            time.sleep(0.05)
    """
    with started(script, 2, args=[str(tmp_path)]) as running:
        first = ended(running)[0]
    assert re.search(r"listing the steps: process 1 did not report within 3 s", first.said[0])
    assert re.search(r"listing the steps: waiting for process 1 since \d+ s", first.output)


def test_directories_may_be_made_by_all_at_once(tmp_path):  # field report 44
    directory = open_directory(tmp_path / "a" / "b" / "c", store.new_context())
    errors = []
    barrier = threading.Barrier(8)

    def make(number):
        barrier.wait()
        try:
            directory.make()
            (directory / "d").write(f"e{number}/f", b"x")
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(names(tmp_path / "a" / "b" / "c" / "d")) == 8


# 8 Memory and time


def test_leaves_larger_than_a_file_or_than_32_bits_count(tmp_path, monkeypatch):  # field report 49
    monkeypatch.setattr(store, "_DATA_FILE_NBYTES", 10_000)
    values = np.arange(25_000, dtype=np.float32)
    rps.save(tmp_path / "c", {"w": on_all_devices(values)}, config={"replica_parallel": {"min_slice_bytes": 1}})
    assert rps.load(tmp_path / "c")["w"].tobytes() == values.tobytes()
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    plan = rps.plan({"w": jax.ShapeDtypeStruct((5 << 30,), jnp.uint8, sharding=sharding)})
    (leaf,) = plan.leaves
    assert plan.nbytes == 5 << 30
    assert leaf.start(7)[0] == 7 * (5 << 30) // 8


# 10 Paths and storage


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOTSUP])
def test_a_file_system_that_cannot_rename_fails_the_save_and_leaves_the_steps(
    tmp_path, monkeypatch, code
):  # field report 56
    rename = os.rename

    def refusing(source, target):
        if pathlib.Path(target).name == "20":
            raise OSError(code, os.strerror(code), str(source), None, str(target))
        rename(source, target)

    with rps.CheckpointCallback(config(tmp_path)) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refusing)
            checkpoint(20, state_at(20))
            with pytest.raises(rps.SaveError, match=rf"step 20 .*{os.strerror(code)}"):
                checkpoint.wait()
        assert names(tmp_path) == ["10"]
        assert checkpoint(30, state_at(30))


SAVES = """
import sys
import numpy as np
import flax_rpsave as rps
config = {"directory": sys.argv[1], "save_interval_steps": 1, "storage": {"use_ocdbt": "ocdbt" in sys.argv[2]}}
with rps.CheckpointCallback(config) as checkpoint:
    checkpoint(1, {"x": np.arange(1000.0), "y": np.ones(3)})
"""


def traced(tmp_path, form, *options):
    """The system calls of a program that saves step 1, as strace writes them."""
    if subprocess.run(["strace", "-V"], capture_output=True, check=False).returncode:
        pytest.skip("there is no strace")
    log = tmp_path / "log"
    done = subprocess.run(
        [
            "strace",
            "--seccomp-bpf",
            "-f",
            "-y",
            "-qq",
            "-o",
            log,
            *options,
            sys.executable,
            "-c",
            SAVES,
            tmp_path / "run",
            form,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.parametrize("form", ["ocdbt", "files", "files by tensorstore"])
def test_no_lock_is_asked_of_the_file_system_and_all_is_synced_before_the_rename(
    tmp_path, form, monkeypatch
):  # field reports 57 and 60
    """Durable in this order: every file, its directory, the step's directory; rename; the run's directory."""
    monkeypatch.setenv("RPSAVE_ENGINE", "tensorstore" if "tensorstore" in form else "direct")
    calls = "flock,fcntl,fsync,fdatasync,syncfs,rename,renameat,renameat2,openat,pwrite64,pwritev,pwritev2"
    lines = traced(tmp_path, form, "-e", f"trace={calls}")
    assert not [line for line in lines if re.search(r"flock\(|F_OFD_SETLK|F_SETLK", line)]
    run = str(tmp_path / "run")
    (published,) = [k for k, line in enumerate(lines) if re.search(rf'rename\w*\(.*"{run}/1"', line)]
    temporary = re.search(rf'"({run}/1\.orbax-checkpoint-tmp-\w+)"', lines[published])[1]
    synced = {m[1] for line in lines[:published] if (m := re.search(r"f(?:data)?sync\(\d+<([^>]+)>", line))}
    if form == "files":  # all that was written before is synced by one call
        (whole,) = [
            k for k, line in enumerate(lines[:published]) if f"<{temporary}/default>) = 0" in line and "syncfs(" in line
        ]
        synced |= {m[1] for line in lines[:whole] if (m := re.search(r"pwrite\w*\(\d+<([^>]+)>", line))}
        assert not [
            line for line in lines[whole:] if re.search(r"pwrite\w*\(", line) and f"{temporary}/default" in line
        ]
    stored = [path.relative_to(f"{run}/1") for path in pathlib.Path(run, "1").rglob("*")]
    assert stored
    for path in stored:  # TensorStore syncs a file under another name, then renames it
        name = f"{temporary}/{path}"
        assert any(done == name or re.fullmatch(re.escape(name) + r"(_\w+)?\.__lock", done) for done in synced), path
    assert temporary in synced
    assert any(re.search(rf"fsync\(\d+<{run}>", line) for line in lines[published:])


def test_little_room_is_said_before_the_write_fails(tmp_path, caplog):  # field report 58
    place = tmp_path / "disk"
    with faults.mounted(place, "size=2m"), rps.CheckpointCallback(config(place / "run")) as checkpoint:
        checkpoint(10, {"x": np.ones(1 << 20, np.float32)})
        with pytest.raises(rps.SaveError, match=rf"{place}/run/10: .*No space left"):
            checkpoint.wait()
        said = warnings(caplog)
        assert re.search(
            rf"step 10 has 0\.004 GB, and 0\.00\d GB are free at {place}/run: it will probably not", said[0]
        )
        assert names(place / "run") == []


# Two runs on one directory


def test_a_save_that_another_live_run_has_under_way_is_left_alone(tmp_path, caplog):  # field report 59
    other = faults.start_python(
        """
        import sys, threading
        from tests import faults
        import numpy as np
        import flax_rpsave as rps

        with faults.gated_writer() as gate, rps.CheckpointCallback({"directory": sys.argv[1]}) as checkpoint:
            checkpoint(15, {"w": np.full(4, 15, np.float32), "step": 15}, force=True)
            gate.wait_reached()
            print("writing", flush=True)
            threading.Event().wait()
        """,
        tmp_path,
    )
    assert other.stdout.readline() == "writing\n"
    (under_way,) = names(tmp_path)
    with rps.CheckpointCallback(config(tmp_path)) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        assert names(tmp_path) == ["10", under_way]
        assert f"{under_way} is being written by process {other.pid} on " in caplog.text
        other.kill()
        other.communicate(timeout=60)
        checkpoint(20, state_at(20))  # now its writer is dead
        checkpoint.wait()
        assert names(tmp_path) == ["10", "20"]


class NoFault:
    """For `faults.engine`, within a block that has one."""


def test_both_of_two_live_runs_commit_whole_steps_and_are_told_of_each_other(tmp_path, caplog):  # field report 59
    first, second = (rps.CheckpointCallback(config(tmp_path)) for _ in range(2))
    with first, second:
        with faults.gated_writer() as gate:
            first(10, state_at(10))
            gate.wait_reached()
            with faults.engine(NoFault):
                second(15, state_at(15), force=True)
                second.wait()
            gate.open()
            first.wait()
        first(20, state_at(20))
        first.wait()
    for step in (10, 15, 20):
        assert rps.load(tmp_path, state_at(0), step=step)["step"] == step
    assert f"steps [15] in {tmp_path} were saved by another run" in caplog.text
    runs = [json.loads((tmp_path / step / "_CHECKPOINT_METADATA").read_text()) for step in ("10", "15", "20")]
    ids = [run["custom_metadata"]["flax_rpsave"]["run"] for run in runs]
    assert ids[0] == ids[2] != ids[1]


def test_a_save_whose_directory_was_taken_away_fails_and_shows_no_step(tmp_path):  # field report 59
    class TakenAway:
        def finish(self, values):
            written = super().finish(values)
            (place,) = (path for path in tmp_path.iterdir() if path.name.startswith("10."))
            place.rename(tmp_path / "elsewhere")
            return written

    with rps.CheckpointCallback(config(tmp_path)) as checkpoint:
        with faults.engine(TakenAway):
            checkpoint(10, state_at(10))
            with pytest.raises(rps.SaveError, match=r"is not in .*10\.orbax-checkpoint-tmp|taken away"):
                checkpoint.wait()
        assert checkpoint.all_steps() == []
        assert checkpoint(20, state_at(20))


def test_documents_alone_never_become_a_step(tmp_path):  # field report 59: taken away between check and commit
    root = open_directory(tmp_path, store.new_context())
    step = commit.prepare(root / "10", "01234567")
    (tmp_path / step.name).rename(tmp_path / "elsewhere")
    with pytest.raises(rps.SaveError, match=r"taken away while it was written: does another run use"):
        commit.publish(step, step / "default", root / "10", {"_METADATA": b"{}"}, "01234567")
    assert commit.committed_steps(root) == {}


def leftover(root, step, who):
    place = root / f"{step}.orbax-checkpoint-tmp-0123456{step % 10}"
    place.mkdir()
    if who is not None:
        (place / ".rpsave-writing").write_bytes(who)
    return place.name


def test_what_a_dead_process_left_goes_at_once_and_that_of_an_unknown_one_in_an_hour(tmp_path):  # field report 59
    mine = json.loads(identity.record("a"))
    dead = leftover(tmp_path, 1, json.dumps({**mine, "began": mine["began"] + 1}).encode())
    gone = leftover(tmp_path, 2, json.dumps({**mine, "pid": 2**22 + 1}).encode())
    nobody = leftover(tmp_path, 3, None)
    alive = leftover(
        tmp_path, 4, json.dumps({**mine, "pid": os.getppid(), "began": identity._began(os.getppid())}).encode()
    )
    elsewhere = leftover(tmp_path, 5, json.dumps({**mine, "boot": "another"}).encode())
    garbled = leftover(tmp_path, 6, b"{")
    root, spared = open_directory(tmp_path, store.new_context()), {}
    assert {dead, gone, nobody} < set(names(tmp_path))
    commit.delete_leftovers(root, "89abcdef", spared, now=100.0)
    assert names(tmp_path) == [alive, elsewhere, garbled]
    assert spared == dict.fromkeys((alive, elsewhere, garbled), 100.0)
    commit.delete_leftovers(root, "89abcdef", spared, now=3600.0)
    assert names(tmp_path) == [alive, elsewhere, garbled]
    commit.delete_leftovers(root, "89abcdef", spared, now=3700.0)
    assert names(tmp_path) == [alive]
    assert list(spared) == [alive]


# 11 Other topology


def test_a_long_restore_says_how_far_it_is(tmp_path, caplog, monkeypatch):  # field report 62
    caplog.set_level(logging.INFO, "flax_rpsave")
    monkeypatch.setattr(restore, "_PROGRESS_SECS", 0.0)
    state = {str(k): np.ones(3) for k in range(3)}
    rps.save(tmp_path / "c", state)
    rps.load(tmp_path / "c", state)
    said = [message for record in caplog.records if "restoring" in (message := record.getMessage())]
    assert [re.search(r"(\d) of 3 arrays", message)[1] for message in said] == ["0", "1", "2"]


# 12 Versions


def test_what_is_installed_is_within_the_declared_bounds(tmp_path):  # field report 66
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for text in declared:
        requirement = Requirement(text)
        assert requirement.specifier, f"{text} has no bound"
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{text}, installed is {version}"
    rps.save(tmp_path / "c", state_at(1))
    document = json.loads((tmp_path / "c" / "_CHECKPOINT_METADATA").read_text())
    versions = document["custom_metadata"]["flax_rpsave"]["versions"]
    assert versions["jax"] == jax.__version__
    assert set(versions) == {"flax_rpsave", "jax", "orbax-checkpoint", "tensorstore"}


# The list of all of them


def test_every_report_has_tests_that_exist():
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "docs" / "field_reports.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 68))
    for number, cell in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert tests, number
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (number, file, name)
