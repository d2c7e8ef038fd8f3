import asyncio
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from flax_rpsave import cleaning, commit
from tests import faults


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def config(root, **keys):
    return {"directory": root, "save_interval_steps": 10, **keys}


def state_at(step):
    """A state of host values, which is saved without compiling anything."""
    return {"w": np.full(4, step, np.float32), "updates": step}


def assert_is_state_at(step, state):
    assert state["updates"] == step
    np.testing.assert_array_equal(state["w"], np.full(4, step, np.float32))


def train(root, *steps, **keys):
    """A run that saves each of these steps, and no other."""
    with rps.CheckpointCallback(config(root, save_interval_steps=1, **keys)) as checkpoint:
        for step in steps:
            assert checkpoint(step, state_at(step))


def damage(root, step):
    """Flips the first bit of every stored file of a step's database."""
    for file in (root / str(step)).rglob("d/*"):
        data = file.read_bytes()
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def document(root, step):
    return json.loads((root / str(step) / "_CHECKPOINT_METADATA").read_text())


def names(root):
    return sorted(path.name for path in root.iterdir())


class Numbers:
    """A data iterator over 0, 1, 2, …, with its position as a dict."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return self.position - 1

    def get_state(self):
        return {"position": self.position, "epoch": {"seed": 7, "order": [2, 0, 1]}}

    def set_state(self, state):
        assert state["epoch"] == {"seed": 7, "order": [2, 0, 1]}
        self.position = state["position"]


class NumbersAsBytes(Numbers):
    """The same, with its position as bytes, as grain's DataLoader has it."""

    def get_state(self):
        return b"\xff\x00" + str(self.position).encode()

    def set_state(self, state):
        assert state[:2] == b"\xff\x00"
        self.position = int(state[2:])


# The loop


