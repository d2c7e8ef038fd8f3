"""Whatever stands in the `checkpoint:` block becomes a configuration or a `ConfigError`."""

import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

import flax_rpsave as rps
from tests.faults.sizes import SIZES

PROFILE = hypothesis.settings(
    max_examples=SIZES.examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
BLOCKS = {
    "": [
        "enabled", "directory", "save_interval_steps", "max_to_keep", "keep_period", "resume", "async_save", "on_error",
        "commit_timeout_secs", "save_on_preemption", "preemption_signals", "item", "max_staging_gb", "keep_best",
        "replica_parallel", "storage",
    ],
    "keep_best": ["metric", "mode", "n"],
    "replica_parallel": ["enable", "min_slice_bytes", "max_replicas", "check_divergence"],
    "storage": ["use_ocdbt", "compression", "checksum"],
}  # fmt: skip
WORDS = [
    *("auto", "never", "required", "raise", "log", "min", "max", "zstd", "blosc", "warn", "fail"),
    *("SIGTERM", "SIGKILL", "TERM", "true", "None", "1e4", "010", "1:30"),
    *("~", "~nobody/x", "$HOME/x", "${NOT_SET}/x", "gs://b/x", "s3:/b", "hdfs://h", "/a\0b", "~a\0b", "\ud800"),
    *("0x" + "f" * 5000, "9" * 5000, ".inf", "-.inf", ".nan", "1970-01-01", "<<", "=", "!!int x", "&a", "*a"),
]


def scalars():
    numbers = st.one_of(
        st.integers(),
        st.floats(),
        st.sampled_from([0, -1, 2**63, 10**400, -(10**400), 1e308, 5e-324]),
    )
    texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=30), st.binary(max_size=9))
    return st.one_of(st.none(), st.booleans(), numbers, texts, st.dates())


def keys(block):
    near = [name[:-1] for name in BLOCKS[block]] + [name.upper() for name in BLOCKS[block]]
    known = st.sampled_from(BLOCKS[block])
    return st.one_of(known, known, known, st.sampled_from([*near, "every", "keep_last_n", "<<"]), scalars())


def values():
    return st.recursive(
        scalars(),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(scalars(), inner, max_size=4)),
        max_leaves=8,
    )


def blocks(name=""):
    inner = st.one_of(*(blocks(other) for other in BLOCKS if other)) if not name else st.nothing()
    return st.dictionaries(keys(name), st.one_of(values(), inner), max_size=6)


def outcome(make):
    try:
        return make()
    except rps.ConfigError as error:
        return error


@PROFILE
@hypothesis.given(st.one_of(blocks(), values()))
def test_whatever_mapping_is_a_configuration_or_a_config_error(block):
    found = outcome(lambda: rps.CheckpointConfig.from_mapping(block))
    if isinstance(found, rps.CheckpointConfig):
        assert outcome(lambda: rps.CheckpointConfig.from_mapping(block)) == found


@PROFILE
@hypothesis.given(st.one_of(blocks(), values()), st.data())
def test_whatever_text_is_a_configuration_or_a_config_error(block, data):
    text = yaml.dump({"checkpoint": block, "model": {"layers": 2}}, allow_unicode=True)
    for _ in range(data.draw(st.integers(0, 2))):  # and as a hand may change it
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 3))
        text = text[:at] + data.draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=3))) + text[at + length :]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "config.yaml")
        file.write_bytes(text.encode(errors="surrogatepass"))
        found = outcome(lambda: rps.CheckpointConfig.from_yaml(file))
    if isinstance(found, rps.ConfigError):
        assert str(file) in str(found)


def test_nesting_and_aliases_without_bound_are_refused_in_no_time(tmp_path):
    deep = "checkpoint: " + "[" * 20_000
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))
    itself = "checkpoint: &a\n  directory: /x\n  storage: *a\n"
    for text in (deep, aliases + "checkpoint: {directory: *a39}", aliases + "checkpoint: *a39", itself):
        (tmp_path / "c.yaml").write_text(text)
        assert len(str(outcome(lambda: rps.CheckpointConfig.from_yaml(tmp_path / "c.yaml")))) < 5000


def test_a_character_beyond_all_is_refused(tmp_path):
    """PyYAML asks Python for it, which raises an OverflowError."""
    (tmp_path / "c.yaml").write_text('checkpoint:\n  directory: "\\U99999999"\n')
    with pytest.raises(rps.ConfigError, match="not valid YAML"):
        rps.CheckpointConfig.from_yaml(tmp_path / "c.yaml")


def test_numbers_too_long_for_text_are_refused_by_name(tmp_path):
    digits = "f" * 5000  # Python writes none of more than 4300 decimal digits
    for key in ("max_to_keep", "max_staging_gb", "commit_timeout_secs", "resume", "directory", f"0x{digits[:900]}"):
        for sign in ("", "-"):
            (tmp_path / "c.yaml").write_text(f"checkpoint:\n  directory: /x\n  {key}: {sign}0x{digits}\n")
            found = outcome(lambda: rps.CheckpointConfig.from_yaml(tmp_path / "c.yaml"))
            if isinstance(found, rps.ConfigError):
                assert ("checkpoint.2^3599 or more" if key[0] == "0" else f"checkpoint.{key}") in str(found)
            else:
                assert (key, sign) == ("max_to_keep", "")
