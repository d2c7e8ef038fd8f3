"""What the encoder of OCDBT databases writes, TensorStore reads, lists and merges."""

import pathlib
import random
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
import tensorstore as ts

from flax_rpsave import commit, ocdbt
from flax_rpsave.directory import FileDirectory
from flax_rpsave.store import MAX_INLINE_NBYTES, OCDBT_MANIFEST, database, new_context, open_database

DATA = bytes(range(256)) * 4
FILES = ("d/first", "d/the-second", "d/third")

PROFILE = hypothesis.settings(max_examples=60, deadline=None)


def keys():
    """Keys that share long beginnings, are one another's beginnings, or have no byte in common."""
    part = st.sampled_from(
        [b"", b"a", b"params.layer_17.attention.kernel/", b"\x00", b"\xff\xff", "schlüssel".encode()]
    )
    return st.builds(bytes.__add__, st.lists(part, max_size=4).map(b"".join), st.binary(max_size=6))


def values():
    location = st.builds(
        lambda file, begin, length: ocdbt.Location(file, begin, length),
        st.sampled_from(FILES), st.integers(0, 500), st.integers(0, 500),
    )  # fmt: skip
    return st.one_of(st.binary(max_size=120), location)


def bytes_of(value):
    return DATA[value.offset : value.offset + value.length] if isinstance(value, ocdbt.Location) else value


def write(directory, entries, **options):
    """Writes a database; its nodes lie behind the data of the first file."""
    nodes, manifest = ocdbt.encode(
        entries, FILES[0], len(DATA), uuid=bytes(range(16)), commit_ns=1_700_000_000_000_000_000,
        max_inline_nbytes=MAX_INLINE_NBYTES, **options,
    )  # fmt: skip
    for file in FILES:
        directory.write(file, DATA + (nodes if file == FILES[0] else b""))
    directory.write(OCDBT_MANIFEST, manifest)


def read(store):
    reading = {key: store.read(key) for key in store.list().result()}
    return {key: read.result().value for key, read in reading.items()}


def root_of(directory):
    """What the manifest says of the root."""
    return ts.ocdbt.dump(ts.KvStore.open(directory.kvstore()).result()).result()["versions"][0]


