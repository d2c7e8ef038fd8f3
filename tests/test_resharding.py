"""What was saved on some devices is restored on any others, bit-equal, and can be donated to the train loop."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_rpsave as rps
from flax_rpsave import CheckpointCallback, host_memory
from flax_rpsave.restore import put
from tests import xla_flags
from tests.trees import abstract, assert_same_tree, blank, mesh_of, on, values

CONFIG = {"replica_parallel": {"min_slice_bytes": 16}}


def replicated(mesh, leaf):
    return on(mesh)


def sharded(mesh, leaf):
    """Along as many dimensions as the mesh's axes divide; the other axes hold replicas."""
    axes = [a for a, n in zip(mesh.axis_names, leaf.shape, strict=False) if n % mesh.shape[a] == 0]
    return on(mesh, *(a if a in axes else None for a in mesh.axis_names[: leaf.ndim]))


def partly(mesh, leaf):
    """Along the last axis only: sharded and replicated."""
    last = mesh.axis_names[-1]
    fits = leaf.ndim and leaf.shape[-1] % mesh.shape[last] == 0
    return on(mesh, *[None] * (leaf.ndim - 1), last) if fits else on(mesh)


def together(mesh, leaf):
    """All axes along one dimension."""
    fits = leaf.ndim and leaf.shape[0] % mesh.size == 0
    return on(mesh, mesh.axis_names) if fits else on(mesh)


LAYOUTS = {
    "8 replicated": ((8,), 0, replicated),
    "8 sharded": ((8,), 0, sharded),
    "4x2 sharded": ((4, 2), 0, sharded),
    "4x2 sharded and replicated": ((4, 2), 0, partly),
    "2x4 sharded": ((2, 4), 0, sharded),
    "2x4 sharded and replicated": ((2, 4), 0, partly),
    "2x4 along one dimension": ((2, 4), 0, together),
    "2x2x2 sharded and replicated": ((2, 2, 2), 0, partly),
    "3 replicated": ((3,), 5, replicated),
    "3 sharded": ((3,), 2, sharded),
    "1": ((1,), 7, replicated),
}
NAMES = ("data", "model", "stage")


def state_on(layout):
    """The same values, whatever the layout: leaves that 8, 4, 3 and 2 divide, and leaves that nothing divides."""
    shape, first, rule = LAYOUTS[layout]
    mesh = mesh_of(shape, NAMES, first)
    params = {
        "kernel": values((24, 48), np.float32),
        "embedding": values((50, 24), jnp.bfloat16, 1),
        "odd": values((7, 5, 3), np.float32, 2),
        "bias": values((24,), np.float16, 3),
    }
    weights = jax.tree.map(lambda x: jax.device_put(x, rule(mesh, x)), params)
    opt_state = jax.tree.map(
        lambda x: jax.device_put(x, rule(mesh, x)), optax.adamw(0.1).init(jax.tree.map(jnp.asarray, params))
    )
    keys = jax.random.split(jax.random.key(4), 24)
    return {
        "params": weights,
        "opt_state": opt_state,
        "step": jax.device_put(jnp.int32(10), on(mesh)),
        "keys": jax.device_put(keys, rule(mesh, keys)),
    }


@pytest.fixture(scope="module")
def run_on(tmp_path_factory):
    """The directory of a run that was saved with a layout."""
    made = {}

    def run(layout):
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("run")
            with CheckpointCallback({"directory": str(made[layout]), "save_interval_steps": 1, **CONFIG}) as callback:
                callback(10, state_on(layout))
        return made[layout]

    return run


