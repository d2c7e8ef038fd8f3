"""Inputs at the edges of what is promised: each has the right value, or an error of the promised kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import flax_rpsave as rps
from flax_rpsave.documents import DOCUMENT_NAMES


@pytest.mark.parametrize("name", sorted(DOCUMENT_NAMES))
def test_a_leaf_named_as_a_document_is_refused_where_both_would_be_files(tmp_path, name):
    state = {name: jnp.ones(3), "text": "hello"}
    with pytest.raises(rps.UnsupportedLeafError, match=name):
        rps.save(tmp_path / "raw", state, config={"storage": {"use_ocdbt": False}})
    assert list(tmp_path.iterdir()) == []
    rps.save(tmp_path / "ocdbt", state)
    assert rps.load(tmp_path / "ocdbt")[name].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("x.__lock", "lock"),
        ("x.__lock/y", "lock"),
        ("a\\b", "backslash"),
        ("a\\", "backslash"),
        ("k" * 300, "255 bytes"),
    ],
)
def test_a_leaf_whose_name_is_no_directorys_is_refused_where_it_would_be_one(tmp_path, name, what):
    state = {name: jnp.ones(3)}
    with pytest.raises(rps.UnsupportedLeafError, match=f"leaf .* would be .*{what}.*; rename its key"):
        rps.save(tmp_path / "raw", state, config={"storage": {"use_ocdbt": False}})
    assert list(tmp_path.iterdir()) == []
    rps.save(tmp_path / "ocdbt", state)
    assert rps.load(tmp_path / "ocdbt")[name].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (1e30, jnp.zeros((), jnp.float16)),
        (1e300, jnp.zeros((), jnp.float32)),
        (1e300 + 1j, jnp.zeros((), jnp.complex64)),
        (jnp.float32(1e30), np.float16(0)),
        (-1, jnp.zeros((), jnp.uint32)),
    ],
)
def test_a_scalar_that_does_not_fit_is_refused(tmp_path, stored, target):
    rps.save(tmp_path / "one", {"x": stored})
    with pytest.raises(rps.TreeMismatchError, match="does not fit"):
        rps.load(tmp_path / "one", {"x": target})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_a_python_float_and_a_small_float_of_rank_0_match_both_ways(tmp_path, dtype):
    rps.save(tmp_path / "python", {"x": 1.5})
    assert rps.load(tmp_path / "python", {"x": jnp.zeros((), dtype)})["x"] == jnp.asarray(1.5, dtype)
    rps.save(tmp_path / "array", {"x": jnp.asarray(1.5, dtype)})
    loaded = rps.load(tmp_path / "array", {"x": 0.0})["x"]
    assert (type(loaded), loaded) == (float, 1.5)


@pytest.mark.parametrize("dtype", [jnp.int8, bool, "S1", object])
def test_load_casts_floats_to_floats_only(tmp_path, dtype):
    rps.save(tmp_path / "one", {"x": jnp.ones(3)})
    with pytest.raises(TypeError, match="floating-point"):
        rps.load(tmp_path / "one", dtype=dtype)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sharding": PartitionSpec()}, "jax.sharding.Sharding"),
        ({"sharding": {"x": None}}, "jax.sharding.Sharding"),
        ({"subtree": ("x",)}, "subtree"),
    ],
)
def test_load_names_an_argument_of_the_wrong_type(tmp_path, options, word):
    rps.save(tmp_path / "one", {"x": jnp.ones(3)})
    with pytest.raises(TypeError, match=word):
        rps.load(tmp_path / "one", **options)


def test_a_sharding_that_does_not_fit_a_leaf_is_an_error_that_names_the_leaf(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    rps.save(tmp_path / "one", {"ten": jnp.ones(10)})
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        with pytest.raises(rps.TreeMismatchError, match="ten"):
            rps.load(tmp_path / "one", sharding=NamedSharding(mesh, spec))
    placed = rps.load(tmp_path / "one", sharding=SingleDeviceSharding(jax.devices()[3]))
    assert placed["ten"].devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    ("leaf", "word"),
    [
        (np.ma.masked_array([1.0, 2.0], mask=[True, False]), "mask"),
        (jax.ShapeDtypeStruct((3,), jnp.float32), "no values"),
    ],
)
def test_leaves_without_all_of_their_values_are_refused_by_name(tmp_path, leaf, word):
    with pytest.raises(rps.UnsupportedLeafError, match=f"odd.*{word}"):
        rps.save(tmp_path / "one", {"odd": leaf})
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_no_unicode_text_is_refused(tmp_path):
    with pytest.raises(rps.UnsupportedLeafError, match="key"):
        rps.save(tmp_path / "one", {"\ud800": jnp.ones(3)})


def test_directories_that_only_look_like_steps_are_none(tmp_path):
    with rps.CheckpointCallback({"directory": str(tmp_path), "save_interval_steps": 1}) as checkpoint:
        checkpoint(1, {"x": jnp.ones(3)})
    (tmp_path / "٣").mkdir()
    assert rps.CheckpointCallback({"directory": str(tmp_path)}).all_steps() == [1]


def test_skip_as_one_string_is_a_type_error(tmp_path):
    with rps.CheckpointCallback({"directory": str(tmp_path), "save_interval_steps": 1}) as checkpoint:
        checkpoint(1, {"x": jnp.ones(3)})
        checkpoint.wait()
        with pytest.raises(TypeError, match="list of patterns"):
            checkpoint.resume({"x": jnp.ones(3)}, skip="x")
