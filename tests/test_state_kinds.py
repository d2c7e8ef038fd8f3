"""Every kind of state comes back as it was: structure, node types, dtypes, bits, keys, places, weak types."""

import dataclasses
import logging
from collections import OrderedDict
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import nnx
from flax.training.train_state import TrainState

import flax_rpsave as rps
from flax_rpsave import CheckpointCallback
from tests.trees import abstract, assert_same_tree, bits, blank, mesh_of, on, values

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow.*outside of 'nnx.capture:DeprecationWarning")


def in_run(directory, **options):
    return CheckpointCallback({
        "directory": str(directory), "save_interval_steps": 1, "replica_parallel": {"min_slice_bytes": 16}, **options
    })  # fmt: skip


def through_callback(directory, state, target):
    """Saved by one run, resumed by the next."""
    with in_run(directory / "run") as callback:
        callback(3, state, force=True)
    with in_run(directory / "run") as callback:
        found, step = callback.resume(target)
    assert step == 3
    return found


def through_files(directory, state, target):
    rps.save(directory / "one", state)
    return rps.load(directory / "one", target)


@pytest.fixture(params=[through_callback, through_files])
def through(request, tmp_path):
    """Saves a state, and restores it into a target."""
    return lambda state, target: request.param(tmp_path, state, target)


@pytest.fixture
def back(tmp_path):
    """Saves a state, and restores it into a blank one of its kind."""
    return lambda state: through_files(tmp_path, state, blank(state))


def listing(root):
    """Everything below a directory, and when it was changed."""
    return {str(p): p.stat().st_mtime_ns for p in [root, *root.rglob("*")]}


# linen


class Net(nn.Module):
    """Some layers, with BatchNorm."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(4)(nn.relu(x))


class EmaState(TrainState):
    """A linen TrainState as people extend it."""

    ema_params: Any
    batch_stats: Any
    key: Any


NET = Net()
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50)))


def linen_state(seed):
    variables = NET.init(jax.random.key(seed), jnp.ones((2, 8)))
    return EmaState.create(
        apply_fn=NET.apply,
        params=variables["params"],
        tx=TX,
        ema_params=jax.tree.map(jnp.copy, variables["params"]),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(seed + 1),
    )


def linen_step(state):
    key, noise = jax.random.split(state.key)
    x = jax.random.normal(noise, (8, 8))

    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
        return jnp.mean(out**2), changed["batch_stats"]

    grads, batch_stats = jax.grad(loss, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats, key=key)
    return state.replace(ema_params=optax.incremental_update(state.params, state.ema_params, 0.1))


def test_a_linen_train_state_goes_on_as_if_it_had_not_stopped(through):
    """Parameters, EMA, BatchNorm, moments, schedule count and key, bit for bit; nothing is compiled anew (17)."""
    step = jax.jit(linen_step)
    state = linen_state(0)
    for _ in range(3):
        state = step(state)
    compiled = step._cache_size()
    target = blank(state)
    found = through(state, target)
    assert type(found) is EmaState
    assert found.apply_fn is target.apply_fn
    assert found.tx is target.tx
    assert_same_tree(step(step(found)), step(step(state)))
    assert step._cache_size() == compiled


def test_a_fresh_int_step_takes_an_arrays_place_and_the_other_way(through):
    """`TrainState.step` is an int when fresh, and an array after a jitted step; the target's kind comes back."""
    trained = jax.jit(linen_step)(linen_state(0))
    assert isinstance(trained.step, jax.Array)
    into_int = through(trained, linen_state(1))
    assert type(into_int.step) is int
    assert into_int.step == 1


def test_an_array_takes_the_place_of_a_fresh_int_step(through):
    target = jax.jit(linen_step)(linen_state(0))
    found = through(linen_state(5), target)
    assert isinstance(found.step, jax.Array)
    assert found.step.dtype == jnp.int32
    assert found.step == 0


def test_a_resumed_run_compiles_its_step_no_more_often_than_a_fresh_one(tmp_path):
    """Weak types of a Python step and of `jnp.asarray(0.1)` (report 20); uncommitted arrays."""

    tx = optax.adamw(0.1)

    def train(state):
        inner = state["train"].apply_gradients(grads=jax.tree.map(jnp.cos, state["train"].params))
        return {"step": state["step"] + 1, "rate": state["rate"] * 0.5, "train": inner}

    def compilations(state):
        jitted = jax.jit(lambda s: train(s))  # a function of its own: equal functions share a cache
        for _ in range(3):
            state = jitted(state)
        return jitted._cache_size(), state

    def fresh(seed):
        inner = TrainState.create(apply_fn=None, params={"w": jnp.full((4, 4), float(seed)), "b": jnp.ones(4)}, tx=tx)
        return {"step": 0, "rate": jnp.asarray(0.1), "train": inner}

    first, trained = compilations(fresh(0))
    assert fresh(0)["rate"].weak_type
    for name, saved in (("trained", trained), ("fresh", fresh(0))):
        with in_run(tmp_path / name) as callback:
            callback(3, saved)
        with in_run(tmp_path / name) as callback:
            resumed, _ = callback.resume(fresh(1))
            again, _ = callback.resume(jax.tree.map(lambda x: x, trained))
        assert resumed["rate"].weak_type
        assert compilations(resumed)[0] <= first
        assert compilations(again)[0] == compilations(trained)[0] == 1


# nnx


class Count(nnx.Variable):
    """A custom Variable that is not trained."""