@PROFILE
@hypothesis.given(st.dictionaries(keys(), values(), max_size=40), st.integers(1, 2000))
def test_tensorstore_reads_what_was_encoded_whatever_the_size_of_the_nodes(content, max_node_nbytes):
    with tempfile.TemporaryDirectory() as root:
        directory = FileDirectory(pathlib.Path(root))
        write(directory, sorted(content.items()), max_node_nbytes=max_node_nbytes)
        store = open_database(database(directory, True), new_context())
        assert read(store) == {key: bytes_of(value) for key, value in content.items()}
        for key in content:
            assert store.read(key + b"\0").result().state == "missing" or key + b"\0" in content
        middle = sorted(content)[len(content) // 2] if content else b""
        listed = store.list(ts.KvStore.KeyRange(middle, b"")).result()
        assert sorted(listed) == sorted(key for key in content if key >= middle)


@PROFILE
@hypothesis.given(
    st.lists(st.dictionaries(keys(), values(), max_size=25), min_size=1, max_size=3),
    st.integers(1, 2000),
    st.booleans(),
)
def test_encoded_databases_are_merged_also_with_those_of_tensorstore(contents, max_node_nbytes, one_of_theirs):
    with tempfile.TemporaryDirectory() as root:
        item, expected = FileDirectory(pathlib.Path(root)), {}
        context = new_context()
        for process, content in enumerate(contents):
            part = item / f"{commit.PROCESS_DATABASE}{process}"
            content = {b"%d" % process + key: value for key, value in content.items()}
            if one_of_theirs and process == 0:
                store = open_database(database(part, True), context)
                for key, value in content.items():
                    store.write(key, bytes_of(value)).result()
            else:
                write(part, sorted(content.items()), max_node_nbytes=max_node_nbytes)
            expected |= {key: bytes_of(value) for key, value in content.items()}
        assert read(commit.merge(item, len(contents), context)) == expected


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
    magnitude=st.floats(0, 5),
    shared=st.integers(0, 60_000),
    node=st.integers(6, 23),
    processes=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@hypothesis.example(magnitude=5, shared=40, node=13, processes=2, seed=0)
def test_databases_of_1_to_100_000_keys_are_read_whole_and_merged(magnitude, shared, node, processes, seed):
    rng, count = random.Random(seed), int(10**magnitude)
    prefix = b"p" * min(shared, 10_000_000 // count)
    with tempfile.TemporaryDirectory() as root:
        item, context, expected = FileDirectory(pathlib.Path(root)), new_context(), {}
        for process in range(processes):
            content = {}
            for _ in range(-(-count // processes)):
                key = prefix + b"%d" % process + rng.randbytes(rng.randint(0, 8))
                inline = rng.random() < 0.5
                content[key] = (
                    rng.randbytes(rng.randint(0, 60))
                    if inline
                    else ocdbt.Location(rng.choice(FILES), rng.randint(0, 500), rng.randint(0, 500))
                )
            part = item / f"{commit.PROCESS_DATABASE}{process}"
            write(part, sorted(content.items()), max_node_nbytes=max(2**node, len(prefix)))
            expected |= {key: bytes_of(value) for key, value in content.items()}
        assert read(commit.merge(item, processes, context)) == expected


@pytest.mark.parametrize(
    ("count", "options", "height"),
    [
        (0, {}, 0),
        (1, {}, 0),
        (50, {}, 0),
        (1_000, {"max_node_nbytes": 200}, 10),
        (20_000, {"max_node_nbytes": 5_000}, 2),
        (100_000, {"max_node_nbytes": 10_000}, 2),
        (100_000, {}, 1),
    ],
)
def test_the_tree_is_as_high_as_its_size_asks(tmp_path, count, options, height):
    directory = FileDirectory(tmp_path)
    key = "opt_state.0.mu.decoder.layers_{:06}.self_attention.query.kernel/c/{:03}/0".format
    names = sorted(key(i // 8, i % 8).encode() for i in range(count))
    locations = [ocdbt.Location(FILES[i % 2], i % 700, 200) for i in range(count)]
    content = {name: b"%d" % i if i % 3 == 0 else locations[i] for i, name in enumerate(names)}
    write(directory, list(content.items()), **options)
    root = root_of(directory)
    assert root["root_height"] == height
    statistics = root["root"]["statistics"]
    assert (statistics["num_keys"], statistics["num_indirect_value_bytes"]) == (count, 200 * (count - -(-count // 3)))
    size = (tmp_path / FILES[0]).stat().st_size - len(DATA)
    assert statistics["num_tree_bytes"] == size
    store = open_database(database(directory, True), new_context())
    assert sorted(store.list().result()) == names
    for name in names[:: max(1, count // 500)]:
        assert store.read(name).result().value == bytes_of(content[name])


def test_keys_may_share_all_but_their_last_of_65535_bytes(tmp_path):
    content = {b"k" * 65_534 + last: last for last in (b"a", b"b", b"c")}
    for options in ({}, {"max_node_nbytes": 1}):
        write(FileDirectory(tmp_path), sorted(content.items()), **options)
        assert read(open_database(database(FileDirectory(tmp_path), True), new_context())) == content


def test_values_and_nodes_may_lie_behind_four_gigabytes(tmp_path):
    behind = 5 << 30
    content = [(b"a", ocdbt.Location(FILES[0], behind, len(DATA))), (b"b", b"inline")]
    nodes, manifest = ocdbt.encode(
        content, FILES[0], behind + len(DATA), uuid=bytes(16), commit_ns=1, max_inline_nbytes=MAX_INLINE_NBYTES
    )
    directory = FileDirectory(tmp_path)
    directory.write(FILES[0], b"")
    with (tmp_path / FILES[0]).open("wb") as file:  # a hole before it
        file.seek(behind)
        file.write(DATA + nodes)
    directory.write(OCDBT_MANIFEST, manifest)
    assert read(open_database(database(directory, True), new_context())) == {b"a": DATA, b"b": b"inline"}


def test_tensorstore_goes_on_with_a_database_that_was_encoded(tmp_path):
    directory = FileDirectory(tmp_path)
    write(directory, [(b"a", b"1"), (b"b", ocdbt.Location(FILES[1], 3, 4))], max_node_nbytes=1)
    store = open_database(database(directory, True), new_context())
    store.write("c", b"x" * 500).result()
    store.write("a", None).result()
    assert read(open_database(database(directory, True), new_context())) == {b"b": DATA[3:7], b"c": b"x" * 500}


def test_a_changed_byte_of_a_node_is_found_by_its_checksum(tmp_path):
    directory = FileDirectory(tmp_path)
    write(directory, [(b"a", b"1" * 50), (b"b", b"2" * 50)])
    file = tmp_path / FILES[0]
    data = bytearray(file.read_bytes())
    data[len(DATA) + 60] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="CRC-32C"):
        open_database(database(directory, True), new_context()).read("a").result()


@pytest.mark.parametrize(
    ("keys", "said"),
    [((b"b", b"a"), "ascend"), ((b"a", b"a"), "ascend"), ((b"k" * 65536,), "at most 65535 bytes, got 65536")],
)
def test_keys_that_cannot_be_encoded_are_named(tmp_path, keys, said):
    with pytest.raises(ValueError, match=said):
        write(FileDirectory(tmp_path), [(key, b"") for key in keys])
