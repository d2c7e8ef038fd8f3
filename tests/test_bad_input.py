"""Wrong input, wrong states, wrong directories: each gives the right error, by name, and changes nothing."""

import contextlib
import os
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import flax_rpsave as rps
from flax_rpsave import cli
from tests import faults


def config(root, **keys):
    return {"directory": root, "save_interval_steps": 10, **keys}


def state_at(step):
    """A small state with every kind of stored thing in it."""
    return {
        "params": {"w": jnp.full((4, 3), step, jnp.float32), "b": np.arange(5.0) + step},
        "key": jax.random.key(step),
        "count": step,
        "note": f"step {step}",
        "empty": {},
    }


def plain(state):
    """A state as bytes, to be compared."""

    def leaf(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        return x.dtype.name, x.shape, x.tobytes()

    return jax.tree.map(leaf, state)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run with steps 10 and 20, not to be changed."""
    root = tmp_path_factory.mktemp("finished") / "run"
    with rps.CheckpointCallback(config(root)) as checkpoint:
        for step in (10, 20):
            checkpoint(step, state_at(step))
    return root


@pytest.fixture
def run(finished_run, tmp_path):
    """A run of one's own with steps 10 and 20."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


@contextlib.contextmanager
def nothing_changes(root):
    """Checks that the directory is as before, and its steps restorable."""
    before = faults.files_in(root)
    yield
    assert faults.files_in(root) == before
    for step in (10, 20):
        assert plain(rps.load(root, state_at(0), step=step)) == plain(state_at(step))


# The YAML section


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("save_intervall_steps: 5", "checkpoint.save_intervall_steps is not a key; did you mean save_interval_steps"),
        ("every: 5", "checkpoint.every is not a key; did you mean save_interval_steps"),
        ("keep_last_n: 5", "checkpoint.keep_last_n is not a key; did you mean max_to_keep"),
        ("frobnicate: 5", "checkpoint.frobnicate is not a key"),
        ("async_save: maybe", "checkpoint.async_save must be true or false"),
        ("max_to_keep: [3]", "checkpoint.max_to_keep must be"),
        ("save_interval_steps: 1e4", "checkpoint.save_interval_steps must be an integer"),
        ("max_to_keep: None", "checkpoint.max_to_keep must be"),
        ("save_interval_steps: 010", "checkpoint.save_interval_steps is written 010"),
        ("save_interval_steps: 0", "checkpoint.save_interval_steps must be"),
        ("resume: true", "checkpoint.resume must be"),
    ],
)
def test_a_wrong_line_of_yaml_is_named_with_its_place_and_nothing_is_made_report_63(tmp_path, line, said):
    file = tmp_path / "config.yaml"
    file.write_text(f"checkpoint:\n  directory: {tmp_path}/run\n  {line}\n")
    with pytest.raises(rps.ConfigError, match=re.escape(said)) as caught:
        rps.CheckpointCallback(rps.CheckpointConfig.from_yaml(file))
    assert f"{file}:3: " in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_wrong_mapping_is_refused_by_the_callback_itself(tmp_path):
    with pytest.raises(rps.ConfigError, match=r"checkpoint\.every is not a key; did you mean save_interval_steps"):
        rps.CheckpointCallback({"directory": tmp_path / "run", "every": 5})
    assert not (tmp_path / "run").exists()


# The directory