class NnxNet(nnx.Module):
    """Tied embeddings, BatchNorm, Dropout, a counter, a list of layers and a sown intermediate."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(11)])
        self.count = Count(jnp.int32(0))
        self.act = nnx.relu
        self.head = self.embed

    def __call__(self, tokens):
        h = self.norm(self.embed(tokens))
        self.sow(nnx.Intermediate, "hidden", h)
        h = self.dropout(self.act(self.layers[10](self.layers[2](h))))
        self.count[...] += 1
        return self.head.attend(h)


def nnx_state(seed):
    model = NnxNet(nnx.Rngs(seed, dropout=seed + 1))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    ema = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    return {"model": model, "optimizer": optimizer, "ema": ema, "rngs": nnx.Rngs(seed)}


@nnx.jit
def nnx_step(model, optimizer, tokens):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def run_nnx(state, steps=2):
    tokens = (jnp.arange(8) + state["rngs"].default.count[...].astype(jnp.int32)) % 11
    losses = []
    for _ in range(steps):
        losses.append(float(nnx_step(state["model"], state["optimizer"], tokens)))
        nnx.pop(state["model"], nnx.Intermediate)  # or the model is another one in every step
    state["rngs"]()
    return losses


def kept(node):
    """An NNX object's Variables but for those that are no state."""
    is_state = nnx.Not(nnx.Any(nnx.Intermediate, nnx.Cache, nnx.Perturbation))
    return nnx.split(node, is_state, ...)[1]


def test_nnx_objects_in_a_container_go_on_as_if_they_had_not_stopped(through):
    """Dropout keys, BatchNorm, custom Variables, optimizer and Rngs, not Params only (report 21); updated in place."""
    state = nnx_state(0)
    run_nnx(state)
    target = nnx_state(7)
    found = through(state, target)
    assert found.keys() == target.keys()
    for name, node in target.items():
        assert found[name] is node
        assert_same_tree(kept(found[name]), kept(state[name]))
    assert int(found["model"].count[...]) == 2
    assert found["model"].head is found["model"].embed
    assert run_nnx(found, 3) == run_nnx(state, 3)
    for name in target:
        assert_same_tree(kept(found[name]), kept(state[name]))


def test_an_ema_that_begins_as_the_models_own_variables_comes_back_apart_from_them(tmp_path):
    """`nnx.state(model)` shares its Variables with the model until it is averaged for the first time."""
    state = nnx_state(0)
    rps.save(tmp_path / "one", {"model": state["model"], "ema": jax.tree.map(lambda x: 2 * x, state["ema"])})
    model = nnx_state(1)["model"]
    found = rps.load(tmp_path / "one", {"model": model, "ema": nnx.state(model, nnx.Param)})
    assert_same_tree(kept(found["model"]), kept(state["model"]))
    assert bits(found["ema"]["embed"]["embedding"][...]) == bits(2 * model.embed.embedding[...])


def test_tied_nnx_variables_are_stored_once_and_stay_shared(tmp_path):
    model = nnx_state(0)["model"]
    rps.save(tmp_path / "one", model)
    names = rps.load(tmp_path / "one").keys()
    assert "embed" in names
    assert "head" not in names
    found = rps.load(tmp_path / "one", nnx_state(1)["model"])
    found.embed.embedding[...] = jnp.zeros((11, 8))
    assert not found.head.embedding[...].any()


def test_sown_intermediates_are_left_out_and_logged(tmp_path, caplog):
    model = nnx_state(0)["model"]
    model.unusual_name = nnx.Intermediate(jnp.ones(3))
    model.cache_name = nnx.Cache(jnp.ones(3))
    with caplog.at_level(logging.INFO, "flax_rpsave"):
        rps.save(tmp_path / "one", model)
    assert "unusual_name" in caplog.text
    assert "cache_name" in caplog.text
    assert not {"unusual_name", "cache_name"} & rps.load(tmp_path / "one").keys()
    assert rps.load(tmp_path / "one", nnx_state(1)["model"]).count[...] == 0  # a target that has none


def test_nnx_intermediates_of_the_target_are_left_alone(tmp_path):
    rps.save(tmp_path / "one", nnx_state(0)["model"])
    target = nnx_state(1)["model"]
    target(jnp.arange(3))
    rps.load(tmp_path / "one", target)
    assert target.hidden[0].shape == (3, 8)


def test_an_abstract_nnx_target_becomes_a_whole_model(through):
    """Through `nnx.eval_shape`, with typed keys (report 14)."""
    state = nnx_state(0)
    run_nnx(state)
    abstract_state = nnx.eval_shape(lambda: nnx_state(1))
    found = through(state, abstract_state)
    for name in state:
        assert_same_tree(kept(found[name]), kept(state[name]))
    assert run_nnx(found) == run_nnx(state)


def test_an_abstract_nnx_target_is_placed_by_its_shardings(tmp_path):
    model = nnx_state(0)["model"]
    rps.save(tmp_path / "one", model)
    mesh = mesh_of((8,))
    graph, variables = nnx.split(nnx.eval_shape(lambda: nnx_state(1)["model"]))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(mesh)), variables)
    found = rps.load(tmp_path / "one", nnx.merge(graph, placed))
    for leaf in jax.tree.leaves(nnx.state(found)):
        assert leaf.sharding == on(mesh)
    assert bits(found.embed.embedding[...]) == bits(model.embed.embedding[...])


def test_a_model_that_does_not_fit_is_not_touched(tmp_path):
    rps.save(tmp_path / "one", nnx_state(0)["model"])
    target = nnx_state(1)["model"]
    target.added = nnx.Param(jnp.ones(2))
    before = [bits(x) for x in jax.tree.leaves(nnx.state(target))]
    with pytest.raises(rps.TreeMismatchError, match="added/value: missing"):
        rps.load(tmp_path / "one", target)
    assert [bits(x) for x in jax.tree.leaves(nnx.state(target))] == before


def test_stock_orbax_restores_an_nnx_model_by_its_state(tmp_path):
    model = nnx_state(0)["model"]
    rps.save(tmp_path / "one", model)
    target = nnx.state(nnx_state(1)["model"])
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_tree(checkpointer.restore(tmp_path / "one", target), nnx.state(model), exactly=False)


