"""Several processes save one state, and any number of them restore it."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from tests.processes import run
from tests.test_interop import STEP, WITH_TARGET
from tests.trees import bits, mesh_of, on

# A state with a leaf of each kind that processes can share or have for themselves, and Adam's moments, sharded; a train
# step on the whole batch, gathered before it is used, so that the bits do not depend on the order in which an
# all-reduce adds; a digest of all the state.
STATE = """
import hashlib, optax
OPTIMIZER = optax.adam(0.01)
rng = np.random.default_rng(7)
VALUES = {
    "w": rng.normal(size=(48, 24)).astype(np.float32),
    "odd": rng.normal(size=(11,)).astype(np.float32),
    "zeros": np.zeros((16, 4), np.float32),
}
BATCHES = rng.normal(size=(8, 24, 48)).astype(np.float32)

def make():
    shared = {name: put(v) for name, v in VALUES.items()}
    moments = jax.tree.map(
        lambda x: put(np.zeros(x.shape, x.dtype), P("data") if x.ndim else P()),
        jax.eval_shape(OPTIMIZER.init, VALUES["w"]),
    )
    own = {"own": jnp.arange(5.0), "host": np.arange(4), "n": 0}
    return {"shared": shared, "moments": moments, "own": own}

everywhere = NamedSharding(mesh, P())

@jax.jit
def update(shared, moments, batch):
    batch = jax.lax.with_sharding_constraint(batch, everywhere)
    gradient = jax.grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(shared["w"])
    updates, moments = OPTIMIZER.update(jax.lax.with_sharding_constraint(gradient, everywhere), moments)
    w = jax.lax.with_sharding_constraint(optax.apply_updates(shared["w"], updates), everywhere)
    return {**shared, "w": w}, moments

def train(state):
    step = state["own"]["n"]
    shared, moments = update(state["shared"], state["moments"], put(BATCHES[step % 8], P("data")))
    shardings = jax.tree.map(lambda x: x.sharding, state["moments"])
    own = {"own": state["own"]["own"] + 1, "host": state["own"]["host"] + 1, "n": step + 1}
    return {"shared": shared, "moments": jax.device_put(moments, shardings), "own": own}

def digest(state):
    whole = jax.jit(lambda s: s, out_shardings=everywhere)((state["shared"], state["moments"]))
    leaves = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(whole)]
    leaves += [np.asarray(x) for x in jax.tree.leaves(state["own"])]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()

config = dict(directory=sys.argv[1], save_interval_steps=1, replica_parallel={"min_slice_bytes": 1},
              commit_timeout_secs=60, storage={"use_ocdbt": "raw" not in sys.argv[2:]})
"""

# Three steps, saved, after what there is; then two that are not: the digests after each.
SAVE = (
    STATE
    + """
with rps.CheckpointCallback(config) as checkpoint:
    state, step = checkpoint.resume(make())
    said = [digest(state)]
    for step in range(step + 1, step + 4):
        state = train(state)
        checkpoint(step, state)
        said.append(digest(state))
    checkpoint.wait()
    say(checkpoint.all_steps())
for _ in range(2):
    state = train(state)
    said.append(digest(state))
say(*said)
"""
)

# The digest of what was resumed, and of the two steps after it.
RESUME = (
    STATE
    + """
with rps.CheckpointCallback(config) as checkpoint:
    state, step = checkpoint.resume(make())
    assert state["own"]["n"] == step == 3
said = [digest(state)]
for _ in range(2):
    state = train(state)
    said.append(digest(state))
say(*said)
"""
)


@pytest.fixture(scope="module", params=["ocdbt", "ocdbt by tensorstore", "raw by direct"])
def saved_by_four(request, tmp_path_factory):
    """A run's directory with three steps of four processes of two devices, its form, and the digests of all steps."""
    root = tmp_path_factory.mktemp("four") / "run"
    form, *engine = request.param.split(" by ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPSAVE_ENGINE", engine[0] if engine else "auto")
        results = run(SAVE, 4, devices=2, args=[str(root), form])
    assert [result.said[0] for result in results] == ["[1, 2, 3]"] * 4
    (digests,) = {result.said[1] for result in results}
    return root, request.param, digests.split()