def test_the_loop_of_the_contract_saves_resumes_and_ends_reports_23_and_27(tmp_path):
    (tmp_path / "config.yaml").write_text(
        f"model: {{width: 3}}\ncheckpoint:\n  directory: {tmp_path}/run\n  save_interval_steps: 3\n"
    )
    optimizer = optax.adam(0.1)

    @jax.jit
    def train_step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(lambda w: ((w - batch) ** 2).sum())(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def run(num_steps):
        train_iter = Numbers()
        state = (jnp.zeros(3), optimizer.init(jnp.zeros(3)))
        began_at = None

        config = rps.CheckpointConfig.from_yaml(tmp_path / "config.yaml")
        with rps.CheckpointCallback(config, data=train_iter) as checkpoint:
            state, step = checkpoint.resume(state)
            began_at = (step, train_iter.position, int(state[1][0].count), float(abs(state[1][0].mu).sum()))
            while step < num_steps and not checkpoint.should_stop:
                state, metrics = train_step(state, next(train_iter))
                step += 1
                checkpoint(step, state, metrics=metrics)
            checkpoint(step, state, force=True)
        return began_at, step, state

    began_at, step, _ = run(7)
    assert (began_at, step) == ((0, 0, 0, 0.0), 7)
    began_at, step, state = run(11)
    assert began_at[:3] == (7, 7, 7)  # a step is the number of completed updates: of batches seen, of optimizer counts
    assert began_at[3] > 0
    assert step == 11
    assert names(tmp_path / "run") == ["11", "3", "6", "7", "9"]
    np.testing.assert_array_equal(rps.load(tmp_path / "run")[0], state[0])


@pytest.mark.parametrize(
    ("interval", "called", "saved"),
    [
        (10, [4, 9, 13, 19, 31, 39], [13, 31]),
        (10, [9, 10, 11, 20, 21], [10, 20]),
        (10, [35, 36], []),
        (10, [1000], [1000]),
        (1, [3, 4, 9], [3, 4, 9]),
        (7, [0, 6, 7, 8, 22, 22, 27, 28], [0, 7, 22, 28]),
    ],
)
def test_a_step_is_saved_where_a_boundary_was_reached_or_crossed(root, interval, called, saved):
    with rps.CheckpointCallback(config(root, save_interval_steps=interval)) as checkpoint:
        began = [step for step in called if checkpoint(step, state_at(step))]
        checkpoint.wait()
        assert began == saved == checkpoint.all_steps()
        assert checkpoint.latest_step() == max(saved, default=None)


def test_boundaries_are_counted_from_the_step_resumed_from(root):
    train(root, 15)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, step = checkpoint.resume(state_at(0))
        assert step == 15
        assert [s for s in (15, 17, 23, 29) if checkpoint(s, state)] == [23]


def test_force_saves_whatever_the_interval_says(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert not checkpoint(3, state_at(3))
        assert checkpoint(3, state_at(3), force=True)
        assert checkpoint(4, state_at(4), force=True)
    assert names(root) == ["3", "4"]
    assert_is_state_at(4, rps.load(root, state_at(0)))


def test_a_step_committed_or_in_flight_is_saved_once_and_a_line_says_so_report_53(root, caplog):
    caplog.set_level(logging.INFO, "flax_rpsave")
    with faults.gated_writer() as gate, rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint(10, state_at(10))
        gate.wait_reached()
        assert not checkpoint(10, state_at(10), force=True)  # in flight
        assert checkpoint.all_steps() == []
        gate.open()
        checkpoint.wait()
        assert not checkpoint(10, state_at(10), force=True)  # committed
    skipped = [r.getMessage() for r in caplog.records if "not saved again" in r.getMessage()]
    assert len(skipped) == 2
    assert all("step 10" in line for line in skipped)
    assert names(root) == ["10"]


def test_the_step_resumed_from_is_not_saved_again(root):
    train(root, 20)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, step = checkpoint.resume(state_at(0))
        assert not checkpoint(step, state, force=True)


def test_a_jax_array_as_step_is_refused_with_what_converting_it_costs(root):
    said = r"got a jax\.Array: converting it would wait for the device"
    with rps.CheckpointCallback(config(root)) as checkpoint, pytest.raises(TypeError, match=said):
        checkpoint(jnp.asarray(10), state_at(10))
    assert names(root) == []


@pytest.mark.parametrize("step", [True, np.True_, 10.0, "10", None])
def test_a_step_that_is_no_int_is_refused(root, step):
    with rps.CheckpointCallback(config(root)) as checkpoint, pytest.raises(TypeError, match="step must be an int, got"):
        checkpoint(step, state_at(10), force=True)
    assert names(root) == []


def test_a_numpy_integer_is_a_step(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint(np.int64(10), state_at(10))
        assert checkpoint(np.uint8(20), state_at(20))
    assert type(checkpoint.stats.step) is int
    assert names(root) == ["10", "20"]


def test_steps_are_ordered_by_number_report_30(root):
    train(root, 9, 10, 100, 9000, 10000)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint.all_steps() == [9, 10, 100, 9000, 10000]
        assert checkpoint.latest_step() == 10000
        assert checkpoint.resume(state_at(0))[1] == 10000


def test_waiting_for_the_save_before_is_logged_and_in_the_stats(root, caplog):
    caplog.set_level(logging.INFO, "flax_rpsave")
    with rps.CheckpointCallback(config(root)) as checkpoint, faults.waited_for(checkpoint._saver.writer) as waited_for:

        class Awaited:
            """The first save goes on a while after the loop began to wait for it."""

            def write(self, pieces):
                assert waited_for.wait(30)
                began = time.perf_counter()
                while time.perf_counter() - began < 0.02:
                    pass
                super().write(pieces)

        with faults.engine(Awaited):
            checkpoint(10, state_at(10))
            checkpoint(20, state_at(20))
            checkpoint.wait()
        assert checkpoint.stats.step == 20
        assert checkpoint.stats.waited_secs >= 0.001
    assert [r for r in caplog.records if r.getMessage().startswith("step 20 waited ")]
    assert not [r for r in caplog.records if r.getMessage().startswith("step 10 waited ")]


def test_async_save_false_returns_after_the_commit(root):
    with rps.CheckpointCallback(config(root, async_save=False)) as checkpoint:
        assert checkpoint(10, state_at(10))
        assert names(root) == ["10"]
        assert checkpoint.stats.blocking_secs == checkpoint.stats.total_secs


def test_async_save_false_raises_in_the_call_that_failed(root):
    with rps.CheckpointCallback(config(root, async_save=False)) as checkpoint:
        with faults.failing_writer(OSError("device is gone")), pytest.raises(rps.SaveError, match=r"step 10.*is gone"):
            checkpoint(10, state_at(10))
        assert checkpoint(10, state_at(10), force=True)
    assert names(root) == ["10"]


# Metrics, extra, data


def test_metrics_are_fetched_in_the_background_whatever_they_are(root, caplog):
    donated = jnp.ones(())
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    metrics = {
        "loss": jnp.asarray(0.5),
        "half": jnp.asarray(1.5, jnp.bfloat16),
        "count": jnp.asarray(7),
        "python": 0.25,
        "numpy": np.float32(2),
        "nan": jnp.asarray(np.nan),
        "vector": jnp.ones(3),
        "text": "high",
        "thing": object(),
        "complex": 1j,
        "nothing": None,
        "donated": donated,
        3: 1.0,
    }
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint(10, state_at(10), metrics=metrics)
    stored = document(root, 10)["metrics"]
    assert np.isnan(stored.pop("nan"))
    good = {"loss": 0.5, "half": 1.5, "count": 7, "python": 0.25, "numpy": 2.0, "3": 1.0}
    bad = ("vector", "text", "thing", "complex", "nothing", "donated")
    assert stored == {**good, **dict.fromkeys(bad)}
    for name in bad:
        assert f"metric '{name}' cannot be stored" in caplog.text


def test_metrics_are_those_of_the_call(root):
    metrics = {"loss": np.ones(())}
    with faults.gated_writer() as gate, rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, state_at(10), metrics=metrics)
        gate.wait_reached()
        metrics["loss"][...] = 9
        metrics["later"] = 1
        gate.open()
    assert document(root, 10)["metrics"] == {"loss": 1.0}


def test_extra_comes_back(root):
    extra = {"epoch": 3, "tags": ["a", None, True], "lr": 1e-3, "nested": {"μ": "ü"}}
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint.extra is None
        checkpoint(10, state_at(10), extra=extra)
        extra["epoch"] = 4  # after the call
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint.resume(state_at(0))
        assert checkpoint.extra == {**extra, "epoch": 3}


@pytest.mark.parametrize("extra", [{"x": np.ones(2)}, {"x": {1, 2}}, object(), {1: "one"}, [{"a": {2.5: 0}}]])
def test_extra_that_json_cannot_hold_is_refused_before_anything_is_written(root, extra):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.SaveError, match="extra must be something that JSON can hold"):
            checkpoint(10, state_at(10), extra=extra)
        assert names(root) == []
        assert checkpoint(10, state_at(10), extra={"fine": 1})  # the boundary was not used up


@pytest.mark.parametrize("data_type", [Numbers, NumbersAsBytes])
def test_the_data_position_is_that_of_the_step_report_25(root, data_type):
    data = data_type()
    with faults.gated_writer() as gate, rps.CheckpointCallback(config(root), data=data) as checkpoint:
        seen = [next(data) for _ in range(10)]
        checkpoint(10, state_at(10))
        seen += [next(data) for _ in range(5)]  # before the save is written
        gate.open()
    resumed = data_type()
    with rps.CheckpointCallback(config(root), data=resumed) as checkpoint:
        checkpoint.resume(state_at(0))
    assert [next(resumed) for _ in range(5)] == seen[10:]


def test_data_state_that_nobody_takes_is_an_error_report_25(root):
    with rps.CheckpointCallback(config(root), data=Numbers()) as checkpoint:
        checkpoint(10, state_at(10))
    with (
        rps.CheckpointCallback(config(root)) as checkpoint,
        pytest.raises(rps.DataStateError, match=r"has data-iterator state.*data=False"),
    ):
        checkpoint.resume(state_at(0))
    with rps.CheckpointCallback(config(root), data=False) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_data_without_a_state_to_take_is_an_error_report_25(root):
    train(root, 10)
    data = Numbers()
    with (
        rps.CheckpointCallback(config(root), data=data) as checkpoint,
        pytest.raises(rps.DataStateError, match=r"no data-iterator state.*data=False"),
    ):
        checkpoint.resume(state_at(0))
    with rps.CheckpointCallback(config(root), data=False) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_data_is_positioned_only_once_the_state_was_read(root):
    with rps.CheckpointCallback(config(root), data=Numbers()) as checkpoint:
        checkpoint(10, state_at(10))
    data = Numbers()
    data.position = 3
    with rps.CheckpointCallback(config(root), data=data) as checkpoint, pytest.raises(rps.TreeMismatchError):
        checkpoint.resume({"other": np.ones(2)})
    assert data.position == 3


def test_data_that_is_no_iterator_with_a_state_is_refused(root):
    with pytest.raises(TypeError, match=r"data must have get_state\(\) and set_state\(\).*got list"):
        rps.CheckpointCallback(config(root), data=[1, 2, 3])
    assert not root.exists()


# Resuming


def test_resume_without_a_checkpoint_gives_the_state_back(root):
    state = state_at(0)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint.latest_step() is None
        resumed, step = checkpoint.resume(state)
    assert resumed is state
    assert step == 0


def test_resume_auto_takes_the_newest_step_and_the_new_config_counts_report_64(root):
    train(root, 10, 20)
    with rps.CheckpointCallback(config(root, save_interval_steps=7)) as checkpoint:
        state, step = checkpoint.resume(state_at(0))
        assert_is_state_at(20, state)
        assert [s for s in range(21, 36) if checkpoint(s, state)] == [21, 28, 35]
    assert step == 20


def test_resume_never_refuses_existing_steps_report_54(root):
    with rps.CheckpointCallback(config(root, resume="never")) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 0
        checkpoint(10, state_at(10))
    before = faults.files_in(root)
    with rps.CheckpointCallback(config(root, resume="never")) as checkpoint:
        with pytest.raises(rps.ConfigError, match=r"resume is 'never', but .*steps up to 10.*resume: auto"):
            checkpoint.resume(state_at(0))
        with pytest.raises(rps.RPSaveError, match="10"):
            checkpoint(20, state_at(20))
    assert faults.files_in(root) == before


def test_resume_required_refuses_an_empty_directory(root):
    with (
        rps.CheckpointCallback(config(root, resume="required")) as checkpoint,
        pytest.raises(rps.NoCheckpointError, match=rf"resume is 'required', but {root} has no committed step"),
    ):
        checkpoint.resume(state_at(0))
    train(root, 10)
    with rps.CheckpointCallback(config(root, resume="required")) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10


def test_a_run_that_did_not_resume_may_not_save_among_the_steps_of_another_report_54(root):
    train(root, 10, 20)
    before = faults.files_in(root)
    with (
        rps.CheckpointCallback(config(root)) as checkpoint,
        pytest.raises(rps.StepOrderError, match=r"steps up to 20.*did not resume, is at step 1\b"),
    ):
        checkpoint(1, state_at(1))  # at the start, not when the first save is due
    assert faults.files_in(root) == before


def test_an_explicit_step_is_taken_and_newer_ones_need_rewind_report_54(root):
    train(root, 10, 20, 30)
    before = faults.files_in(root)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.StepOrderError, match=r"step 10 is not the newest: \[20, 30\].*rewind=True"):
            checkpoint.resume(state_at(0), step=10)
        with pytest.raises(rps.NoCheckpointError, match=r"has no step 15; it has \[10, 20, 30\]"):
            checkpoint.resume(state_at(0), step=15, rewind=True)
        with pytest.raises(TypeError, match="rewind=True moves steps aside that are newer than `step`"):
            checkpoint.resume(state_at(0), rewind=True)
        assert faults.files_in(root) == before
        state, step = checkpoint.resume(state_at(0), step=30)
        assert_is_state_at(30, state)
        assert step == 30


