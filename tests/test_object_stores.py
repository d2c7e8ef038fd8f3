"""Everything a run does works in S3 and in Google Cloud Storage as it does on a file system."""

import json
import logging
import signal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_rpsave as rps
from tests import faults, processes
from tests.helpers import assert_same_tree
from tests.object_stores import MARKER, keys, objects, own_url


@pytest.fixture
def run(store, request):
    """A URL of this test's own."""
    return own_url(store, request)


@pytest.fixture(params=[True, False], ids=["ocdbt", "raw"])
def use_ocdbt(request):
    return request.param


def config(directory, **settings):
    return {
        "directory": directory,
        "save_interval_steps": 1,
        "replica_parallel": {"min_slice_bytes": 64},
        **settings,
    }


def state(seed):
    """A state on eight devices: replicated and sharded leaves, small floats, a key, names that URLs must quote."""
    rng = np.random.default_rng(seed)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def put(shape, spec, dtype=np.float32):
        return jax.device_put(rng.normal(size=shape).astype(dtype), NamedSharding(mesh, spec))

    return {
        "params": {
            "kernel": put((24, 16), P(None, "y")),
            "bias": put((7,), P()),
            "half": put((8, 8), P("x"), jnp.bfloat16),
            "odd name+%20é?#": put((5,), P()),
        },
        "key": jax.random.key(seed),
        "count": seed,
    }


class Data:
    """An iterator that can be positioned."""

    position = 0

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def save_steps(directory, steps, **settings):
    """A run that saves these steps and ends."""
    with rps.CheckpointCallback(config(directory, **settings)) as checkpoint:
        checkpoint.resume(state(0))
        for step in steps:
            checkpoint(step, state(step), metrics={"loss": 1 / step})


def test_a_run_is_saved_and_resumed_bit_for_bit(run, use_ocdbt):
    data = Data()
    storage = {"use_ocdbt": use_ocdbt}
    with rps.CheckpointCallback(config(run, storage=storage), data=data) as checkpoint:
        assert checkpoint.resume(state(0))[1] == 0
        for step in (1, 2, 10):
            data.position = 100 * step
            assert checkpoint(step, state(step), metrics={"loss": jnp.float32(step)}, extra={"note": f"after {step}"})
        checkpoint.wait()
        assert checkpoint.all_steps() == [1, 2, 10]
    data = Data()
    with rps.CheckpointCallback(config(run, storage=storage), data=data) as checkpoint:
        assert checkpoint.latest_step() == 10
        resumed, step = checkpoint.resume(state(0))
        assert (step, data.position, checkpoint.extra) == (10, 1000, {"note": "after 10"})
        assert_same_tree(resumed, state(10))
        assert checkpoint(11, resumed)
    assert_same_tree(rps.load(run, state(0), step=11), state(10))
    metadata = json.loads(objects(run).read("10/_CHECKPOINT_METADATA").result().value)
    assert metadata["metrics"] == {"loss": 10.0}


def test_the_marker_is_written_after_everything_else_of_its_step(store, run, use_ocdbt):
    with rps.CheckpointCallback(config(run, storage={"use_ocdbt": use_ocdbt})) as checkpoint:
        begin = len(store.proxy.done)
        checkpoint(1, state(1))
    prefix = run.partition("//bucket/")[2] + "/1/"
    written = [r.key.removeprefix(prefix) for r in store.proxy.done[begin:] if r.kind == "write" and prefix in r.key]
    assert written[0] == ".rpsave-writing"
    assert written[-1] == MARKER
    assert written.count(MARKER) == 1
    assert set(keys(run + "/1")) <= set(written) - {".rpsave-writing"}


def test_a_step_without_its_marker_is_invisible_and_what_others_put_there_is_not_deleted(run, caplog):
    save_steps(run, (1, 2))
    objects(run).write(f"2/{MARKER}", None).result()
    before = keys(run + "/2")
    with rps.CheckpointCallback(config(run)) as checkpoint, caplog.at_level(logging.WARNING):
        assert checkpoint.all_steps() == [1]
        resumed, step = checkpoint.resume(state(0))
        assert step == 1
        assert f"2 without {MARKER}, so passed over" in caplog.text
        assert_same_tree(resumed, state(1))
        with pytest.raises(rps.NoCheckpointError, match="no step 2"):
            rps.load(run, step=2)
        checkpoint(2, state(22))
        checkpoint.wait()
        assert checkpoint.all_steps() == [1, 2]
    assert_same_tree(rps.load(run, state(0)), state(22))
    (aside,) = {key.partition("/")[0] for key in keys(run)} - {"1", "2"}
    assert aside.startswith("2.unfinished-")
    assert aside in caplog.text
    assert keys(f"{run}/{aside}") == before