def test_what_four_processes_save_any_number_resumes_and_goes_on_bit_equal(saved_by_four):
    root, form, digests = saved_by_four
    assert len(set(digests)) == 6
    for processes, devices in ((1, 8), (2, 4), (8, 1)) if form == "ocdbt" else ((2, 4),):
        resumed = run(RESUME, processes, devices=devices, args=[str(root), form.split()[0]])
        assert [result.said[0].split() for result in resumed] == [digests[3:]] * processes, processes


def test_what_one_process_saved_four_resume_and_go_on_bit_equal_and_three_devices_after_them(tmp_path):
    args = [str(tmp_path / "run")]
    (alone,) = run(SAVE, 1, devices=8, args=args)
    four = run(SAVE, 4, devices=2, args=args)
    assert {result.said[0] for result in four} == {"[1, 2, 3, 4, 5, 6]"}
    digests = four[0].said[1].split()
    assert digests[:3] == alone.said[1].split()[3:]
    (three,) = run(SAVE, 1, devices=3, args=args)
    assert three.said[1].split()[0] == digests[3]


@pytest.mark.filterwarnings("ignore:Use `(load|save)` instead:DeprecationWarning")
@pytest.mark.parametrize("read", WITH_TARGET)
def test_every_stock_reader_restores_what_four_processes_saved(saved_by_four, read):
    root, _, _ = saved_by_four
    mine = rps.load(root, step=STEP)
    own = jax.tree.map(np.empty_like, mine)  # 64-bit integers among them, which JAX would not take
    spread = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(mesh_of((4, 2)))), mine)
    for target in (own, {**spread, "own": own["own"]}):
        found = read(root, target)
        assert jax.tree.map(bits, found) == jax.tree.map(bits, mine)


def test_each_process_writes_its_share_of_a_replicated_state(tmp_path):  # report 3
    script = """
    values = np.random.default_rng(0).normal(size=(1000, 77)).astype(np.float32)
    small = {f"bias{i}": put(np.full(40 + i % 3, i, np.float32)) for i in range(60)}
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1,
                                     replica_parallel={"min_slice_bytes": 4096})) as checkpoint:
        checkpoint(1, {"w": put(values), **small})
        checkpoint.wait()
        say(checkpoint.stats.bytes_written)
    """
    written = [int(result.said[0]) for result in run(script, 3, args=[str(tmp_path / "run")])]
    assert max(written) * 3 / sum(written) <= 1.02
    assert sum(written) <= 1.02 * (1000 * 77 + 60 * 41) * 4


def test_a_replicated_state_is_read_from_storage_once_by_all_processes_together(tmp_path):
    script = """
    import tensorstore as ts
    values = np.random.default_rng(0).normal(size=(8000, 256)).astype(np.float32)
    config = dict(directory=sys.argv[1], save_interval_steps=1)
    with rps.CheckpointCallback(config) as checkpoint:
        if sys.argv[2] == "save":
            checkpoint(1, {"w": put(values)})
        else:
            state, _ = checkpoint.resume({"w": put(values * 0)})
            assert np.asarray(state["w"].addressable_data(0)).tobytes() == values.tobytes()
            metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
            say(sum(v["value"] for m in metrics for v in m["values"]))
    """
    run(script, 4, args=[str(tmp_path / "run"), "save"])
    read = [int(result.said[0]) for result in run(script, 4, args=[str(tmp_path / "run"), "resume"])]
    state = 8000 * 256 * 4
    assert state <= sum(read) <= 1.05 * state
    assert max(read) <= 0.3 * state


