"""Replicas that have drifted apart are found before they become the checkpoint (divergence.py, fingerprints.py)."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flax_rpsave as rps
from flax_rpsave.config import ReplicaParallelConfig
from flax_rpsave.divergence import build_report, compared_leaves, describe, find
from flax_rpsave.planner import LeafLayout, MeshLayout, layout_of, plan_leaves
from flax_rpsave.snapshot import Snapshotter
from tests.helpers import arrays_of, staging_nbytes, values_of
from tests.processes import run

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
EVERYWHERE = NamedSharding(MESH, P())
BY_COLUMN = NamedSharding(MESH, P(None, "y"))  # shard 0 on the even devices, shard 1 on the odd ones
DTYPES = [
    "bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e3m4",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def values(*shape, dtype="float32", seed=0):
    """Random bits, NaNs with payloads among them; of bool and int4 those that there are."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng([seed, *shape]).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype.name in ("bool", "int4"):
        return (raw & (1 if dtype.name == "bool" else 7)).astype(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape)


def drifted(array, sharding, flips):
    """An array of whose copies some have flipped bits: `flips` has (byte, bit) within the shard, by device."""

    def held(device, index):
        data = np.array(array[index], order="C")
        bits = data.reshape(-1).view(np.uint8)
        for byte, bit in flips.get(device.id, ()):
            bits[byte] ^= 1 << bit
        return jax.device_put(data, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))

    shards = [held(device, index) for device, index in sharding.devices_indices_map(array.shape).items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=array.dtype)


class Checker:
    """Compares the replicas of states of one structure as a save of one process does, without storage."""

    def __init__(self, state, *, max_nbytes=None, **options):
        leaves = arrays_of(state)
        layouts = [layout_of(leaf.name, leaf.value) for leaf in leaves]
        self.plan = plan_leaves(layouts, ReplicaParallelConfig(**{"min_slice_bytes": 1, **options}))
        self.compared = compared_leaves(self.plan, 1)
        self.snapshotter = Snapshotter(self.plan, leaves, 0, max_nbytes, self.compared)

    def taken(self, state):
        arrays = values_of(state)
        return [self.snapshotter.take(arrays, group) for group in range(self.snapshotter.groups)]

    def found(self, state):
        """{(leaf's name, shard): groups of devices}, the largest first."""
        fingerprints = {}
        for snapshot in self.taken(state):
            assert len(list(snapshot.pieces())) > 0 or self.snapshotter.groups > 1
            of_group = snapshot.fingerprints()
            assert not fingerprints.keys() & of_group.keys(), "each leaf is fingerprinted once"
            fingerprints |= of_group
        assert sorted(fingerprints) == sorted(self.compared)
        report = build_report(self.plan, 0, 1, fingerprints)
        assert report["agreed"] == "", "one process has nobody to tell of what agrees"
        return {
            (self.plan.leaves[d.leaf].layout.name, d.shard): [[device for device, _ in group] for group in d.groups]
            for d in find(self.plan, [report])
        }


