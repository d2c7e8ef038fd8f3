"""The positions of grain's iterators are saved with the state, each process's own, and come back exactly."""

import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_rpsave as rps
from tests.processes import run

STATE = {"w": np.arange(8, dtype=np.float32)}


def shuffled():
    return grain.MapDataset.range(100).seed(3).shuffle().repeat().batch(4)


def mixed():
    """Nested states: of a mixture, and of windows that are shuffled."""
    parts = [grain.MapDataset.range(first, first + 50).shuffle(seed=first).to_iter_dataset() for first in (0, 1000)]
    return grain.experimental.WindowShuffleIterDataset(grain.IterDataset.mix(parts, [0.7, 0.3]), window_size=8, seed=5)


def loader(shard=0, shards=1):
    """`DataLoader`, whose state is bytes."""
    options = grain.sharding.ShardOptions(shard, shards)
    sampler = grain.samplers.IndexSampler(num_records=100, shard_options=options, shuffle=True, seed=7)
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 100, 1),
        sampler=sampler,
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


ITERATORS = {
    "dataset": lambda: iter(shuffled().to_iter_dataset()),
    "dataset with threads": lambda: iter(shuffled().to_iter_dataset(grain.ReadOptions(num_threads=2))),
    "mixture": lambda: iter(mixed()),
    "loader": lambda: iter(loader()),
}


def config(directory):
    return {"directory": str(directory), "save_interval_steps": 1}


def taken(iterator, count):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS.keys())
def test_an_iterator_of_grain_goes_on_with_the_element_after_the_save(tmp_path, make):
    data = make()
    with rps.CheckpointCallback(config(tmp_path), data=data) as checkpoint:
        seen = taken(data, 5)
        checkpoint(5, STATE)
        expected = taken(data, 12)  # while the save may be under way
    again = make()
    with rps.CheckpointCallback(config(tmp_path), data=again) as checkpoint:
        assert checkpoint.resume(STATE)[1] == 5
        assert taken(again, 12) == expected
    assert seen + expected == taken(make(), 17)


@pytest.mark.parametrize("iterable", [shuffled(), mixed(), loader()], ids=lambda x: type(x).__name__)
def test_what_an_iterator_is_made_from_is_no_iterator(tmp_path, iterable):
    with pytest.raises(TypeError, match=f"got {type(iterable).__name__}: pass the iterator"):
        rps.CheckpointCallback(config(tmp_path), data=iterable)


def test_a_position_in_other_data_is_refused_with_the_iterators_reason(tmp_path):
    data = iter(loader())
    with rps.CheckpointCallback(config(tmp_path), data=data) as checkpoint:
        checkpoint(1, STATE)
    other = iter(loader(shard=1, shards=2))
    expected = r"does not take the state in .*data=False.*ValueError: Sampler"
    with (
        rps.CheckpointCallback(config(tmp_path), data=other) as checkpoint,
        pytest.raises(rps.DataStateError, match=expected),
    ):
        checkpoint.resume(STATE)


SHARDS = """
import grain

def iterator(kind, shard):
    if kind == "dataset":
        numbers = grain.MapDataset.range(200).seed(3).shuffle()[shard::processes].repeat().batch(4)
        return iter(numbers.to_iter_dataset())
    options = grain.sharding.ShardOptions(shard, processes)
    sampler = grain.samplers.IndexSampler(num_records=200, shard_options=options, shuffle=True, seed=7)
    source = grain.sources.RangeDataSource(0, 200, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(4)]))

def resumed(kind, data, save=False):
    config = dict(directory=f"{sys.argv[1]}/{kind}", save_interval_steps=1)
    with rps.CheckpointCallback(config, data=data) as checkpoint:
        try:
            say("step", checkpoint.resume(state)[1])
        except rps.DataStateError as error:
            say("refused:", *str(error).splitlines())
        if save:
            for step in range(3 + process):  # so that the positions differ, too
                next(data)
            checkpoint(3, state)

state = {"w": put(np.arange(8, dtype=np.float32))}
save = sys.argv[2] == "save"
for kind in ("dataset", "loader"):
    data = iterator(kind, process)
    resumed(kind, data, save)
    say([np.asarray(next(data)).tolist() for _ in range(8)])
if not save:
    resumed("loader", iterator("loader", 0))  # process 1 takes the data of process 0
"""


def test_each_process_goes_on_in_its_own_shard_and_no_other_number_of_processes_does(tmp_path):
    saved = run(SHARDS, 2, args=[str(tmp_path), "save"])
    resumed = run(SHARDS, 2, args=[str(tmp_path), "resume"])
    for before, after in zip(saved, resumed, strict=True):
        assert before.said[::2] == ["step 0", "step 0"]
        assert after.said[:4:2] == ["step 3", "step 3"]
        assert after.said[1:4:2] == before.said[1::2]
    for kind in (1, 3):
        shares = [{n for batch in json.loads(result.said[kind]) for n in batch} for result in saved]
        assert len(shares[0]) == len(shares[1]) == 32
        assert not shares[0] & shares[1]
    # A position that process 1 cannot take keeps process 0 from training without it.
    assert "refused: process 1: data.set_state() does not take the state" in resumed[0].said[4]
    assert resumed[1].said[4].startswith("refused: data.set_state() does not take the state")
    (alone,) = run(SHARDS, 1, args=[str(tmp_path), "resume"])
    for said in (alone.said[0], alone.said[2]):
        assert said.startswith("refused:")
        assert "has the data-iterator states of 2 processes, and this run has 1" in said
        assert "Resume with 2 processes, or pass data=False and position the data yourself" in said
    for kind in ("dataset", "loader"):
        with ocp.CheckpointManager(tmp_path / kind) as manager:
            target = {"w": np.zeros(8, np.float32)}
            assert (manager.restore(3, args=ocp.args.StandardRestore(target))["w"] == np.arange(8)).all()
