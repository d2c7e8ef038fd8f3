"""Copies of the owner slices (flax_rpsave/snapshot.py)."""

import threading
import weakref
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flax_rpsave as rps
from flax_rpsave import owner_slices
from flax_rpsave.config import ReplicaParallelConfig
from flax_rpsave.planner import layout_of, plan_leaves
from flax_rpsave.shares import chunk_boxes
from flax_rpsave.snapshot import Snapshotter
from tests.helpers import arrays_of, assert_same_tree, bits, staging_nbytes, values_of
from tests.models import adam_state, replicated

FINE = ReplicaParallelConfig(min_slice_bytes=1)
DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
SHORT_FLOATS = [
    "bfloat16",
    "float16",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def put(value, spec=None, mesh=MESH, **kwargs):
    return jax.device_put(value, NamedSharding(mesh, spec or P(), **kwargs))


def values(*shape, dtype="float32", seed=0):
    """Random bits, NaNs and infinities among them; of bool 0 and 1."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng([seed, *shape]).bytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype.kind == "b":
        return (np.frombuffer(raw, np.uint8) & 1).astype(bool).reshape(shape)
    return np.frombuffer(raw, dtype).reshape(shape)


def snapshotter_for(state, options=FINE, max_nbytes=None, process=0):
    leaves = arrays_of(state)
    plan = plan_leaves([layout_of(leaf.name, leaf.value) for leaf in leaves], options)
    return Snapshotter(plan, leaves, process, max_nbytes)


def host_copy(state):
    """{name: (dtype, shape, bytes)} of the leaves as they are now."""
    return {leaf.name: bits(np.array(leaf.value)) for leaf in arrays_of(state)}


def put_together(plan, pieces):
    """{name: (dtype, shape, bytes)} from chunks; each chunk of the plan must be there once."""
    arrays = [np.empty(leaf.layout.shape, leaf.layout.dtype) for leaf in plan.leaves]
    missing = [{index for index, _ in chunk_boxes(leaf.layout.shape, leaf.chunk_shape)} for leaf in plan.leaves]
    for piece in pieces:
        missing[piece.leaf].remove(piece.chunk)
        arrays[piece.leaf][plan.leaves[piece.leaf].chunk_box(piece.chunk)] = piece.data
    assert not any(missing)
    return {leaf.layout.name: bits(array) for leaf, array in zip(plan.leaves, arrays, strict=True)}


def take_all(snapshotter, state):
    """All the groups of a save, one after the other."""
    arrays = values_of(state)
    for group in range(snapshotter.groups):
        yield from snapshotter.take(arrays, group).pieces()


def check(state, options=FINE, max_nbytes=None):
    snapshotter = snapshotter_for(state, options, max_nbytes)
    for _ in range(2):  # the second time into the memory of the first
        assert put_together(snapshotter.plan, take_all(snapshotter, state)) == host_copy(state)
    return snapshotter


def small_state(mesh=MESH):
    """Some of each: replicated, sharded, on one device, uncommitted, a key, host values."""
    return {
        "params": {"w": put(values(24, 10), P(), mesh), "v": put(values(16, 6), P(mesh.axis_names[0]), mesh)},
        "scale": put(values(5), P(), mesh),
        "step": jnp.asarray(3),
        "one": jax.device_put(values(7, 3), DEVICES[5]),
        "key": jax.random.key(7),
        "numpy": values(4, dtype="int64"),
        "float": 0.5,
    }


@pytest.fixture(scope="module")
def zoo():
    half, backwards = Mesh(DEVICES[:4], ("z",)), Mesh(DEVICES[::-1].reshape(2, 4), ("x", "y"))
    cube = Mesh(DEVICES.reshape(2, 2, 2), ("a", "b", "c"))
    return {
        "replicated": {
            "even": put(values(16, 6)),
            "uneven": put(values(17, 3)),
            "minor": put(values(3, 16)),
            "small": [put(values(n)) for n in (1, 5, 7)],
            "alike": [put(values(11, 4, seed=k)) for k in range(3)],
            "0d": put(values()),
            "large": put(values(1200, 1000)),  # above the size up to which leaves are packed
        },
        "sharded": {
            "x": put(values(8, 6), P("x")),
            "y": put(values(6, 8), P(None, "y")),
            "x_y": put(values(12, 10), P("x", "y")),
            "y_x": put(values(10, 12), P("y", "x")),
            "tuple": put(values(16, 3), P(("x", "y"))),
            "tuple_minor": put(values(3, 16), P(None, ("y", "x"))),
        },
        "cube": {"a": put(values(4, 9), P("a"), cube), "c_a": put(values(8, 7), P(("c", "a")), cube)},
        "half": {"z": put(values(8), P("z"), half), "rep": put(values(9, 2), P(), half)},
        "backwards": {"x": put(values(8, 5), P("x"), backwards), "rep": put(values(19), P(), backwards)},
        "single": jax.device_put(values(13, 2), DEVICES[6]),
        "uncommitted": jnp.asarray(values(6)),
        "pinned": {
            "rep": put(values(3), memory_kind="pinned_host"),
            "x": put(values(8, 7), P("x"), memory_kind="pinned_host"),
            "0d": put(values(), memory_kind="pinned_host"),
        },
        "dtypes": {
            name: [put(values(9, 8, dtype=name)), put(values(8, 3, dtype=name), P("x"))]
            for name in ("bfloat16", "float8_e4m3fn", "float16", "bool", "complex64", "int8", "uint32")
        },
        "int4": [put(jnp.arange(24).astype("int4")), put(jnp.arange(16).astype("int4"), P("x"))],
        "empty": [put(values(0, 3)), put(values(4, 0), P("x")), jnp.zeros((0,)), np.zeros((2, 0))],
        "keys": [jax.random.key(1), put(jax.random.split(jax.random.key(2, impl="rbg"), 8), P("x"))],
        "host": [values(3, 5, dtype="float64").T, np.int64(2**40), 3, 2.5, True, 1j],
    }


@pytest.mark.parametrize("min_slice_bytes", [1, 64, 1 << 20])
def test_every_chunk_comes_once_with_the_bits_of_its_leaf(zoo, min_slice_bytes):
    check(zoo, ReplicaParallelConfig(min_slice_bytes=min_slice_bytes))


def test_disabled_the_first_replica_alone_copies(zoo):
    snapshotter = check(zoo, ReplicaParallelConfig(enable=False))
    on_host = sum(
        snapshotter.plan.leaves[i].layout.nbytes
        for i, leaf in enumerate(arrays_of(zoo))
        if leaf.name.startswith(("pinned", "int4", "host"))
    )
    assert staging_nbytes(snapshotter) == snapshotter.plan.nbytes - on_host


@pytest.mark.parametrize("max_nbytes", [1, 100_000, 3_000_000])
def test_a_budget_cuts_the_save_into_groups_that_fit_it(zoo, max_nbytes):
    snapshotter = check(zoo, FINE, max_nbytes)
    assert snapshotter.groups > 1
    largest_output = 1200 * 1000 * 4
    assert staging_nbytes(snapshotter) <= max(max_nbytes, largest_output)


@pytest.mark.parametrize(("max_nbytes", "groups"), [(1, 6), (2_000, 3), (3_000, 2), (100_000, 1)])
def test_what_the_host_copies_is_in_the_budget_too(max_nbytes, groups):
    state = {
        "numpy": [values(250, seed=k) for k in range(3)],
        "pinned": put(values(16, 16), P("x"), memory_kind="pinned_host"),
        "float": 0.5,
        "device": put(values(8, 8), P("x")),
    }
    snapshotter = snapshotter_for(state, max_nbytes=max_nbytes)
    assert snapshotter.groups == groups
    pieces = []
    for group in range(groups):
        snapshot = snapshotter.take(values_of(state), group)
        taken = list(snapshot.pieces())
        assert sum(piece.data.nbytes for piece in taken) <= max(max_nbytes, 1024)
        assert list(snapshot.pieces()) == []  # the writer refers to a snapshot while the next one is taken
        pieces += taken
    assert put_together(snapshotter.plan, pieces) == host_copy(state)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (np.zeros((64, 100), np.float32), 25_600),
        (put(np.zeros((64, 100), np.float32)), 25_600),
        (put(np.zeros((64, 100), np.float32), P("x"), memory_kind="pinned_host"), 25_600),
        (jax.device_put(np.zeros((64, 100), np.float32), DEVICES[3]), 25_600),
    ],
    ids=["host value", "replicated", "in host memory", "on one device"],
)
def test_a_copy_larger_than_the_budget_is_named_once_with_what_it_needs(tmp_path, caplog, value, nbytes):
    state = {"deep": {"large": value}, "small": put(values(8))}
    options = {"replica_parallel": {"min_slice_bytes": 1}, "save_interval_steps": 1, "directory": tmp_path}
    for gb, warned in ((0.9 * nbytes / 1e9, True), (nbytes / 1e9, False)):
        caplog.clear()
        with rps.CheckpointCallback({**options, "max_staging_gb": gb}) as checkpoint:
            for _ in range(2):
                checkpoint((checkpoint.latest_step() or 0) + 1, state)
                checkpoint.wait()
        said = [r.getMessage() for r in caplog.records if "is not kept" in r.getMessage()]
        assert len(said) == warned
        assert all("leaf deep/large " in text and "2.56e-05 GB" in text for text in said)


def test_under_a_budget_no_program_takes_more_leaves_than_without(zoo, monkeypatch):
    monkeypatch.setattr(owner_slices, "_PROGRAM_LEAVES", 4)
    for max_nbytes in (None, 100_000_000):
        snapshotter = snapshotter_for(zoo, FINE, max_nbytes)
        assert snapshotter.groups == 1
        assert max(len(program.leaves) for program in snapshotter._groups[0]) == 4


@pytest.mark.parametrize("dtype", SHORT_FLOATS)
def test_every_bit_pattern_of_a_short_float_survives(dtype):
    size = np.dtype(dtype).itemsize
    every = np.arange(256**size, dtype=f"uint{8 * size}").view(dtype)
    check({"sliced": put(every), "packed": put(every[::-1].copy(), P(("x", "y"))), "both": put(every, P("x"))})


def test_the_memory_layout_of_a_leaf_does_not_matter():
    def laid_out(order, sharding, *shape):
        return jax.device_put(values(*shape), Format(Layout(order), sharding))

    state = {
        "replicated": laid_out((1, 0), NamedSharding(MESH, P()), 24, 10),
        "sharded": laid_out((2, 0, 1), NamedSharding(MESH, P(None, "x")), 4, 8, 6),
        "single": laid_out((1, 0), SingleDeviceSharding(DEVICES[2]), 5, 3),
    }
    check(state)
    check(state, ReplicaParallelConfig(enable=False))


def test_the_memory_layout_of_a_leaf_may_change_between_saves():
    usual = {"w": put(values(24, 10)), "one": jax.device_put(values(5, 3), DEVICES[2])}
    other = jax.tree.map(lambda x: jax.device_put(x, Format(Layout((1, 0)), x.sharding)), usual)
    snapshotter = snapshotter_for(usual)
    for state in (usual, other, other, usual):
        assert put_together(snapshotter.plan, take_all(snapshotter, state)) == host_copy(usual)


def test_report_8_a_state_may_be_donated_at_once():
    @jax.jit
    def mix(x):
        return jnp.where(jnp.isfinite(x), x, 1) * 3 + 1

    step = jax.jit(lambda tree: jax.tree.map(mix, tree), donate_argnums=0)
    state = {
        "w": [put(np.full((64, 500), k, np.float32)) for k in range(4)],
        "sharded": put(np.ones((64, 500), np.float32), P("x", "y")),
        "alone": jax.device_put(np.ones((300, 300), np.float32), DEVICES[3]),
        "small": put(np.ones((3,), np.float32)),
    }
    meshed = {k: v for k, v in state.items() if k != "alone"}
    snapshotter, alone, kept = snapshotter_for(state), state["alone"], []
    for k in range(5):
        state = {**meshed, "alone": alone}
        expected = host_copy(state)
        snapshot = snapshotter.take(values_of(state), 0)
        old = [*jax.tree.leaves(meshed), alone]
        meshed, alone = step(meshed), step(alone)
        assert all(array.is_deleted() for array in old), "the step did take the memory"
        pieces = list(snapshot.pieces())
        assert put_together(snapshotter.plan, pieces) == expected
        if k % 2:
            kept.append((pieces, expected))  # views of staging memory that the next save would reuse
    for pieces, expected in kept:
        assert put_together(snapshotter.plan, pieces) == expected


def test_report_9_host_values_are_copied_in_the_call():
    array = values(1000, dtype="int64").copy()
    state = {"numpy": array, "device": jax.device_put(values(64, 64), DEVICES[0])}
    snapshotter, expected = snapshotter_for(state), host_copy(state)
    snapshot = snapshotter.take(values_of(state), 0)
    array[:] = 0
    assert put_together(snapshotter.plan, snapshot.pieces()) == expected


def test_report_6_leaves_in_pinned_host_memory_are_copied_in_the_call():
    state = [put(values(*shape), memory_kind="pinned_host") for shape in ((3,), (5, 7), ())]
    snapshotter, expected = snapshotter_for(state), host_copy(state)
    snapshot = snapshotter.take(values_of(state), 0)
    for array in state:
        array.delete()
    assert put_together(snapshotter.plan, snapshot.pieces()) == expected
    assert staging_nbytes(snapshotter) == 0


AMBIENT = {
    "the same": MESH,
    "explicit": jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2),
    "other axes": Mesh(DEVICES, ("devices",)),
    "other order": Mesh(DEVICES[::-1].reshape(4, 2), ("x", "y")),
    "fewer devices": Mesh(DEVICES[:2], ("x",)),
    "one device": Mesh(DEVICES[3:4], ("x",)),
}


@pytest.mark.parametrize("ambient", AMBIENT.values(), ids=AMBIENT)
def test_report_2_the_ambient_mesh_does_not_matter(ambient):
    state = small_state()
    expected = host_copy(state)
    with jax.set_mesh(ambient):
        snapshotter = snapshotter_for(state)
        assert put_together(snapshotter.plan, take_all(snapshotter, state)) == expected
    assert put_together(snapshotter.plan, take_all(snapshotter, state)) == expected  # compiled under it, called without
    outside = snapshotter_for(state)
    outside.compile()
    with jax.set_mesh(ambient):
        assert put_together(outside.plan, take_all(outside, state)) == expected


@pytest.mark.parametrize("ambient", [True, False])
def test_report_2_states_on_explicit_axes_are_saved(ambient):
    mesh = AMBIENT["explicit"]
    state = {**small_state(mesh), "tuple": put(values(3, 8), P(None, ("y", "x")), mesh)}
    with jax.set_mesh(mesh) if ambient else nullcontext():
        check(state)


SETTINGS = {
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leak checks": lambda: jax.checking_leaks(),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "default device": lambda: jax.default_device(jax.devices()[5]),
    "64 bits": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_callers_thread_do_not_matter(setting):
    state = small_state()
    state["not_finite"] = put(np.array([np.nan, np.inf, -np.inf] * 8, np.float32))
    state["short"] = put(jnp.arange(24).astype("int4"))  # copied by the host
    expected = host_copy(state)
    with setting():
        snapshotter = snapshotter_for(state)
        assert put_together(snapshotter.plan, take_all(snapshotter, state)) == expected
    assert put_together(snapshotter.plan, take_all(snapshotter, state)) == expected


def test_64_bit_arrays_outlive_the_block_that_allowed_them():
    with jax.enable_x64(True):
        state = {"i": put(values(64, dtype="int64")), "f": jax.device_put(values(5, dtype="float64"), DEVICES[1])}
    check(state)


def test_programs_compile_on_another_thread_ahead_of_the_first_save():
    with jax.enable_x64(True):
        state = {**small_state(), "wide": put(values(64, dtype="float64"))}
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x,
            state,
        )
        snapshotter = snapshotter_for(abstract)
        thread = threading.Thread(target=snapshotter.compile)
        thread.start()
        early = list(take_all(snapshotter, state))  # does not wait for the thread to be done
        thread.join()
        assert put_together(snapshotter.plan, early) == host_copy(state)
        assert put_together(snapshotter.plan, take_all(snapshotter, state)) == host_copy(state)


def test_staging_memory_is_used_again():
    state = {"w": put(values(640, 50)), "small": [put(values(n)) for n in (3, 4)], "step": jnp.asarray(1)}
    snapshotter = snapshotter_for(state)

    def addresses():
        return {(p.leaf, p.chunk): p.data.ctypes.data for p in take_all(snapshotter, state)}

    first = addresses()
    assert [addresses() for _ in range(3)] == [first] * 3


def test_report_48_staging_memory_is_about_as_large_as_a_replicated_state():
    # GPT-2 small with Adam's moments.
    params = {
        "wte": ((50257, 768), P()),
        "wpe": ((1024, 768), P()),
        "ln_f.scale": ((768,), P()),
        "ln_f.bias": ((768,), P()),
    }
    for k in range(12):
        for norm in ("ln_1", "ln_2"):
            params |= {f"h{k}.{norm}.{part}": ((768,), P()) for part in ("scale", "bias")}
        for name, inner, outer in (("qkv", 768, 2304), ("o", 768, 768), ("up", 768, 3072), ("down", 3072, 768)):
            params |= {f"h{k}.{name}.kernel": ((inner, outer), P()), f"h{k}.{name}.bias": ((outer,), P())}
    state = dict(adam_state(replicated(params), MESH))
    snapshotter = snapshotter_for(state, ReplicaParallelConfig())
    assert snapshotter.plan.nbytes > 1.4e9
    assert staging_nbytes(snapshotter) <= 1.05 * snapshotter.plan.nbytes


def test_small_leaves_of_many_shapes_share_staging_memory():
    state = [put(values(100 + k, seed=k)) for k in range(40)]
    snapshotter = check(state, ReplicaParallelConfig())
    assert staging_nbytes(snapshotter) <= 1.15 * snapshotter.plan.nbytes


def test_host_values_are_saved_by_process_0_alone():
    state = {"numpy": values(3), "float": 1.5}
    assert list(snapshotter_for(state, process=1).take(values_of(state), 0).pieces()) == []
    assert len(list(snapshotter_for(state, process=0).take(values_of(state), 0).pieces())) == 2


def test_neither_snapshotter_nor_snapshot_keeps_a_state_alive():
    state = {"w": put(values(64, 8)), "one": jax.device_put(values(3), DEVICES[1])}
    references = [weakref.ref(array) for array in state.values()]
    snapshotter = snapshotter_for(state)
    snapshot = snapshotter.take(values_of(state), 0)
    snapshot.wait()
    del state
    assert [reference() for reference in references] == [None, None]
    assert len(list(snapshot.pieces())) == 9


def test_a_state_without_device_arrays_needs_no_staging():
    snapshotter = check({"a": 1, "b": np.arange(3)})
    assert (snapshotter.groups, staging_nbytes(snapshotter)) == (1, 0)


def test_typed_keys_come_as_their_data():
    state = {"k": put(jax.random.split(jax.random.key(3), 5))}
    snapshotter = snapshotter_for(state)
    (data,) = (np.concatenate([p.data for p in sorted(take_all(snapshotter, state), key=lambda p: p.chunk)]),)
    assert_same_tree(jax.random.wrap_key_data(jnp.asarray(data)), state["k"])