def test_what_stock_orbax_saved_is_resumed_if_its_marker_is_there(run, tmp_path):
    values = {"w": np.arange(12.0).reshape(3, 4)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave(values))
    files = faults.files_in(tmp_path)
    stored = objects(run)
    for name in (name for name in files if (tmp_path / name).is_file() and name != f"5/{MARKER}"):
        stored.write(name, files[name]).result()
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume({"w": np.zeros((3, 4))})[1] == 0
        stored.write(f"5/{MARKER}", files[f"5/{MARKER}"]).result()
        resumed, step = checkpoint.resume({"w": np.zeros((3, 4))})
    assert step == 5
    assert_same_tree(resumed, values)


def test_the_newest_and_the_best_steps_are_kept(run):
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}
    settings = config(run, max_to_keep=1, keep_best={"metric": "loss", "mode": "min", "n": 1})
    with rps.CheckpointCallback(settings) as checkpoint:
        for step, loss in losses.items():
            checkpoint(step, state(step), metrics={"loss": loss})
        checkpoint.wait()
        assert checkpoint.all_steps() == [2, 4]
    assert {key.partition("/")[0] for key in keys(run)} == {"2", "4"}
    assert_same_tree(rps.load(run, state(0), step=2), state(2))


def test_rewind_moves_newer_steps_aside_whole(run):
    save_steps(run, (1, 2, 3))
    with rps.CheckpointCallback(config(run)) as checkpoint:
        with pytest.raises(rps.StepOrderError, match="rewind=True"):
            checkpoint.resume(state(0), step=1)
        resumed, step = checkpoint.resume(state(0), step=1, rewind=True)
        assert (step, checkpoint.all_steps()) == (1, [1])
        checkpoint(2, resumed)
    assert_same_tree(rps.load(run, state(0)), state(1))
    aside = sorted({key.partition("/")[0] for key in keys(run)} - {"1", "2"})
    assert [name.partition(".abandoned-")[0] for name in aside] == ["2", "3"]
    assert_same_tree(rps.load(f"{run}/{aside[1]}", state(0)), state(3))


def test_one_checkpoint_is_saved_and_loaded_whole_or_in_part(run):
    settings = {"storage": {"use_ocdbt": False, "compression": "zstd"}}
    rps.save(run + "/export", state(1), config=settings)
    assert_same_tree(rps.load(run + "/export", state(0)), state(1))
    params = rps.load(run + "/export", subtree="params", dtype=jnp.bfloat16)
    assert sorted(params) == sorted(state(1)["params"])
    np.testing.assert_array_equal(params["kernel"], np.asarray(state(1)["params"]["kernel"]).astype(jnp.bfloat16))
    with pytest.raises(rps.StepOrderError, match="exists already"):
        rps.save(run + "/export", state(2))
    with pytest.raises(rps.NoCheckpointError, match="does not exist"):
        rps.load(run + "/elsewhere")


def test_an_object_that_changed_is_found_and_the_step_before_is_taken(run, use_ocdbt, caplog):
    save_steps(run, (1, 2), storage={"use_ocdbt": use_ocdbt})
    stored = objects(run)
    kernel = np.asarray(state(2)["params"]["kernel"])[:, :4].astype("<f4")  # one column block is in some chunk whole
    parts = [kernel[i].tobytes() for i in range(len(kernel))]
    changed = 0
    for key in keys(run + "/2"):
        value = stored.read(f"2/{key}").result().value
        if any(part in value for part in parts):
            at = next(value.index(part) for part in parts if part in value)
            stored.write(f"2/{key}", value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]).result()
            changed += 1
    assert changed
    with rps.CheckpointCallback(config(run)) as checkpoint, caplog.at_level(logging.WARNING):
        resumed, step = checkpoint.resume(state(0))
    assert step == 1
    assert_same_tree(resumed, state(1))
    assert "step 2 is damaged" in caplog.text
    assert "kernel" in caplog.text
    with pytest.raises(rps.CorruptCheckpointError, match="kernel"):
        rps.load(run, state(0), step=2)


KILLED = """
import os, signal, sys
import numpy as np
import flax_rpsave as rps
from flax_rpsave import documents
def dying(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1)) as checkpoint:
    checkpoint(1, {"w": np.ones(5)})
    checkpoint.wait()
    documents.build_commit = dying  # all is written but the marker
    checkpoint(2, {"w": np.ones(5)})
"""