def test_processes_exchange_what_they_read_in_rounds_that_do_not_heed_chunks(tmp_path):
    """Chunks that lie apart in the array, that only some processes need, that are whole arrays, empty, or of rank 0."""
    script = """
    import flax_rpsave.exchange
    flax_rpsave.exchange._ROUND_NBYTES = 1000
    rng = np.random.default_rng(0)
    values = {
        "columns": (rng.normal(size=(30, 24)).astype(np.float32), P(None, "data")),
        "rows": (rng.integers(0, 99, (30, 7)).astype(np.int32), P("data")),
        "short": (rng.normal(size=(500,)).astype(jnp.bfloat16), P()),
        "scalar": (np.float32(3.5), P()),
        "empty": (np.zeros((0, 3), np.float32), P()),
    }
    config = dict(directory=sys.argv[1], save_interval_steps=1, replica_parallel={"min_slice_bytes": 64})
    with rps.CheckpointCallback(config) as checkpoint:
        if sys.argv[2] == "save":
            checkpoint(1, {name: put(np.asarray(v), spec) for name, (v, spec) in values.items()})
        else:
            # Rows stay apart, so that each process needs some; the others are replicated.
            target = {
                name: put(np.zeros_like(v), spec if name == "rows" else P()) for name, (v, spec) in values.items()
            }
            state, _ = checkpoint.resume(target)
            for name, (v, _) in values.items():
                for shard in state[name].addressable_shards:
                    assert np.asarray(shard.data).tobytes() == np.asarray(v)[shard.index].tobytes(), name
            say("equal")
    """
    run(script, 3, args=[str(tmp_path / "run"), "save"])
    found = run(script, 2, args=[str(tmp_path / "run"), "resume"])
    assert [result.said for result in found] == [["equal"]] * 2


def test_each_process_narrows_what_it_holds_whatever_lies_where_it_holds_nothing(tmp_path):
    """Without 64-bit types JAX takes 64-bit values as 32-bit ones where they fit; the rest of an array is undefined."""
    with jax.enable_x64(True), rps.CheckpointCallback({"directory": str(tmp_path)}) as checkpoint:
        assert checkpoint(1, {"w": jax.device_put(np.arange(64).reshape(8, 8), on(mesh_of((8,)), "data"))}, force=True)
    script = """
    from flax_rpsave import host_memory
    empty = host_memory.empty
    def undefined(shape, dtype):
        array = empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0x7F
        return array
    host_memory.empty = undefined
    wide = jax.ShapeDtypeStruct((8, 8), np.int64, sharding=NamedSharding(mesh, P("data")))
    with rps.CheckpointCallback({"directory": sys.argv[1]}) as checkpoint:
        state, step = checkpoint.resume({"w": wide})
    (own,) = state["w"].addressable_shards
    assert (np.asarray(own.data) == np.arange(64).reshape(8, 8)[own.index]).all()
    say(step, state["w"].dtype)
    """
    assert [result.said for result in run(script, 2, args=[str(tmp_path)])] == [["1 int32"]] * 2