def test_a_relative_directory_is_made_absolute_at_the_start_report_55(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with rps.CheckpointCallback(config("./run/")) as checkpoint:
        assert checkpoint.config.directory == str(tmp_path / "run")
        monkeypatch.chdir("/")
        assert checkpoint(10, state_at(10))
    assert (tmp_path / "run" / "10").is_dir()


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_where_the_directory_should_be_is_refused_at_the_start(tmp_path, below):
    (tmp_path / "run").write_text("a file")
    directory = tmp_path / "run" / below
    with pytest.raises(
        rps.ConfigError, match=rf"checkpoint\.directory {directory} cannot be written: .*(exists|Not a)"
    ):
        rps.CheckpointCallback(config(directory))
    assert (tmp_path / "run").read_text() == "a file"


def test_a_read_only_directory_is_refused_at_the_start_report_58(finished_run, tmp_path):
    place = tmp_path / "disk"
    with faults.mounted(place, "size=4m"):
        shutil.copytree(finished_run, place / "run")
        faults.remount(place, "ro")
        with nothing_changes(place / "run"):
            with pytest.raises(
                rps.ConfigError, match=rf"checkpoint\.directory {place}/run cannot be written.*Read-only"
            ):
                rps.CheckpointCallback(config(place / "run"))
            with pytest.raises(OSError, match="Read-only"):
                (place / "probe").touch()  # the rig works


def test_a_directory_of_another_user_is_refused_at_the_start_report_58():
    with faults.without_rights() as folder:
        os.seteuid(65534)
        with pytest.raises(rps.ConfigError, match=rf"checkpoint\.directory {folder}/run cannot be written.*Permission"):
            rps.CheckpointCallback(config(folder / "run"))


@pytest.mark.parametrize("file", ["manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA"])
def test_a_step_that_may_not_be_read_is_an_error_and_not_passed_over(finished_run, file):
    with faults.without_rights() as folder:
        shutil.copytree(finished_run, folder / "run")
        (folder / "run").chmod(0o777)
        for path in (folder / "run" / "20").rglob(file):
            path.chmod(0)
        os.seteuid(65534)
        with (
            rps.CheckpointCallback(config(folder / "run")) as checkpoint,
            pytest.raises(rps.StorageError, match=rf"{folder}/run/20.* cannot be read: .*([Pp]ermission|DENIED)"),
        ):
            checkpoint.resume(state_at(0))


@pytest.mark.parametrize("scheme", ["memory://run", "hdfs://host/run"])
def test_an_unknown_scheme_is_refused_at_the_start_report_56(scheme):
    with pytest.raises(rps.ConfigError, match=r"checkpoint\.directory .*a path, gs:// and s3:// work"):
        rps.CheckpointCallback(config(scheme))


# The state


class Thing:
    pass


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (Thing(), "a test_bad_input.Thing, which cannot be stored"),
        (b"bytes", "a builtins.bytes, which cannot be stored"),
        ({1, 2}, "a builtins.set, which cannot be stored"),
        (np.array([Thing()]), "dtype object"),
        (np.array(["a", "bc"]), "dtype str"),
        (np.array(["2020-01-01"], "datetime64[D]"), "dtype datetime64"),
        (np.zeros(2, [("x", "f4")]), "dtype void"),
        (np.zeros(2, ml_dtypes.uint4), "dtype uint4"),
        (np.zeros(2, ml_dtypes.float8_e4m3), "dtype float8_e4m3"),
        (jnp.zeros(2, jnp.uint4), "dtype uint4"),
        (2**70, "integer of more than 64 bits"),
        (np.longdouble(1), "dtype float128"),
        (np.ones(2, np.clongdouble), "dtype complex256"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value) if isinstance(value, str) else "",
)
def test_a_leaf_that_cannot_be_stored_is_named_before_anything_is_written(run, leaf, said):
    state = {"params": {"layer": [np.ones(2), leaf]}}
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        with pytest.raises(rps.UnsupportedLeafError, match=rf"leaf params/layer/1 .*({said})"):
            checkpoint(30, state)
        with pytest.raises(rps.UnsupportedLeafError, match="params/layer/1"):
            rps.save(run / "other", state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {"a": {"b": np.ones(1)}, "a.b": np.ones(2)},
            r"\['a', 'b'\] and \['a.b'\] would both be stored as 'a.b'; rename",
        ),
        ({"a": [np.ones(1)], "a.0": np.ones(2)}, r"would both be stored as 'a.0'; rename"),
        ({1: np.ones(1), "1": np.ones(2)}, r"keys cannot be sorted.*one type"),
        ({"a": np.ones(1), "a/c": np.ones(2)}, r"'a/c' would be stored inside the array of leaf 'a'; rename"),
        ({"../up": np.ones(1)}, r"'\.\./up' cannot be stored under that name; rename"),
        ({"a//b": np.ones(1)}, r"'a//b' cannot be stored under that name; rename"),
        ({".rpsave/process_0/index": np.ones(1)}, r"begin with '\.rpsave' are kept"),
        ({"a\x00b": np.ones(1)}, r"NUL character in a key; rename"),
        ({"note": "\ud800"}, r"leaf note is no Unicode text"),
    ],
)
def test_names_that_collide_or_cannot_be_stored_are_refused_before_anything_is_written_report_13(run, state, said):
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        with pytest.raises(rps.UnsupportedLeafError, match=said):
            checkpoint(30, state)