@pytest.mark.parametrize("restored", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_restores_what_any_other_saved(run_on, saved, restored):
    """Reports 61 and 62."""
    wanted = state_on(restored)
    with CheckpointCallback({"directory": str(run_on(saved)), "save_interval_steps": 1, **CONFIG}) as callback:
        found, step = callback.resume(abstract(wanted))
    assert step == 10
    assert_same_tree(found, wanted)


@pytest.mark.parametrize("between", ["3 sharded", "1", "2x4 sharded and replicated"])
def test_there_and_back_again_is_bit_equal(tmp_path, between):
    first, other = state_on("4x2 sharded"), state_on(between)
    rps.save(tmp_path / "a", first, config=CONFIG)
    rps.save(tmp_path / "b", rps.load(tmp_path / "a", blank(other)), config=CONFIG)
    assert_same_tree(rps.load(tmp_path / "b", blank(first)), first)


def test_leaves_of_one_state_may_lie_on_different_meshes_and_devices(tmp_path):
    def spread(a, b):
        left, right = mesh_of((4,), first=a), mesh_of((2, 2), first=b)
        return {
            "left": jax.device_put(values((8, 6), np.float32), on(left, "data")),
            "right": jax.device_put(values((8, 6), np.float32, 1), on(right, None, "model")),
            "one": jax.device_put(values((5,), np.int32), jax.devices()[a]),
            "free": jnp.ones(3),
        }

    rps.save(tmp_path / "one", spread(0, 4), config=CONFIG)
    assert_same_tree(rps.load(tmp_path / "one", blank(spread(3, 2))), spread(3, 2))


def test_a_mesh_in_another_device_order_is_another_place(tmp_path):
    devices = np.array(jax.devices())
    forward = jax.sharding.Mesh(devices, ("data",))
    backward = jax.sharding.Mesh(devices[::-1], ("data",))
    shuffled = jax.sharding.Mesh(devices[[3, 1, 4, 0, 5, 7, 2, 6]], ("data",))
    for number, (source, target) in enumerate([(forward, backward), (backward, shuffled), (shuffled, forward)]):
        state = [{"x": jax.device_put(values((16, 3), np.float32), on(m, "data"))} for m in (source, target)]
        rps.save(tmp_path / str(number), state[0], config=CONFIG)
        assert_same_tree(rps.load(tmp_path / str(number), blank(state[1])), state[1])


DONATED = [
    ("8 replicated", "4x2 sharded"),
    ("4x2 sharded", "8 replicated"),
    ("4x2 sharded", "1"),
    ("1", "1"),
]


def pointers_of(arrays):
    """Where each array's shards lie: a dict from part to the addresses of its replicas."""
    return [
        {index: [s.data.unsafe_buffer_pointer() for s in shards] for index, shards in by_part(x).items()}
        for x in arrays
    ]


def by_part(array):
    groups = {}
    for shard in array.addressable_shards:
        groups.setdefault(str(shard.index), []).append(shard)
    return groups


@pytest.mark.parametrize(("saved", "restored"), DONATED)
def test_restored_arrays_can_be_donated(run_on, saved, restored):
    """A step takes them over and nothing else changes, whoever is restored from the same chunks."""
    wanted = state_on(restored)
    found = rps.load(run_on(saved), abstract(wanted))
    other = rps.load(run_on(saved), abstract(wanted))
    del wanted
    arrays = [x for x in jax.tree.leaves(found) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    parts = [replicas for parts in pointers_of(arrays) for replicas in parts.values()]
    assert all(len(set(replicas)) == 1 for replicas in parts)  # one piece of memory for all devices that hold the same
    assert len({replicas[0] for replicas in parts}) == len(parts)
    alone = {replicas[0] for replicas in parts if len(replicas) == 1}
    step = jax.jit(lambda xs: [x + jnp.ones((), x.dtype) for x in xs], donate_argnums=0)
    stepped = step(arrays)
    assert all(x.is_deleted() for x in arrays)
    after = [p for parts in pointers_of(stepped) for replicas in parts.values() for p in replicas]
    assert len(set(after)) == len(after)  # from here on each device has its own
    assert alone <= set(after)  # and where it had before, it still is the same
    plain = [x for x in jax.tree.leaves(other) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    for before, one_more in zip(plain, stepped, strict=True):
        for shard in one_more.addressable_shards:
            expected = np.asarray(before)[shard.index] + np.ones((), before.dtype)
            assert np.array_equal(np.asarray(shard.data), expected)
    assert_same_tree(other, state_on(restored))


def test_uncommitted_restored_arrays_can_be_donated(tmp_path):
    state = {"w": jnp.asarray(values((64, 64), np.float32))}
    rps.save(tmp_path / "one", state)
    found = rps.load(tmp_path / "one", blank(state))
    assert not found["w"].committed
    pointer = found["w"].unsafe_buffer_pointer()
    stepped = jax.jit(lambda s: {"w": s["w"] * 2}, donate_argnums=0)(found)
    assert found["w"].is_deleted()
    assert stepped["w"].unsafe_buffer_pointer() == pointer
    assert np.array_equal(stepped["w"], 2 * state["w"])


@pytest.mark.parametrize("where", ["uncommitted", "one device", "sharded"])
def test_memory_that_only_one_cpu_device_could_use_as_it_lies_is_copied(where):
    """`device_put(…, may_alias=False)` uses NumPy memory that is aligned to 64 bytes all the same."""
    source = host_memory.empty((64, 64), np.float32)
    source[...] = 0
    sharding = {
        "uncommitted": None,
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        "sharded": on(mesh_of((8,)), "data"),
    }[where]
    array = put(source, sharding, "x")
    pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    stepped = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert [shard.data.unsafe_buffer_pointer() for shard in stepped.addressable_shards] == pointers
    assert len(set(pointers)) == len(pointers)
    source[:] = 5
    assert (np.asarray(stepped) == 1).all()


def test_replicas_on_cpu_devices_share_memory_until_they_are_donated():
    """Nobody pays for eight copies who only evaluates; the host's copy is never written to."""
    source = host_memory.empty((64, 64), np.float32)
    source[...] = 0
    array = put(source, on(mesh_of((8,))), "x")
    pointers = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    assert pointers == {source.ctypes.data}
    stepped = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert len({shard.data.unsafe_buffer_pointer() for shard in stepped.addressable_shards} - pointers) == 8
    assert all((np.asarray(shard.data) == 1).all() for shard in stepped.addressable_shards)
    assert (source == 0).all()


IN_ANOTHER_PROCESS = """
    import sys
    import jax
    import flax_rpsave as rps
    from tests.test_resharding import LAYOUTS, CONFIG, state_on
    from tests.trees import abstract, assert_same_tree

    devices, source, target, destination = sys.argv[1:]
    assert len(jax.devices()) == int(devices)
    LAYOUTS["here"] = ((int(devices),), 0, LAYOUTS[target][2])
    wanted = state_on("here")
    found = rps.load(source, abstract(wanted))
    assert_same_tree(found, wanted)
    host = rps.load(source)
    assert host["params"]["kernel"].shape == (24, 48)
    rps.save(destination, found, config=CONFIG)
"""


@pytest.mark.parametrize(("devices", "target"), [(1, "1"), (3, "3 sharded"), (2, "8 sharded")])
def test_a_process_with_fewer_devices_restores_and_its_save_is_restored_on_all(run_on, tmp_path, devices, target):
    """The sharding stored in the checkpoint names devices that are not there (report 61)."""
    script = textwrap.dedent(IN_ANOTHER_PROCESS)
    done = subprocess.run(
        [sys.executable, "-c", script, str(devices), run_on("4x2 sharded"), target, tmp_path / "back"],
        env={**os.environ, "XLA_FLAGS": xla_flags.devices(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = state_on("2x4 sharded and replicated")
    assert_same_tree(rps.load(tmp_path / "back", blank(wanted)), wanted)