def test_rewind_moves_newer_steps_aside_where_they_are_no_steps_any_more_report_54(root):
    train(root, 10, 20, 30)
    moved = faults.files_in(root / "30")
    with rps.CheckpointCallback(config(root, max_to_keep=1)) as checkpoint:
        state, step = checkpoint.resume(state_at(0), step=10, rewind=True)
        assert_is_state_at(10, state)
        assert step == 10
        assert checkpoint.all_steps() == [10]
        assert checkpoint(20, state_at(21))
    assert len([name for name in names(root) if name.startswith("20.abandoned-")]) == 1
    (aside,) = [name for name in names(root) if name.startswith("30.abandoned-")]
    assert faults.files_in(root / aside) == moved  # retention leaves it alone
    assert rps.load(root)["updates"] == 21


def test_a_run_can_be_rewound_twice(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, state_at(10))
        for attempt in (1, 2):
            checkpoint(20, state_at(20 + attempt))
            assert_is_state_at(20 + attempt, checkpoint.resume(state_at(0), step=20)[0])
            _, step = checkpoint.resume(state_at(0), step=10, rewind=True)
            assert step == 10
            assert checkpoint.all_steps() == [10]
    aside = [rps.load(root / name)["updates"] for name in names(root) if name.startswith("20.abandoned-")]
    assert sorted(aside) == [21, 22]


def test_an_explicit_step_never_falls_back(root):
    train(root, 10, 20)
    damage(root, 20)
    with (
        rps.CheckpointCallback(config(root)) as checkpoint,
        pytest.raises(rps.CorruptCheckpointError, match=str(root / "20")),
    ):
        checkpoint.resume(state_at(0), step=20)


def test_resume_into_an_abstract_target_makes_arrays_or_calls_init(root):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d"))
    target = {
        "x": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }
    calls = []

    def init():
        calls.append(1)
        return {"x": jax.device_put(jnp.arange(16.0), sharding), "key": jax.random.key(5)}

    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.NoCheckpointError, match=r"(key|x) is a ShapeDtypeStruct\): pass init="):
            checkpoint.resume(target)
        state, step = checkpoint.resume(target, init=init)
        assert (step, len(calls)) == (0, 1)
        checkpoint(10, state)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        resumed, step = checkpoint.resume(target, init=init)
    assert (step, len(calls)) == (10, 1)
    assert resumed["x"].sharding == sharding
    np.testing.assert_array_equal(resumed["x"], state["x"])
    assert jax.random.bits(resumed["key"]) == jax.random.bits(jax.random.key(5))


def test_skipped_leaves_keep_the_targets_values(root):
    saved = {"params": {"a": np.ones(2), "b": np.ones(3)}, "opt_state": [{"mu": np.ones(2)}, {"nu": np.ones(2)}]}
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, saved)
    other = {"params": {"a": np.zeros(2), "b": np.zeros(3)}, "opt_state": [{"momentum": np.zeros(5)}, {}]}
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, _ = checkpoint.resume(other, skip=("opt_state/**", "params/*a"))
    assert state["params"]["b"].sum() == 3
    assert state["params"]["a"].sum() == 0
    assert state["opt_state"][0]["momentum"].sum() == 0


@pytest.mark.parametrize("pattern", ["opt/**", "params", "params/*/*", "PARAMS/a", ""])
def test_a_skip_pattern_that_matches_nothing_is_an_error(root, pattern):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, {"params": {"a": np.ones(2)}})
    with (
        rps.CheckpointCallback(config(root)) as checkpoint,
        pytest.raises(rps.TreeMismatchError, match=r"matches no leaf.*'params/a'"),
    ):
        checkpoint.resume({"params": {"a": np.ones(2)}}, skip=(pattern,))


def test_skipped_abstract_leaves_come_from_init(root):
    target = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, {"a": jnp.ones(2), "b": jnp.ones(3)})
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.TreeMismatchError, match="pass init="):
            checkpoint.resume(target, skip=("a",))
        state, _ = checkpoint.resume(target, skip=("a",), init=lambda: {"a": jnp.full(2, 5.0), "b": jnp.zeros(3)})
    assert (float(state["a"].sum()), float(state["b"].sum())) == (10, 3)


# Damage


@pytest.mark.usefixtures("each_engine")
def test_a_damaged_newest_step_is_passed_over_and_saved_again_reports_29_33_and_34(root, caplog):
    train(root, 10, 20, 30)
    damage(root, 30)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, step = checkpoint.resume(state_at(0))
        assert_is_state_at(20, state)
        assert step == 20
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warning.startswith("step 30 is damaged and passed over: ")
        assert str(root / "30") in warning
        assert checkpoint(30, state_at(30))
        checkpoint.wait()
        assert checkpoint.latest_step() == 30
    assert len([name for name in names(root) if name.startswith("30.damaged-")]) == 1
    assert_is_state_at(30, rps.load(root, state_at(0)))


def test_a_step_that_was_saved_again_is_sound_to_retention(root):
    train(root, 10, 20)
    damage(root, 20)
    with rps.CheckpointCallback(config(root, max_to_keep=1)) as checkpoint:
        checkpoint.resume(state_at(0))
        checkpoint(20, state_at(20))
        checkpoint(30, state_at(30))
        checkpoint.wait()
        assert checkpoint.all_steps() == [30]


def test_retention_does_not_count_a_damaged_step(root):
    train(root, 10, 20, 30)
    damage(root, 30)
    with rps.CheckpointCallback(config(root, max_to_keep=2)) as checkpoint:
        checkpoint.resume(state_at(0))
        checkpoint(25, state_at(25), force=True)
    assert names(root) == ["20", "25", "30"]
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 25