@pytest.mark.parametrize("which", ["params", "key"])
def test_a_donated_state_is_refused_by_leaf_before_anything_is_written_report_8(run, which):
    state = state_at(30)
    consume = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf[...], x), donate_argnums=0)
    kept = consume({which: state[which]})
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        leaf = "params/w" if which == "params" else "key"
        with pytest.raises(
            rps.SaveError, match=rf"leaf {leaf} was deleted.*Pass the state that the train step returned"
        ):
            checkpoint(30, state)
    assert kept is not None


def saved(checkpoint, run, state):
    checkpoint(30, {"x": state})


def saved_not_due(checkpoint, run, state):
    checkpoint(21, {"x": state})


def saved_at_a_traced_step(checkpoint, run, step):
    checkpoint(step, state_at(30))


def saved_what_is_concrete(checkpoint, run, state):
    checkpoint(30, state_at(30))


def saved_with_a_metric(checkpoint, run, state):
    checkpoint(30, state_at(30), metrics={"loss": state})


def saved_without_a_run(checkpoint, run, state):
    rps.save(run / "other", {"x": state})


def resumed(checkpoint, run, state):
    checkpoint.resume({"x": state})


TRANSFORMED = {
    "jit": lambda f: jax.jit(f)(jnp.ones(3)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(3)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(3)),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(3)),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED.keys())
@pytest.mark.parametrize(
    "call",
    [
        saved,
        saved_not_due,
        saved_at_a_traced_step,
        saved_what_is_concrete,
        saved_with_a_metric,
        saved_without_a_run,
        resumed,
    ],
)
def test_a_call_inside_a_function_that_is_traced_is_refused_before_anything_is_written(run, transformed, call):
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))

        def step(x):
            call(checkpoint, run, x)
            return 2 * x

        with pytest.raises(rps.RPSaveError, match=r"inside a function that is being traced by jax\.jit, jax\.grad"):
            transformed(step)


def test_a_tracer_that_outlived_its_function_is_refused_by_name(run):
    leaked = []
    jax.jit(lambda x: leaked.append(x) or x)(jnp.ones(3))
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        with pytest.raises(rps.UnsupportedLeafError, match="leaf params/w is a tracer, which has no values"):
            checkpoint(30, {"params": {"w": leaked[0]}})
        with pytest.raises(rps.SaveError, match="metric 'loss' is a tracer"):
            checkpoint(30, state_at(30), metrics={"loss": leaked[0]})
        with pytest.raises(rps.UnsupportedLeafError, match="leaf x is a tracer"):
            rps.load(run, {"x": leaked[0]})


@pytest.mark.parametrize("state", [{}, None, [], {"a": {}, "b": (None, [])}, {"f": len}])
def test_a_state_without_anything_to_store_is_refused_report_67(run, state):
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        with pytest.raises(rps.SaveError, match="nothing to save"):
            checkpoint(30, state)
        with pytest.raises(rps.SaveError, match="nothing to save"):
            rps.save(run / "other", state)


@pytest.mark.parametrize("state", [jnp.ones(()), 3, np.float32(2), np.arange(3)])
def test_a_bare_leaf_is_a_state_report_19(tmp_path, state):
    with rps.CheckpointCallback(config(tmp_path / "run")) as checkpoint:
        checkpoint(10, state)
    with rps.CheckpointCallback(config(tmp_path / "run")) as checkpoint:
        resumed, _ = checkpoint.resume(jax.tree.map(lambda x: x * 0, state))
    assert type(resumed) is type(state)
    np.testing.assert_array_equal(resumed, state)


# Steps


def test_a_step_that_goes_backwards_is_refused(run):
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        assert not checkpoint(25, state_at(25))
        with pytest.raises(rps.StepOrderError, match=r"step 24 lies before step 25.*must not go backwards"):
            checkpoint(24, state_at(24), force=True)
        with pytest.raises(rps.StepOrderError, match=r"step must not be negative, got -1"):
            checkpoint(-1, state_at(0))


