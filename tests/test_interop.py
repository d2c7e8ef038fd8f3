"""Stock Orbax reads what we save, and we resume from what stock Orbax saved.

Every reader is asked twice: for the values, and whether it gives back what it gives for the checkpoint that stock Orbax
itself made of the same state (the structure of a reader that has no target is its own matter).
"""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import flax_rpsave as rps
from flax_rpsave import CheckpointCallback, cli, commit
from flax_rpsave.directory import FileDirectory
from tests.trees import abstract, assert_same_tree, bits, blank, mesh_of, on, values

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find sharding info:UserWarning"),
    pytest.mark.filterwarnings("ignore:Use `(load|save)` instead:DeprecationWarning"),
]

FORMATS = [(use_ocdbt, compression) for use_ocdbt in (True, False) for compression in (None, "zstd", "blosc")]
WAYS = [(True, None, "direct"), (False, None, "direct"), *((*form, "tensorstore") for form in FORMATS)]
STEP = 3


def make_state():
    """A state with every kind of leaf that stock Orbax restores with a target, some of them split over replicas."""
    mesh = mesh_of((4, 2))
    params = {
        "dense": {
            "kernel": jax.device_put(values((16, 8), np.float32), on(mesh, "data", "model")),
            "bias": jax.device_put(values((10,), np.float32, 1), on(mesh)),  # uneven over 8 replicas
        },
        "embedding": jax.device_put(values((24, 6), jnp.bfloat16), on(mesh, None, "model")),
        "layers": [jax.device_put(values((4, 4), np.float16, i), on(mesh, "data")) for i in range(11)],
    }
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {
        "params": params,
        "opt_state": opt.init(params),  # zeros: moments of a fresh Adam
        "step": jax.device_put(jnp.int32(STEP), on(mesh)),
        "key": jax.device_put(jax.random.key(1), on(mesh)),
        "keys": jax.device_put(jax.random.split(jax.random.key(2, impl="rbg"), 8), on(mesh, "data")),
        "one_device": jax.device_put(values((3, 5), np.int8), jax.devices()[2]),
        "flags": jax.device_put(values((9,), np.bool_), on(mesh)),
        "host": values((5, 3), np.int64) + 2**40,
        "epoch": 7,
        "scale": 0.5,
        "empty": {"dict": {}, "none": None, "list": [], "tuple": ()},
        "by_number": {0: jnp.ones(2), 10: jnp.zeros(2), 2: jnp.full(2, 3.0)},
    }


def settings(use_ocdbt=True, compression=None):
    return {
        "storage": {"use_ocdbt": use_ocdbt, "compression": compression},
        "replica_parallel": {"min_slice_bytes": 8},  # so that small leaves are split, too
    }


def in_run(directory, **options):
    return CheckpointCallback({"directory": str(directory), "save_interval_steps": 1, **settings(), **options})


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{'ocdbt' if way[0] else 'files'}-{way[1]}-{way[2]}")
def ours(request, state, tmp_path_factory):
    """A run's directory with one step, saved by us."""
    root = tmp_path_factory.mktemp("ours") / "run"
    *form, engine = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPSAVE_ENGINE", engine)
        with in_run(root, **settings(*form)) as callback:
            callback(STEP, state, force=True)
            callback.wait()
            assert callback.stats.engine == engine
    return root


@pytest.fixture(scope="module")
def stock(state, tmp_path_factory):
    """The same, saved by stock Orbax with its defaults."""
    root = tmp_path_factory.mktemp("stock") / "run"
    with ocp.CheckpointManager(root) as manager:
        manager.save(STEP, args=ocp.args.StandardSave(state))
    return root


@pytest.fixture(scope="module")
def read_of_stock(stock):
    """What a stock reader without a target makes of stock's own."""
    return functools.cache(lambda read: read(stock))


def by_standard_checkpointer(root, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(STEP) / "default", *target)


def by_pytree_checkpointer(root):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(root / str(STEP) / "default")


