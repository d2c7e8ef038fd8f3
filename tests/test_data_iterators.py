"""The positions of grain's iterators are saved with the state, each process's own, and come back exactly."""

import collections
import enum
import json

import grain
import ml_dtypes
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


class Positioned:
    """An iterator whose position is whatever it was given."""

    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def assert_same(got, expected):
    """Equal, and of the same types throughout."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    else:
        assert repr(got) == repr(expected)  # NaN and -0.0, too


@pytest.mark.parametrize(
    "state",
    [
        None,
        (),
        (1, [2, (3,)], {"a": (None, True)}),
        {"epoch": 3, "shards": [(0, 7), (1, 9)], "buffer": b"\x00\xff", "rest": {"b": [b"", (b"x",)]}},
        {"empty": {}, "list": [], "tuple": (), "deep": [{}, [[], ((),)]]},
        [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 0.1],
        {"big": 10**400, "less": -(2**64), "flag": False},
        {"text": "ü\ud800\x00", "": 0, "json": {"json": 1}, "bytes": "eA==", "tuple": [1], "nested": ({"tuple": []},)},
        np.float64(1.5),
        [np.int64(2**60), np.uint8(3), np.bool_(True), np.float16("nan"), np.complex64(1 - 2j)],
        {"array": np.arange(6, dtype=">i4").reshape(2, 3), "none": np.zeros((0, 2)), "rank 0": np.array(7)},
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([True, False])),
    ],
    ids=lambda state: type(state).__name__,
)
def test_a_position_comes_back_equal_and_of_the_same_types(tmp_path, state):
    with rps.CheckpointCallback(config(tmp_path), data=Positioned(state)) as checkpoint:
        checkpoint(1, STATE)
    data = Positioned("not set")
    with rps.CheckpointCallback(config(tmp_path), data=data) as checkpoint:
        assert checkpoint.resume(STATE)[1] == 1
    assert_same(data.state, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        target = {"w": np.zeros(8, np.float32)}
        assert (manager.restore(1, args=ocp.args.StandardRestore(target))["w"] == np.arange(8)).all()


def test_an_array_of_a_position_can_be_written_to(tmp_path):
    with rps.CheckpointCallback(config(tmp_path), data=Positioned(np.arange(3))) as checkpoint:
        checkpoint(1, STATE)
    data = Positioned()
    with rps.CheckpointCallback(config(tmp_path), data=data) as checkpoint:
        checkpoint.resume(STATE)
    data.state[0] = 5
    assert data.state.tolist() == [5, 1, 2]


class Shard(enum.IntEnum):
    FIRST = 1


Range = collections.namedtuple("Range", ["start", "stop"])
ITSELF: list = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({1: 2}, r"get_state\(\) has the key 1, which would come back as text"),
        ({"a": [0, {(0, 1): 2}]}, r"get_state\(\)\['a'\]\[1\] has the key \(0, 1\)"),
        ({"seen": {1, 2}}, r"get_state\(\)\['seen'\] is a builtins.set, which would not come back as one"),
        ([Range(0, 5)], r"get_state\(\)\[0\] is a .*Range"),
        (collections.OrderedDict(a=1), "is a collections.OrderedDict"),
        ({"shard": Shard.FIRST}, r"\['shard'\] is a .*Shard"),
        (bytearray(b"x"), "is a builtins.bytearray"),
        (1j, "is a builtins.complex"),
        (np.array(["a"]), "has dtype str"),
        (np.array([{}]), "has dtype object"),
        (np.zeros(2, ml_dtypes.bfloat16), "has dtype bfloat16"),
        (np.zeros(2, "i4,f4"), "has dtype void"),
        (np.longlong(1), "has dtype int64"),
        (np.ma.masked_array([1], [True]), "is a numpy.ma.*MaskedArray"),
        (10**5000, "cannot be stored: Exceeds the limit"),
        (ITSELF, "cannot be stored: maximum recursion depth"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_as_it_is_is_refused_at_the_save_by_its_place(tmp_path, state, said):
    data = Positioned(state)
    with rps.CheckpointCallback(config(tmp_path), data=data) as checkpoint:
        with pytest.raises(rps.DataStateError, match=said) as raised:
            checkpoint(1, STATE)
        assert str(raised.value).startswith("data.get_state()")
        assert str(raised.value).count("get_state()") == 1
        assert list(tmp_path.iterdir()) == []
        data.state = "a better one"
        checkpoint(2, STATE)
    assert checkpoint.all_steps() == [2]


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