def test_a_model_and_its_nnx_state_have_the_same_names_on_disk(tmp_path):
    """What people saved with stock Orbax, `nnx.state(model)`, is read into the model."""
    model = nnx_state(0)["model"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", nnx.state(model))
    found = rps.load(tmp_path / "stock", nnx_state(1)["model"])
    assert_same_tree(nnx.state(found), nnx.state(model))


# optax


def params():
    return {
        "a": {"kernel": jnp.asarray(values((4, 4), np.float32)), "bias": jnp.ones(4)},
        "b": jnp.full((4, 4), 0.5, jnp.float32),
    }


LABELS = {"a": {"kernel": "fast", "bias": "none"}, "b": "slow"}
MASK = {"a": {"kernel": True, "bias": False}, "b": True}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd with bf16 momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adam": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adamw": optax.adamw(0.1),
    "adamw with schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 100)),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "novograd": optax.novograd(0.1),
    "identity": optax.identity(),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(0.1)),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
    "chain in a chain": optax.chain(optax.chain(optax.trace(0.9), optax.identity()), optax.chain(optax.identity())),
    "masked": optax.masked(optax.adamw(0.1), MASK),
    "masked decay": optax.adamw(0.1, mask=MASK),
    "multi_transform": optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}, LABELS
    ),
    "MultiSteps": optax.MultiSteps(optax.adamw(0.1), every_k_schedule=4),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    "inject_hyperparams of numbers": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=1e-2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.centralize(), optax.adam(0.1)),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, key=1), optax.sgd(0.1)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "reduce_on_plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "muon": optax.contrib.muon(0.1),
    "flatten": optax.flatten(optax.adamw(0.1)),
    "lookahead": optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.5),
    "lbfgs without a line search": optax.lbfgs(0.1, memory_size=3, linesearch=None),
}


def weights_for(name):
    return optax.LookaheadParams.init_synced(params()) if name == "lookahead" else params()


def update(name, weights, opt_state):
    tx = OPTIMIZERS[name]
    grads = jax.tree.map(lambda x: 0.1 * x + 0.01, weights.fast if name == "lookahead" else weights)
    extra = {"value": jnp.float32(1.5)} if isinstance(tx, optax.GradientTransformationExtraArgs) else {}
    updates, opt_state = tx.update(grads, opt_state, weights, **extra)
    return optax.apply_updates(weights, updates), opt_state


@pytest.fixture(scope="module")
def optimizer_states(tmp_path_factory):
    """One checkpoint that has all optimizers' states after three updates, in the middle of MultiSteps' accumulation."""
    states = {}
    for name, tx in OPTIMIZERS.items():
        weights, opt_state = weights_for(name), tx.init(weights_for(name))
        for _ in range(3):
            weights, opt_state = update(name, weights, opt_state)
        states[name] = (weights, opt_state)
    path = tmp_path_factory.mktemp("optax") / "one"
    rps.save(path, states)
    return path, states


def nodes(tree):
    """Types of all tuples and dicts within a tree."""
    if isinstance(tree, (tuple, list)):
        return [type(tree), *map(nodes, tree)]
    return [type(tree), *(nodes(tree[k]) for k in sorted(tree))] if isinstance(tree, dict) else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optax_state_comes_back_with_its_node_types(optimizer_states, name):
    """NamedTuples, EmptyState, MaskedNode, None, counts and keys: exact types, in a fresh target (16, 17, 28)."""
    path, states = optimizer_states
    fresh = (weights_for(name), OPTIMIZERS[name].init(weights_for(name)))
    found = rps.load(path, fresh, subtree=name)
    assert nodes(found) == nodes(fresh) == nodes(states[name])
    assert [bits(x) for x in jax.tree.leaves(found)] == [bits(x) for x in jax.tree.leaves(states[name])]
    assert_same_tree(rps.load(path, blank(states[name]), subtree=name), states[name])
    again, expected = update(name, *found), update(name, *states[name])
    assert [bits(x) for x in jax.tree.leaves(again)] == [bits(x) for x in jax.tree.leaves(expected)]


@pytest.mark.parametrize("name", ["adamw", "MultiSteps", "masked", "inject_hyperparams"])
def test_one_compiled_step_that_branches_serves_the_fresh_and_the_resumed_optimizer(tmp_path, name):
    """Report 17."""

    @jax.jit
    def step(weights, opt_state):
        return jax.lax.cond(optax.tree.norm(weights) > 0, lambda s: update(name, *s), lambda s: s, (weights, opt_state))

    state = step(weights_for(name), OPTIMIZERS[name].init(weights_for(name)))
    for _ in range(5):
        state = step(*state)
    compiled = step._cache_size()
    found = through_files(tmp_path, state, blank(state))
    assert_same_tree(step(*found), step(*state))
    assert step._cache_size() == compiled


# keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_come_back_typed_and_give_the_same_draws(back, impl):
    """Scalar and batched, on one device, replicated and sharded (report 14)."""
    mesh = mesh_of((4, 2))
    key = jax.random.key(5, impl=impl)
    keys = jax.random.split(key, (8, 3))
    state = {
        "scalar": key,
        "batched": keys,
        "replicated": jax.device_put(key, on(mesh)),
        "sharded": jax.device_put(keys, on(mesh, "data")),
        "sharded twice": jax.device_put(keys, on(mesh, ("data", "model"))),
    }
    found = back(state)
    assert_same_tree(found, state)
    assert bits(jax.random.normal(found["scalar"], (4,))) == bits(jax.random.normal(key, (4,)))


def test_abstract_typed_keys_are_filled(tmp_path):
    mesh = mesh_of((8,))
    state = {"key": jax.device_put(jax.random.split(jax.random.key(1), 8), on(mesh, "data"))}
    rps.save(tmp_path / "one", state)
    assert_same_tree(rps.load(tmp_path / "one", abstract(state)), state)
    shapes = jax.eval_shape(lambda: {"key": jax.random.split(jax.random.key(0), 8)})
    assert bits(rps.load(tmp_path / "one", shapes)["key"]) == bits(state["key"])


def test_keys_of_another_implementation_are_refused(tmp_path):
    rps.save(tmp_path / "one", {"key": jax.random.key(1, impl="rbg")})
    with pytest.raises(rps.TreeMismatchError, match=r"key: the checkpoint has key<rbg>.*expects key<"):
        rps.load(tmp_path / "one", {"key": jax.random.key(1)})
    with pytest.raises(rps.TreeMismatchError, match=r"key: the checkpoint has key<rbg>.*expects uint32"):
        rps.load(tmp_path / "one", {"key": jnp.zeros(4, jnp.uint32)})


# dtypes and values

DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "int2", "float16", "bfloat16", "float32",
    "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e3m4",
    "float8_e8m0fnu", "float4_e2m1fn", "complex64",
]  # fmt: skip