def by_manager(root, *target):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(STEP, args=ocp.args.StandardRestore(*target)) if target else manager.restore(STEP)


def by_pytree_handler(root, *target):
    handler = ocp.PyTreeCheckpointHandler()
    if not target:
        return handler.restore(root / str(STEP) / "default")
    how = ocp.checkpoint_utils.construct_restore_args(*target)
    return handler.restore(root / str(STEP) / "default", args=ocp.args.PyTreeRestore(item=target[0], restore_args=how))


def by_v1(root, *target):
    return v1.load_pytree(root / str(STEP), *target)


def by_v1_checkpointer(root, *target):
    with v1.training.Checkpointer(root) as checkpointer:
        found = checkpointer.load_checkpointables(STEP, {"default": target[0] if target else None})
        return found["default"]


WITH_TARGET = [by_standard_checkpointer, by_manager, by_pytree_handler, by_v1, by_v1_checkpointer]
WITHOUT_TARGET = [*WITH_TARGET, by_pytree_checkpointer]


@pytest.mark.parametrize("read", WITH_TARGET)
def test_a_stock_reader_with_a_target_restores_our_checkpoint_bit_equal(ours, state, read):
    assert_same_tree(read(ours, abstract(state)), state, exactly=False)


@pytest.mark.parametrize("read", WITHOUT_TARGET)
def test_a_stock_reader_without_a_target_reads_ours_as_it_reads_its_own(ours, read_of_stock, state, read):
    found = read(ours)
    assert_same_tree(found, read_of_stock(read), exactly=False)
    assert [bits(x) for x in jax.tree.leaves(found["params"])] == [bits(x) for x in jax.tree.leaves(state["params"])]


def test_the_fixture_has_leaves_split_over_replicas(state):
    slices = {leaf.layout.name: leaf.slices for leaf in rps.plan(state, settings()).leaves}
    assert slices["params.dense.bias"] > 1
    assert slices["params.embedding"] == 4


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_save_wrote_is_a_standard_checkpointers_checkpoint(tmp_path, state, use_ocdbt):
    rps.save(tmp_path / "ours", state, config=settings(use_ocdbt))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", state)
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "ours", abstract(state)), state, exactly=False)
        assert_same_tree(
            checkpointer.restore(tmp_path / "ours"), checkpointer.restore(tmp_path / "stock"), exactly=False
        )
    assert_same_tree(v1.load_pytree(tmp_path / "ours", abstract(state)), state, exactly=False)
    assert {p.name for p in (tmp_path / "ours").iterdir()} >= {"_METADATA", "_CHECKPOINT_METADATA"}


def test_strings_are_read_by_stock_readers(tmp_path):
    tree = {"name": "gpt", "nested": [{"text": "zwölf\n"}], "x": jnp.ones(3)}
    rps.save(tmp_path / "ours", tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "ours")
    assert found["name"] == "gpt"
    assert found["nested"] == [{"text": "zwölf\n"}]


@pytest.mark.parametrize("value", [1 / 3 - 2j, np.complex64(1 - 2j)])
def test_a_complex_number_is_read_by_stock_readers_as_an_array_of_rank_0(tmp_path, value):
    """Orbax has no complex scalars: where its own document says that there is one, no stock reader takes it."""
    rps.save(tmp_path / "c", {"z": value, "x": jnp.ones(2)})
    array = np.asarray(value)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "c")["z"]
        assert (found.dtype, found.shape, found) == (array.dtype, (), array)
        assert checkpointer.restore(tmp_path / "c", {"z": np.zeros_like(array), "x": jnp.zeros(2)})["z"] == array
    back = rps.load(tmp_path / "c", {"z": type(value)(0), "x": jnp.zeros(2)})["z"]
    assert (type(back), back) == (type(value), value)
    on_device = rps.load(tmp_path / "c", {"z": jnp.zeros((), jnp.complex64), "x": jnp.zeros(2)})["z"]
    assert (on_device.dtype, on_device) == (jnp.complex64, jnp.complex64(value))