def test_each_process_gets_its_own_data_state_back(tmp_path):
    script = """
    class Data:
        position = 0
        def get_state(self): return {"position": self.position}
        def set_state(self, state): self.position = state["position"]
    data = Data()
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1), data=data) as checkpoint:
        try:
            state, step = checkpoint.resume({"w": put(np.ones(8, np.float32))})
        except rps.DataStateError as error:
            say("refused", error)
            sys.exit()
        say(step, data.position)
        data.position = 100 * process + step + 1
        checkpoint(step + 1, state)
    """
    args = [str(tmp_path / "run")]
    assert [r.said for r in run(script, 2, args=args)] == [["0 0"], ["0 0"]]
    assert [r.said for r in run(script, 2, args=args)] == [["1 1"], ["1 101"]]
    for result in run(script, 4, args=args):  # report 26
        assert result.said[0].startswith("refused")
        assert "Resume with 2 processes" in result.said[0]
    target = {"w": np.zeros(8, np.float32)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert (manager.restore(2, args=ocp.args.StandardRestore(target))["w"] == 1).all()


def test_the_loops_thread_makes_no_collective_and_no_coordination_call_in_a_later_save(tmp_path):
    script = """
    import threading
    from jax._src import distributed
    real = distributed.global_state.client
    calls = []
    class Counting:
        def __getattr__(self, name):
            def call(*args, **keys):
                calls.append((threading.current_thread() is threading.main_thread(), name))
                return getattr(real, name)(*args, **keys)
            return call
    distributed.global_state.client = Counting()  # whoever calls it: this package, jax, Orbax
    state = {f"leaf{i}": put(np.ones((64, 64), np.float32)) for i in range(74)}
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1)) as checkpoint:
        checkpoint(1, state)
        checkpoint.wait()
        calls.clear()
        checkpoint(2, state)
        checkpoint.wait()
        distributed.global_state.client = real
        in_loop = [name for main, name in calls if main]
        in_background = [name for main, name in calls if not main]
        programs = [p.executables[1].as_text() for g in checkpoint._saver._snapshotter._groups for p in g]
        collectives = [op for op in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
                       if any(op in text for text in programs)]
        import json
        say(json.dumps([in_loop, len(in_background), len(programs), collectives]))
    """
    for result in run(script, 2, devices=2, args=[str(tmp_path / "run")]):
        in_loop, in_background, programs, collectives = json.loads(result.said[0])
        assert in_loop == []
        assert collectives == []
        assert in_background > 0
        assert programs > 0


def test_a_save_gets_as_far_as_the_agreement_while_no_other_process_has_begun_it(tmp_path):
    """Whatever collective or barrier were in the call, or in what it dispatches, would wait here for ever."""
    script = """
    import threading
    from flax_rpsave.agreement import Channel
    reported = threading.Event()
    report = Channel.report
    def announced(self, *args, **kwargs):
        report(self, *args, **kwargs)
        reported.set()
    state = {"w": put(np.ones((64, 64), np.float32)), "sharded": put(np.ones((64, 64), np.float32), P("data"))}
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1)) as checkpoint:
        checkpoint(1, state)
        checkpoint.wait()
        Channel.report = announced
        go = f"{sys.argv[1]}-go"
        if process == 0:
            assert checkpoint(2, state)
            assert reported.wait(60)
            open(go, "w").close()
        else:
            while not os.path.exists(go):
                time.sleep(0.02)
            assert checkpoint(2, state)
        checkpoint.wait()
        say(checkpoint.all_steps())
    """
    assert [r.said for r in run(script, 2, devices=2, args=[str(tmp_path / "run")])] == [["[1, 2]"]] * 2


def test_each_process_logs_which_engine_writes_once_and_when_that_changes(tmp_path):
    script = """
    state = {"w": put(np.ones((64, 64), np.float32))}
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1)) as checkpoint:
        for step in range(1, 5):
            if (process, step) == (1, 3):
                checkpoint._saver.writer._engines._direct = False  # as after a refusal
            checkpoint(step, state)
            checkpoint.wait()
    """
    first, second = run(script, 2, args=[str(tmp_path / "run")], env={"RPSAVE_ENGINE": "direct"})
    assert re.findall(r"step (\d) committed: .* by (\w+), the loop", first.output) == [(k, "direct") for k in "1234"]
    assert re.findall(r"step \d: process \d wrote by", first.output) == []
    said = re.findall(r"step (\d): process (\d) wrote by (\w+)", second.output)
    assert said == [("1", "1", "direct"), ("3", "1", "tensorstore")]


def test_a_leaf_on_the_devices_of_some_processes_is_saved_by_them(tmp_path):
    script = """
    half = Mesh(np.array([d for d in jax.devices() if d.process_index in (1, 2)]), ("data",))
    values = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    def make(v):
        return {"everywhere": put(v), "half": put(v, on=half), "sharded": put(v, P("data"), on=half)}
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1,
                                     replica_parallel={"min_slice_bytes": 1})) as checkpoint:
        state, step = checkpoint.resume(make(values if sys.argv[2] == "save" else values * 0))
        for name, leaf in state.items():
            for shard in leaf.addressable_shards:
                assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), name
        checkpoint(step + 1, state)
    """
    run(script, 3, args=[str(tmp_path / "run"), "save"])
    run(script, 3, args=[str(tmp_path / "run"), "resume"])
    loaded = rps.load(tmp_path / "run")
    assert loaded["half"].tobytes() == loaded["everywhere"].tobytes() == loaded["sharded"].tobytes()


ONE_DEVICE_EACH = """
import ml_dtypes
from jax.experimental.layout import Format, Layout
grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
rng = np.random.default_rng(5)
VALUES, state = {}, {}

def add(name, shape, dtype, spec):
    VALUES[name] = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    state[name] = put(VALUES[name], spec, on=grid)

for dtype in (np.float32, ml_dtypes.bfloat16):  # any bits: NaNs with payloads among them
    for place, spec in {"whole": P(), "rows": P("x"), "columns": P(None, "y"), "both": P("y", "x")}.items():
        add(f"{np.dtype(dtype).name}-{place}", (52, 22), dtype, spec)  # no number of processes divides 26, 11 or 13
    for k in range(3):
        add(f"{np.dtype(dtype).name}-small{k}", (k + 1,), dtype, P())
add("scalar", (), np.float32, P())
VALUES["transposed"] = VALUES["float32-rows"]
state["transposed"] = jax.device_put(state["float32-rows"], Format(Layout((1, 0)), state["float32-rows"].sharding))

for name, config in CONFIGS.items():
    with rps.CheckpointCallback(dict(directory=f"{sys.argv[1]}/{name}", save_interval_steps=1, **config)) as checkpoint:
        for step in (1, 2):
            formats = {name: x.format for name, x in state.items()}
            checkpoint(step, state)
            jax.tree.map(lambda x: x.delete(), state)  # as a donation does
            state = {name: jax.device_put(put(VALUES[name], place.sharding.spec, on=grid), place)
                     for name, place in formats.items()}
        checkpoint.wait()
        groups = checkpoint._saver._snapshotter._groups
        say(len(groups), *sorted({program.mesh.size for group in groups for program in group}))
if process == 0:
    np.savez(f"{sys.argv[1]}/values.npz", **{name: v.view(f"uint{8 * v.itemsize}") for name, v in VALUES.items()})
"""

CONFIGS = {
    "fine": {"replica_parallel": {"min_slice_bytes": 1}},
    "coarse": {},
    "groups": {"replica_parallel": {"min_slice_bytes": 1}, "max_staging_gb": 2e-6},
    "compared": {"replica_parallel": {"min_slice_bytes": 1, "check_divergence": "fail"}},
    "single": {"replica_parallel": {"enable": False}},
}


def test_processes_of_one_device_each_save_from_it_alone(tmp_path):
    results = run(f"CONFIGS = {CONFIGS}" + ONE_DEVICE_EACH, 4, args=[str(tmp_path)])
    for name, *said in zip(CONFIGS, *(result.said for result in results), strict=True):
        groups, sizes = zip(*(line.partition(" ")[::2] for line in said), strict=True)
        assert len(set(groups)) == 1
        assert (int(groups[0]) > 1) == (name == "groups")
        assert set(sizes) - {""} == {"1"}, "a process that saves nothing has no program"
    expected = np.load(tmp_path / "values.npz")
    for name in CONFIGS:
        loaded = rps.load(tmp_path / name)
        assert set(loaded) == set(expected)
        for key in expected:
            assert np.ascontiguousarray(loaded[key]).tobytes() == expected[key].tobytes(), (name, key)


@pytest.mark.parametrize("enable", [True, False])
def test_one_replica_a_process_is_not_its_first_device(tmp_path, enable):
    script = f"""
    grid = Mesh(np.array(jax.devices())[[[0, 2], [3, 1]]], ("x", "y"))  # rows: shards; columns: replicas
    values = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    with rps.CheckpointCallback(dict(directory=sys.argv[1], save_interval_steps=1,
                                     replica_parallel=dict(enable={enable}, min_slice_bytes=1))) as checkpoint:
        for step in (1, 2):
            checkpoint(step, {{"w": put(values * step, P("x"), on=grid)}})
    """
    run(script, 2, devices=2, args=[str(tmp_path / "run")])
    values = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    assert rps.load(tmp_path / "run")["w"].tobytes() == (values * 2).tobytes()