def of_dtype(dtype):
    """Sharded, partly sharded, replicated (split over the replicas), on one device, on the host, 0-d."""
    mesh = mesh_of((4, 2))
    data = np.asarray(values((16, 8), np.dtype(getattr(ml_dtypes, dtype, dtype)), 1))
    if dtype not in ("bool", "int4", "int2", "float4_e2m1fn"):
        raw = np.resize(np.arange(256, dtype=np.uint8), data.nbytes)  # NaNs of every payload, −0.0, inf, subnormals
        data = raw.view(data.dtype).reshape(16, 8)
    return {
        "sharded": jax.device_put(data, on(mesh, "data", "model")),
        "partly": jax.device_put(data, on(mesh, None, "model")),
        "replicated": jax.device_put(data, on(mesh)),
        "one": jax.device_put(data, jax.devices()[3]),
        "uncommitted": jnp.asarray(data),
        "host": data,
        "0-d": jnp.asarray(data[3, 1]),
    }


@pytest.fixture(scope="module", params=["direct", "tensorstore"])
def dtype_states(request, tmp_path_factory):
    states = {dtype: of_dtype(dtype) for dtype in DTYPES}
    path = tmp_path_factory.mktemp("dtypes") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPSAVE_ENGINE", request.param)
        rps.save(path, states, config={"replica_parallel": {"min_slice_bytes": 16}})
    return path, states


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_equal(dtype_states, dtype):
    """Report 11."""
    path, states = dtype_states
    for leaf in states[dtype].values():
        assert leaf.dtype.name == dtype
    assert_same_tree(rps.load(path, blank(states[dtype]), subtree=dtype), states[dtype])
    host = rps.load(path, subtree=dtype)
    assert {key: bits(x) for key, x in host.items()} == {key: bits(x) for key, x in states[dtype].items()}


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_nan_payloads_signed_zeros_and_infinities_survive(back, dtype):
    """Report 11."""
    info = jnp.finfo(dtype)
    exponent = np.array(np.inf, dtype).view(f"u{info.bits // 8}")
    payloads = np.array([exponent | 1, exponent | 5, np.array(-np.inf, dtype).view(exponent.dtype) | 3], exponent.dtype)
    special = np.array([-0.0, 0.0, np.inf, -np.inf, float(info.tiny) / 2, float(info.max)], dtype)
    data = np.concatenate([special, payloads.view(dtype)])
    mesh = mesh_of((3,))
    state = {
        "host": data,
        "replicated": jax.device_put(data, on(mesh)),
        "sharded": jax.device_put(data, on(mesh, "data")),
    }
    found = back(state)
    for leaf in found.values():
        assert np.asarray(leaf).tobytes() == data.tobytes()