@pytest.mark.parametrize("empty", [None, {}, [], (), optax.EmptyState()], ids=repr)
def test_an_empty_node_that_only_one_side_has_is_a_mismatch_here_and_to_stock(tmp_path, empty):
    with_it, without = {"w": np.ones(2), "n": {"below": empty}}, {"w": np.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock with", with_it)
        checkpointer.save(tmp_path / "stock without", without)
    rps.save(tmp_path / "with", with_it)
    rps.save(tmp_path / "without", without)
    for whose in ("", "stock "):
        with pytest.raises(rps.TreeMismatchError, match=r"n/below: in the checkpoint \(.*\), but not in the target"):
            rps.load(tmp_path / f"{whose}with", without)
        with pytest.raises(rps.TreeMismatchError, match=r"n/below: missing in the checkpoint, the target expects "):
            rps.load(tmp_path / f"{whose}without", with_it)
        assert rps.load(tmp_path / f"{whose}with", with_it)["n"] == {"below": empty}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, target in (("with", without), ("without", with_it)):
            with pytest.raises(ValueError, match="do not match"):
                checkpointer.restore(tmp_path / name, target)


def test_stock_reads_the_metadata_of_our_checkpoint(ours, stock):
    with ocp.StandardCheckpointer() as checkpointer:
        found, expected = (checkpointer.metadata(root / str(STEP) / "default") for root in (ours, stock))
    of = lambda tree: {jax.tree_util.keystr(k): (type(v), getattr(v, "shape", None), getattr(v, "dtype", None))  # noqa: E731
                       for k, v in jax.tree_util.tree_leaves_with_path(tree)}  # fmt: skip
    assert of(found.item_metadata.tree) == of(expected.item_metadata.tree)


@pytest.mark.parametrize(
    ("shape", "spec"), [((2, 4), ("model", "data")), ((8,), ("data",)), ((3,), ()), ((1,), ())], ids=str
)
def test_stock_restores_our_checkpoint_into_another_sharding(ours, state, shape, spec):
    mesh = mesh_of(shape)

    def elsewhere(x):
        fits = isinstance(x, jax.Array) and x.ndim == len(spec) and all(n % 8 == 0 for n in x.shape)
        return jax.device_put(x, on(mesh, *spec) if fits else on(mesh)) if isinstance(x, jax.Array) else x

    moved = jax.tree.map(elsewhere, state)
    assert_same_tree(by_standard_checkpointer(ours, abstract(moved)), moved, exactly=False)


def write_with_manager(root, state, step=10, args=ocp.args.StandardSave, handler=None, **kwargs):
    if handler is not None:
        kwargs = {"item_handlers": handler, **kwargs}
    with ocp.CheckpointManager(root, **kwargs) as manager:
        assert manager.save(step, args=args(state))


def composite(*names):
    return lambda state: ocp.args.Composite(**{name: ocp.args.StandardSave(state) for name in names})


def write_with_v1_replica_parallel(root, state, **saving):
    context = v1.Context()
    context.array.saving.use_replica_parallel = True
    context.array.saving.min_slice_bytes_for_replica_parallel = 8
    for option, value in saving.items():
        setattr(context.array.saving, option, value)
    with context:
        v1.save_pytree(root / "10", state)


STOCK_WRITERS = {
    "its defaults": lambda root, state: write_with_manager(root, state),
    "PyTreeSave": lambda root, state: write_with_manager(root, state, args=ocp.args.PyTreeSave),
    "StandardSave without OCDBT": lambda root, state: write_with_manager(
        root, state, handler=ocp.StandardCheckpointHandler(use_ocdbt=False)
    ),
    **{
        f"{'OCDBT' if ocdbt else 'files'}, zarr{3 if zarr3 else 2}, {'zstd' if codec else 'raw'}": (
            lambda root, state, ocdbt=ocdbt, zarr3=zarr3, codec=codec: write_with_manager(
                root,
                state,
                args=ocp.args.PyTreeSave,
                handler=ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=codec),
            )
        )
        for ocdbt in (True, False)
        for zarr3 in (True, False)
        for codec in (True, False)
    },
    **{
        f"item {name}": lambda root, state, name=name: write_with_manager(root, state, args=composite(name))
        for name in ("default", "state", "items")
    },
    "replica-parallel": lambda root, state: write_with_v1_replica_parallel(root, state),
    "replica-parallel, a folder a replica": lambda root, state: write_with_v1_replica_parallel(
        root, state, enable_replica_parallel_separate_folder=True
    ),
    "replica-parallel, files": lambda root, state: write_with_v1_replica_parallel(root, state, use_ocdbt=False),
    "with metrics": lambda root, state: write_with_manager_and_metrics(root, state),
    "StandardCheckpointer": lambda root, state: write_with_standard_checkpointer(root / "10", state),
    "v1 save": lambda root, state: v1.save_pytree(root / "10", state),
    "v1 Checkpointer": lambda root, state: write_with_v1(root, state),
}