def test_a_step_that_exists_is_not_overwritten_report_53(run):
    with (
        nothing_changes(run),
        rps.CheckpointCallback(config(run)) as checkpoint,
        pytest.raises(rps.StepOrderError, match=r"has steps up to 20.*is at step 20.*Call resume\(\), or set another"),
    ):
        checkpoint(20, state_at(21), force=True)
    with nothing_changes(run), pytest.raises(rps.StepOrderError, match=r"/20 exists already and is not overwritten"):
        rps.save(run / "20", state_at(21))


def test_a_step_that_another_program_saved_meanwhile_is_not_overwritten_report_59(run, finished_run):
    shutil.rmtree(run / "20")
    with rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        shutil.copytree(finished_run / "20", run / "20")
        with nothing_changes(run):
            assert checkpoint(20, state_at(21))
            with pytest.raises(rps.SaveError, match=rf"step 20 was not saved to {run}/20: .* exists"):
                checkpoint.wait()
        assert checkpoint(30, state_at(30))


def test_a_file_in_the_place_of_a_step_fails_that_step_only(run):
    (run / "30").write_text("mine")
    with rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        assert checkpoint(30, state_at(30))
        with pytest.raises(rps.SaveError, match=rf"{run}/30"):
            checkpoint.wait()
        assert (run / "30").read_text() == "mine"
        assert checkpoint(40, state_at(40))
        checkpoint.wait()
        assert checkpoint.all_steps() == [10, 20, 40]


def test_what_has_a_steps_name_and_is_no_directory_is_named_and_passed_over(run, caplog):
    """A pipe that is opened would hang until somebody writes to it."""
    os.mkfifo(run / "30")
    (run / "0020").write_text("not step 20")
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 20
        assert any(message.startswith(f"{run}: 0020, 30 named like steps") for message in caplog.messages)
        with pytest.raises(rps.NoCheckpointError, match=r"has no step 30; it has \[10, 20\]"):
            checkpoint.resume(state_at(0), step=30)
        with pytest.raises(rps.NoCheckpointError, match=f"{run}/30 is neither"):
            rps.load(run / "30")
        assert checkpoint(30, state_at(30))
        with pytest.raises(rps.SaveError, match=rf"{run}/30 exists already and is not overwritten"):
            checkpoint.wait()
    assert sorted(os.listdir(run)) == ["0020", "10", "20", "30"]