def test_host_values_never_pass_through_a_device(back):
    """64-bit NumPy values come back whole, where JAX has 32 bits."""
    state = {
        "int64": np.arange(-3, 3) * 2**40,
        "uint64": np.array([2**64 - 1], np.uint64),
        "float64": np.arange(6) / 7,
        "complex128": np.array([1 / 3 + 2j / 7]),
        "scalar": np.int64(2**50),
        "0-d": np.array(2**50),
        "int": 2**45,
        "negative": -(2**63),
        "float": 1e300,
        "complex": 1 / 3 - 2j,
        "bool": True,
        "half": np.float16(0.1),
        "flag": np.bool_(True),
    }
    assert_same_tree(back(state), state)


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[::-1],
        lambda x: x[:, ::-3],
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(">f4"),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x[2, 3:4].reshape(()),
    ],
)
def test_numpy_layouts_are_not_scrambled(back, view):
    """Transposed, strided, reversed, Fortran order, the other byte order (report 12)."""
    array = view(np.arange(60, dtype=np.float32).reshape(6, 10))
    found = back({"x": array})["x"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.usefixtures("each_engine")
def test_transposed_jax_arrays_are_not_scrambled(back):
    mesh = mesh_of((4, 2))
    data = jax.device_put(values((8, 12, 4), np.float32), on(mesh, "data"))
    layout = jax.experimental.layout.Layout(major_to_minor=(2, 0, 1))
    moved = jax.device_put(data, jax.experimental.layout.Format(layout, data.sharding))
    assert moved.format.layout.major_to_minor == (2, 0, 1)
    state = {"jitted": jax.jit(lambda x: x.transpose(2, 0, 1))(data), "layout": moved}
    assert_same_tree(back(state), state)


def test_a_memory_layout_that_changes_between_two_saves_is_followed(tmp_path):
    mesh = mesh_of((4, 2))
    data = jax.device_put(values((8, 12), np.float32), on(mesh, "data"))
    form = jax.experimental.layout.Format(jax.experimental.layout.Layout(major_to_minor=(1, 0)), data.sharding)
    with in_run(tmp_path / "run") as callback:
        for step, array in enumerate((data, jax.device_put(data, form), data), start=1):
            callback(step, {"x": array})
    for step in (1, 2, 3):
        assert bits(rps.load(tmp_path / "run", step=step)["x"]) == bits(data)


def test_later_changes_of_a_numpy_leaf_do_not_reach_the_checkpoint(tmp_path):
    """Nor those of a buffer that a `jax.Array` on the CPU shares (report 9)."""
    source = np.ones((512, 512), np.float32)
    with in_run(tmp_path / "run") as callback:
        leaf = np.ones((512, 512), np.float32)
        state = {
            "host": leaf,
            "device": jax.device_put(source),
            "replicated": jax.device_put(source, on(mesh_of((8,)))),
        }
        callback(1, state)
        leaf[:] = 2
        source[:] = 2
    for value in rps.load(tmp_path / "run").values():
        assert (value == 1).all()


# structure


class Pair(NamedTuple):
    """A NamedTuple."""

    left: Any
    right: Any


class Nothing(NamedTuple):
    """One without fields."""


@flax.struct.dataclass
class Struct:
    """A dataclass of Flax, with a static field."""

    x: Any
    name: str = flax.struct.field(pytree_node=False, default="fixed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """A dataclass of JAX."""

    x: Any
    inner: Any


STRUCTURES = {
    "empties": lambda: {"a": 0, "b": {}, "c": (), "d": [], "e": None, "f": Nothing(), "g": optax.EmptyState()},
    "named tuples": lambda: Pair(jnp.ones(2), Pair({"x": jnp.zeros(3)}, Nothing())),
    "flax dataclass": lambda: Struct({"w": jnp.ones(2)}, "given"),
    "jax dataclass": lambda: Registered(jnp.ones(2), Registered(3, None)),
    "nested": lambda: [(jnp.ones(1), [jnp.ones(2), {"k": (jnp.ones(3),)}]), {"l": [[[jnp.ones(4)]]]}],
    "long list": lambda: [jnp.full(2, float(i)) for i in range(12)],
    "int keys": lambda: {0: jnp.zeros(1), 1: jnp.ones(2), 10: jnp.full(3, 10.0), 2: jnp.full(4, 2.0)},
    "ordered dict": lambda: OrderedDict(z=jnp.ones(1), a=jnp.zeros(2)),
    "strings": lambda: {"name": "gpt", "text": "zwölf \n\x01", "empty": "", "x": jnp.ones(1)},
    "odd keys": lambda: {
        "a/b": jnp.ones(1),
        "a b": jnp.zeros(2),
        "ü": jnp.ones(3),
        "a.b": jnp.ones(4),
        "": jnp.ones(5),
    },
    "zero-size": lambda: {"a": jnp.zeros((0,)), "b": jnp.zeros((0, 3)), "c": np.zeros((4, 0, 2), np.int8), "x": 1},
    "zero-size only": lambda: {"a": jnp.zeros((0, 3), jnp.bfloat16)},
    "zero-size sharded": lambda: {"a": jax.device_put(jnp.zeros((8, 0)), on(mesh_of((8,)), "data")), "b": jnp.ones(1)},
    "root array": lambda: jnp.arange(3),
    "root 0-d array": lambda: jnp.array(1),
    "root sharded": lambda: jax.device_put(jnp.arange(8), on(mesh_of((8,)), "data")),
    "root NumPy": lambda: np.arange(3),
    "root NumPy scalar": lambda: np.float32(2.5),
    "root int": lambda: 5,
    "root key": lambda: jax.random.key(3),
    "root string": lambda: "text",
    "root list": lambda: [jnp.ones(1), jnp.zeros(2)],
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_every_structure_comes_back(tmp_path, make):
    """Reports 13, 15, 16, 17 and 19."""
    state = make()
    assert_same_tree(through_files(tmp_path, state, blank(state)), state)
    plain = rps.load(tmp_path / "one")
    assert [bits(x) for x in jax.tree.leaves(plain) if not isinstance(x, str)] == [
        bits(x) for x in jax.tree.leaves(_by_text(state)) if not isinstance(x, str)
    ]


@pytest.mark.usefixtures("each_engine")
def test_all_structures_at_once_come_back_through_a_run(tmp_path):
    state = {name.replace(" ", "_"): make() for name, make in STRUCTURES.items()}
    assert_same_tree(through_callback(tmp_path, state, blank(state)), state)


def _by_text(tree):
    """The tree with its dict keys as text, which is all that the format has of them."""
    if isinstance(tree, dict):
        return {str(k): _by_text(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return [_by_text(v) for v in tree]
    if isinstance(tree, (Pair, Registered, Struct)):
        return {n: _by_text(getattr(tree, n)) for n in ("left", "right", "x", "inner") if hasattr(tree, n)}
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(tree)
    return tree


def test_functions_among_the_leaves_come_from_the_target_and_are_named_in_the_log(tmp_path, caplog):
    """Report 18."""
    saved = {"act": jax.nn.relu, "nested": [lambda x: x, jnp.ones(2)], "x": jnp.ones(3)}
    target = {"act": jax.nn.gelu, "nested": [abs, jnp.zeros(2)], "x": jnp.zeros(3)}
    with caplog.at_level(logging.INFO, "flax_rpsave"):
        found = through_callback(tmp_path, saved, target)
    assert found["act"] is jax.nn.gelu
    assert found["nested"][0] is abs
    assert (found["nested"][1] == 1).all()
    assert "leaf act is a function" in caplog.text


def test_a_none_in_the_checkpoint_does_not_become_an_array(tmp_path):
    """Report 18: never silently nulled, in neither direction."""
    rps.save(tmp_path / "none", {"ema": None, "x": jnp.ones(2)})
    with pytest.raises(rps.TreeMismatchError, match=r"ema: the checkpoint has None, the target expects float32\[2\]"):
        rps.load(tmp_path / "none", {"ema": jnp.zeros(2), "x": jnp.zeros(2)})
    rps.save(tmp_path / "some", {"ema": jnp.ones(2), "x": jnp.ones(2)})
    with pytest.raises(rps.TreeMismatchError, match="ema"):
        rps.load(tmp_path / "some", {"ema": None, "x": jnp.zeros(2)})


def test_uncommitted_arrays_come_back_uncommitted_and_committed_ones_where_they_were(through):
    state = {"free": jnp.ones(4), "bound": jax.device_put(jnp.ones(4), jax.devices()[5])}
    found = through(state, blank(state))
    assert not found["free"].committed
    assert found["bound"].committed
    assert found["bound"].devices() == {jax.devices()[5]}
    assert (found["free"] + jax.device_put(jnp.ones(4), jax.devices()[5])).devices() == {jax.devices()[5]}


# refusals


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (object(), "builtins.object"),
        (b"bytes", "builtins.bytes"),
        ({1, 2}, "builtins.set"),
        (np.array(["2020"], "M8[D]"), "datetime64"),
        (np.array(["a"]), "dtype str32"),
        (np.array([None]), "dtype object"),
        (np.zeros(2, [("a", "i4")]), "dtype void32"),
        (np.longdouble(1), "dtype float128"),
        (2**70, "integer of more than 64 bits"),
        (jnp.ones(2, jnp.uint4), "dtype uint4"),
        (jnp.ones(2, jnp.uint2), "dtype uint2"),
        (np.ones(2, ml_dtypes.float8_e4m3), "dtype float8_e4m3"),
        (np.ones(2, ml_dtypes.float6_e2m3fn), "dtype float6_e2m3fn"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_unsupported_leaf_is_refused_by_name_before_anything_is_written(tmp_path, leaf, said):
    with in_run(tmp_path / "run") as callback:
        callback(1, {"x": jnp.ones(2)})
        callback.wait()
        before = listing(tmp_path)
        with pytest.raises(rps.UnsupportedLeafError, match=rf"leaf model/bad.*{said}"):
            callback(2, {"x": jnp.ones(2), "model": {"bad": leaf}})
        with pytest.raises(rps.UnsupportedLeafError, match="leaf model/bad"):
            rps.save(tmp_path / "one", {"model": {"bad": leaf}})
        assert listing(tmp_path) == before
        assert callback(3, {"x": jnp.ones(2)})
    assert callback.all_steps() == [1, 3]


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(2)},
        {1: jnp.ones(1), "1": jnp.ones(2)},
        [{"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}],
    ],
    ids=["dotted", "int and text", "nested"],
)
def test_colliding_names_are_refused_before_anything_is_written(tmp_path, state):
    """Report 13: "1" and 1."""
    with pytest.raises(rps.UnsupportedLeafError):
        rps.save(tmp_path / "one", state)
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_array_is_refused_by_name(tmp_path):
    state = {"params": {"w": jnp.ones(4)}}
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    with pytest.raises(rps.SaveError, match="leaf params/w was deleted"):
        rps.save(tmp_path / "one", state)
    assert list(tmp_path.iterdir()) == []


def test_a_pmap_style_state_is_refused_and_not_stored_once_a_device(tmp_path):
    """Report 47."""
    state = flax.jax_utils.replicate({"w": jnp.ones((3, 2))})
    stepped = {"w": jax.pmap(lambda x: x * 2)(state["w"])}
    for each in (state, stepped):
        with pytest.raises(rps.UnsupportedLeafError, match=r"leaf 'w'.*pmap.*unreplicate"):
            rps.save(tmp_path / "one", each)
    assert list(tmp_path.iterdir()) == []
    rps.save(tmp_path / "one", flax.jax_utils.unreplicate(stepped))
    assert rps.load(tmp_path / "one")["w"].shape == (3, 2)


def test_a_mismatch_lists_every_difference_at_once(tmp_path):
    """Missing, unexpected, renamed, reshaped and recast (report 22)."""
    saved = {
        "layers": [{"w": jnp.ones((4, 4))} for _ in range(12)],
        "renamed": jnp.ones(1),
        "reshaped": jnp.ones((2, 3)),
        "recast": jnp.ones(2, jnp.int32),
        "key": jax.random.key(0),
        "name": "gpt",
    }
    target = {
        "layers": [{"w": jnp.zeros((4, 4))} for _ in range(14)],
        "new_name": jnp.zeros(1),
        "reshaped": jnp.zeros((3, 2)),
        "recast": jnp.zeros(2, jnp.float32),
        "key": jnp.zeros(2, jnp.uint32),
        "name": jnp.zeros(1),
    }
    with in_run(tmp_path / "run") as callback:
        callback(3, saved)
    with in_run(tmp_path / "run") as callback, pytest.raises(rps.TreeMismatchError) as caught:
        callback.resume(target)
    lines = str(caught.value).splitlines()
    assert "8 differences" in lines[0]
    assert str(tmp_path / "run" / "3") in lines[0]
    for said in (
        "layers/12/w: missing in the checkpoint, the target expects float32[4, 4]",
        "layers/13/w: missing",
        "new_name: missing",
        "renamed: in the checkpoint (jax.Array), but not in the target",
        "reshaped: the checkpoint has float32[2, 3], the target expects float32[3, 2]",
        "recast: the checkpoint has int32[2], the target expects float32[2]",
        "key: the checkpoint has key<",
        "name: the checkpoint has string, the target expects float32[1]",
    ):
        assert sum(line.strip().startswith(said) for line in lines) == 1, said


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (jnp.int32(16777217), jnp.float32(0)),  # report 10
        (16777217, jnp.float32(0)),
        (16777217, 0.0),
        (jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32)),
        (np.ones(3, np.float64), np.ones(3, np.float32)),
        (np.ones(3, np.int64), jnp.ones(3, jnp.int32)),
        (True, 0),
        (0.5, 0),
        (jnp.ones(1), jnp.float32(0)),
    ],
    ids=str,
)
def test_nothing_is_cast_in_silence(tmp_path, saved, target):
    rps.save(tmp_path / "one", {"count": saved})
    with pytest.raises(rps.TreeMismatchError, match="count: the checkpoint has"):
        rps.load(tmp_path / "one", {"count": target})


def test_a_stored_number_that_does_not_fit_the_targets_width_is_an_error(tmp_path):
    rps.save(tmp_path / "one", {"count": 2**40})
    said = r"count: the stored int64 value 1099511627776 does not fit into int32"
    with pytest.raises(rps.TreeMismatchError, match=said):
        rps.load(tmp_path / "one", {"count": jnp.int32(0)})


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (np.float64(0.1), np.float32(0)),
        (0.1, np.float32(0)),
        (0.1, np.zeros((), np.float32)),
        (np.complex128(0.1), np.complex64(0)),
        (np.float32(0.1), jnp.bfloat16(0)),
        (np.uint8(200), np.int8(0)),
        (np.uint32(2**31), jnp.int32(0)),
        (np.int32(-1), np.uint32(0)),
        (-1, np.uint64(0)),
    ],
    ids=str,
)
def test_a_number_that_another_width_would_change_is_not_cast(tmp_path, saved, target):
    rps.save(tmp_path / "one", {"rate": saved})
    with pytest.raises(rps.TreeMismatchError, match=r"rate: the stored \w+ value .* does not fit into \w+"):
        rps.load(tmp_path / "one", {"rate": target})


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        (0.1, jnp.float32(0), jnp.asarray(0.1)),  # as JAX rounds a Python number
        (np.float64(0.5), np.float32(0), np.float32(0.5)),
        (np.float32(0.1), 0.0, float(np.float32(0.1))),
        (float("nan"), np.float32(0), np.float32("nan")),
        (jnp.bfloat16(np.nan), np.float32(0), np.float32("nan")),
        (2**63 + 7, 0, 2**63 + 7),  # stored as uint64: Python's numbers have no width
    ],
    ids=str,
)
def test_a_number_takes_the_targets_width_where_it_stays_what_it_is(tmp_path, saved, target, expected):
    rps.save(tmp_path / "one", {"rate": saved})
    loaded = rps.load(tmp_path / "one", {"rate": target})["rate"]
    assert type(loaded) is type(expected) or isinstance(loaded, jax.Array)
    assert np.asarray(loaded).tobytes() == np.asarray(expected).tobytes()


# load


def bytes_read(action):
    """Bytes that TensorStore reads from files while `action` runs."""

    def total():
        name = "/tensorstore/kvstore/file/bytes_read"
        found = [m for m in ts.experimental_collect_matching_metrics(name) if m["name"] == name]
        return sum(value["value"] for metric in found for value in metric["values"])

    before = total()
    action()
    return total() - before


def trained():
    """A run's state on 8 devices: a part sharded, a part replicated."""
    mesh = mesh_of((4, 2))
    weights = {
        "decoder": {"kernel": jax.device_put(values((256, 512), np.float32), on(mesh, "data", "model"))},
        "embedding": jax.device_put(values((512, 256), np.float32, 1), on(mesh)),
        "ids": jax.device_put(values((512,), np.int32), on(mesh)),
    }
    return {
        "params": weights,
        "opt_state": optax.adam(0.1).init(weights),
        "step": jax.device_put(jnp.int32(9), on(mesh)),
        "key": jax.device_put(jax.random.key(3), on(mesh)),
    }


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained") / "run"
    state = trained()
    with in_run(root) as callback:
        callback(10, jax.tree.map(lambda x: x, state), force=True)
        callback(20, {**state, "step": state["step"] + 1})
    return root, state


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_storage_is_read_once_however_many_replicas_the_target_has(tmp_path, use_ocdbt, monkeypatch):
    monkeypatch.setenv("RPSAVE_ENGINE", "tensorstore")  # it counts; direct reads: see test_direct_reads
    state = trained()
    everywhere = jax.tree.map(lambda x: jax.device_put(x, on(mesh_of((8,)))), state)
    config = {"storage": {"use_ocdbt": use_ocdbt}, "replica_parallel": {"min_slice_bytes": 16}}
    rps.save(tmp_path / "one", state, config=config)
    read = bytes_read(lambda: assert_same_tree(rps.load(tmp_path / "one", abstract(everywhere)), everywhere))
    stored = nbytes({**state, "key": jax.random.key_data(state["key"])})
    assert stored <= read <= 1.05 * stored


def test_load_reads_only_what_it_returns(run_of_two_steps, monkeypatch):
    monkeypatch.setenv("RPSAVE_ENGINE", "tensorstore")  # it counts; direct reads: see test_direct_reads
    root, state = run_of_two_steps
    for subtree, part in (
        ("params/embedding", state["params"]["embedding"]),
        ("params", state["params"]),
        ("opt_state/0/mu", state["opt_state"][0].mu),
    ):
        read = bytes_read(lambda subtree=subtree: rps.load(root, subtree=subtree))
        assert nbytes(part) <= read <= nbytes(part) + 20_000, subtree
        assert [bits(x) for x in jax.tree.leaves(rps.load(root, subtree=subtree))] == [
            bits(x) for x in jax.tree.leaves(part)
        ]
    assert bytes_read(lambda: rps.load(root, subtree="step")) <= 20_000


def test_load_takes_the_newest_step_or_the_one_asked_for(run_of_two_steps):
    root, _ = run_of_two_steps
    assert rps.load(root, subtree="step") == 10
    assert rps.load(root, step=10, subtree="step") == 9
    assert rps.load(root / "10", subtree="step") == 9
    assert rps.load(root / "10" / "default", subtree="step") == 9
    with pytest.raises(rps.NoCheckpointError, match=r"no step 15; it has \[10, 20\]"):
        rps.load(root, step=15)
    with pytest.raises(rps.NoCheckpointError, match="does not exist"):
        rps.load(root / "nothing")
    with pytest.raises(rps.TreeMismatchError, match=r"no subtree 'parms'; at the top it has .*'params'"):
        rps.load(root, subtree="parms")


def test_load_without_a_target_returns_numpy(run_of_two_steps):
    root, state = run_of_two_steps
    found = rps.load(root, step=10)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    assert sorted(found) == sorted(state)
    assert bits(found["opt_state"][0]["nu"]["decoder"]["kernel"]) == bits(state["opt_state"][0].nu["decoder"]["kernel"])
    assert bits(found["key"]) == bits(jax.random.key_data(state["key"]))


def test_load_writes_nothing(run_of_two_steps):
    root, state = run_of_two_steps
    leftover = root / "30.orbax-checkpoint-tmp-0123abcd"
    leftover.mkdir(exist_ok=True)
    before = listing(root)
    rps.load(root)
    rps.load(root, abstract(state))
    rps.load(root, subtree="params", dtype=jnp.bfloat16)
    assert listing(root) == before


def test_dtype_casts_floats_and_nothing_else(run_of_two_steps):
    root, state = run_of_two_steps
    found = rps.load(root, dtype=jnp.bfloat16)
    assert found["params"]["decoder"]["kernel"].dtype == jnp.bfloat16
    assert found["params"]["ids"].dtype == np.int32
    assert found["step"].dtype == np.int32
    assert found["key"].dtype == np.uint32
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, jnp.bfloat16 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype, sharding=x.sharding
        ),
        state,
    )
    into = rps.load(root, like, dtype=jnp.bfloat16)
    assert bits(into["params"]["embedding"]) == bits(state["params"]["embedding"].astype(jnp.bfloat16))
    with pytest.raises(rps.TreeMismatchError, match="bfloat16"):
        rps.load(root, like)