def test_what_a_killed_run_left_is_removed_by_the_next_runs_first_save_and_by_no_reader(run):
    assert faults.run_python(KILLED, run).returncode == -signal.SIGKILL
    left = keys(run + "/2")
    assert "_CHECKPOINT_METADATA" in left
    with rps.CheckpointCallback(config(run)) as checkpoint:
        restored, step = checkpoint.resume({"w": np.zeros(5)})
        assert step == 1
        assert list(rps.load(run)) == ["w"]
        assert keys(run + "/2") == left
        checkpoint(7, restored)
        checkpoint.wait()
        assert keys(run + "/2") == []
        assert checkpoint.all_steps() == [1, 7]


def test_a_checkpoint_whose_save_was_interrupted_is_none_and_can_be_saved_again(store, run):
    def interrupted(request):  # neither can be finished, nor cleaned up
        denied = request.kind == "delete" or (request.kind == "write" and request.key.endswith(MARKER))
        return 403 if denied else None

    with store.proxy.faulty(interrupted), pytest.raises(rps.SaveError, match=MARKER):
        rps.save(run, state(1))
    with pytest.raises(rps.CorruptCheckpointError, match=f"{MARKER} is missing"):
        rps.load(run)
    rps.save(run, state(2))
    assert_same_tree(rps.load(run, state(0)), state(2))


def test_an_interrupted_deletion_of_a_step_is_finished_by_the_next_run(store, run):
    script = """
    import sys
    import numpy as np
    import flax_rpsave as rps
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1, max_to_keep=1)) as checkpoint:
        checkpoint(1, {"w": np.arange(50.0)})
        checkpoint(2, {"w": np.arange(50.0)})
    """

    def undeletable(request):
        return 403 if request.kind == "delete" and "/1/" in request.key and "/d/" in request.key else None

    with store.proxy.faulty(undeletable):
        done = faults.run_python(script, run)
    assert (done.returncode, "tried again later" in done.stderr) == (0, True), done.stderr
    assert any("/d/" in key for key in keys(run + "/1"))
    with rps.CheckpointCallback(config(run)) as checkpoint:
        resumed, step = checkpoint.resume({"w": np.zeros(50)})
        assert (step, checkpoint.all_steps()) == (2, [2])
        checkpoint(3, resumed)
    assert keys(run + "/1") == []


def test_several_processes_save_to_one_bucket_and_any_number_resumes(store, run):
    script = """
    values = np.random.default_rng(7).normal(size=(48, 24)).astype(np.float32)
    def make(factor):
        return {"replicated": put(values * factor), "sharded": put(values * factor, P("data")),
                "host": np.arange(4) * factor}
    class Data:
        position = 0
        def get_state(self): return {"position": self.position}
        def set_state(self, state): self.position = state["position"]
    for form in "ocdbt", "raw":
        config = dict(directory=sys.argv[1] + form, save_interval_steps=1, replica_parallel={"min_slice_bytes": 1},
                      storage={"use_ocdbt": form == "ocdbt"})
        data = Data()
        with rps.CheckpointCallback(config, data=data) as checkpoint:
            assert checkpoint.resume(make(0))[1] == 0
            for step in (1, 2):
                data.position = 10 * step + process
                checkpoint(step, make(step))
            checkpoint.wait()
            say(checkpoint.all_steps())
        data = Data()
        with rps.CheckpointCallback(config, data=data) as checkpoint:
            state, step = checkpoint.resume(make(0))
            for name in ("replicated", "sharded"):
                for shard in state[name].addressable_shards:
                    assert np.asarray(shard.data).tobytes() == (values * 2)[shard.index].tobytes(), name
            assert (state["host"] == np.arange(4) * 2).all()
            say(step, data.position)
    """
    results = processes.run(script, 2, args=[run], env=store.environment)
    assert [result.said for result in results] == [["[1, 2]", "2 20"] * 2, ["[1, 2]", "2 21"] * 2]
    values = np.random.default_rng(7).normal(size=(48, 24)).astype(np.float32) * 2
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    target = {
        "replicated": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding),
        "sharded": np.zeros_like(values),
        "host": np.zeros(4, int),
    }
    for form in ("ocdbt", "raw"):
        with rps.CheckpointCallback(config(run + form), data=False) as checkpoint:
            resumed, step = checkpoint.resume(target)
        assert step == 2
        for name, expected in {"replicated": values, "sharded": values, "host": np.arange(4) * 2}.items():
            assert np.asarray(resumed[name]).tobytes() == expected.tobytes(), name
