"""A state that is like the one before is taken apart as that was, and every other one anew."""

import dataclasses
import enum
import weakref
from typing import Any

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
from flax_rpsave.templates import flat_of, template_of
from tests.helpers import bits


def put(value, *axes):
    return jax.device_put(value, jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), P(*axes)))


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


def assert_same(flat, state):
    expected = flat_of(flatten(state)[0])
    assert flat.leaves == expected.leaves
    assert list(map(bits, flat.arrays)) == list(map(bits, expected.arrays))


def test_the_next_state_is_taken_apart_as_flatten_does():
    template = template_for(state_at(1))
    for step in (2, 3):
        assert_same(template.flatten(state_at(step)), state_at(step))


def test_shardings_that_mean_the_same_are_alike():
    state = state_at(2) | {"b": put(jnp.full((3, 2), 7, jnp.bfloat16), None, None)}
    flat = template_for(state_at(1)).flatten(state)
    assert list(map(bits, flat.arrays)) == list(map(bits, flat_of(flatten(state)[0]).arrays))


UNLIKE = {
    "another shape": lambda: {"w": put(jnp.arange(8.0), "d")},
    "another dtype": lambda: {"w": put(jnp.arange(16), "d")},
    "another sharding": lambda: {"w": put(jnp.arange(16.0))},
    "on the host": lambda: {"w": np.arange(16.0, dtype=np.float32)},
    "no values": lambda: {"w": jax.ShapeDtypeStruct((16,), jnp.float32)},
    "another shape on the host": lambda: {"host": np.arange(6)},
    "another dtype on the host": lambda: {"host": np.arange(5.0)},
    "another implementation of keys": lambda: {"key": jax.random.key(0, impl="rbg")},
    "a key without type": lambda: {"key": jax.random.PRNGKey(0)},
    "a float": lambda: {"step": 2.0},
    "a bool": lambda: {"step": True},
    "a number for a string": lambda: {"note": 3},
    "a number for a function": lambda: {"run": 1.0},
    "an empty node less": lambda: {"empty": [{}, None]},
    "another empty node": lambda: {"empty": [[], None, ()]},
    "a leaf more": lambda: {"more": 1},
    "another optimizer": lambda: {"opt": optax.sgd(1e-3).init({"x": jnp.zeros(4)})},
    "an NNX object": lambda: {"opt": nnx.Rngs(0)},
    "keys without an order": lambda: {1: 2},
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_state_that_is_unlike_is_left_to_flatten(what):
    assert template_for(state_at(1)).flatten(state_at(2) | UNLIKE[what]()) is None


def test_a_deleted_array_is_left_to_flatten_which_names_it(tmp_path):
    state = state_at(2)
    template = template_for(state_at(1))
    state["w"].delete()
    assert template.flatten(state) is None
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        checkpoint(1, state_at(1))
        with pytest.raises(rps.SaveError, match="leaf w was deleted"):
            checkpoint(2, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Odd:
    """Its static field cannot be compared."""

    x: jax.Array
    table: Any = dataclasses.field(metadata={"static": True})


class Letter(str, enum.Enum):  # noqa: UP042 - whose text is not its value
    A = "a"


WITHOUT_TEMPLATE = {
    "an NNX object": lambda: {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},
    "an NNX state": lambda: {"state": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))},
    "a bool as key": lambda: {True: 1.0},
    "a float as key": lambda: {1.0: 1.0},
    "an enum as key": lambda: {Letter.A: 1.0},
    "a static NumPy array": lambda: Odd(jnp.zeros(3), np.arange(3)),
    "a static array on a device": lambda: Odd(jnp.zeros(3), jnp.arange(1)),
}


@pytest.mark.parametrize("what", WITHOUT_TEMPLATE)
def test_states_whose_like_may_differ_have_no_template(what):
    assert template_for(WITHOUT_TEMPLATE[what]()) is None


@pytest.mark.parametrize(("key", "equal"), [(1, True), ("a", Letter.A), (0, 0.0)], ids=["bool", "enum", "float"])
def test_keys_that_are_equal_and_have_other_names_are_told_apart(tmp_path, key, equal):
    assert key == equal
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step, name in enumerate((key, key, key, equal, key), 1):
            checkpoint(step, {name: jnp.full(4, float(step))})
    for step in range(1, 6):
        assert list(rps.load(tmp_path, step=step)) == [str(equal if step == 4 else key)]


class Named:
    """A node whose key is none of its static data."""

    def __init__(self, key, x):
        self.key, self.x = key, x


jax.tree_util.register_pytree_with_keys(
    Named, lambda node: ([(jax.tree_util.GetAttrKey(node.key), node.x)], None), lambda _, x: Named("?", *x)
)


def test_a_node_that_changes_its_keys_is_told_apart(tmp_path):
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step, name in enumerate("aaabba", 1):
            checkpoint(step, Named(name, jnp.full(4, float(step))))
    assert [next(iter(rps.load(tmp_path, step=step))) for step in range(1, 7)] == list("aaabba")


def test_a_static_field_that_cannot_be_compared_does_no_harm(tmp_path):
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step in (1, 2, 3):
            checkpoint(step, Odd(jnp.full(4, float(step)), np.arange(3)))
    for step in (1, 2, 3):
        np.testing.assert_array_equal(rps.load(tmp_path, step=step)["x"], np.full(4, step))


def test_no_state_is_kept_alive(tmp_path):
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step in (1, 2, 3):
            arrays = [put(jnp.full((8, 50), step)), np.full(500, step)]
            alive = [weakref.ref(array) for array in arrays]
            checkpoint(step, arrays)
            del arrays
            checkpoint.wait()
            assert [ref() for ref in alive] == [None, None]


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
    """Of many saves of a linen `TrainState` only the first two are flattened."""
    flattened = []
    monkeypatch.setattr("flax_rpsave.saver.flatten", lambda state: flattened.append(state) or flatten(state))
    state = train_state.TrainState.create(apply_fn=print, params={"w": jnp.ones(4)}, tx=optax.adamw(1e-2))
    with rps.CheckpointCallback({"directory": tmp_path, "save_interval_steps": 1}) as checkpoint:
        for step in range(1, 5):
            state = jax.jit(lambda s: s.apply_gradients(grads=s.params), donate_argnums=0)(state)
            checkpoint(step, state)
    assert len(flattened) == 2
    np.testing.assert_array_equal(rps.load(tmp_path, step=4)["params"]["w"], state.params["w"])