def test_serving_on_one_device_in_bf16_from_a_run_saved_on_many(run_of_two_steps):
    root, state = run_of_two_steps
    device = jax.devices()[6]
    one = jax.sharding.SingleDeviceSharding(device)
    served = rps.load(root, subtree="params", dtype=jnp.bfloat16, sharding=one)
    for leaf in jax.tree.leaves(served):
        assert leaf.devices() == {device}
        assert leaf.committed
    assert bits(served["decoder"]["kernel"]) == bits(state["params"]["decoder"]["kernel"].astype(jnp.bfloat16))
    assert served["ids"].dtype == jnp.int32
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), served)
    placed = rps.load(root, like, subtree="params", dtype=jnp.bfloat16, sharding=one)
    assert_same_tree(placed, served)


def test_a_sharding_places_numpy_leaves_of_the_target_too(tmp_path):
    everywhere = on(mesh_of((8,)))
    rps.save(tmp_path / "c", {"w": np.arange(4, dtype=np.float32), "n": 3})
    found = rps.load(tmp_path / "c", {"w": np.zeros(4, np.float32), "n": 0}, sharding=everywhere)
    assert found["w"].sharding == everywhere
    assert (found["w"] == np.arange(4)).all()
    assert found["n"] == 3


def test_a_guard_against_transfers_does_not_matter(tmp_path):
    state = {"w": jax.device_put(np.arange(8.0, dtype=np.float32), on(mesh_of((8,)))), "n": 3}
    loss = state["w"][0]
    with jax.transfer_guard("disallow"):
        with rps.CheckpointCallback({"directory": tmp_path}) as checkpoint:
            assert checkpoint(1, state, metrics={"loss": loss}, force=True)
            checkpoint.wait()
            resumed, _ = checkpoint.resume(state)
        loaded = rps.load(tmp_path, sharding=state["w"].sharding)
        targeted = rps.load(tmp_path, state)
    for found in (resumed, loaded, targeted):
        assert (np.asarray(found["w"]) == np.arange(8)).all()
        assert found["n"] == 3


