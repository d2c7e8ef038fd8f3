"""A run that is stopped and resumed is, bit for bit, the run that was never stopped."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import flax_rpsave as rps
from tests import faults

MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
REPLICATED = NamedSharding(MESH, PartitionSpec())
BATCHED = NamedSharding(MESH, PartitionSpec("data"))


class TrainState(train_state.TrainState):
    key: jax.Array
    ema: dict
    mask_key: jax.Array  # of the old kind: a plain uint32 array
    decay: jax.Array  # weakly typed, and on one device at first


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(1)(x)


class Batches:
    """Shuffled batches of a finite data set, epoch after epoch; its position is all that decides the order."""

    def __init__(self):
        self.epoch, self.at, self.seen = 0, 0, []

    def __next__(self):
        order = np.random.default_rng(self.epoch).permutation(40)[self.at : self.at + 16]
        self.at += 16
        if self.at + 16 > 40:
            self.epoch, self.at = self.epoch + 1, 0
        self.seen.append(tuple(order.tolist()))
        x = np.sin(np.outer(order + 1, np.arange(1, 9))).astype(np.float32)
        return jax.device_put((x, x.sum(1, keepdims=True)), BATCHED)

    def get_state(self):
        return {"epoch": self.epoch, "at": self.at}

    def set_state(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


def optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 20)
    return optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)), 3
    )


MODEL, OPTIMIZER = Model(), optimizer()
TRACES = []


@jax.jit
def _init(key):
    keys = jax.random.split(key, 3)
    params = MODEL.init(keys[0], jnp.ones((1, 8)), train=False)["params"]
    return params, OPTIMIZER.init(params), keys[1], jax.tree.map(jnp.copy, params), jax.random.key_data(keys[2])


def fresh(seed):
    """A state as a program makes it at its start: `step` is an int, the arrays lie on all devices."""
    params, opt_state, key, ema, mask_key = jax.device_put(_init(jax.random.key(seed)), REPLICATED)
    return TrainState(
        step=0, apply_fn=MODEL.apply, params=params, tx=OPTIMIZER, opt_state=opt_state, key=key, ema=ema,
        mask_key=mask_key, decay=jnp.asarray(0.9),
    )  # fmt: skip


def _train_step(state, batch):
    TRACES.append(1)
    x, y = batch
    key, dropout = jax.random.split(state.key)
    mask_key, use = jax.random.split(state.mask_key)
    mask = jax.random.bernoulli(use, 0.9, x.shape)

    def loss_of(params):
        out = state.apply_fn({"params": params}, x * mask, train=True, rngs={"dropout": dropout})
        return ((out - y) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    state = state.apply_gradients(grads=gradients)
    ema = jax.tree.map(lambda e, p: state.decay * e + (1 - state.decay) * p, state.ema, state.params)
    return state.replace(key=key, mask_key=mask_key, ema=ema), loss


train_step = jax.jit(_train_step, donate_argnums=0)


def bits(tree):
    """Every leaf of a state as its path, dtype, shape and bytes."""

    def leaf(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        return x.dtype.name, x.shape, x.tobytes()

    return [(jax.tree_util.keystr(path), leaf(x)) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


class Run:
    """What a run saw and came to."""

    def __init__(self, root, until, *, seed=0, step=None, during=None, **keys):
        data = Batches()
        state = fresh(seed)
        self.losses, self.states = {}, {}
        keys = {"directory": root, "save_interval_steps": 5, "replica_parallel": {"min_slice_bytes": 64}, **keys}
        with rps.CheckpointCallback(keys, data=data) as checkpoint:
            state, step = checkpoint.resume(state) if step is None else checkpoint.resume(state, step=step, rewind=True)
            self.began = step
            while step < until:
                donated = state
                state, loss = train_step(state, next(data))
                step += 1
                self.losses[step] = np.asarray(loss).tobytes()  # read in each step: at most one step is in flight
                assert all(x.is_deleted() for x in jax.tree.leaves(donated.params))
                checkpoint(step, state, metrics={"loss": loss})
                if step % 5 == 0:
                    self.states[step] = bits(state)
                if during is not None:
                    during(step)
            checkpoint(step, state, force=True)
        self.seen, self.position, self.final = data.seen, data.get_state(), bits(state)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """20 steps without a stop."""
    return Run(tmp_path_factory.mktemp("straight"), 20)


def assert_same(parts, straight, until):
    """The runs together are the first steps of the straight one."""
    losses = {step: loss for run in parts for step, loss in run.losses.items()}
    assert losses == {step: straight.losses[step] for step in range(1, until + 1)}
    assert [batch for run in parts for batch in run.seen] == straight.seen[:until]
    assert parts[-1].final == straight.states[until]


@pytest.mark.usefixtures("each_engine")
def test_ten_straight_steps_equal_five_and_five_resumed_reports_23_25_27_and_28(tmp_path, straight):
    first = Run(tmp_path, 5)
    second = Run(tmp_path, 10, seed=99)  # nothing of the fresh state is left
    assert (first.began, second.began) == (0, 5)
    assert_same([first, second], straight, 10)
    moments = [leaf for path, leaf in second.final if ".mu" in path or ".nu" in path]
    assert len(moments) == 8
    assert any(any(data) for _, _, data in moments)


def test_three_generations_equal_one_run_wherever_they_were_stopped(tmp_path, straight):
    parts = [Run(tmp_path, until, seed=seed, max_to_keep=1) for seed, until in enumerate((4, 5, 11, 20))]
    assert [part.began for part in parts] == [0, 4, 5, 11]
    assert_same(parts, straight, 20)


@pytest.mark.usefixtures("each_engine")
def test_what_is_saved_is_the_state_of_the_call_while_steps_donate_it_report_8(tmp_path, straight):
    trained_on = []
    with faults.gated_writer() as gate:

        def during(step):
            if step == 5:
                gate.wait_reached()
            if step == 9:  # four steps have consumed and overwritten what step 5 had
                trained_on.append(step)
                gate.open()

        first = Run(tmp_path, 9, during=during)
    assert trained_on == [9]
    assert first.states[5] == straight.states[5]
    second = Run(tmp_path, 10, seed=99, step=5)
    assert second.began == 5
    first.losses = {step: first.losses[step] for step in range(1, 6)}
    first.seen = first.seen[:5]
    assert_same([first, second], straight, 10)


def test_saves_that_are_always_slower_than_the_steps_between_them_change_nothing(tmp_path, straight):
    class Slow:
        """Ends when the loop has gone on by two steps, or waits for it."""

        def write(self, pieces):
            slots.acquire(timeout=30)
            super().write(pieces)

    slots = faults.threading.Semaphore(0)
    with faults.engine(Slow):
        first = Run(tmp_path, 6, during=lambda step: step % 2 == 0 and slots.release(), save_interval_steps=2)
        second = Run(
            tmp_path, 10, seed=9, during=lambda step: step % 2 == 1 and slots.release(2), save_interval_steps=3
        )
    assert_same([first, second], straight, 10)


@pytest.mark.parametrize(
    "keys",
    [
        {"storage": {"use_ocdbt": False}},
        {"storage": {"compression": "zstd"}},
        {"replica_parallel": {"enable": False}},
        {"max_staging_gb": 1e-6},
        {"async_save": False},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_no_way_of_saving_changes_the_run(tmp_path, straight, keys):
    first = Run(tmp_path, 5, **keys)
    second = Run(tmp_path, 10, seed=99, **keys)
    assert second.began == 5
    assert_same([first, second], straight, 10)


def test_a_resumed_run_compiles_no_step_anew_reports_17_and_20(tmp_path):
    Run(tmp_path / "a", 5)  # compiles for the int `step` of a fresh state, and for the array it becomes
    traces, compiled = len(TRACES), train_step._cache_size()
    assert traces == 2
    run = Run(tmp_path / "a", 10)
    assert run.began == 5
    assert (len(TRACES), train_step._cache_size()) == (traces, compiled)
    resumed = jax.jit(lambda state, batch: _train_step(state, batch), donate_argnums=0)  # as a new process would
    with rps.CheckpointCallback({"directory": tmp_path / "a"}, data=Batches()) as checkpoint:
        state, _ = checkpoint.resume(fresh(3))
        batches = Batches()
        for _ in range(3):
            state, loss = resumed(state, next(batches))
            loss.block_until_ready()
    assert resumed._cache_size() <= compiled


@pytest.mark.usefixtures("each_engine")
def test_numpy_leaves_are_those_of_the_call_though_changed_in_place_report_9(tmp_path):
    counts = np.arange(1000)
    aliased = np.arange(1 << 16, dtype=np.float32)  # large enough for a device array to share its memory on the CPU
    state = {
        "counts": counts,
        "strided": counts[::2],
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "device": jax.device_put(aliased, jax.devices()[0]),
    }
    wanted = bits(state)
    with faults.gated_writer() as gate, rps.CheckpointCallback({"directory": tmp_path}) as checkpoint:
        checkpoint(1, state, force=True)
        counts += 1  # at once
        state["fortran"][...] = -1
        gate.wait_reached()
        aliased[...] = -1  # once the copies on the devices are done
        gate.open()
    target = {
        "counts": np.zeros(1000, np.int64), "strided": np.zeros(500, np.int64), "fortran": np.zeros((3, 4)),
        "device": jnp.zeros(1 << 16),
    }  # fmt: skip
    assert bits(rps.load(tmp_path, target)) == wanted
    assert counts[0] == 1


def test_restored_arrays_own_their_memory_and_may_be_donated(tmp_path):
    Run(tmp_path, 5)
    with rps.CheckpointCallback({"directory": tmp_path}, data=Batches()) as checkpoint:
        state, _ = checkpoint.resume(fresh(3))
        before = bits(state)
        state, loss = train_step(state, next(Batches()))
        loss.block_until_ready()
        again, _ = checkpoint.resume(fresh(3))
    assert bits(again) == before