@pytest.mark.parametrize("how", ["all damaged", "only empty directories"])
def test_where_no_step_verifies_nothing_is_started_from_zero_report_29(root, how):
    train(root, 10, 20)
    for step in (10, 20):
        if how == "all damaged":
            damage(root, step)
        else:
            shutil.rmtree(root / str(step))
            (root / str(step)).mkdir()
    before = faults.files_in(root)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.CorruptCheckpointError, match=r"has steps \[10, 20\], and none of them verifies"):
            checkpoint.resume(state_at(0))
        with pytest.raises(rps.StepOrderError, match="steps up to 20"):  # nor if the error is caught
            checkpoint(20, state_at(20), force=True)
    assert faults.files_in(root) == before


# Preemption


def test_a_real_sigterm_saves_at_the_next_call_and_ends_the_loop_report_43(root):
    process = faults.start_python(
        """
        import signal, sys
        import jax.numpy as jnp
        import flax_rpsave as rps

        told = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        before = signal.getsignal(signal.SIGTERM)
        state, step = {"x": jnp.arange(4.0)}, 0
        with rps.CheckpointCallback({"directory": sys.argv[1], "save_interval_steps": 10**9}) as checkpoint:
            state, step = checkpoint.resume(state)
            while not checkpoint.should_stop:
                step += 1
                began = checkpoint(step, {"x": state["x"] + step})
                assert began == checkpoint.should_stop
                if step == 3:
                    print("training", flush=True)
            assert not checkpoint(step, state, force=True)
        assert told == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is before
        print(step)
        """,
        root,
    )
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    step = int(out)
    assert names(root) == [str(step)]
    np.testing.assert_array_equal(rps.load(root)["x"], np.arange(4.0) + step)
    assert f"preempted (SIGTERM): step {step} is being saved" in err


@pytest.fixture
def handled():
    """Signals that reach this process's own handler for SIGUSR1, which stands as before when the test ends."""
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, before)


def kill_self(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # a point at which Python runs handlers


INTERRUPTED = """
import os, signal, sys, time
import flax_rpsave as rps

def interrupted():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # a point at which Python runs handlers
    except KeyboardInterrupt:
        return True
    return False

signal.signal(signal.SIGINT, signal.default_int_handler)
keys = {"directory": sys.argv[1], "preemption_signals": ["SIGINT"]}
below = rps.CheckpointCallback(keys)
with rps.CheckpointCallback(keys) as checkpoint:
    below.close()  # its handler stays below the other's
    assert not interrupted()
    assert checkpoint(1, {"w": 1.0}) and checkpoint.should_stop
    assert interrupted()  # the second one, by who will not wait
assert interrupted()
"""


INTERRUPTED_WAIT = """
import os, signal, sys, threading
import flax_rpsave as rps
from tests import faults

signal.signal(signal.SIGINT, signal.default_int_handler)
with faults.gated_writer() as gate:
    def interrupt():
        gate.wait_reached()
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.5, gate.open).start()

    threading.Thread(target=interrupt).start()
    try:
        with rps.CheckpointCallback({"directory": sys.argv[1], "async_save": False}) as checkpoint:
            checkpoint(1, {"w": 1.0}, force=True)
    except KeyboardInterrupt:
        print(os.listdir(sys.argv[1]))
"""


def test_an_interrupt_while_a_call_waits_for_its_save_does_not_keep_the_end_of_the_block_from_waiting(root):
    done = faults.run_python(INTERRUPTED_WAIT, root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['1']\n"


def test_a_first_interrupt_that_is_watched_saves_and_a_second_one_interrupts(root):
    done = faults.run_python(INTERRUPTED, root)
    assert done.returncode == 0, done.stderr
    assert names(root) == ["1"]


def test_a_signal_before_the_first_call_or_during_a_save_is_not_lost_report_43(root, handled):
    keys = config(root, save_interval_steps=1000, preemption_signals=["SIGUSR1"])
    with rps.CheckpointCallback(keys) as checkpoint:
        kill_self(signal.SIGUSR1)  # in set-up, or the first compilation
        assert not checkpoint.should_stop
        assert checkpoint(1, state_at(1))
        assert checkpoint.should_stop
    with faults.gated_writer() as gate, rps.CheckpointCallback(keys) as checkpoint:
        checkpoint.resume(state_at(0))
        assert checkpoint(1000, state_at(1000))
        kill_self(signal.SIGUSR1)
        kill_self(signal.SIGUSR1)  # twice
        gate.open()
        assert checkpoint(1001, state_at(1001))
        assert checkpoint.should_stop
        assert not checkpoint(1002, state_at(1002))  # saved once, not at every further call
    assert names(root) == ["1", "1000", "1001"]
    assert handled == [signal.SIGUSR1] * 3


def test_a_signal_at_a_step_that_is_saved_anyway_stops_without_another_save(root, handled):
    with rps.CheckpointCallback(config(root, preemption_signals=["SIGUSR1"])) as checkpoint:
        assert checkpoint(10, state_at(10))
        kill_self(signal.SIGUSR1)
        assert not checkpoint(10, state_at(10), force=True)
        assert checkpoint.should_stop
    assert names(root) == ["10"]


def test_handlers_are_put_back_and_signals_reach_them_in_whatever_order_callbacks_close(tmp_path, handled):
    first = rps.CheckpointCallback(config(tmp_path / "a", preemption_signals=["SIGUSR1"]))
    second = rps.CheckpointCallback(config(tmp_path / "b", preemption_signals=["SIGUSR1"]))
    kill_self(signal.SIGUSR1)
    first.close()
    kill_self(signal.SIGUSR1)
    assert second(1, state_at(1))  # told of the signal
    second.close()
    kill_self(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1] * 3
    third = rps.CheckpointCallback(config(tmp_path / "c", preemption_signals=["SIGUSR1"]))
    third.close()
    kill_self(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1] * 4


def test_skip_passes_over_what_only_the_checkpoint_has(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, {**state_at(10), "sown": {"h": jnp.ones(3)}})
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.TreeMismatchError, match="sown/h: in the checkpoint"):
            checkpoint.resume(state_at(0))
        state, step = checkpoint.resume(state_at(0), skip=["sown/**"])
    assert step == 10
    assert jax.tree.structure(state) == jax.tree.structure(state_at(0))


def test_a_step_under_another_steps_name_is_passed_over(root):
    with rps.CheckpointCallback(config(root, save_interval_steps=1)) as checkpoint:
        checkpoint(1, state_at(1))
        checkpoint(2, state_at(2))
    shutil.copytree(root / "1", root / "7")
    with rps.CheckpointCallback(config(root, save_interval_steps=1)) as checkpoint:
        _, step = checkpoint.resume(state_at(0))
    assert step == 2


def test_steps_of_a_stock_run_with_a_prefix_are_not_passed_over_in_silence(root):
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(step_prefix="ckpt")) as manager:
        manager.save(10, args=ocp.args.StandardSave(state_at(10)))
        manager.wait_until_finished()
    with (
        rps.CheckpointCallback(config(root)) as checkpoint,
        pytest.raises(rps.NoCheckpointError, match="ckpt_10, steps of a run with a step_prefix"),
    ):
        checkpoint.resume(state_at(0))