def test_each_empty_node_that_is_loaded_is_the_callers_own(tmp_path):
    rps.save(tmp_path / "c", {"w": np.zeros(4), "a": {}, "b": {}, "c": [], "d": []})
    first = rps.load(tmp_path / "c")
    first["a"]["x"] = 1
    first["c"].append(1)
    assert (first["b"], first["d"]) == ({}, [])
    second = rps.load(tmp_path / "c")
    assert [second[key] for key in "abcd"] == [{}, {}, [], []]


def test_a_sharding_does_not_narrow_values_in_silence(tmp_path):
    """A 64-bit host value that JAX cannot hold is an error; a small one, such as a Python step, becomes an int32."""
    everywhere = on(mesh_of((8,)))
    rps.save(tmp_path / "small", {"step": 7, "rate": 0.1, "counts": np.arange(4)})
    found = rps.load(tmp_path / "small", sharding=everywhere)
    assert found["step"] == 7
    assert found["rate"] == np.float32(0.1)
    assert found["counts"].sharding == everywhere
    for name, value, hint in (
        ("counts", np.arange(4) + 2**40, r"\(no sharding\)$"),
        ("rates", np.arange(4) / 7, r"\(no sharding\), or cast it with dtype=$"),
    ):
        rps.save(tmp_path / name, {name: value})
        with pytest.raises(rps.TreeMismatchError, match=f"{name}: the stored .*64 values do not fit.*x64.*{hint}"):
            rps.load(tmp_path / name, sharding=everywhere)
    assert rps.load(tmp_path / "rates", sharding=everywhere, dtype=jnp.float32)["rates"].dtype == jnp.float32


