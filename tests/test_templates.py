"""A state that is like the one before is taken apart as that was, and every other one anew."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import flax_rpsave as rps
from flax_rpsave.leaves import flatten
from flax_rpsave.templates import taken_apart, template_of
from tests.helpers import bits

MESH = jax.make_mesh((8,), ("d",))


def put(value, *axes):
    return jax.device_put(value, jax.sharding.NamedSharding(MESH, P(*axes)))


def state_at(step):
    return {
        "w": put(jnp.arange(16.0) * step, "d"),
        "b": put(jnp.full((3, 2), step, jnp.bfloat16)),
        "host": np.arange(5) * step,
        "key": jax.random.key(step),
        "step": step,
        "loss": 0.5 * step,
        "note": f"step {step}",
        "run": str.upper,
        "empty": [{}, None, ()],
        "opt": optax.adam(1e-3).init({"x": jnp.zeros(4)}),
    }


def template_for(state):
    return template_of(state, *flatten(state))


def assert_same(taken, state):
    expected = taken_apart(flatten(state)[0])
    assert taken.leaves == expected.leaves
    assert list(map(bits, taken.arrays)) == list(map(bits, expected.arrays))


def test_the_next_state_is_taken_apart_as_flatten_does():
    template = template_for(state_at(1))
    for step in (2, 3):
        assert_same(template.fill(state_at(step)), state_at(step))


def test_shardings_that_mean_the_same_are_alike():
    state = state_at(2) | {"b": put(jnp.full((3, 2), 7, jnp.bfloat16), None, None)}
    taken = template_for(state_at(1)).fill(state)
    assert list(map(bits, taken.arrays)) == list(map(bits, taken_apart(flatten(state)[0]).arrays))


@pytest.mark.parametrize(
    "leaves",
    [
        {"w": put(jnp.arange(8.0), "d")},
        {"w": put(jnp.arange(16), "d")},
        {"w": put(jnp.arange(16.0))},
        {"w": np.arange(16.0, dtype=np.float32)},
        {"w": jax.ShapeDtypeStruct((16,), jnp.float32)},
        {"host": np.arange(6)},
        {"host": np.arange(5.0)},
        {"key": jax.random.key(0, impl="rbg")},
        {"key": jax.random.PRNGKey(0)},
        {"step": 2.0},
        {"step": True},
        {"note": 3},
        {"run": 1.0},
        {"empty": [{}, None]},
        {"empty": [[], None, ()]},
        {"more": 1},
        {"opt": optax.sgd(1e-3).init({"x": jnp.zeros(4)})},
        {"opt": nnx.Rngs(0)},
        {1: 2},
    ],
    ids=str,
)
def test_a_state_that_is_unlike_is_left_to_flatten(leaves):
    assert template_for(state_at(1)).fill(state_at(2) | leaves) is None


def test_a_deleted_array_is_left_to_flatten_which_names_it(tmp_path):
    state = state_at(2)
    template = template_for(state_at(1))
    state["w"].delete()
    assert template.fill(state) is None
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        checkpoint(1, state_at(1))
        with pytest.raises(rps.SaveError, match="leaf w was deleted"):
            checkpoint(2, state)


def test_states_with_nnx_objects_have_no_template():
    assert template_for({"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}) is None
    assert template_for({"state": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))}) is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Odd:
    """Its static field cannot be compared."""

    x: jax.Array
    table: np.ndarray = dataclasses.field(metadata={"static": True})


def test_a_static_field_that_cannot_be_compared_does_no_harm(tmp_path):
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step in (1, 2):
            checkpoint(step, Odd(jnp.full(4, float(step)), np.arange(3)))
    for step in (1, 2):
        np.testing.assert_array_equal(rps.load(tmp_path, step=step)["x"], np.full(4, step))


def test_a_run_may_change_between_structures_and_back(tmp_path):
    """Equal shapes under other names, other leaves beside them, and what is no array follows each state."""
    states = {
        1: {"a": jnp.full(4, 1.0), "note": "one"},
        2: {"a": jnp.full(4, 2.0), "note": "two"},
        3: {"b": jnp.full(4, 3.0), "note": "three"},
        4: {"a": jnp.full(4, 4.0), "note": "four", "n": 4},
        5: {"a": jnp.full(4, 5.0), "note": "five"},
    }
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step, state in states.items():
            checkpoint(step, state)
    for step, state in states.items():
        loaded = rps.load(tmp_path, step=step)
        assert loaded.keys() == state.keys()
        assert loaded["note"] == state["note"]
        assert all(bits(loaded[name]) == bits(np.asarray(value)) for name, value in state.items() if name != "note")


def test_a_trained_state_is_taken_apart_by_its_template(tmp_path, monkeypatch):
    """Of many saves of a linen `TrainState` only the first is flattened."""
    flattened = []
    monkeypatch.setattr("flax_rpsave.saver.flatten", lambda state: flattened.append(state) or flatten(state))
    state = train_state.TrainState.create(apply_fn=print, params={"w": jnp.ones(4)}, tx=optax.adamw(1e-2))
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step in range(1, 5):
            state = jax.jit(lambda s: s.apply_gradients(grads=s.params), donate_argnums=0)(state)
            checkpoint(step, state)
    assert len(flattened) == 1
    np.testing.assert_array_equal(rps.load(tmp_path, step=4)["params"]["w"], state.params["w"])
