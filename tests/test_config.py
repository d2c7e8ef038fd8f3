import dataclasses
import os
import pathlib
import pickle
import re
import signal
import textwrap

import numpy as np
import pytest
import yaml

from flax_rpsave import _foreign
from flax_rpsave.config import CheckpointConfig, KeepBestConfig, ReplicaParallelConfig, StorageConfig
from flax_rpsave.errors import ConfigError, RPSaveError

CONTRACT = """
checkpoint:
  enabled: true
  directory: /ckpt/run1
  save_interval_steps: 1000
  max_to_keep: null
  keep_period: null
  keep_best: null
  resume: auto
  async_save: true
  on_error: raise
  commit_timeout_secs: 600
  save_on_preemption: true
  preemption_signals: [SIGTERM]
  item: null
  max_staging_gb: null
  replica_parallel:
    enable: true
    min_slice_bytes: 1048576
    max_replicas: null
    check_divergence: null
  storage:
    use_ocdbt: true
    compression: null
    checksum: true
"""


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path."""

    def write_file(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_file


def refusal(**keys: object) -> str:
    """The message with which a section of these keys, and a directory, is refused."""
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_mapping({"directory": "/ckpt", **keys})
    return str(caught.value)


def nest(dotted: str, value: object) -> dict[str, object]:
    block, _, key = dotted.rpartition(".")
    if not block:
        return {key: value}
    extra = {"metric": "loss", "mode": "min"} if block == "keep_best" else {}
    return {block: {**extra, key: value}}


# What the section looks like


def test_the_keys_and_defaults_of_the_section_are_frozen():
    section = yaml.safe_load(CONTRACT)["checkpoint"]
    config = dataclasses.asdict(CheckpointConfig(directory="/ckpt/run1"))
    config["preemption_signals"] = list(config["preemption_signals"])
    assert config == section
    assert list(config) == list(section)
    assert [f.name for f in dataclasses.fields(KeepBestConfig)] == ["metric", "mode", "n"]


def test_the_section_as_documented_equals_the_defaults(write):
    assert CheckpointConfig.from_yaml(write(CONTRACT)) == CheckpointConfig(directory="/ckpt/run1")


def test_every_key_can_be_set(write):
    config = CheckpointConfig.from_yaml(
        write(
            """
            train: {lr: 1.0}
            checkpoint:
              enabled: yes
              directory: gs://bucket/run1/
              save_interval_steps: 10_000
              max_to_keep: 3
              keep_period: 50000
              keep_best: {metric: eval/loss, mode: min}
              resume: required
              async_save: off
              on_error: log
              commit_timeout_secs: 0.5
              save_on_preemption: false
              preemption_signals: [SIGUSR1, SIGTERM]
              item: params
              max_staging_gb: 2
              replica_parallel: {enable: false, min_slice_bytes: 0, max_replicas: 4, check_divergence: fail}
              storage: {use_ocdbt: false, compression: zstd, checksum: false}
            """
        )
    )
    assert config == CheckpointConfig(
        enabled=True,
        directory="gs://bucket/run1",
        save_interval_steps=10_000,
        max_to_keep=3,
        keep_period=50_000,
        keep_best=KeepBestConfig(metric="eval/loss", mode="min", n=1),
        resume="required",
        async_save=False,
        on_error="log",
        commit_timeout_secs=0.5,
        save_on_preemption=False,
        preemption_signals=("SIGUSR1", "SIGTERM"),
        item="params",
        max_staging_gb=2,
        replica_parallel=ReplicaParallelConfig(
            enable=False, min_slice_bytes=0, max_replicas=4, check_divergence="fail"
        ),
        storage=StorageConfig(use_ocdbt=False, compression="zstd", checksum=False),
    )


def test_a_config_is_immutable_hashable_and_survives_pickling():
    config = CheckpointConfig(directory="/ckpt", keep_best={"metric": "loss", "mode": "min"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_to_keep = 3
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


def test_keyword_arguments_take_mappings_for_the_nested_blocks():
    config = CheckpointConfig(directory="/ckpt", storage={"compression": "blosc"}, replica_parallel={"max_replicas": 2})
    assert config.storage == StorageConfig(compression="blosc")
    assert config.replica_parallel == ReplicaParallelConfig(max_replicas=2)


def test_a_changed_copy_is_checked_too():
    config = CheckpointConfig(directory="/ckpt")
    assert dataclasses.replace(config, max_to_keep=2).max_to_keep == 2
    with pytest.raises(ConfigError, match=r"checkpoint\.max_to_keep"):
        dataclasses.replace(config, max_to_keep=0)


def test_numpy_numbers_become_python_numbers():
    config = CheckpointConfig(directory="/c", save_interval_steps=np.int64(5), commit_timeout_secs=np.float32(0.5))
    assert (type(config.save_interval_steps), type(config.commit_timeout_secs)) == (int, float)


def test_members_of_signal_become_names():
    assert CheckpointConfig(directory="/c", preemption_signals=[signal.SIGINT]).preemption_signals == ("SIGINT",)


# The directory


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("/ckpt/run1", "/ckpt/run1"),
        ("/ckpt/run1/", "/ckpt/run1"),
        ("ckpt", "{cwd}/ckpt"),
        ("./ckpt//", "{cwd}/ckpt"),
        (".", "{cwd}"),
        (pathlib.Path("ckpt"), "{cwd}/ckpt"),
        ("~/ckpt", "/home/me/ckpt"),
        ("$SCRATCH/run", "/scratch/run"),
        ("${SCRATCH}/run", "/scratch/run"),
        ("gs://bucket/run/", "gs://bucket/run"),
        ("gs://$BUCKET/run", "gs://mine/run"),
        ("s3://bucket", "s3://bucket"),
    ],
)
def test_a_directory_is_made_absolute_once_report_55(given, resolved, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("BUCKET", "mine")
    start = tmp_path / "start"
    start.mkdir()
    monkeypatch.chdir(start)
    config = CheckpointConfig(directory=given)
    monkeypatch.chdir(tmp_path)
    assert config.directory == resolved.format(cwd=start)
    assert dataclasses.replace(config, max_to_keep=1).directory == config.directory


def test_a_symbolic_link_stays_the_name_of_the_directory_report_55(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert CheckpointConfig(directory=tmp_path / "link").directory == str(tmp_path / "link")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("$UNSET_VARIABLE/run", "$UNSET_VARIABLE is not set"),
        ("${EMPTY_VARIABLE}/run", "${EMPTY_VARIABLE} is not set, or empty"),
        ("~nobody-of-this-name/run", "no such user"),
        ("file:///ckpt", "leave file:// away"),
        ("memory://ckpt", "a path, gs:// and s3:// work"),
        ("hdfs://host/ckpt", "a path, gs:// and s3:// work"),
        ("GS://bucket/ckpt", "a path, gs:// and s3:// work"),
        (pathlib.Path("gs://bucket/ckpt"), "pathlib.Path drops one of the two slashes"),
        ("gs:///run", "write gs://bucket/…"),
        ("s3://bucket/../run", "leave them out"),
        ("s3://bucket//run", "leave them out"),
        ("/ckpt/a\0b", "control characters"),
        (" /ckpt", "spaces around it"),
        ("/ckpt\n", "line breaks"),
        ("  ", "must be a path"),
        (7, "got 7"),
        (b"/ckpt", "must be a path"),
        (None, "is missing"),
        ("", "is missing"),
    ],
)
def test_a_directory_that_cannot_be_meant_is_refused_reports_55_and_56(given, hint, monkeypatch):
    monkeypatch.delenv("UNSET_VARIABLE", raising=False)
    monkeypatch.setenv("EMPTY_VARIABLE", "")
    message = refusal(directory=given)
    assert message.startswith("checkpoint.directory ")
    assert hint in message


def test_a_directory_is_needed_unless_nothing_is_saved():
    with pytest.raises(ConfigError, match=r"checkpoint\.directory is missing.*enabled: false"):
        CheckpointConfig()
    assert CheckpointConfig(enabled=False).directory == ""
    assert CheckpointConfig.from_mapping({"enabled": False, "directory": None}).directory == ""


# Values that are refused

BAD_VALUES = [
    ("enabled", "true", "without quotes"),
    ("enabled", 1, "must be true or false, got 1"),
    ("enabled", None, "must be true or false, got None"),
    ("async_save", "y", "it is text: write true or false"),
    ("resume", "no", "never; it is an error over existing steps"),
    ("resume", "on", "auto, which starts at 0"),
    ("save_interval_steps", 0, "`enabled: false` switches saving off"),
    ("save_interval_steps", -5, "at least 1, got -5"),
    ("save_interval_steps", True, "got True"),
    ("save_interval_steps", 1000.0, "write 1000"),
    ("save_interval_steps", 0.5, "an integer"),
    ("save_interval_steps", "1e4", "write 10000"),
    ("save_interval_steps", "1.0e4", "write 10000"),
    ("save_interval_steps", "08", "write 8"),
    ("save_interval_steps", "1000", "write 1000"),
    ("save_interval_steps", "-5", "at least 1, got '-5'"),
    ("max_to_keep", "0", "null"),
    ("save_interval_steps", "0o10", "got '0o10': it is text, since YAML 1.1 does not know 0o: write 8"),
    ("save_interval_steps", "0o1_750", "write 1000"),
    ("save_interval_steps", "0o19", "a plain number"),
    ("save_interval_steps", "1,000", "got '1,000': it is text, since YAML does not group digits so: write 1000"),
    ("save_interval_steps", "1 000 000", "write 1000000"),
    ("save_interval_steps", "1'000", "write 1000"),
    ("save_interval_steps", "1,000e3", "a plain number"),
    ("save_interval_steps", "10k", "got '10k': it is text: write a plain number such as 1000, without a unit"),
    ("save_interval_steps", "1,0", "a plain number"),
    ("save_interval_steps", 1000.5, "got 1000.5: write a whole number such as 1001"),
    ("save_interval_steps", "often", "an integer of at least 1, got 'often'"),
    ("save_interval_steps", None, "an integer"),
    ("save_interval_steps", [1000], "got [1000]"),
    ("max_to_keep", 0, "null keeps all"),
    ("max_to_keep", -1, "null keeps all"),
    ("max_to_keep", "None", "write null (YAML reads it as text)"),
    ("max_to_keep", "none", "write null"),
    ("max_to_keep", False, "write null"),
    ("max_to_keep", "all", "null keeps all"),
    ("max_to_keep", float("inf"), "null keeps all"),
    ("keep_period", 0, "null keeps no step for its number"),
    ("keep_period", "None", "write null"),
    ("keep_best", "loss", "write {metric: loss, mode: min, n: 1}"),
    ("keep_best", 3, "null or a mapping, got 3"),
    ("keep_best", "None", "write null"),
    ("keep_best.metric", "", "a name (text)"),
    ("keep_best.metric", 5, "got 5"),
    ("keep_best.mode", "minimum", "min or max"),
    ("keep_best.mode", None, "there is no default"),
    ("keep_best.mode", "auto", "there is no default"),
    ("keep_best.mode", True, "max where greater is better"),
    ("keep_best.n", 0, "`keep_best: null` switches it off"),
    ("keep_best.n", None, "an integer of at least 1"),
    ("resume", True, "auto"),
    ("resume", False, "never"),
    ("resume", "true", "auto"),
    ("resume", None, "never"),
    ("resume", "latest", "auto or never or required"),
    ("resume", "require", "did you mean required?"),
    ("resume", "must", "required"),
    ("resume", 1000, "auto or never or required"),
    ("on_error", "ignore", "log"),
    ("on_error", "Raise", "did you mean raise?"),
    ("commit_timeout_secs", 0, "a wait without an end is not offered"),
    ("commit_timeout_secs", float("inf"), "a wait without an end is not offered"),
    ("commit_timeout_secs", float("nan"), "finite"),
    ("commit_timeout_secs", -1.5, "above 0, got -1.5"),
    ("commit_timeout_secs", "1e3", "write 1000"),
    ("commit_timeout_secs", "2.5", "write 2.5"),
    ("save_interval_steps", "1,000.5", "write a whole number such as 1001"),
    ("commit_timeout_secs", "1,000.5", "write 1000.5"),
    ("commit_timeout_secs", "10 min", "without a unit"),
    ("commit_timeout_secs", 2e9, "at most 1,000,000,000 and above 0, got 2000000000.0"),
    ("commit_timeout_secs", True, "got True"),
    ("commit_timeout_secs", None, "a finite number of at most 1,000,000,000 and above 0, got None"),
    ("preemption_signals", "SIGTERM", "write [SIGTERM]"),
    ("preemption_signals", None, "[] names none"),
    ("preemption_signals", ["SIGKILL"], "SIGKILL cannot be caught"),
    ("preemption_signals", ["SIGSTOP"], "SIGSTOP cannot be caught"),
    ("preemption_signals", ["SIGTERM", "SIGSEGV"], "SIGSEGV cannot be caught"),
    ("preemption_signals", ["TERM"], "did you mean SIGTERM?"),
    ("preemption_signals", ["sigusr1"], "did you mean SIGUSR1?"),
    ("preemption_signals", [15], "did you mean SIGTERM?"),
    ("preemption_signals", ["SIGTREM"], "did you mean SIGTERM?"),
    ("preemption_signals", ["later"], "is not a signal's name"),
    ("preemption_signals", [True], "is not a signal's name"),
    ("preemption_signals", [["SIGTERM"]], "is not a signal's name"),
    ("item", "a/b", "a plain file name"),
    ("item", ".hidden", "a plain file name"),
    ("item", "ends.", "a plain file name"),
    ("item", "", "write null"),
    ("item", "None ", "write null"),
    ("item", 7, "got 7"),
    ("item", "7/a", "got '7/a'"),
    ("item", "metrics", "Orbax gives that name to something else"),
    ("item", "_CHECKPOINT_METADATA", "Orbax gives that name to something else"),
    ("item", "x.orbax-checkpoint-tmp-1", "Orbax gives that name to something else"),
    ("max_staging_gb", 0, "null sets no limit"),
    ("max_staging_gb", float("inf"), "null sets no limit"),
    ("max_staging_gb", "None", "write null"),
    ("replica_parallel", True, "write {enable: true} or {enable: false}"),
    ("replica_parallel", None, "a mapping, got None"),
    ("replica_parallel.enable", "on", "write true or false"),
    ("replica_parallel.min_slice_bytes", -1, "0 sets no floor"),
    ("replica_parallel.min_slice_bytes", "1e6", "write 1000000"),
    ("replica_parallel.min_slice_bytes", 1e6, "write 1000000"),
    ("replica_parallel.max_replicas", 0, "`enable: false` saves with one replica"),
    ("replica_parallel.max_replicas", "none", "write null"),
    ("replica_parallel.check_divergence", True, "warn, or fail"),
    ("replica_parallel.check_divergence", False, "write null"),
    ("replica_parallel.check_divergence", "warning", "did you mean warn?"),
    ("replica_parallel.check_divergence", "raise", "fail"),
    ("storage", "zstd", "write {compression: zstd}"),
    ("storage.use_ocdbt", "false", "write true or false"),
    ("storage.compression", "gzip", "null or zstd or blosc"),
    ("storage.compression", "None", "write null"),
    ("storage.compression", False, "write null"),
    ("storage.compression", "ZSTD", "did you mean zstd?"),
    ("storage.compression", 3, "null or zstd or blosc"),
    ("storage.checksum", "crc32c", "true or false"),
]


@pytest.mark.parametrize(("key", "value", "hint"), BAD_VALUES)
def test_a_wrong_value_is_refused_by_key_with_what_to_write_reports_30_and_63(key, value, hint):
    message = refusal(**nest(key, value))
    assert message.startswith(f"checkpoint.{key} must be ")
    assert hint in message


@pytest.mark.parametrize(("key", "value", "hint"), BAD_VALUES)
def test_keyword_arguments_are_refused_with_the_same_words(key, value, hint):
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(directory="/ckpt", **nest(key, value))
    assert str(caught.value) == refusal(**nest(key, value))


def test_a_nested_block_names_its_dotted_keys_by_itself():
    with pytest.raises(ConfigError, match=r"^checkpoint\.replica_parallel\.max_replicas must be"):
        ReplicaParallelConfig(max_replicas=0)
    with pytest.raises(ConfigError, match=r"^checkpoint\.storage\.compression must be"):
        StorageConfig(compression="gzip")


def test_the_metric_and_its_mode_have_no_default():
    message = refusal(keep_best={})
    assert "checkpoint.keep_best.metric is missing: it must be a name" in message
    assert "checkpoint.keep_best.mode is missing: it must be min or max" in message


# Keys that do not exist

UNKNOWN_KEYS = [
    ("every", "save_interval_steps"),
    ("save_every", "save_interval_steps"),
    ("save_interval", "save_interval_steps"),
    ("period", "save_interval_steps"),
    ("checkpoint_period", "save_interval_steps"),
    ("save_steps", "save_interval_steps"),
    ("every_n_train_steps", "save_interval_steps"),
    ("saveIntervalSteps", "save_interval_steps"),
    ("save-interval-steps", "save_interval_steps"),
    ("save_intervall_steps", "save_interval_steps"),
    ("keep_last_n", "max_to_keep"),
    ("keep", "max_to_keep"),
    ("keep_checkpoint_max", "max_to_keep"),
    ("max_num_checkpoints_to_keep", "max_to_keep"),
    ("save_total_limit", "max_to_keep"),
    ("max_to_kep", "max_to_keep"),
    ("keep_every_n_steps", "keep_period"),
    ("save_top_k", "keep_best ({metric: …, mode: min or max, n: 1})"),
    ("best_fn", "keep_best"),
    ("monitor", "keep_best.metric"),
    ("mode", "keep_best.mode"),
    ("greater_is_better", "keep_best.mode (min or max)"),
    ("async_checkpointing", "async_save"),
    ("enable_async_checkpointing", "async_save"),
    ("enable_checkpointing", "enabled"),
    ("enable", "enabled"),
    ("ckpt_dir", "directory"),
    ("checkpoint_dir", "directory"),
    ("path", "directory"),
    ("dirpath", "directory"),
    ("output_dir", "directory"),
    ("base_output_directory", "directory"),
    ("directroy", "directory"),
    ("resume_from_checkpoint", "resume (auto, never or required)"),
    ("restore", "resume"),
    ("overwrite", "resume"),
    ("timeout_secs", "commit_timeout_secs"),
    ("commit_timeout", "commit_timeout_secs"),
    ("use_ocdbt", "storage.use_ocdbt"),
    ("compression", "storage.compression"),
    ("use_compression", "storage.compression (null, zstd or blosc)"),
    ("use_replica_parallel", "replica_parallel.enable"),
    ("max_replicas", "replica_parallel.max_replicas"),
    ("min_slice_bytes_for_replica_parallel", "replica_parallel.min_slice_bytes"),
    ("replica_parallel.enabled", "replica_parallel.enable"),
    ("replica_parallel.min_slice_byte", "replica_parallel.min_slice_bytes"),
    ("replica_parallel.compression", "storage.compression"),
    ("storage.codec", "storage.compression"),
    ("storage.ocdbt", "storage.use_ocdbt"),
    ("keep_best.monitor", "keep_best.metric"),
    ("keep_best.max_to_keep", "max_to_keep"),
]


@pytest.mark.parametrize(("key", "meant"), UNKNOWN_KEYS)
def test_an_unknown_key_is_answered_with_the_one_probably_meant_report_63(key, meant):
    message = refusal(**nest(key, 3))
    expected = f"checkpoint.{key} is not a key; did you mean {meant}"
    assert re.match(rf"{re.escape(expected)}( \(.*\))?\?$", message)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("save_interval_secs", "clocks of processes differ and each would save another step; use save_interval_steps"),
        ("save_every_minutes", "clocks of processes differ"),
        ("train_time_interval", "clocks of processes differ"),
        ("save_checkpoints_secs", "clocks of processes differ"),
        ("keep_time_interval", "use keep_period"),
        ("keep_checkpoint_every_n_hours", "use keep_period"),
        ("every_n_epochs", "save_interval_steps counts completed updates"),
        ("save_weights_only", 'load(path, subtree="params")'),
        ("step_prefix", "named by its number"),
        ("save_last", "force=True"),
        ("zzz", "the keys here: enabled, directory, save_interval_steps"),
        ("checkpoint", "not the whole file"),
        (True, "YAML reads on, yes, no"),
        (7, "the keys here"),
    ],
)
def test_a_key_that_is_not_offered_is_answered_with_the_reason_report_42(key, why):
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_mapping({"directory": "/ckpt", key: 3})
    message = str(caught.value)
    assert message.startswith(f"checkpoint.{key} is not a key")
    assert why in message


def test_no_spelling_of_another_tool_is_a_key_here_and_all_point_to_keys_that_exist():
    keys = {f.name for f in dataclasses.fields(CheckpointConfig)}
    for block in (ReplicaParallelConfig, StorageConfig, KeepBestConfig):
        keys |= {f"{block._key.removeprefix('checkpoint.')}.{f.name}" for f in dataclasses.fields(block)}
    assert set(_foreign._SPELLINGS) <= keys
    assert set(_foreign._HOLDS) <= keys
    assert not set(_foreign._MEANT) & keys
    listed = [name for names in _foreign._SPELLINGS.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert not set(listed) & set(_foreign._NOT_OFFERED)


def test_all_problems_are_reported_at_once():
    lines = refusal(every=5, max_to_keep=0, storage={"compression": "gzip", "codec": 1}).splitlines()
    assert lines[0] == "4 problems:"
    assert [line.split()[0] for line in lines[1:]] == [
        "checkpoint.every",
        "checkpoint.max_to_keep",
        "checkpoint.storage.compression",
        "checkpoint.storage.codec",
    ]


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_only_a_mapping_makes_a_config(value):
    with pytest.raises(ConfigError, match=r"^checkpoint (must be a mapping|is empty)"):
        CheckpointConfig.from_mapping(value)


def test_a_config_error_is_caught_as_a_value_error_and_as_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, RPSaveError)


# Files


@pytest.mark.parametrize(
    ("line", "key", "hint"),
    [
        ("save_interval_steps: 1e4", "save_interval_steps", "write 10000"),
        ("save_interval_steps: 1.0e4", "save_interval_steps", "write 10000"),
        ("save_interval_steps: 1.0e+4", "save_interval_steps", "write 10000"),
        ("save_interval_steps: 010", "save_interval_steps", "octal, 8; write 10"),
        ("save_interval_steps: 0_100", "save_interval_steps", "octal, 64; write 100"),
        ("max_to_keep: 00", "max_to_keep", "octal, 0; write 0"),
        ("save_interval_steps: 0o10", "save_interval_steps", "since YAML 1.1 does not know 0o: write 8"),
        ("save_interval_steps: 1,000", "save_interval_steps", "group digits so: write 1000"),
        ("save_interval_steps: 1_000.5", "save_interval_steps", "got 1000.5: write a whole number such as 1001"),
        ("save_interval_steps: 1:30", "save_interval_steps", "base 60"),
        ("commit_timeout_secs: 1:30.5", "commit_timeout_secs", "base 60"),
        ("max_to_keep: None", "max_to_keep", "write null"),
        ("resume: true", "resume", "auto"),
        ("resume: off", "resume", "never"),
        ("every: 10", "every", "did you mean save_interval_steps?"),
        ("keep_best: {metric: loss, mode: min, n: 01}", "keep_best.n", "octal, 1; write 1"),
        ("storage: {checksum: true, checksum: false}", "storage.checksum", "stands twice, first on line 3"),
        ("directory: /other", "directory", "stands twice, first on line 2"),
        ("preemption_signals: [SIGKILL]", "preemption_signals", "cannot be caught"),
        ("replica_parallel:", "replica_parallel", "a mapping, got None"),
        ("resume: 2024-01-01", "resume", "auto or never or required"),
        ("keep_best: {metric: loss}", "keep_best.mode", "is missing"),
    ],
)
def test_a_trap_of_yaml_is_refused_with_file_line_and_key_report_63(line, key, hint, write):
    path = write(f"checkpoint:\n  directory: /ckpt\n  {line}\n")
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_yaml(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: checkpoint.{key} ")
    assert hint in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "value"),
    [("10_000", 10_000), ("0x10", 16), ("0b11", 3), ("+5", 5), ("1000", 1000)],
)
def test_a_number_that_shows_what_it_is_is_accepted_report_63(text, value, write):
    path = write(f"checkpoint: {{directory: /ckpt, save_interval_steps: {text}}}")
    assert CheckpointConfig.from_yaml(path).save_interval_steps == value


def test_text_that_looks_like_a_trap_is_accepted_in_quotes(write):
    path = write('checkpoint: {directory: /ckpt, item: "010", keep_best: {metric: "1:30", mode: max}}')
    config = CheckpointConfig.from_yaml(path)
    assert (config.item, config.keep_best.metric) == ("010", "1:30")


def test_problems_of_a_file_come_in_the_order_of_its_lines(write):
    path = write("checkpoint:\n  every: 1\n  keep_period: 010\n  max_to_keep: 0\n")
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_yaml(path)
    assert re.findall(r":(\d+): checkpoint\.(\w+)", str(caught.value)) == [
        ("1", "directory"),
        ("2", "every"),
        ("3", "keep_period"),
        ("4", "max_to_keep"),
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "is empty; it must hold a `checkpoint:` section"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", ":1: must be a mapping"),
        ("text\n", ":1: must be a mapping"),
        (
            "a: {}\nckeckpoint: {}\n",
            "its top-level keys: 'a', 'ckeckpoint'; did you mean section='ckeckpoint'?",
        ),
        ("{}\n", "its top-level keys: none"),
        ("a: 1\ncheckpoint:\n", ":2: checkpoint is empty; it must hold at least `directory`"),
        ("checkpoint: []\n", ":1: checkpoint must be a mapping, got []"),
        ("checkpoint: {}\n", ":1: checkpoint.directory is missing"),
        (
            "checkpoint: {enabled: false}\ncheckpoint: {}\n",
            ":2: `checkpoint:` stands twice, first on line 1",
        ),
        ("a: 1\ncheckpoint: {directory: [}\n", ":2: not valid YAML"),
        ("a: b: c\n", ":1: not valid YAML"),
        ("checkpoint:\n  directory: !!python/name:os.sep\n", ":2: not valid YAML"),
        ("checkpoint: {resume: 2024-99-99}\n", ": not valid YAML"),
        ("checkpoint: {directory: \x00}\n", ": not valid YAML"),
        ("checkpoint: {directory: /a}\n---\ncheckpoint: {directory: /b}\n", ":2: not valid YAML"),
    ],
)
def test_a_file_without_a_usable_section_is_refused_by_name(text, hint, write):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_yaml(path)
    assert str(caught.value).startswith(path)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_file_that_cannot_be_read_is_refused_by_name(name, tmp_path):
    with pytest.raises(ConfigError, match=f"^{re.escape(os.path.join(tmp_path, name))}: cannot be read"):
        CheckpointConfig.from_yaml(os.path.join(tmp_path, name))


def test_another_section_is_read_and_named_in_errors(write):
    path = write("ckpt: {directory: /ckpt}\nbad: {directory: /ckpt, storage: {checksum: 1}}\n")
    assert CheckpointConfig.from_yaml(path, section="ckpt").directory == "/ckpt"
    with pytest.raises(ConfigError, match=r":2: bad\.storage\.checksum must be true or false"):
        CheckpointConfig.from_yaml(path, section="bad")


def test_tags_and_traps_of_other_sections_do_no_harm(write):
    path = write("model: !custom {size: 010}\ncheckpoint: {directory: /ckpt}\n")
    assert CheckpointConfig.from_yaml(pathlib.Path(path)).directory == "/ckpt"


def test_anchors_and_merge_keys_work_and_are_looked_into(write):
    text = """
        shared: &shared {directory: /ckpt, max_to_keep: 2}
        checkpoint:
          <<: *shared
          max_to_keep: 5
    """
    assert CheckpointConfig.from_yaml(write(text)).max_to_keep == 5
    with pytest.raises(ConfigError, match=r":2: checkpoint\.keep_period is written 010"):
        CheckpointConfig.from_yaml(write(text.replace("max_to_keep: 2", "keep_period: 010")))


def test_a_section_that_holds_itself_is_refused(write):
    with pytest.raises(ConfigError, match=r"checkpoint\.storage"):
        CheckpointConfig.from_yaml(write("checkpoint: &c {directory: /ckpt, storage: *c}\n"))