def grouped(state):
    """What `Checker.found` must find, from the bytes of the state's arrays."""
    expected = {}
    for leaf in arrays_of(state):
        held = {}
        for shard in leaf.value.addressable_shards:
            index = tuple((s.start or 0) for s in shard.index)
            held.setdefault(index, {}).setdefault(np.asarray(shard.data).tobytes(), []).append(shard.device.id)
        sizes = leaf.value.sharding.shard_shape(leaf.value.shape)
        for index, groups in held.items():
            shard = tuple(i // n for i, n in zip(index, sizes, strict=True))
            if len(groups) > 1:
                key = leaf.name, shard if len(held) > 1 else None
                expected[key] = sorted(map(sorted, groups.values()), key=lambda g: (-len(g), g))
    return expected


# Whether the fingerprints see it


@pytest.fixture(scope="module")
def of_each_dtype():
    with jax.enable_x64(True):
        state = {
            f"{dtype}_{n}": drifted(values(*shape, dtype=dtype, seed=n), sharding, {})
            for dtype in DTYPES
            for n, (shape, sharding) in enumerate([((7, 6), BY_COLUMN), ((7, 6), BY_COLUMN), ((5,), EVERYWHERE)])
        }
        state["float32_0d"] = drifted(values(), EVERYWHERE, {})
        return state, Checker(state)


def test_equal_replicas_of_every_dtype_are_equal(of_each_dtype):
    state, checker = of_each_dtype
    assert checker.found(state) == {}
    assert len(checker.compared) == len(state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_flipped_bit_of_any_dtype_is_found_where_it_is(of_each_dtype, dtype):
    state, checker = of_each_dtype
    rng = np.random.default_rng(DTYPES.index(dtype))
    bits = {"bool": 1, "int4": 3}.get(dtype, 8)
    with jax.enable_x64(True):
        for n in range(3):
            name, device = f"{dtype}_{n}", int(rng.integers(8))
            shape, sharding = ((5,), EVERYWHERE) if n == 2 else ((7, 6), BY_COLUMN)
            nbytes = (5 if n == 2 else 21) * np.dtype(dtype).itemsize
            flip = int(rng.integers(nbytes)), int(rng.integers(bits))
            changed = {**state, name: drifted(values(*shape, dtype=dtype, seed=n), sharding, {device: [flip]})}
            others = [d for d in range(8) if d != device and (n == 2 or d % 2 == device % 2)]
            assert checker.found(changed) == {(name, None if n == 2 else (0, device % 2)): [others, [device]]}


@pytest.fixture(scope="module")
def sharded_and_replicated():
    state = {
        "halves": drifted(values(33, 10), BY_COLUMN, {}),
        "short": drifted(values(3, 7, dtype="bfloat16"), EVERYWHERE, {}),
        "large": drifted(values(150, 120), EVERYWHERE, {}),  # folded alone
    }
    return Checker(state)


SHAPES = {"halves": ((33, 10), "float32", BY_COLUMN, 660), "short": ((3, 7), "bfloat16", EVERYWHERE, 42),
          "large": ((150, 120), "float32", EVERYWHERE, 72000)}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flips_are_found_on_the_devices_that_have_them(sharded_and_replicated, data):
    def flips(nbytes):
        places = st.tuples(st.integers(0, nbytes - 1), st.integers(0, 7))
        return st.dictionaries(st.integers(0, 7), st.lists(places, min_size=1, max_size=6, unique=True), max_size=4)

    state = {
        name: drifted(values(*shape, dtype=dtype), sharding, data.draw(flips(nbytes), name))
        for name, (shape, dtype, sharding, nbytes) in SHAPES.items()
    }
    assert sharded_and_replicated.found(state) == grouped(state)


def swapped(array, a, b):
    array[[a, b]] = array[[b, a]]


CHANGES = {
    "two signs": lambda w: np.negative(w[:2], out=w[:2]),
    "all signs": lambda w: np.negative(w, out=w),
    "two rows trade places": lambda w: swapped(w, 3, 4),
    "two elements trade places": lambda w: swapped(w.reshape(-1), 0, 149 * 120),
    "a row moves down": lambda w: np.copyto(w, np.roll(w, 1, axis=0)),
    "one more, one less": lambda w: np.add(w.view(np.int32)[:2], [[1], [-1]], out=w.view(np.int32)[:2]),
    "the same bit everywhere": lambda w: np.bitwise_xor(w.view(np.uint32), 1, out=w.view(np.uint32)),
    "a zero's sign": lambda w: np.copyto(w[7, 7:8], -w[7, 7]),
    "the payload of a NaN": lambda w: np.copyto(w[9, 9:10].view(np.uint32), np.uint32(0x7FC00001)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_would_cancel_in_a_sum_are_found(sharded_and_replicated, change):
    array = np.array(np.random.default_rng(0).standard_normal((150, 120), np.float32))
    array[7, 7], array[9, 9] = 0.0, np.nan
    other = array.copy()
    change(other)
    shards = [jax.device_put(np.array(other if device.id == 6 else array), device) for device in DEVICES]
    state = {name: drifted(values(*s, dtype=t), sharding, {}) for name, (s, t, sharding, _) in SHAPES.items()}
    state["large"] = jax.make_array_from_single_device_arrays(array.shape, EVERYWHERE, shards)
    assert sharded_and_replicated.found(state) == {("large", None): [[0, 1, 2, 3, 4, 5, 7], [6]]}


# Whether every leaf is compared, however it is copied


def mixed(flips=(), mesh=MESH):
    """A state with leaves on several meshes, in host memory and alone; `flips`: which leaves differ on device 5."""

    def put(name, array, sharding):
        return drifted(array, sharding, {5: [(2, 1)]} if name in flips else {})

    half, backwards = Mesh(DEVICES[4:], ("z",)), Mesh(DEVICES[::-1].reshape(2, 4), ("x", "y"))
    return {
        "packed": put("packed", values(11), NamedSharding(mesh, P())),
        "sliced": put("sliced", values(1200, 1000), NamedSharding(mesh, P("y"))),  # above what is packed
        "half": put("half", values(9, 2), NamedSharding(half, P())),
        "backwards": put("backwards", values(8, 5), NamedSharding(backwards, P("x"))),
        "pinned": put("pinned", values(3, 4), NamedSharding(mesh, P(), memory_kind="pinned_host")),
        "int4": put("int4", values(6, dtype="int4"), NamedSharding(mesh, P())),
        "whole": put("whole", values(8, 2), NamedSharding(mesh, P(("x", "y")))),  # R = 1
        "alone": jax.device_put(values(3), DEVICES[5]),
        "empty": put("empty", values(0, 3), NamedSharding(mesh, P())),
        "numpy": values(4),
        "number": 3,
    }


COMPARED = {"packed", "sliced", "half", "backwards", "pinned", "int4"}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_nbytes": 1}, {"max_nbytes": 2_000_000}, {"enable": False}, {"max_nbytes": 9_000, "enable": False}],
    ids=str,
)
def test_every_leaf_that_has_replicas_is_compared(options):
    checker = Checker(mixed(), **options)
    assert {checker.plan.leaves[i].layout.name for i in checker.compared} == COMPARED
    assert checker.found(mixed()) == {}
    found = checker.found(mixed(COMPARED))
    assert {name for name, _ in found} == COMPARED
    assert all(minority == [5] for _, (*_, minority) in found.items())


def test_comparing_copies_no_more_than_a_save_does():
    for options in ({}, {"enable": False}):
        checker = Checker(mixed(), **options)
        plain = Snapshotter(checker.plan, arrays_of(mixed()), 0)
        assert staging_nbytes(checker.snapshotter) == staging_nbytes(plain)


def test_the_memory_layout_of_a_leaf_may_be_another_and_change():
    usual = {"w": drifted(values(24, 10), EVERYWHERE, {3: [(8, 1)]})}
    other = jax.tree.map(lambda x: jax.device_put(x, Format(Layout((1, 0)), x.sharding)), usual)
    checker = Checker(usual)
    for state in (usual, other, usual):
        assert checker.found(state) == {("w", None): [[0, 1, 2, 4, 5, 6, 7], [3]]}


SETTINGS = {
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "another mesh": lambda: jax.set_mesh(Mesh(DEVICES[:2], ("x",))),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_callers_thread_do_not_matter(setting):
    state = {"w": drifted(values(13, 3), EVERYWHERE, {1: [(0, 0)]}), "b": drifted(values(5), EVERYWHERE, {})}
    with setting():
        found = Checker(state).found(state)
    assert found == {("w", None): [[0, 2, 3, 4, 5, 6, 7], [1]]}


def test_a_state_may_be_donated_at_once():
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 3 + 1, tree), donate_argnums=0)
    state = jax.device_put({"w": np.ones((500, 640), np.float32), "b": np.ones(7, np.float32)}, EVERYWHERE)
    checker = Checker(state)
    for _ in range(4):
        snapshots = checker.taken(jax.block_until_ready(state))
        old, state = state, step(state)
        assert all(array.is_deleted() for array in old.values())
        report = build_report(checker.plan, 0, 1, snapshots[0].fingerprints())
        assert find(checker.plan, [report]) == []
    drift = {"w": drifted(np.ones((500, 640), np.float32), EVERYWHERE, {2: [(9, 0)]}), "b": state["b"]}
    snapshot = checker.taken(drift)[0]
    repaired = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0, keep_unused=True)(drift)
    (divergence,) = find(checker.plan, [build_report(checker.plan, 0, 1, snapshot.fingerprints())])
    assert divergence.groups[1] == ((2, 0),)
    assert not np.asarray(repaired["w"]).any()


def programs_of(snapshotter):
    snapshotter.compile()
    return [program.executables[1].as_text() for group in snapshotter._groups for program in group]


def test_nothing_is_computed_where_it_is_not_asked_for_or_nothing_has_replicas():
    replicated = Checker(state := {"w": drifted(values(16, 6), EVERYWHERE, {})})
    off = Snapshotter(replicated.plan, arrays_of(state), 0)
    assert off.take(values_of(state), 0).fingerprints() == {}
    assert "reduce" not in "".join(programs_of(off))
    assert "reduce" in "".join(programs_of(replicated.snapshotter))
    alone = Checker(state := {"w": jax.device_put(values(16, 6), NamedSharding(MESH, P("x", "y"))), "n": 1})
    assert alone.compared == []
    assert programs_of(alone.snapshotter) == programs_of(Snapshotter(alone.plan, arrays_of(state), 0))


# Whether process 0 finds it in what the processes report


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_process_0_finds_what_all_the_fingerprints_together_say(data):
    sizes = data.draw(st.sampled_from([(2, 2, 2), (3, 2, 1), (4, 2, 1), (2, 1, 3), (1, 6, 1)]))
    count = math.prod(sizes)
    processes = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if count % n == 0]))
    of = data.draw(st.permutations([d * processes // count for d in range(count)]))
    mesh = MeshLayout(tuple(zip("abc", sizes, strict=True)), tuple(range(100, 100 + count)), tuple(of))
    specs = [((), ()), (("a",), ()), (("b",), ("c",)), ((), ("c", "a")), (("a", "b", "c"), ())]
    layouts = [LeafLayout(f"leaf{k}", (24, 24), np.dtype("f4"), mesh, spec) for k, spec in enumerate(specs * 2)]
    layouts.append(LeafLayout("own", (3,), np.dtype("f4"), None, ((),)))
    plan = plan_leaves(layouts, ReplicaParallelConfig())
    compared = compared_leaves(plan, processes)
    found, expected = [{} for _ in range(processes)], {}
    for leaf in compared:
        layout, shards = layouts[leaf], {}
        own = layout.mesh is None
        for holder, process in [(p, p) for p in range(processes)] if own else zip(mesh.device_ids, of, strict=True):
            number = data.draw(st.sampled_from([2**64 - 1] * 4 + [1, 0]))
            found[process].setdefault(leaf, {})[holder] = number
            shard = None if own or not any(layout.spec) else layout.place(holder)[1]
            shards.setdefault(shard, {}).setdefault(number, []).append((holder, process))
        for shard, groups in shards.items():
            if len(groups) > 1:
                ordered = sorted((tuple(sorted(group)) for group in groups.values()), key=lambda g: (-len(g), g))
                expected[leaf, shard if any(n > 1 for n in layout.shards) else None] = tuple(ordered)
    reports = [build_report(plan, process, processes, found[process]) for process in range(processes)]
    got = {(d.leaf, d.shard): tuple(tuple(sorted(group)) for group in d.groups) for d in find(plan, reports)}
    assert got == expected


def test_the_report_of_a_healthy_process_is_eight_bytes_a_shard_that_others_hold_too():
    mesh = MeshLayout((("a", 4), ("b", 2)), tuple(range(8)), (0, 0, 0, 0, 1, 1, 1, 1))
    layouts = [
        LeafLayout(f"leaf{k}", (16, 16), np.dtype("f4"), mesh, spec)
        for k, spec in enumerate([((), ()), (("b",), ()), (("a",), ())])
    ]
    plan = plan_leaves(layouts, ReplicaParallelConfig())
    report = build_report(plan, 0, 2, {leaf: dict.fromkeys(range(4), 7) for leaf in range(3)})
    assert report["differing"] == []
    assert len(report["agreed"]) == 4 * 3 * 8 / 3  # base64: one shard, two shards; the last leaf's lie in one process


def test_the_words_name_the_minority_and_stay_bounded():
    mesh = MeshLayout((("a", 64),), tuple(range(64)), tuple(d // 16 for d in range(64)))
    layouts = [LeafLayout(f"p.leaf{k:03}", (4,), np.dtype("f4"), mesh, ((),)) for k in range(300)]
    plan = plan_leaves(layouts, ReplicaParallelConfig())

    def told(numbers):
        reports = [
            build_report(plan, p, 4, {leaf: {d: numbers(d) for d in range(16 * p, 16 * p + 16)} for leaf in range(300)})
            for p in range(4)
        ]
        return describe(find(plan, reports), [layout.name.replace(".", "/") for layout in layouts])

    text = told(lambda d: d in (3, 17))
    assert text.startswith("the replicas of 300 leaves have drifted apart:\n  p/leaf000: in the minority devices ")
    assert (
        "3 (process 0), 17 (process 1); in the majority devices 0, 1, 2, 4, 5, 6, 7, 8 (process 0) and 54 more" in text
    )
    assert text.endswith("\n  and 290 more")
    assert len(text) < 3000
    assert len(told(lambda d: d)) < 3000
    assert "no majority: devices 0, 2," in told(lambda d: d % 2)


# What becomes of the step


def config(root, mode, **keys):
    return {
        "directory": root,
        "save_interval_steps": 1,
        "replica_parallel": {"check_divergence": mode, "min_slice_bytes": 1},
        **keys,
    }


def training_state(step, flips):
    """A state as in a run; `flips` in the kernel of device 5 alone, and in a bias that is sharded."""
    return {
        "params": {
            "kernel": drifted(np.full((16, 6), step, np.float32), EVERYWHERE, {5: flips} if flips else {}),
            "bias": drifted(np.full((2, 8), step, np.float32), BY_COLUMN, {4: flips, 6: flips} if flips else {}),
        },
        "key": jax.device_put(jax.random.key(step), EVERYWHERE),
        "step": step,
    }


EXPECTED = (
    "params/bias, shard [0, 0]: no majority: devices 0, 2 (process 0) | devices 4, 6 (process 0)",
    "params/kernel: in the minority device 5 (process 0); in the majority devices 0, 1, 2, 3, 4, 6, 7 (process 0)",
)


def test_with_fail_a_drifted_state_is_never_a_step_and_the_next_save_works(tmp_path):
    with rps.CheckpointCallback(config(tmp_path, "fail")) as checkpoint:
        checkpoint(1, training_state(1, []))
        checkpoint.wait()
        checkpoint(2, training_state(2, [(7, 7)]))
        with pytest.raises(rps.DivergenceError) as raised:
            checkpoint.wait()
        assert all(text in str(raised.value) for text in ("step 2: the replicas of 2 leaves", *EXPECTED, "Resume from"))
        assert checkpoint.all_steps() == [1]
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        state, step = checkpoint.resume(training_state(0, []))
        assert (step, float(state["params"]["kernel"][0, 0])) == (1, 1.0)
        assert checkpoint(3, training_state(3, []))
        checkpoint.wait()
        assert checkpoint.all_steps() == [1, 3]
    checkpoint = rps.CheckpointCallback(config(tmp_path, "fail"))
    checkpoint.resume(training_state(0, []))
    checkpoint(4, training_state(4, [(7, 7)]))
    with pytest.raises(rps.DivergenceError):
        checkpoint.close()


def test_with_warn_each_drifted_step_is_saved_and_warned_of_once(tmp_path, caplog):
    with rps.CheckpointCallback(config(tmp_path, "warn")) as checkpoint, caplog.at_level(logging.WARNING):
        for step, flips in ((1, []), (2, [(0, 0)]), (3, [(0, 0)])):
            checkpoint(step, training_state(step, flips))
        checkpoint.wait()
        assert checkpoint.all_steps() == [1, 2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    for step, record in zip((2, 3), caplog.records, strict=True):
        text = record.getMessage()
        assert all(words in text for words in (f"step {step} is saved, but the replicas of 2 leaves", *EXPECTED))


@pytest.mark.parametrize("keys", [{}, {"max_staging_gb": 1e-7}, {"async_save": False}], ids=str)
def test_drifted_keys_fail_and_healthy_states_do_not(tmp_path, keys):
    def state(flips):
        data = drifted(np.arange(8, dtype=np.uint32).reshape(4, 2), EVERYWHERE, flips)
        return {"keys": jax.random.wrap_key_data(data), "w": drifted(values(40, 8), BY_COLUMN, {})}

    with rps.CheckpointCallback(config(tmp_path, "fail", **keys)) as checkpoint:
        checkpoint(1, state({}))
        checkpoint.wait()

        def save():
            checkpoint(2, state({1: [(0, 0)], 2: [(0, 0)]}))
            checkpoint.wait()

        with pytest.raises(rps.DivergenceError, match=r"keys: in the minority devices 1, 2 .*; in the majority"):
            save()
        assert checkpoint.all_steps() == [1]


def test_without_it_a_drifted_state_is_saved_without_a_word(tmp_path, caplog):
    with rps.CheckpointCallback(config(tmp_path, None)) as checkpoint, caplog.at_level(logging.WARNING):
        checkpoint(1, training_state(1, [(0, 0)]))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_save_without_a_loop_compares_too(tmp_path):
    options = {"replica_parallel": {"check_divergence": "fail"}}
    with pytest.raises(rps.DivergenceError, match="the root"):
        rps.save(tmp_path / "a", drifted(values(5), EVERYWHERE, {0: [(3, 3)]}), config=options)
    assert not (tmp_path / "a").exists()
    rps.save(tmp_path / "a", drifted(values(5), EVERYWHERE, {}), config=options)


SCRIPT = """
values = np.arange(96.0, dtype=np.float32).reshape(8, 12)
grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("process", "device"))
def held(on, spec, bad):
    sharding = NamedSharding(on, spec)
    def shard(device, index):
        data = np.array(values[index])
        data.reshape(-1).view(np.uint8)[5] ^= 8 * (device.id in bad)
        return jax.device_put(data, device)
    shards = [shard(d, i) for d, i in sharding.addressable_devices_indices_map(values.shape).items()]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)
last, first = jax.devices()[-1].id, jax.devices()[0].id
def make(replicated=(), across=(), within=(), number=0, own=0.0):
    return {"replicated": held(mesh, P(), replicated), "across": held(grid, P("device"), across),
            "within": held(grid, P("process"), within), "number": np.int64(7 + process * number),
            "own": jnp.arange(5.0) + process * own, "short": put(np.zeros(3, np.float32))}
drifts = [{}, dict(replicated=[last]), dict(across=[last]), dict(within=[first]), dict(number=1), dict(own=1.0),
          dict(replicated=[d.id for d in jax.local_devices()] if process else []), {}]
config = dict(directory=sys.argv[1], save_interval_steps=1, commit_timeout_secs=60,
              replica_parallel=dict(check_divergence=sys.argv[2], min_slice_bytes=1))
with rps.CheckpointCallback(config) as checkpoint:
    for step, drift in enumerate(drifts):
        try:
            checkpoint(step, make(**drift))
            checkpoint.wait()
        except rps.DivergenceError as error:
            say(step, str(error).splitlines()[1].strip())
    say(checkpoint.all_steps())
"""


def test_processes_of_which_one_has_drifted_all_hear_which_it_is(tmp_path):
    results = run(SCRIPT, 2, devices=2, args=[str(tmp_path), "fail"])
    for result in results:
        first, second, third, fourth = result.said[0], result.said[1], result.said[2], result.said[5]
        assert first.startswith("1 replicated: in the minority device ")
        assert first.partition(";")[0].endswith("(process 1)")
        assert "(process 0), " in first.partition("; in the majority devices ")[2]
        assert second.startswith("2 across, shard [1, 0]: no majority: device")
        assert third.startswith("3 within, shard [0, 0]: no majority: device")
        assert "(process 1)" in second
        assert "(process 1)" not in third
        assert result.said[3] == "4 number: no majority: process 0 | process 1"
        assert result.said[4] == "5 own: no majority: process 0 | process 1"
        assert fourth.startswith("6 replicated: no majority: devices ")
        assert fourth.endswith("(process 1)")
        assert result.said[6] == "[0, 7]"
    assert results[0].said == results[1].said


def test_with_warn_process_0_warns_and_every_step_is_saved(tmp_path):
    first, second = run(SCRIPT, 2, devices=2, args=[str(tmp_path), "warn"])
    assert first.said == second.said == [str(list(range(8)))]
    assert first.output.count("have drifted apart") == 6
    assert "have drifted apart" not in second.output