def write_with_manager_and_metrics(root, state):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.save(10, args=ocp.args.StandardSave(state), metrics={"loss": 1.5})


def write_with_standard_checkpointer(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def write_with_v1(root, state):
    with v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save_pytree(10, state)


@pytest.mark.parametrize("write", STOCK_WRITERS.values(), ids=STOCK_WRITERS.keys())
def test_we_resume_from_what_stock_wrote(tmp_path, state, write):
    root = tmp_path / "run"
    root.mkdir()
    write(root, state)
    with in_run(root) as callback:
        found, step = callback.resume(blank(state))
        assert step == 10
        assert_same_tree(found, state)
    loaded = rps.load(root, abstract(state))
    assert_same_tree(loaded, state, exactly=False)
    params = rps.load(root / "10", subtree="params")
    assert [bits(x) for x in jax.tree.leaves(params)] == [bits(x) for x in jax.tree.leaves(state["params"])]


def test_zeros_that_stock_left_out_are_read_as_zeros(tmp_path):
    """TensorStore drops chunks that are all zero, unless told otherwise, as Orbax now does; older Orbax did not."""
    state = {"zeros": jnp.zeros((4, 4)), "ones": jnp.ones((4, 4))}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    write_with_manager(tmp_path / "run", state, args=ocp.args.PyTreeSave, handler=handler)
    item = tmp_path / "run" / "10" / "default"
    metadata = (item / "_METADATA").read_text()
    assert '"store_array_data_equal_to_fill_value": true' in metadata
    shutil.rmtree(item / "zeros" / "c")
    with in_run(tmp_path / "run") as callback, pytest.raises(rps.CorruptCheckpointError, match="zeros"):
        callback.resume(blank(state))
    (item / "_METADATA").write_text(metadata.replace('fill_value": true', 'fill_value": false'))
    with in_run(tmp_path / "run") as callback:
        assert_same_tree(callback.resume(blank(state))[0], state)


def test_several_items_are_an_error_that_lists_them(tmp_path, state):
    root = tmp_path / "run"
    write_with_manager(root, state, args=composite("model", "ema"))
    with in_run(root) as callback, pytest.raises(rps.NoCheckpointError, match=r"'ema', 'model'.*item"):
        callback.resume(blank(state))
    with pytest.raises(rps.NoCheckpointError, match="'ema', 'model'"):
        rps.load(root)


def test_item_picks_one_of_several(tmp_path):
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        manager.save(
            10,
            args=ocp.args.Composite(
                model=ocp.args.StandardSave({"x": jnp.ones(2)}), ema=ocp.args.StandardSave({"x": jnp.zeros(2)})
            ),
        )
    assert rps.load(root, item="ema")["x"].tolist() == rps.load(root / "10", item="ema")["x"].tolist() == [0.0, 0.0]
    for item, value in (("model", 1.0), ("ema", 0.0)):
        with in_run(root, item=item) as callback:
            found, step = callback.resume({"x": jnp.full(2, 9.0)})
        assert (found["x"] == value).all()
        assert step == 10


def test_an_item_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path):
    write_with_manager(tmp_path / "run", {"x": jnp.ones(2)}, args=composite("model", "ema"))
    with in_run(tmp_path / "run", item="modle") as callback, pytest.raises(rps.NoCheckpointError, match="'ema'"):
        callback.resume({"x": jnp.ones(2)})


