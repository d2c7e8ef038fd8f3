"""Who saves which slice (flax_rpsave/planner.py)."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from flax_rpsave.config import ReplicaParallelConfig
from flax_rpsave.errors import UnsupportedLeafError
from flax_rpsave.planner import LeafLayout, MeshLayout, as_named_sharding, layout_of, plan_leaves
from flax_rpsave.shares import chunk_boxes
from tests.models import abstract_mesh, adam_state, maxtext_gpt3, megatron_gpt, replicated

DEFAULT = ReplicaParallelConfig()
NO_FLOOR = ReplicaParallelConfig(min_slice_bytes=0)
DTYPES = [np.dtype(name) for name in ("int8", "bfloat16", "float32", "complex64")]


def mesh_layout(sizes, processes=1, first_id=0):
    """A mesh of axes a, b, c…, its devices in blocks of equal size over the processes."""
    devices = math.prod(sizes.values())
    return MeshLayout(
        tuple(sizes.items()),
        tuple(range(first_id, first_id + devices)),
        tuple(d * processes // devices for d in range(devices)),
    )


def leaf(name, shape, mesh, spec=None, dtype="float32", order=None):
    spec = tuple(spec or ((),) * len(shape))
    return LeafLayout(name, tuple(shape), np.dtype(dtype), mesh, spec, None, order or tuple(range(len(shape))))


@st.composite
def meshes(draw, devices_a_process=4):
    replicas = draw(st.sampled_from([2, 3, 4, 5, 7, 8, 11, 16, 1]))
    others = draw(st.sampled_from([(2,), (3,), (4,), (), (1, 2), (2, 2), (3, 2)]))
    axes = dict(zip("abc", draw(st.permutations([replicas, *others])), strict=False))
    mesh = mesh_layout(axes, first_id=draw(st.sampled_from([0, 4, 100])))
    return dataclasses.replace(mesh, processes=tuple(d // devices_a_process for d in mesh.device_ids))


@st.composite
def leaves_on(draw, mesh):
    """A leaf in which each axis of the mesh shards one of the dimensions, or none."""
    ndim = draw(st.integers(0, 3))
    spec = [[] for _ in range(ndim)]
    for axis, size in draw(st.permutations(mesh.axes)):
        at = draw(st.integers(0, ndim)) if size <= 4 or draw(st.integers(0, 3)) == 0 else ndim
        if at < ndim:
            spec[at].append(axis)
    shards = [math.prod(mesh.sizes[a] for a in axes) for axes in spec]
    shape = [n * draw(st.sampled_from([*range(1, 13), 0])) for n in shards]
    dtype, order = draw(st.sampled_from(DTYPES)), tuple(draw(st.permutations(range(ndim))))
    return leaf("", shape, mesh, map(tuple, spec), dtype, order)


@st.composite
def states(draw):
    """Up to eight leaves, some of them alike, on one or two meshes, on single devices or on the host."""
    on = draw(st.lists(meshes(draw(st.integers(1, 9))), min_size=1, max_size=2))
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        mesh = draw(st.sampled_from([*on, *on, None]))
        if mesh is not None:
            kinds.append(draw(leaves_on(mesh)))
        else:
            shape = draw(st.lists(st.integers(0, 9), max_size=3))
            kind = leaf("", shape, None, dtype=draw(st.sampled_from(DTYPES)))
            ids = [(d, p) for d, p in zip(on[0].device_ids, on[0].processes, strict=True)]
            kinds.append(dataclasses.replace(kind, device=draw(st.sampled_from([None, *ids]))))
    members = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    return [dataclasses.replace(kind, name=f"leaf{i}") for i, kind in enumerate(members)]


options_strategy = st.builds(
    ReplicaParallelConfig,
    enable=st.sampled_from([True, True, True, False]),
    min_slice_bytes=st.sampled_from([0, 0, 0, 1, 16, 100, 1 << 20]),
    max_replicas=st.sampled_from([None, None, 1, 2, 3, 5]),
)


def holders(layout):
    """(device id, replica, box) of every device that holds a shard, by the definition of a partition spec."""
    if layout.mesh is None:
        yield None if layout.device is None else layout.device[0], 0, tuple(slice(0, n) for n in layout.shape)
        return
    names = [name for name, _ in layout.mesh.axes]
    everywhere = itertools.product(*[range(size) for _, size in layout.mesh.axes])
    for device, position in zip(layout.mesh.device_ids, everywhere, strict=True):
        at = dict(zip(names, position, strict=True))
        box = []
        for n, axes in zip(layout.shape, layout.spec, strict=True):
            index, count = 0, 1
            for axis in axes:
                index, count = index * layout.mesh.sizes[axis] + at[axis], count * layout.mesh.sizes[axis]
            box.append(slice(index * (n // count), (index + 1) * (n // count)))
        replica = 0
        for axis in names:
            if not any(axis in axes for axes in layout.spec):
                replica = replica * layout.mesh.sizes[axis] + at[axis]
        yield device, replica, tuple(box)


def owned(plan):
    """(device id, global start) of every slice, from the owners alone."""
    for device, replica, box in holders(plan.layout):
        for t, owner in enumerate(plan.owners):
            if owner == replica:
                yield device, tuple(b.start + s for b, s in zip(box, plan.start(t), strict=True))


def check_leaf(plan, options):
    layout, chunk = plan.layout, plan.chunk_shape
    times_owned = np.zeros(layout.shape, int)
    writers = {}
    boxes = {device: box for device, _, box in holders(layout)}
    for device, start in owned(plan):
        assert all(s % c == 0 for s, c in zip(start, chunk, strict=True)), "slices lie on the chunk grid"
        index = tuple(s // c for s, c in zip(start, chunk, strict=True))
        assert writers.setdefault(index, device) is device, "no chunk has two writers"
        held = boxes[device]
        part = tuple(slice(s, min(s + c, b.stop)) for s, c, b in zip(start, chunk, held, strict=True))
        assert all(p.start >= b.start and p.start < p.stop for p, b in zip(part, held, strict=True)), "it holds it"
        times_owned[part] += 1
    assert (times_owned == 1).all(), "every element has one owner"
    assert set(writers) == {index for index, _ in chunk_boxes(plan.layout.shape, plan.chunk_shape)}
    for d, (n, c) in enumerate(zip(layout.shape, chunk, strict=True)):
        if layout.shards[d] > 1 and n:
            assert layout.shard_shape[d] % c == 0, "no chunk of a sharded axis straddles shards"

    shard_nbytes = math.prod(layout.shard_shape) * layout.dtype.itemsize
    assert plan.slices <= max(1, layout.replicas)
    assert plan.slices <= (options.max_replicas or plan.slices)
    if plan.slices:
        assert plan.slice_nbytes >= min(options.min_slice_bytes, shard_nbytes)
    if not options.enable:
        assert not plan.owners.any()
        assert chunk == tuple(max(1, n) for n in layout.shard_shape)


@settings(max_examples=200, deadline=None)
@given(states(), options_strategy)
def test_every_element_has_one_owner_that_holds_it_and_no_chunk_has_two_writers(layouts, options):
    plan = plan_leaves(layouts, options)
    assert [leaf.layout for leaf in plan.leaves] == layouts
    for leaf_plan in plan.leaves:
        check_leaf(leaf_plan, options)


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 7, 11, 16])
def test_no_small_shard_of_a_sharded_axis_is_cut_across_its_border(replicas):
    mesh = mesh_layout({"data": replicas, "model": 2})
    for n, m in itertools.product(range(1, 14), range(1, 6)):
        for spec in ([("model",), ()], [(), ("model",)]):
            shape = [k * (2 if axes else 1) for k, axes in zip((n, m), spec, strict=True)]
            check_leaf(plan_leaves([leaf("w", shape, mesh, spec)], NO_FLOOR).leaves[0], NO_FLOOR)


@settings(max_examples=100, deadline=None)
@given(states(), options_strategy)
def test_bytes_by_device_and_process_add_up(layouts, options):
    plan = plan_leaves(layouts, options)
    expected = {}
    for leaf_plan in plan.leaves:
        for device, _ in owned(leaf_plan):
            expected[device] = expected.get(device, 0) + leaf_plan.slice_nbytes
    on_host = expected.pop(None, 0)
    assert {device: n for device, n in plan.device_bytes.items() if n} == {d: n for d, n in expected.items() if n}

    process_of = {}
    for layout in layouts:
        if layout.mesh is not None:
            process_of.update(zip(layout.mesh.device_ids, layout.mesh.processes, strict=True))
        elif layout.device is not None:
            process_of.update([layout.device])
    by_process = {0: on_host}
    for device, n in expected.items():
        by_process[process_of[device]] = by_process.get(process_of[device], 0) + n
    assert {p: n for p, n in plan.process_bytes.items() if n} == {p: n for p, n in by_process.items() if n}
    assert plan.nbytes == sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in layouts)
    assert plan.nbytes <= sum(plan.process_bytes.values())


@settings(max_examples=100, deadline=None)
@given(states(), options_strategy, st.randoms(use_true_random=False))
def test_processes_that_made_their_meshes_apart_compute_the_same_plan(layouts, options, random):
    plan = plan_leaves(layouts, options)
    # Every leaf with a mesh object of its own, as after a cache has forgotten some.
    apart = [dataclasses.replace(layout, mesh=layout.mesh and dataclasses.replace(layout.mesh)) for layout in layouts]
    again = plan_leaves(apart, options)
    assert again.device_bytes == plan.device_bytes
    assert again.process_bytes == plan.process_bytes
    for one, other in zip(plan.leaves, again.leaves, strict=True):
        assert (one.chunk_shape, one.grid) == (other.chunk_shape, other.grid)
        assert one.owners.tolist() == other.owners.tolist()

    random.shuffle(apart)
    chunks = {leaf_plan.layout.name: leaf_plan.chunk_shape for leaf_plan in plan.leaves}
    shuffled = plan_leaves(apart, options)
    assert {leaf_plan.layout.name: leaf_plan.chunk_shape for leaf_plan in shuffled.leaves} == chunks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_owners_hold_their_slices_by_jaxs_own_index_map(data):
    sizes = data.draw(st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (7,), (3, 2), (5,), (1, 8)]))
    devices = np.array(jax.devices()[: math.prod(sizes)])
    if data.draw(st.booleans()):
        devices = devices[::-1]
    names = tuple("abc"[: len(sizes)])
    mesh = Mesh(devices.reshape(sizes), names)
    abstract = data.draw(leaves_on(mesh_layout(dict(zip(names, sizes, strict=True)))))
    sharding = NamedSharding(mesh, P(*(axes or None for axes in abstract.spec)))
    layout = layout_of("leaf", jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding))
    plan = plan_leaves([layout], data.draw(options_strategy)).leaves[0]

    index_map = sharding.devices_indices_map(abstract.shape)
    held = {
        device.id: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, abstract.shape, strict=True))
        for device, index in index_map.items()
    }
    assert {device: box for device, _, box in holders(layout)} == held
    times_owned = np.zeros(abstract.shape, int)
    for device, start in owned(plan):
        part = tuple(
            slice(s, min(s + c, b.stop)) for s, c, b in zip(start, plan.chunk_shape, held[device], strict=True)
        )
        times_owned[part] += 1
    assert (times_owned == 1).all()


@pytest.mark.parametrize("replicas", [2, 3, 5, 7, 8, 11, 16])
@pytest.mark.parametrize("shape", [(1000,), (97, 1000), (3, 1000), (1, 1, 1000), (40, 300, 20)])
def test_any_number_of_replicas_all_write_a_share(replicas, shape):
    plan = plan_leaves([leaf("w", shape, mesh_layout({"data": replicas}))], NO_FLOOR)
    assert plan.leaves[0].writers == replicas
    assert plan.leaves[0].slice_nbytes * replicas <= plan.nbytes / 0.95  # a small part is padding
    assert plan.device_balance == 1


@pytest.mark.parametrize(
    ("shape", "replicas", "chunk"),
    [
        ((16, 6), 8, (2, 6)),  # even, on the most major axis
        ((7, 64), 8, (7, 8)),  # the major axis splits badly, the minor one evenly
        ((1000, 64), 7, (143, 64)),  # nearly even on the major axis is better than even on another
        ((6, 6), 9, (2, 2)),  # no axis alone is good: both
        ((5,), 8, (1,)),  # fewer elements than replicas
    ],
)
def test_a_slice_is_contiguous_where_that_costs_little_padding(shape, replicas, chunk):
    plan = plan_leaves([leaf("w", shape, mesh_layout({"data": replicas}))], NO_FLOOR)
    assert plan.leaves[0].chunk_shape == chunk


def test_the_axis_that_is_major_in_memory_is_cut():
    mesh = mesh_layout({"data": 8})
    plan = plan_leaves([leaf("w", (64, 32), mesh), leaf("wt", (64, 32), mesh, order=(1, 0))], NO_FLOOR)
    assert [leaf_plan.chunk_shape for leaf_plan in plan.leaves] == [(8, 32), (64, 4)]


def test_the_memory_layout_of_an_array_is_known():
    layouts = pytest.importorskip("jax.experimental.layout")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    transposed = layouts.Format(layouts.Layout((1, 0)), NamedSharding(mesh, P()))
    array = jax.device_put(np.zeros((64, 32), np.float32), transposed)
    assert layout_of("w", array).major_to_minor == (1, 0)
    assert layout_of("w", jax.device_put(np.zeros((64, 32)), NamedSharding(mesh, P()))).major_to_minor == (0, 1)


def test_an_axis_sharded_over_a_mesh_axis_of_one_counts_as_whole():
    mesh = mesh_layout({"data": 8, "fsdp": 1})
    plan = plan_leaves([leaf("w", (1001,), mesh, [("fsdp",)])], NO_FLOOR)
    assert (plan.leaves[0].chunk_shape, plan.leaves[0].writers) == ((126,), 8)


def test_a_shard_that_divides_by_less_than_the_replicas_is_cut_along_another_axis_too():
    mesh = mesh_layout({"data": 8, "model": 2})
    plan = plan_leaves([leaf("w", (2 * 6, 500), mesh, [("model",), ()])], NO_FLOOR)
    assert plan.leaves[0].writers == 8


def test_the_floor_and_the_cap_limit_the_writers():
    mesh = mesh_layout({"data": 16})
    wide = leaf("w", (1 << 20,), mesh)  # 4 MiB
    assert plan_leaves([wide], DEFAULT).leaves[0].writers == 4
    assert plan_leaves([wide], ReplicaParallelConfig(min_slice_bytes=0, max_replicas=5)).leaves[0].writers == 5
    assert plan_leaves([wide], NO_FLOOR).leaves[0].writers == 16


def test_report_3_small_leaves_spread_over_processes_and_devices():
    mesh = mesh_layout({"data": 8}, processes=4)
    alike = [leaf(f"bias{i}", (64,), mesh) for i in range(10)]
    unlike = [leaf(f"norm{i}", (64 + i,), mesh) for i in range(10)]
    for layouts in (alike, unlike, alike + unlike):
        plan = plan_leaves(layouts, DEFAULT)
        assert all(leaf_plan.writers == 1 for leaf_plan in plan.leaves)
        owners = [int(leaf_plan.owners[0]) for leaf_plan in plan.leaves]
        by_process = np.bincount(np.array(mesh.processes)[owners], minlength=4)
        assert by_process.max() - by_process.min() <= 1
        assert np.bincount(owners, minlength=8).max() <= -(-len(layouts) // 8)


def test_report_3_a_replicated_embedding_and_its_moments_are_shared_by_four_processes():
    mesh = mesh_layout({"data": 4}, processes=4)
    layouts = [leaf(f"{part}.{name}", shape, mesh) for part in ("params", "mu", "nu")
               for name, shape in (("embedding", (50257, 768)), ("scale", (768,)), ("bias", (768,)))]  # fmt: skip
    plan = plan_leaves(layouts, DEFAULT)
    assert plan.process_balance <= 1.02
    assert all(n <= 1.02 * plan.nbytes / 4 for n in plan.process_bytes.values())


def test_report_4_thousands_of_small_leaves_over_64_replicas_stay_whole():
    mesh = mesh_layout({"data": 64}, processes=8)
    layouts = [leaf(f"leaf{i}", (100 + i % 7, 10), mesh) for i in range(3000)]
    plan = plan_leaves(layouts, DEFAULT)
    assert sum(leaf_plan.slices for leaf_plan in plan.leaves) == 3000
    assert plan.device_balance <= 1.03
    assert plan.process_balance <= 1.02


def test_leaves_go_where_the_load_of_leaves_that_have_no_choice_is_not():
    mesh = mesh_layout({"data": 4}, processes=4)
    on_device_1 = dataclasses.replace(leaf("a", (999,), None), device=(1, 1))
    on_host = leaf("b", (999,), None)
    small = [leaf(f"z{i}", (1000 + i,), mesh) for i in range(2)]
    plan = plan_leaves([*small, on_device_1, on_host], DEFAULT)
    assert sorted(int(leaf_plan.owners[0]) for leaf_plan in plan.leaves[:2]) == [2, 3]


def test_report_1_leaves_that_divide_by_nothing_are_written_whole_once():
    mesh = mesh_layout({"data": 8})
    shapes = [(), (1,), (7,), (3, 5), (5, 16), (0, 4)]
    plan = plan_leaves([leaf(str(shape), shape, mesh) for shape in shapes], NO_FLOOR)
    for leaf_plan in plan.leaves:
        check_leaf(leaf_plan, NO_FLOOR)
    assert [leaf_plan.slices for leaf_plan in plan.leaves] == [1, 1, 7, 5, 8, 0]


def test_zero_size_leaves_have_no_slices_and_0d_leaves_one():
    mesh = mesh_layout({"data": 4, "model": 2})
    layouts = [
        leaf("empty", (0, 3), mesh),
        leaf("sharded", (4, 0, 2), mesh, [("model",), (), ()]),
        leaf("scalar", (), mesh),
    ]
    plan = plan_leaves(layouts, DEFAULT)
    assert [leaf_plan.slices for leaf_plan in plan.leaves] == [0, 0, 1]
    assert all(min(leaf_plan.chunk_shape, default=1) >= 1 for leaf_plan in plan.leaves)
    assert plan_leaves([], DEFAULT).nbytes == 0
    assert plan_leaves([], DEFAULT).device_balance == 1


def test_disabled_one_replica_saves_whole_shards():
    mesh = mesh_layout({"data": 4, "model": 2}, processes=4)
    layouts = [leaf(f"w{i}", (1 << 20, 8), mesh, [("model",), ()]) for i in range(3)]
    plan = plan_leaves(layouts, ReplicaParallelConfig(enable=False))
    assert plan.device_bytes == {d: plan.nbytes // 2 if d < 2 else 0 for d in range(8)}
    assert plan.process_bytes == {0: plan.nbytes, 1: 0, 2: 0, 3: 0}


def test_leaves_of_one_device_or_the_host_belong_to_it():
    device = jax.devices()[3]
    array = jax.device_put(np.zeros((1000,), np.float32), device)
    abstract = jax.ShapeDtypeStruct((10,), np.float32, sharding=SingleDeviceSharding(jax.devices()[5]))
    layouts = [
        layout_of("array", array),
        layout_of("abstract", abstract),
        layout_of("nowhere", jax.ShapeDtypeStruct((2,), np.float32)),
        layout_of("numpy", np.zeros((50,), np.int64)),
    ]
    plan = plan_leaves(layouts, NO_FLOOR)
    assert plan.device_bytes == {0: 8, 3: 4000, 5: 40}
    assert plan.process_bytes == {0: 4448}
    assert [leaf_plan.layout.replicas for leaf_plan in plan.leaves] == [1, 1, 1, 1]


def test_unreduced_leaves_are_refused_by_name():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P(None, unreduced={"x"}))
    with pytest.raises(UnsupportedLeafError, match="grads/w"):
        layout_of("grads/w", jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding))


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))])
def test_a_sharding_of_another_kind_becomes_named_and_every_device_keeps_its_shard(spec):
    # jax.sharding has no such kind any more, but XLA's own still comes out of some paths.
    shardings = pytest.importorskip("jax._src.sharding_impls")
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("x", "y"))
    named = NamedSharding(mesh, spec)
    other = shardings.GSPMDSharding(tuple(mesh.devices.flat), named._to_xla_hlo_sharding(2))
    made = as_named_sharding(other, (16, 24))
    assert isinstance(made, NamedSharding)
    assert made.devices_indices_map((16, 24)) == named.devices_indices_map((16, 24))
    layout = layout_of("w", jax.ShapeDtypeStruct((16, 24), np.float32, sharding=other))
    assert layout.replicas == layout_of("w", jax.ShapeDtypeStruct((16, 24), np.float32, sharding=named)).replicas
    check_leaf(plan_leaves([layout], NO_FLOOR).leaves[0], NO_FLOOR)


def test_an_abstract_mesh_gives_the_plan_of_a_real_one():
    real = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"w": ((512, 640), P(None, "model")), "b": ((77,), P()), "e": ((1030, 64), P("model"))}
    plans = []
    for mesh in (real, abstract_mesh(data=4, model=2)):
        state = adam_state(specs, mesh)
        plans.append(plan_leaves([layout_of(*item) for item in state], ReplicaParallelConfig(min_slice_bytes=1024)))
    assert [p.chunk_shape for p in plans[0].leaves] == [p.chunk_shape for p in plans[1].leaves]
    assert plans[0].device_bytes == plans[1].device_bytes
    assert len(plans[1].process_bytes) == 8  # whose devices are, nobody knows: each counts as a process


GPT_5B = megatron_gpt(24, 4096)
GPT_5B_STACKED = maxtext_gpt3(24, 4096, 32, fsdp=None, stacked=True)
GPT_175B = maxtext_gpt3(96, 12288, 96)
GPT_175B_STACKED = maxtext_gpt3(96, 12288, 96, stacked=True)
MODELS = [
    *[pytest.param(GPT_5B, {"dp": dp, "tp": 8}, id=f"5B-tp8-dp{dp}") for dp in (2, 4, 8, 16, 32, 64)],
    *[pytest.param(GPT_5B_STACKED, {"dp": dp, "tp": 8}, id=f"5B-stacked-tp8-dp{dp}") for dp in (2, 4, 8, 16, 32, 64)],
    *[pytest.param(GPT_175B, {"dp": dp, "fsdp": 16, "tp": 8}, id=f"175B-fsdp16-tp8-dp{dp}") for dp in (1, 2, 4)],
    *[pytest.param(GPT_175B_STACKED, {"dp": dp, "fsdp": 16, "tp": 8}, id=f"175B-stacked-dp{dp}") for dp in (1, 2, 4)],
    *[pytest.param(replicated(GPT_5B), {"dp": r}, id=f"5B-replicated-{r}") for r in (7, 11, 13, 64)],
    *[pytest.param(replicated(GPT_5B_STACKED), {"dp": r}, id=f"5B-stacked-replicated-{r}") for r in (11, 24, 36)],
]


@pytest.mark.parametrize(("params", "axes"), MODELS)
def test_real_models_are_balanced_and_every_replica_writes_large_leaves(params, axes):
    mesh = abstract_mesh(**axes)
    plan = plan_leaves([layout_of(*item) for item in adam_state(params, mesh)], DEFAULT)
    assert plan.device_balance <= 1.02
    assert plan.process_balance <= 1.02
    assert sum(plan.device_bytes.values()) <= 1.01 * plan.nbytes  # padding
    for leaf_plan in plan.leaves:
        layout = leaf_plan.layout
        if math.prod(layout.shard_shape) * layout.dtype.itemsize >= layout.replicas * DEFAULT.min_slice_bytes:
            assert leaf_plan.writers == layout.replicas, layout.name


def test_the_printed_plan_has_a_row_a_leaf_and_the_balance():
    mesh = mesh_layout({"data": 8})
    text = str(plan_leaves([leaf("params/w", (64, 32), mesh), leaf("", (), mesh)], NO_FLOOR))
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == "params/w 64x32 float32 64x32 8 8 8x32 axis 0 in 8 1,024".split()  # noqa: SIM905
    assert lines[2].startswith("(the root)")
    assert lines[3].startswith("2 leaves, 8,196 bytes; balance (largest ÷ mean bytes): ")