def test_a_lora_run_starts_warm_from_a_pretrained_runs_params(tmp_path, run_of_two_steps):
    """Only the params are read; the LoRA run then saves, and resumes, a state of its own."""
    pretrained, state = run_of_two_steps
    mesh = mesh_of((2, 4))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(mesh)), state["params"])

    def fresh(base):
        lora = {
            "a": jax.device_put(values((256, 4), np.float32, 5), on(mesh)),
            "b": jax.device_put(jnp.zeros((4, 512)), on(mesh)),
        }
        return {"base": base, "lora": lora, "opt_state": optax.adamw(0.1).init(lora), "step": 0}

    base = None

    def warm_start():
        nonlocal base
        base = rps.load(pretrained, like, subtree="params")

    assert bytes_read(warm_start) <= 1.05 * nbytes(state["params"])
    assert [bits(x) for x in jax.tree.leaves(base)] == [bits(x) for x in jax.tree.leaves(state["params"])]

    @jax.jit
    def step(lora_state):
        grads = jax.tree.map(jnp.ones_like, lora_state["lora"])
        updates, opt_state = optax.adamw(0.1).update(grads, lora_state["opt_state"], lora_state["lora"])
        lora = optax.apply_updates(lora_state["lora"], updates)
        return {**lora_state, "lora": lora, "opt_state": opt_state, "step": lora_state["step"] + 1}

    tuned = step(fresh(base))
    with in_run(tmp_path / "lora") as callback:
        callback(1, tuned)
    with in_run(tmp_path / "lora") as callback:
        resumed, at = callback.resume(fresh(jax.tree.map(jnp.zeros_like, base)))
    assert at == 1
    assert_same_tree(step(resumed), step({**tuned, "step": 1}))


def test_resume_skips_what_a_pattern_names(tmp_path):
    """Warm start within one directory: the optimizer begins anew, everything else is strict."""
    state = {"params": {"w": jnp.ones(4)}, "opt_state": optax.adam(0.1).init({"w": jnp.ones(4)})}
    with in_run(tmp_path / "run") as callback:
        callback(5, state)
    other = {"params": {"w": jnp.zeros(4)}, "opt_state": optax.sgd(0.1, momentum=0.9).init({"w": jnp.full(4, 3.0)})}
    with in_run(tmp_path / "run") as callback:
        with pytest.raises(rps.TreeMismatchError):
            callback.resume(other)
        found, _ = callback.resume(other, skip=("opt_state/**",))
        with pytest.raises(rps.TreeMismatchError, match="matches no leaf"):
            callback.resume(other, skip=("opt_stat/**",))
    assert (found["params"]["w"] == 1).all()
    assert_same_tree(found["opt_state"], other["opt_state"])