@pytest.mark.parametrize(
    "name",
    [
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "default/_METADATA",
        "default/_sharding",
        "default/manifest.ocdbt",
        "default/array_metadatas/process_0",
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_a_pipe_or_a_directory_or_an_endless_link_in_the_place_of_a_document_is_damage(run, name, make):
    """A pipe that is opened would hang until somebody writes to it."""
    (run / "20" / name).unlink()
    make(run / "20" / name)
    with pytest.raises(rps.CorruptCheckpointError, match=f"{run}/20"):
        rps.load(run, step=20)
    assert cli.main(["verify", str(run)]) == 1
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_stands_in_the_place_of_array_data_is_damage(tmp_path, make, use_ocdbt, capsys):
    """Also where only TensorStore opens it, which would wait for who writes to a pipe."""
    settings = config(tmp_path / "run", storage={"use_ocdbt": use_ocdbt})
    with rps.CheckpointCallback(settings) as checkpoint:
        for step in (10, 20):
            checkpoint(step, state_at(step))
    files = [path for path in (tmp_path / "run" / "20").rglob("*") if path.is_file() and path.name != "_METADATA"]
    data = max(files, key=lambda path: (path.parent.name in ("d", "c"), path.stat().st_size))
    data.unlink()
    make(data)
    with pytest.raises(rps.CorruptCheckpointError, match=f"{tmp_path}/run/20"):
        rps.load(tmp_path / "run", step=20)
    assert cli.main(["verify", str(tmp_path / "run")]) == 1
    assert str(data.relative_to(tmp_path / "run" / "20")) in capsys.readouterr().out
    with rps.CheckpointCallback(settings) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_a_document_of_more_bytes_than_memory_is_damage(run):
    os.truncate(run / "20" / "default" / "_sharding", 50 * 10**9)  # a hole
    with pytest.raises(rps.CorruptCheckpointError, match=r"_sharding has 50,000,000,000 bytes, more than any document"):
        rps.load(run, step=20)
    assert cli.main(["verify", str(run)]) == 1
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_a_directory_that_may_not_be_listed_is_the_storages_fault():
    with faults.without_rights() as folder:
        rps.save(folder / "run" / "10", state_at(10))
        for closed in (folder / "run" / "10", folder / "run"):
            closed.chmod(0)
            os.seteuid(65534)
            with pytest.raises(rps.StorageError, match="Permission denied"):
                rps.load(folder / "run")
            os.seteuid(0)


def test_a_step_in_the_place_of_another_is_read_by_nobody_as_that(run):
    shutil.rmtree(run / "20")
    shutil.copytree(run / "10", run / "20")
    said = f"{run}/20 was saved as step 10: it was copied or renamed"
    for ask in ({}, {"step": 20}):
        with pytest.raises(rps.CorruptCheckpointError, match=said):
            rps.load(run, **ask)
    assert cli.main(["verify", str(run)]) == 1
    rps.load(run / "20")  # by its own path, it may have been copied on purpose
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_resume_required_with_nothing_there_is_an_error(tmp_path):
    with rps.CheckpointCallback(config(tmp_path / "run", resume="required")) as checkpoint:
        with pytest.raises(rps.NoCheckpointError, match=rf"'required', but {tmp_path}/run has no committed step"):
            checkpoint.resume(state_at(0))
        assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("how", ["missing", "empty", "a file"])
def test_loading_from_where_there_is_nothing_is_an_error_and_makes_nothing(tmp_path, how):
    if how == "empty":
        (tmp_path / "run").mkdir()
    if how == "a file":
        (tmp_path / "run").write_text("a file")
    before = faults.files_in(tmp_path)
    with pytest.raises(rps.NoCheckpointError, match=str(tmp_path / "run")):
        rps.load(tmp_path / "run")
    assert faults.files_in(tmp_path) == before


# Targets that do not fit


def test_every_difference_to_the_target_is_listed_at_once_report_22(run):
    target = state_at(0)
    target["params"]["w"] = jnp.zeros((3, 4))  # reshaped
    target["params"]["b"] = np.zeros(5, np.float32)  # recast
    target["rng"] = target.pop("key")  # renamed
    target["more"] = [jnp.zeros(2)]  # missing in the checkpoint
    del target["note"]  # extra in the checkpoint
    target["count"] = 0.0  # of another kind
    expected = [
        r"params/w: the checkpoint has float32\[4, 3\], the target expects float32\[3, 4\]",
        r"params/b: the checkpoint has float64\[5\], the target expects float32\[5\]",
        r"rng: missing in the checkpoint, the target expects key<\w+> as uint32\[2\]",
        r"more/0: missing in the checkpoint, the target expects float32\[2\]",
        r"count: the checkpoint has int64\[\], the target expects float64\[\]",
        r"key: in the checkpoint \(jax.Array\), but not in the target",
        r"note: in the checkpoint \(string\), but not in the target",
    ]
    with nothing_changes(run), rps.CheckpointCallback(config(run)) as checkpoint:
        with pytest.raises(rps.TreeMismatchError, match=rf"{run}/20 does not fit the target, 7 differences") as resumed:
            checkpoint.resume(target)
        with pytest.raises(rps.TreeMismatchError, match="7 differences") as loaded:
            rps.load(run, target)
    assert str(resumed.value) == str(loaded.value)
    lines = str(loaded.value).splitlines()[1:]
    assert len(lines) == 7
    for pattern in expected:
        assert len([line for line in lines if re.fullmatch(r"  " + pattern, line)]) == 1, pattern


def test_a_target_that_does_not_fit_is_no_reason_to_take_an_older_step_report_29(run):
    shutil.rmtree(run / "10")
    rps.save(run / "10", {"w": np.ones(2)})
    with rps.CheckpointCallback(config(run)) as checkpoint, pytest.raises(rps.TreeMismatchError, match=rf"{run}/20 "):
        checkpoint.resume({"w": np.ones(2)})


def test_nothing_is_cast_in_silence_report_10(tmp_path):
    with rps.CheckpointCallback(config(tmp_path / "run")) as checkpoint:
        checkpoint(10, {"count": jnp.asarray([2**24 + 1], jnp.int32)})
    with pytest.raises(rps.TreeMismatchError, match=r"count: the checkpoint has int32\[1\].*expects float32\[1\]"):
        rps.load(tmp_path / "run", {"count": jnp.zeros(1, jnp.float32)})


@pytest.mark.parametrize("target", [np.int8(0), np.zeros((), np.int8), jnp.zeros((), jnp.int8), np.int32(0)])
def test_a_stored_scalar_that_the_targets_width_cannot_hold_is_an_error_report_10(tmp_path, target):
    rps.save(tmp_path / "c", {"n": np.int64(2**40 + 7)})
    said = rf"n: the stored int64 value {2**40 + 7} does not fit into int(8|32)"
    with pytest.raises(rps.TreeMismatchError, match=said):
        rps.load(tmp_path / "c", {"n": target})


def test_a_model_with_more_layers_or_another_optimizer_does_not_restore_report_22(tmp_path):
    class Model(nn.Module):
        layers: int

        @nn.compact
        def __call__(self, x):
            for _ in range(self.layers):
                x = nn.Dense(4)(x)
            return x

    def make(layers, tx):
        model = Model(layers)
        params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 4)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    small = make(2, optax.adamw(1e-3))
    with rps.CheckpointCallback(config(tmp_path / "run")) as checkpoint:
        checkpoint(10, small)
    with rps.CheckpointCallback(config(tmp_path / "run")) as checkpoint:
        with pytest.raises(rps.TreeMismatchError, match=r"params/Dense_2/kernel: missing.*expects float32\[4, 4\]"):
            checkpoint.resume(make(3, optax.adamw(1e-3)))
        with pytest.raises(rps.TreeMismatchError, match=r"params/Dense_1/kernel: in the checkpoint.*not in the target"):
            checkpoint.resume(make(1, optax.adamw(1e-3)))
        with pytest.raises(rps.TreeMismatchError, match=r"opt_state/0/mu/Dense_0/bias: in the checkpoint"):
            checkpoint.resume(make(2, optax.sgd(1e-3)))
        assert checkpoint.resume(small)[1] == 10


# Damage: every file of a step deleted, cut off and changed


def outcome(load, wanted):
    """What became of reading: "same", or the name of the error; a wrong value fails the test."""
    try:
        found = load()
    except (rps.CorruptCheckpointError, rps.NoCheckpointError) as error:
        return type(error).__name__
    assert plain(found) == wanted
    return "same"


LAYOUTS = {"direct": ("direct", True), "ocdbt": ("tensorstore", True), "files": ("tensorstore", False)}


@pytest.fixture(params=LAYOUTS)
def damageable(request, tmp_path, monkeypatch):
    """(directory, files, values): a checkpoint, the bytes of its files, and what must be read from it."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec())
    state = state_at(7)
    state["replicated"] = jax.device_put(jnp.arange(30, dtype=jnp.int32), sharding)  # in slices of 10
    engine, use_ocdbt = LAYOUTS[request.param]
    monkeypatch.setenv("RPSAVE_ENGINE", engine)
    storage = {"use_ocdbt": use_ocdbt}
    rps.save(tmp_path / "c", state, config={"storage": storage, "replica_parallel": {"min_slice_bytes": 40}})
    files = {path: path.read_bytes() for path in sorted((tmp_path / "c").rglob("*")) if path.is_file()}
    return tmp_path / "c", files, plain(rps.load(tmp_path / "c"))


def put_back(files):
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_a_checkpoint_with_deleted_files_is_never_read_wrongly_report_34(damageable):
    directory, files, wanted = damageable
    seen = set()
    paths = list(files)
    for first, one in enumerate(paths):
        for other in paths[first:]:  # alone, and with each other one
            one.unlink()
            other.unlink(missing_ok=True)
            seen.add(outcome(lambda: rps.load(directory), wanted))
            put_back({one: files[one], other: files[other]})
    for order in (paths, paths[::-1]):  # as `rm -r` goes about it
        for path in order:
            path.unlink()
            seen.add(outcome(lambda: rps.load(directory), wanted))
        put_back(files)
    assert "CorruptCheckpointError" in seen
    assert outcome(lambda: rps.load(directory), wanted) == "same"


def test_a_checkpoint_with_a_truncated_file_is_never_read_wrongly_report_34(damageable):
    directory, files, wanted = damageable
    seen = set()
    for path, data in files.items():
        for size in sorted({0, 1, len(data) // 2, len(data) - 1}):
            path.write_bytes(data[:size])
            seen.add(outcome(lambda: rps.load(directory), wanted))
        put_back({path: data})
    assert "CorruptCheckpointError" in seen


def test_a_checkpoint_with_one_changed_byte_is_never_read_wrongly_report_34(damageable):
    directory, files, wanted = damageable
    seen = set()
    for number, (path, data) in enumerate(files.items()):
        stride = 1 + 2 * (len(data) > 60) + 4 * (len(data) > 400)
        for at in range(number % stride, len(data), stride):
            changed = bytearray(data)
            changed[at] ^= 1 << (at // stride) % 8
            path.write_bytes(changed)
            seen.add(outcome(lambda: rps.load(directory), wanted))
        put_back({path: data})
    assert "CorruptCheckpointError" in seen


@pytest.mark.parametrize(
    ("old", "new"),
    [("[30]", "[20]"), ("[10]", "[30]"), ('"int32"', '"int16"'), ('"int32"', '"uint32"'), ('"float64"', '"int64"')],
)
def test_a_changed_shape_or_dtype_is_damage_and_no_other_value(damageable, old, new):
    directory, files, wanted = damageable
    changed = 0
    for path, data in files.items():
        in_database = path.name != "zarr.json"  # where values must keep their lengths
        if old.encode() in data and b"zarr_format" in data and not (in_database and len(old) != len(new)):
            path.write_bytes(data.replace(old.encode(), new.encode(), 1))
            changed += 1
            with pytest.raises(rps.CorruptCheckpointError):
                rps.load(directory)
            put_back({path: data})
    assert changed or len(old) != len(new)
    assert outcome(lambda: rps.load(directory), wanted) == "same"


def test_a_half_deleted_newest_step_is_passed_over_for_the_one_before_report_29(run):
    files = {path: path.read_bytes() for path in sorted((run / "20").rglob("*")) if path.is_file()}
    found = []
    for path in files:
        path.unlink()
        with rps.CheckpointCallback(config(run)) as checkpoint:
            state, step = checkpoint.resume(state_at(0))
        assert plain(state) == plain(state_at(step))
        found.append(step)
        put_back(files)
    assert set(found) == {10, 20}  # 20 where the file holds nothing that is read
    for path in files:  # one after the other, until nothing is left
        path.unlink()
        with rps.CheckpointCallback(config(run)) as checkpoint:
            state, step = checkpoint.resume(state_at(0))
            assert plain(state) == plain(state_at(step))
    shutil.rmtree(run / "20")
    (run / "20").mkdir()
    with rps.CheckpointCallback(config(run)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


# Failures of the background write


@pytest.mark.usefixtures("each_engine")
def test_a_background_write_that_fails_leaves_earlier_steps_and_the_next_save_works_report_36(run):
    with rps.CheckpointCallback(config(run)) as checkpoint:
        checkpoint.resume(state_at(0))
        with nothing_changes(run), faults.failing_writer(OSError(28, "No space left on device")):
            assert checkpoint(30, state_at(30))
            with pytest.raises(rps.SaveError, match=rf"step 30 was not saved to {run}/30: .*No space left on device"):
                checkpoint.wait()
        assert checkpoint(40, state_at(40))
        checkpoint.wait()
        assert checkpoint.all_steps() == [10, 20, 40]


@pytest.mark.usefixtures("each_engine")
def test_a_save_that_begins_while_the_interpreter_exits_works_or_says_so(tmp_path):
    done = faults.run_python(
        """
        import atexit, sys
        import numpy as np
        import flax_rpsave as rps

        checkpoint = rps.CheckpointCallback({"directory": sys.argv[1], "save_interval_steps": 1})

        @atexit.register
        def last():
            try:
                checkpoint(1, {"x": np.ones(3)})
            except rps.SaveError as error:
                print(f"refused: {error}")
            try:
                checkpoint.close()
            except rps.SaveError as error:
                print(f"close: {error}")
            print("steps", checkpoint.all_steps())
        """,
        tmp_path / "run",
    )
    lines = done.stdout.splitlines()
    if lines[0].startswith("refused: "):  # Python 3.12 starts no thread any more
        assert "step 1" in lines[0]
        assert lines[1:] == ["steps []"]
        assert "flax_rpsave: the last save failed: step 1 cannot be saved" in done.stderr
        assert done.returncode == 1  # also where what is raised goes unheard, as in a function of atexit
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert lines == ["steps [1]"]