def test_item_names_what_we_save(tmp_path, state):
    with in_run(tmp_path / "run", item="state") as callback:
        callback(STEP, state, force=True)
    with ocp.CheckpointManager(tmp_path / "run", item_names=("state",)) as manager:
        how = ocp.args.Composite(state=ocp.args.StandardRestore(abstract(state)))
        assert_same_tree(manager.restore(STEP, args=how)["state"], state, exactly=False)
    with in_run(tmp_path / "run") as callback:
        assert_same_tree(callback.resume(blank(state))[0], state)


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_run_goes_on_in_the_directory_of_a_stock_run_and_back(tmp_path, state, use_ocdbt):
    root = tmp_path / "run"
    write_with_manager(root, state)
    later = jax.tree.map(lambda x: x + 1 if jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating) else x, state)
    with in_run(root, storage={"use_ocdbt": use_ocdbt}) as callback:
        _, step = callback.resume(blank(state))
        assert callback(step + 10, later)
    with ocp.CheckpointManager(root) as manager:
        assert sorted(manager.all_steps()) == [10, 20]
        assert manager.latest_step() == 20
        for step, saved in ((10, state), (20, later)):
            found = manager.restore(step, args=ocp.args.StandardRestore(abstract(state)))
            assert_same_tree(found, saved, exactly=False)
        assert manager.save(30, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [10, 20, 30]
    with in_run(root) as callback:
        assert callback.all_steps() == [10, 20, 30]
        assert callback.resume(blank(state))[1] == 30
    assert_same_tree(rps.load(root, abstract(state), step=20), later, exactly=False)


def unfinished(root, step, nonce):
    """A save of ours that was killed before its commit."""
    shutil.copytree(root / str(STEP), commit.workplace(FileDirectory(root / str(step)), nonce).path)


def test_stock_takes_our_unfinished_saves_for_unfinished_and_leaves_our_steps(tmp_path):
    root = tmp_path / "run"
    with in_run(root) as callback:
        callback(STEP, {"x": jnp.ones(4)}, force=True)
    unfinished(root, 9, "0123abcd")
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [STEP]
        assert manager.latest_step() == STEP
    with v1.training.Checkpointer(root) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints] == [STEP]
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(11, args=ocp.args.StandardSave({"x": jnp.zeros(4)}))  # waits for the clean-up
    assert sorted(p.name for p in root.iterdir()) == ["11", str(STEP)]
    assert (rps.load(root, {"x": jnp.zeros(4)}, step=STEP)["x"] == 1).all()


def test_our_clean_up_leaves_what_others_put_there(tmp_path):  # report 35
    root = tmp_path / "run"
    write_with_manager(root, {"x": jnp.ones(4)})
    shutil.copytree(root / "10", root / "12.orbax-checkpoint-tmp-7")
    (root / "notes").mkdir()
    with in_run(root) as callback:
        _, step = callback.resume({"x": jnp.zeros(4)})
        assert step == 10
        callback(11, {"x": jnp.zeros(4)})
    assert sorted(p.name for p in root.iterdir()) == ["10", "11", "12.orbax-checkpoint-tmp-7", "notes"]


def test_steps_moved_aside_are_no_steps_to_stock(tmp_path):
    root = tmp_path / "run"
    with in_run(root) as callback:
        for step in (1, 2, 3):
            callback(step, {"x": jnp.full(4, float(step))})
    with in_run(root) as callback:
        callback.resume({"x": jnp.zeros(4)}, step=1, rewind=True)
    assert len(list(root.iterdir())) == 3
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [1]