def test_a_signal_is_heard_by_who_still_watches_whoever_closed_before(tmp_path):
    script = """
    import os, signal, sys
    import flax_rpsave as rps
    def make(name):
        return rps.CheckpointCallback({"directory": f"{sys.argv[1]}/{name}", "save_interval_steps": 100})
    first, second = make("a"), make("b")
    first.close()  # its handler stays below the other's
    os.kill(os.getpid(), signal.SIGTERM)
    assert second(2, {"w": 1.0}) and second.should_stop
    second.close()
    with make("c") as third:
        os.kill(os.getpid(), signal.SIGTERM)
        assert third(3, {"w": 1.0}) and third.should_stop
    """
    done = faults.run_python(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b" / "2").is_dir()
    assert (tmp_path / "c" / "3").is_dir()


def test_a_signal_ends_a_program_whose_callbacks_are_all_closed(tmp_path):
    done = faults.run_python(
        """
        import os, signal, sys
        import flax_rpsave as rps

        first, second = [rps.CheckpointCallback({"directory": f"{sys.argv[1]}/{name}"}) for name in "ab"]
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGTERM


def test_a_signal_is_no_preemption_where_that_is_switched_off(root, handled):
    mine = signal.getsignal(signal.SIGUSR1)
    keys = config(root, preemption_signals=["SIGUSR1"], save_on_preemption=False)
    with rps.CheckpointCallback(keys) as checkpoint:
        assert signal.getsignal(signal.SIGUSR1) is mine
        kill_self(signal.SIGUSR1)
        assert not checkpoint(1, state_at(1))
        assert not checkpoint.should_stop


# Errors in the background


def test_a_background_failure_is_raised_at_the_next_call_with_its_cause_report_36(root):
    train(root, 10)
    broken = OSError(5, "Input/output error")
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, _ = checkpoint.resume(state_at(0))
        with faults.failing_writer(broken):
            assert checkpoint(20, state)
            checkpoint._saver.writer.wait()
        with pytest.raises(rps.SaveError, match=r"step 20 was not saved to .*Input/output error") as caught:
            checkpoint(21, state)
        causes = [caught.value]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert causes[-1] is broken
        assert names(root) == ["10"]  # the directory it wrote to is gone
        assert not checkpoint(21, state)  # raised once
        assert checkpoint(30, state_at(30))
    assert names(root) == ["10", "30"]


def test_the_call_that_raises_for_the_save_before_does_not_use_up_its_own_boundary_report_36(root):
    with rps.CheckpointCallback(config(root)) as checkpoint, faults.waited_for(checkpoint._saver.writer) as waited_for:

        class FailsLate:
            def write(self, pieces):
                assert waited_for.wait(30)
                raise OSError("gone")

        with faults.engine(FailsLate):
            checkpoint(10, state_at(10))
            with pytest.raises(rps.SaveError, match=r"step 10 .*gone"):
                checkpoint(20, state_at(20))
        assert checkpoint(20, state_at(20))
    assert names(root) == ["20"]


def test_a_failed_step_is_no_step_and_can_be_saved_again_report_33(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        with faults.failing_writer(OSError("gone")):
            checkpoint(20, state_at(20))
            with pytest.raises(rps.SaveError, match="step 20"):
                checkpoint.wait()
        assert checkpoint.latest_step() == 10
        assert checkpoint.stats.step == 10
        assert checkpoint(20, state_at(20), force=True)
    assert names(root) == ["10", "20"]


def test_on_error_log_lets_training_go_on_report_36(root, caplog):
    with rps.CheckpointCallback(config(root, on_error="log")) as checkpoint:
        with faults.failing_writer(OSError("gone")):
            checkpoint(10, state_at(10))
            checkpoint.wait()
        assert "step 10 was not saved" in caplog.text
        assert not checkpoint(11, state_at(11))
        assert checkpoint(20, state_at(20))
    assert names(root) == ["20"]


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_close_raises_for_a_failed_last_save_whatever_on_error_says_report_24(root, on_error):
    checkpoint = rps.CheckpointCallback(config(root, on_error=on_error))
    with faults.failing_writer(OSError("gone")):
        checkpoint(10, state_at(10))
        with pytest.raises(rps.SaveError, match=r"step 10.*gone"):
            checkpoint.close()
    checkpoint.close()
    assert names(root) == []


@pytest.mark.parametrize("seen", ["wait", "a later call"])
def test_close_raises_for_a_failed_last_save_that_was_only_logged(root, seen):
    checkpoint = rps.CheckpointCallback(config(root, on_error="log"))
    with faults.failing_writer(OSError("gone")):
        checkpoint(10, state_at(10))
        checkpoint._saver.writer.wait()
        checkpoint.wait() if seen == "wait" else checkpoint(11, state_at(11))
    with pytest.raises(rps.SaveError, match=r"step 10.*gone"):
        checkpoint.close()


def test_a_failed_commit_leaves_no_step_report_37(root, monkeypatch):
    def unpublished(*args):
        raise OSError(28, "No space left on device")

    with rps.CheckpointCallback(config(root)) as checkpoint:
        with monkeypatch.context() as patch:
            patch.setattr("flax_rpsave.commit.publish", unpublished)
            checkpoint(10, state_at(10))
            with pytest.raises(rps.SaveError, match=r"step 10 .*No space left"):
                checkpoint.wait()
        assert names(root) == []
        assert checkpoint(10, state_at(10), force=True)
    assert_is_state_at(10, rps.load(root, state_at(0)))


@pytest.mark.parametrize("error", [TypeError("unexpected"), MemoryError("no memory"), KeyboardInterrupt()])
def test_whatever_is_raised_in_the_background_fails_the_save_report_37(root, error):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with faults.failing_writer(error):
            checkpoint(10, state_at(10))
            with pytest.raises(rps.SaveError, match=type(error).__name__):
                checkpoint.wait()
        assert names(root) == []
        assert checkpoint(20, state_at(20))


def test_an_exception_in_the_block_is_never_masked_and_a_failed_save_is_a_note(root):
    own = ValueError("mine")

    def main():
        with rps.CheckpointCallback(config(root)) as checkpoint:
            checkpoint(10, state_at(10))
            raise own

    with faults.failing_writer(OSError("gone")), pytest.raises(ValueError, match="mine") as caught:
        main()
    assert caught.value is own
    (note,) = own.__notes__
    assert note.startswith("besides, a checkpoint was not saved: step 10 was not saved")
    assert "gone" in note


def test_an_exception_in_the_block_leaves_the_save_in_flight_committed(root):
    def main():
        with rps.CheckpointCallback(config(root)) as checkpoint:
            checkpoint(10, state_at(10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        main()
    assert not hasattr(caught.value, "__notes__")
    assert names(root) == ["10"]


# After the commit


def test_on_commit_gets_the_stats_on_another_thread_once_the_step_is_there(root):
    seen = []

    def on_commit(stats):
        seen.append((stats, threading.current_thread(), names(root)))

    with rps.CheckpointCallback(config(root), on_commit=on_commit) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        assert seen[0][0] is checkpoint.stats
    (stats, thread, there) = seen[0]
    assert stats.step == 10
    assert thread is not threading.current_thread()
    assert there == ["10"]


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_exception_of_on_commit_harms_nothing(root, caplog, kind):
    def on_commit(stats):
        raise kind("dashboard is down")

    with rps.CheckpointCallback(config(root), on_commit=on_commit) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint(20, state_at(20))
    assert names(root) == ["10", "20"]
    assert "on_commit failed for step 10; the step is committed" in caplog.text
    assert "dashboard is down" in caplog.text


@pytest.mark.parametrize("what", ["wait", "close", "save", "skip", "resume"])
def test_what_would_wait_for_the_save_is_refused_inside_on_commit(root, what):
    raised = []

    def on_commit(stats):
        if raised:
            return
        calls = {
            "wait": checkpoint.wait,
            "close": checkpoint.close,
            "save": lambda: checkpoint(20, state_at(20)),
            "skip": lambda: checkpoint(11, state_at(11)),
            "resume": lambda: checkpoint.resume(state_at(0)),
        }
        with pytest.raises(rps.RPSaveError, match=r"inside on_commit.*committed already") as caught:
            calls[what]()
        raised.append(caught.value)

    with rps.CheckpointCallback(config(root), on_commit=on_commit) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        assert len(raised) == 1
        assert checkpoint(20, state_at(20))  # not closed, and at the step of before
    assert names(root) == ["10", "20"]


def test_on_commit_is_not_called_for_a_save_that_failed(root):
    seen = []
    with (
        rps.CheckpointCallback(config(root), on_commit=seen.append) as checkpoint,
        faults.failing_writer(OSError("gone")),
    ):
        checkpoint(10, state_at(10))
        with pytest.raises(rps.SaveError):
            checkpoint.wait()
    assert seen == []


@pytest.mark.parametrize("engine", ["direct", "tensorstore"])
def test_the_stats_are_an_immutable_and_complete_record(root, engine, monkeypatch):
    monkeypatch.setenv("RPSAVE_ENGINE", engine)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        assert checkpoint.stats is None
        checkpoint(10, {"x": jnp.zeros((4, 5)), "y": np.zeros(3, np.int8), "s": "text", "e": {}})
        checkpoint.wait()
        stats = checkpoint.stats
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.step = 11
    assert (stats.step, stats.leaves, stats.bytes_written, stats.engine) == (10, 4, 4 * 5 * 4 + 3, engine)
    times = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats) if f.name.endswith("_secs")}
    assert set(times) == {
        "blocking_secs", "waited_secs", "snapshot_secs", "write_secs", "commit_secs", "total_secs",
    }  # fmt: skip
    assert all(value >= 0 for value in times.values())
    parts = times["snapshot_secs"] + times["write_secs"] + times["commit_secs"]
    assert parts == pytest.approx(times["total_secs"])


def test_a_save_is_one_line_at_info_and_taking_is_told_from_committing_reports_38_65_and_67(root, caplog):
    caplog.set_level(logging.DEBUG, "flax_rpsave")
    logging.getLogger().setLevel(logging.INFO)
    with rps.CheckpointCallback(config(root)) as checkpoint:
        for step in range(1, 31):
            checkpoint(step, {"x": jnp.zeros((4, 5)), "y": np.full(3, step, np.int8)})
            checkpoint.wait()
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert [line.split(",")[0] for line in lines if line.startswith("step")] == [
        f"step {step} committed: 2 leaves" for step in (10, 20, 30)
    ]
    assert len(lines) == 3  # of any logger
    taken = [r.getMessage() for r in caplog.records if "snapshot taken" in r.getMessage()]
    assert [line.split(":")[0] for line in taken] == ["step 10", "step 20", "step 30"]
    assert not any("saved" in line or "committed" in line for line in taken)


# Retention


def test_retention_keeps_the_newest_those_of_the_period_and_the_best_reports_51_and_52(root):
    loss = {10: 0.9, 20: float("nan"), 30: 0.1, 40: 0.5, 50: 0.6, 60: 0.7, 70: None}
    keys = config(root, max_to_keep=2, keep_period=40, keep_best={"metric": "loss", "mode": "min", "n": 1})
    with rps.CheckpointCallback(keys) as checkpoint:
        for step, value in loss.items():
            metrics = {} if value is None else {"loss": jnp.asarray(value)}
            checkpoint(step, state_at(step), metrics=metrics)
        checkpoint.wait()
        assert checkpoint.all_steps() == [30, 40, 60, 70]
    for step in (30, 40, 60, 70):
        assert_is_state_at(step, rps.load(root, state_at(0), step=step))


@pytest.mark.parametrize(
    ("metric", "given", "said"),
    [
        ("los", {10: {"loss": 1.0, "acc": 0.5}}, "'los'; those given are 'acc', 'loss': did you mean loss?"),
        ("eval", {30: {"loss": 1.0}}, "'eval'; those given are 'loss'"),
        ("loss", {}, "'loss'; those given are none"),
        ("loss", {10: {"loss": float("nan")}}, None),
        ("loss", {20: {"loss": 1.0, "acc": 0.5}, 30: {"acc": 0.5}}, None),
    ],
)
def test_a_best_metric_that_no_step_has_is_named_once(root, caplog, metric, given, said):
    keys = config(root, max_to_keep=3, keep_best={"metric": metric, "mode": "min"})
    with rps.CheckpointCallback(keys) as checkpoint:
        for step in range(10, 60, 10):
            checkpoint(step, state_at(step), metrics=given.get(step))
    found = [message for message in caplog.messages if "keep_best" in message]
    expected = f"checkpoint.keep_best keeps nothing so far: no step has the metric {said}"
    assert found == ([expected] if said else [])


def test_the_step_before_goes_only_once_the_new_one_is_committed_report_31(root):
    with rps.CheckpointCallback(config(root, max_to_keep=1)) as checkpoint:
        checkpoint(10, state_at(10))
        checkpoint.wait()
        with faults.gated_writer() as gate:
            checkpoint(20, state_at(20))
            gate.wait_reached()
            assert checkpoint.all_steps() == [10]
            gate.open()
        checkpoint.wait()
        assert checkpoint.all_steps() == [20]


@pytest.mark.parametrize(("call", "steps"), [("hide_step", [10, 20]), ("discard", [20])])
def test_steps_that_cannot_be_deleted_fail_no_training_report_50(root, caplog, monkeypatch, call, steps):
    def undeletable(*args):
        raise OSError(30, "Read-only file system")

    with rps.CheckpointCallback(config(root, max_to_keep=1)) as checkpoint:
        checkpoint(10, state_at(10))
        with monkeypatch.context() as patch:
            patch.setattr(f"flax_rpsave.commit.{call}", undeletable)
            checkpoint(20, state_at(20))
            checkpoint.wait()
        assert checkpoint.all_steps() == steps
        assert len(names(root)) == 2
        assert "after step 20 failed, tried again later" in caplog.text
        checkpoint(30, state_at(30))
    assert names(root) == ["30"]


@pytest.mark.parametrize("call", ["hide_step", "read_metrics", "has_checkpoint"])
def test_one_step_that_cannot_be_looked_at_or_deleted_keeps_no_other_from_being_deleted(
    root, caplog, monkeypatch, call
):
    train(root, 10)
    module = cleaning if call == "has_checkpoint" else commit
    real = getattr(module, call)

    def refused(*args):
        if str(args[-2 if call == "hide_step" else -1]) in ("10", str(root / "10")):
            raise PermissionError(13, "Permission denied", str(root / "10"))
        return real(*args)

    monkeypatch.setattr(module, call, refused)
    keep_best = {"metric": "loss", "mode": "min", "n": 1}
    with rps.CheckpointCallback(config(root, max_to_keep=1, keep_best=keep_best)) as checkpoint:
        checkpoint.resume(state_at(0))
        for step in (20, 30, 40):
            checkpoint(step, state_at(step), metrics={"loss": 1 / step})
    assert names(root) == ["10", "40"]
    assert "after step 40 failed, tried again later: [Errno 13]" in caplog.text


def test_a_directory_that_is_named_by_a_number_and_no_checkpoint_is_never_deleted(root):
    (root / "0").mkdir(parents=True)
    (root / "0" / "thesis.txt").write_text("mine")
    with rps.CheckpointCallback(config(root, max_to_keep=1)) as checkpoint:
        for step in (10, 20):
            checkpoint(step, state_at(step))
    assert names(root) == ["0", "20"]
    assert (root / "0" / "thesis.txt").read_text() == "mine"


def test_a_call_while_another_thread_is_in_one_is_refused(root, monkeypatch):
    inside, leave = threading.Event(), threading.Event()
    with rps.CheckpointCallback(config(root)) as checkpoint:
        taken = type(checkpoint._saver).save

        def slow(*arguments, **keys):
            inside.set()
            assert leave.wait(60)
            taken(*arguments, **keys)

        monkeypatch.setattr(type(checkpoint._saver), "save", slow)
        other = threading.Thread(target=checkpoint, args=(10, state_at(10)))
        other.start()
        assert inside.wait(60)
        for call in (lambda: checkpoint(20, state_at(20)), lambda: checkpoint.resume(state_at(0))):
            with pytest.raises(rps.SaveError, match="another thread is calling this callback"):
                call()
        leave.set()
        other.join()
        checkpoint(20, state_at(20))
    assert checkpoint.all_steps() == [10, 20]
    assert_is_state_at(10, rps.load(root, state_at(0), step=10))


def test_metrics_that_are_no_mapping_are_refused(root):
    with rps.CheckpointCallback(config(root)) as checkpoint:
        with pytest.raises(rps.SaveError, match="metrics must be a mapping of names to numbers, got list"):
            checkpoint(10, state_at(10), metrics=[1])
        checkpoint(20, state_at(20))


def test_a_step_whose_metrics_cannot_be_read_does_not_stop_retention(root):
    train(root, 10, 20, 30)
    (root / "10" / "_CHECKPOINT_METADATA").write_bytes(b"{")
    keep_best = {"metric": "loss", "mode": "min"}
    with rps.CheckpointCallback(config(root, max_to_keep=1, keep_best=keep_best)) as checkpoint:
        checkpoint.resume(state_at(0))
        checkpoint(40, state_at(40))
    assert "40" in names(root)
    assert "20" not in names(root)


# Interrupted saves


@pytest.mark.parametrize("record", [None, b""])
def test_what_a_run_left_that_was_killed_before_it_said_who_it_is_goes_too(root, record):
    leftover = root / "20.orbax-checkpoint-tmp-0123abcd"
    leftover.mkdir(parents=True)
    if record is not None:
        (leftover / ".rpsave-writing").write_bytes(record)
    train(root, 10)
    assert names(root) == ["10"]


def test_leftovers_of_a_killed_run_are_cleaned_by_the_next_runs_first_save_only_reports_31_32_and_34(root):
    process = faults.start_python(
        """
        import sys
        from tests import faults
        import jax.numpy as jnp
        import flax_rpsave as rps

        checkpoint = rps.CheckpointCallback({"directory": sys.argv[1], "save_interval_steps": 10, "max_to_keep": 1})
        checkpoint(10, {"x": jnp.full(4, 10.0)})
        checkpoint.wait()
        with faults.gated_writer() as gate:
            checkpoint(20, {"x": jnp.full(4, 20.0)})
            gate.wait_reached()
            print("writing", flush=True)
            sys.stdin.read()
        """,
        root,
    )
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate(timeout=60)
    (leftover,) = [name for name in names(root) if name != "10"]
    assert leftover.startswith("20.orbax-checkpoint-tmp-")
    strange = ["notes.txt.orbax-checkpoint-tmp-1", "20.backup", "logs"]
    for name in strange:  # not ours, report 35
        (root / name).mkdir()

    assert rps.load(root)["x"].tolist() == [10.0] * 4
    assert rps.load(root, step=10)["x"].tolist() == [10.0] * 4
    with rps.CheckpointCallback(config(root)) as checkpoint:
        state, step = checkpoint.resume({"x": jnp.zeros(4)})
        assert step == 10
        assert checkpoint.all_steps() == [10]
        assert leftover in names(root)
        assert checkpoint(20, state)
    assert names(root) == sorted(["10", "20", *strange])


def test_a_copied_run_is_as_complete_as_the_original_report_35(root, tmp_path):
    train(root, 10, 20)
    shutil.copytree(root, tmp_path / "copy")
    with rps.CheckpointCallback(config(tmp_path / "copy")) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 20
        checkpoint(30, state_at(30))
    assert names(tmp_path / "copy") == ["10", "20", "30"]


# Closing, and being switched off


def test_close_waits_for_the_commit_and_may_be_called_again_report_24(root):
    checkpoint = rps.CheckpointCallback(config(root))
    with faults.gated_writer() as gate:
        checkpoint(10, state_at(10))
        gate.wait_reached()
        gate.open()
        checkpoint.close()
    assert names(root) == ["10"]
    checkpoint.close()
    with checkpoint:
        pass
    assert checkpoint.all_steps() == [10]
    assert checkpoint.stats.step == 10
    checkpoint.wait()


def test_a_closed_callback_neither_saves_nor_resumes(root):
    checkpoint = rps.CheckpointCallback(config(root))
    checkpoint.close()
    with pytest.raises(rps.SaveError, match="step 10: the callback is closed"):
        checkpoint(10, state_at(10))
    with pytest.raises(rps.RPSaveError, match="closed"):
        checkpoint.resume(state_at(0))
    assert names(root) == []


def test_a_disabled_callback_does_nothing(tmp_path):
    mine = signal.getsignal(signal.SIGTERM)
    state = state_at(0)
    keys = {"directory": tmp_path / "run", "enabled": False, "resume": "required", "save_interval_steps": 1}
    with rps.CheckpointCallback(keys, data=Numbers()) as checkpoint:
        assert signal.getsignal(signal.SIGTERM) is mine
        assert checkpoint.resume(state) == (state, 0)
        assert not checkpoint(1, state)
        assert not checkpoint(1, state, force=True)
        checkpoint.wait()
        assert (checkpoint.should_stop, checkpoint.stats, checkpoint.extra) == (False, None, None)
        assert (checkpoint.all_steps(), checkpoint.latest_step()) == ([], None)
        made, step = checkpoint.resume({"x": jax.ShapeDtypeStruct((), jnp.float32)}, init=lambda: {"x": 1.0})
        assert (made, step) == ({"x": 1.0}, 0)
    assert names(tmp_path) == []
    with rps.CheckpointCallback({"enabled": False}) as checkpoint:  # needs no directory either
        assert not checkpoint(1, state)


# Where it runs


def test_saving_and_resuming_work_inside_a_running_event_loop_report_45(root):
    async def main():
        with rps.CheckpointCallback(config(root)) as checkpoint:
            state, step = checkpoint.resume({"x": jnp.zeros(4)})
            checkpoint(10, {"x": state["x"] + 1}, metrics={"loss": jnp.asarray(1.0)})
            await asyncio.sleep(0)
        with rps.CheckpointCallback(config(root)) as checkpoint:
            state, step = checkpoint.resume({"x": jnp.zeros(4)})
            return step, float(state["x"].sum()), float(rps.load(root)["x"].sum())

    assert asyncio.run(main()) == (10, 4.0, 4.0)


def test_a_callback_works_in_another_thread_than_the_main_one(root, caplog):
    before = signal.getsignal(signal.SIGTERM)
    failures = []

    def main():
        try:
            with rps.CheckpointCallback(config(root)) as checkpoint:
                state, _ = checkpoint.resume({"x": jnp.zeros(4)})
                checkpoint(10, {"x": state["x"] + 1})
            with rps.CheckpointCallback(config(root)) as checkpoint:
                assert checkpoint.resume({"x": jnp.zeros(4)})[1] == 10
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    assert not failures
    assert signal.getsignal(signal.SIGTERM) is before
    assert "preemption signals are not watched: the callback was not made in the main thread" in caplog.text


# A save that waits until the interpreter shuts down: then no executor (3.11) and no thread (3.12) can be started.
AT_EXIT = """
import atexit, sys, threading
from tests import faults
import jax.numpy as jnp
import flax_rpsave as rps

atexit.register(print, "a handler that the program registered")

class AtExit:
    def write(self, pieces):
        threading.main_thread().join()
        super().write(pieces)

    def finish(self, values):
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        return super().finish(values)

patch = faults.engine(AtExit)
patch.__enter__()
config = {"directory": sys.argv[1], "on_error": sys.argv[3]}
checkpoint = rps.CheckpointCallback(config, on_commit=lambda stats: print("committed"))
state, step = checkpoint.resume({"x": jnp.zeros(4), "n": 1, "s": "text"})
assert checkpoint(10, {**state, "x": state["x"] + 1}, metrics={"loss": jnp.ones(())}, force=True)
print("end of main", flush=True)
"""


@pytest.mark.usefixtures("each_engine")
def test_a_program_that_ends_without_close_commits_its_save_reports_24_and_39(root):
    done = faults.run_python(AT_EXIT, root, "works", "raise")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["end of main", "committed", "a handler that the program registered"]
    assert rps.load(root)["x"].tolist() == [1.0] * 4


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_program_that_ends_without_close_fails_where_its_save_does_reports_24_and_39(root, on_error):
    done = faults.run_python(AT_EXIT, root, "fails", on_error)
    assert done.returncode == 1
    assert "flax_rpsave: the last save failed: step 10 was not saved" in done.stderr
    assert "No space left on device" in done.stderr
    assert done.stdout.splitlines() == ["end of main", "a handler that the program registered"]
    assert names(root) == []


@pytest.mark.parametrize("closes", [False, True])
def test_a_save_that_begins_while_the_program_ends_is_committed_or_fails_it_reports_24_and_39(root, closes):
    """Python 3.12 starts no thread then, and what a registered function raises does not change the exit code."""
    program = """
import atexit, sys
import numpy as np
import flax_rpsave as rps

def save():
    checkpoint(7, {"x": np.ones(5_000_000, np.float32)}, force=True)

checkpoint = rps.CheckpointCallback({"directory": sys.argv[1]})
if sys.argv[2] == "True":
    atexit.register(checkpoint.close)
atexit.register(save)
"""
    done = faults.run_python(program, root, closes)
    committed = sys.version_info < (3, 12)
    assert done.returncode == (0 if committed else 1)
    assert ("flax_rpsave: the last save failed: step 7 cannot be saved" in done.stderr) == (not committed)
    assert names(root) == (["7"] if committed else [])
    if committed:
        assert (rps.load(root)["x"] == 1).all()


def test_a_failed_save_that_is_raised_while_the_program_ends_fails_it_reports_24_and_39(root):
    program = AT_EXIT + "atexit.register(checkpoint.close)\n"
    done = faults.run_python(program, root, "fails", "raise")
    assert done.returncode == 1
    assert "flax_rpsave: the last save failed: step 10 was not saved" in done.stderr
    assert names(root) == []


# Directories


@pytest.mark.parametrize("spelling", ["ckpt", "./ckpt/", "~/ckpt", "$HOME/ckpt", "a/../ckpt//"])
def test_a_directory_is_the_same_however_written_and_wherever_the_program_goes_report_55(
    tmp_path, monkeypatch, spelling
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").mkdir()
    with rps.CheckpointCallback(config(spelling)) as checkpoint:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint(10, state_at(10))
        checkpoint(20, state_at(20))
    assert names(tmp_path / "ckpt") == ["10", "20"]
    assert names(tmp_path / "elsewhere") == []
    with rps.CheckpointCallback(config(pathlib.Path("../ckpt"))) as checkpoint:
        monkeypatch.chdir(tmp_path)
        assert checkpoint.resume(state_at(0))[1] == 20
    assert rps.load(pathlib.Path("ckpt"))["updates"] == rps.load("~/ckpt/")["updates"] == 20


def test_a_symbolic_link_may_be_the_directory_report_55(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    train(tmp_path / "link", 10)
    assert names(tmp_path / "real") == ["10"]
    assert rps.load(tmp_path / "link")["updates"] == 10


def test_a_step_that_is_a_link_goes_and_leaves_what_it_leads_to(tmp_path):
    train(tmp_path / "run", 10)
    shutil.move(tmp_path / "run" / "10", tmp_path / "elsewhere")
    (tmp_path / "run" / "10").symlink_to(tmp_path / "elsewhere")
    with rps.CheckpointCallback(config(tmp_path / "run", max_to_keep=1)) as checkpoint:
        assert checkpoint.resume(state_at(0))[1] == 10
        checkpoint(20, state_at(20))
    assert names(tmp_path / "run") == ["20"]
    assert rps.load(tmp_path / "elsewhere")["updates"] == 10


def test_the_bytes_of_a_data_state_are_stored_as_they_are(root):
    data = NumbersAsBytes()
    data.get_state = lambda: bytes(range(256))
    with rps.CheckpointCallback(config(root), data=data) as checkpoint:
        checkpoint(10, state_at(10))
    got = []
    data.set_state = got.append
    with rps.CheckpointCallback(config(root), data=data) as checkpoint:
        checkpoint.resume(state_at(0))
    assert got == [bytes(range(256))]


def test_importing_the_package_imports_neither_orbax_nor_nnx_nor_what_it_does_not_need():
    code = "import sys, flax_rpsave; print(sorted({'flax', 'optax', 'orbax', 'grain'} & sys.modules.keys()))"
    assert faults.run_python(code).stdout == "[]\n"