def test_retention_counts_steps_of_both(tmp_path):
    root = tmp_path / "run"
    for step in (10, 20):
        write_with_manager(root, {"x": jnp.ones(4)}, step=step)
    with in_run(root, max_to_keep=2) as callback:
        callback.resume({"x": jnp.zeros(4)})
        callback(30, {"x": jnp.ones(4)})
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        assert sorted(manager.all_steps()) == [20, 30]
        manager.save(40, args=ocp.args.StandardSave({"x": jnp.ones(4)}))
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [30, 40]


def test_the_best_of_stocks_steps_is_kept(tmp_path, capsys):
    """Stock Orbax has metrics in an item of their own."""
    root = tmp_path / "run"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.ones(4)}), metrics={"loss": loss})
    cli.main(["ls", str(root)])
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]] == ["loss=3", "loss=1", "loss=2"]
    with in_run(root, max_to_keep=1, keep_best={"metric": "loss", "mode": "min"}) as callback:
        callback.resume({"x": jnp.zeros(4)})
        callback(10, {"x": jnp.ones(4)}, metrics={"loss": 1.5})
    assert sorted(path.name for path in root.iterdir()) == ["10", "2"]


@pytest.mark.parametrize("item", ["default", "state"])
def test_stock_orbax_finds_the_best_of_our_steps(tmp_path, item):
    root = tmp_path / "run"
    with in_run(root, item=item) as callback:
        for step, metrics in ((10, {"loss": 3.0}), (20, {"loss": 1.0, "bad": "text"}), (30, {"loss": 2.0}), (40, None)):
            callback(step, {"x": jnp.full(4, step)}, metrics=metrics)
        callback(50, {"x": jnp.zeros(4, int)}, metrics={"loss": None})  # a null, which could not be compared
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min", max_to_keep=2)
    with ocp.CheckpointManager(root, options=options) as manager:
        assert manager.best_step() == 20
        assert manager.metrics(30) == {"loss": 2.0}
        assert manager.metrics(20) == {"loss": 1.0}
        assert manager.metrics(40) is None
        assert manager.metrics(50) is None
    with pytest.raises(rps.NoCheckpointError, match=rf"no item 'metrics'; it has \['{item}'\]"):
        rps.load(root, step=20, item="metrics")
    with ocp.CheckpointManager(root, item_names=(item,)) as manager:  # which does not disturb others
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore({"x": jnp.zeros(4)})})
        restored = manager.restore(20, args=args)[item]
    np.testing.assert_array_equal(restored["x"], np.full(4, 20))


def test_changed_metrics_of_our_step_are_noticed(tmp_path, capsys):
    root = tmp_path / "run"
    with in_run(root) as callback:
        for step in (10, 20):
            callback(step, {"x": jnp.full(4, float(step))}, metrics={"loss": 1.0})
    (root / "20" / "metrics" / "metrics").write_text('{"loss": 0.0}')
    assert cli.main(["verify", str(root)]) == 1
    assert "metrics/metrics" in capsys.readouterr().out
    with in_run(root) as callback:
        assert callback.resume({"x": jnp.zeros(4)})[1] == 10


def test_a_state_that_stock_wrote_without_key_implementations_fits_legacy_keys_only(tmp_path):
    """Legacy uint32 keys are plain arrays; they are not taken for typed keys, nor the other way (report 14)."""
    write_with_manager(tmp_path / "run", {"key": jax.random.PRNGKey(3)})
    with in_run(tmp_path / "run") as callback:
        assert bits(callback.resume({"key": jax.random.PRNGKey(0)})[0]["key"]) == bits(jax.random.PRNGKey(3))
        with pytest.raises(rps.TreeMismatchError, match=r"key<fry>|key<threefry2x32>"):
            callback.resume({"key": jax.random.key(0)})
