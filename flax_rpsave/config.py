"""The `checkpoint:` section of a YAML file as frozen dataclasses.

Whatever the way in (a file, a mapping, keyword arguments), each value passes the check that stands beside its field,
and all that is wrong is reported in one `ConfigError`, by dotted key.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from flax_rpsave import _yaml
from flax_rpsave._checks import (
    Block,
    InvalidError,
    Nested,
    Problem,
    boolean,
    checked,
    directory,
    integer,
    item_name,
    one_of,
    positive,
    setting,
    signal_names,
    text,
    worded,
)
from flax_rpsave._foreign import shown


@dataclass(frozen=True, kw_only=True)
class ReplicaParallelConfig(Block):
    """How the replicas of a shard share the work of saving it."""

    _key = "checkpoint.replica_parallel"

    enable: bool = setting(boolean(), True)
    """Whether each replica saves a slice; where not, one replica saves whole shards."""
    min_slice_bytes: int = setting(integer(0), 1_048_576)
    """Smaller slices are not made: such a shard has fewer writers. 0 sets no floor."""
    max_replicas: int | None = setting(integer(1, nullable=True), None)
    """Writers of a shard at most; None sets no cap."""
    check_divergence: str | None = setting(one_of("warn", "fail", nullable=True), None)
    """Whether to compare the replicas' bits before they become the checkpoint: None, `warn` or `fail`.

    Replicas are the devices that hold the same shard of a leaf; and, in a run of several processes, what each process
    has for itself of a leaf that is no array on a mesh (a number, a NumPy array, an array on a single device), of which
    process 0's is saved. A leaf that is a NumPy array in one process and on a device in another counts as different.
    `warn` logs which replicas differ and saves the step; with `fail` the save fails with a `DivergenceError`.
    """


@dataclass(frozen=True, kw_only=True)
class StorageConfig(Block):
    """How arrays lie in storage."""

    _key = "checkpoint.storage"

    use_ocdbt: bool = setting(boolean(), True)
    """Whether slices go into an OCDBT database a process; where not, each is a raw zarr3 file."""
    compression: str | None = setting(one_of("zstd", "blosc", nullable=True), None)
    """None, `zstd` or `blosc`."""
    checksum: bool = setting(boolean(), True)
    """Whether to store digests, by which changed bytes are found on restore."""


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig(Block):
    """Which steps are kept for a metric, besides the newest ones."""

    _key = "checkpoint.keep_best"

    metric: str = setting(text())
    """The metric's name in the `metrics` given to the callback."""
    mode: str = setting(one_of("min", "max"))
    """`min` or `max`: what is best. There is no default."""
    n: int = setting(integer(1), 1)
    """How many of the best steps are kept."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Block):
    """The `checkpoint:` section.

    Nested blocks may be given as instances or as mappings. Values are checked at construction.

    Raises:
        ConfigError: with every problem, each by its dotted key.

    Example:
        >>> CheckpointConfig(directory="/ckpt/run1", storage={"compression": "zstd"}).storage.compression
        'zstd'
    """

    _key = "checkpoint"

    enabled: bool = setting(boolean(), True)
    """Whether anything is saved or resumed."""
    directory: str = setting(directory(), "")
    """A path, made absolute at construction (`~` and `$VAR` expanded, a `Path` is taken too), or gs://… or s3://….

    Needed unless `enabled` is false; empty if not given then.
    """
    save_interval_steps: int = setting(integer(1), 1000)
    """A step is saved where a multiple of this was reached or crossed since the last call."""
    max_to_keep: int | None = setting(integer(1, nullable=True), None)
    """How many of the newest committed steps are kept. None keeps all: the other two rules then change nothing."""
    keep_period: int | None = setting(integer(1, nullable=True), None)
    """A step divisible by this is never deleted."""
    keep_best: KeepBestConfig | None = setting(Nested(KeepBestConfig, nullable=True), None)
    """Steps kept for a metric, besides."""
    resume: str = setting(one_of("auto", "never", "required"), "auto")
    """`auto`: where there are steps; `never`: existing steps are an error; `required`: none is an error."""
    async_save: bool = setting(boolean(), True)
    """Whether the call returns while the snapshot is written; where not, it returns after the commit."""
    on_error: str = setting(one_of("raise", "log"), "raise")
    """What a background failure does at the next call: `raise` or `log`. A failed last save always raises at close.

    What a call itself refuses (a state that cannot be saved, a step that goes backwards) it raises in any case.
    """
    commit_timeout_secs: float = setting(positive(), 600)
    """How long process 0 waits for the others after its own write, and each for the others in `resume`, in seconds."""
    save_on_preemption: bool = setting(boolean(), True)
    """Whether a preemption signal saves at the next call and sets `should_stop`."""
    preemption_signals: tuple[str, ...] = setting(signal_names(), ("SIGTERM",))
    """Names of the signals that announce a preemption."""
    item: str | None = setting(item_name(), None)
    """Sub-item of a step's directory. None: `default`, and on reading the only one there is."""
    max_staging_gb: float | None = setting(positive(nullable=True), None)
    """Memory for snapshots, in GB (10⁹ bytes) a process, device and host each; None sets no limit.

    A save that needs more goes in groups, and the call waits until all but the last are written. A slice (times the
    devices of the process that copy one at once) and a host value are not divided: where one is larger than this, it is
    copied all the same, and a warning names its leaf and the memory that it takes. Freed memory that the allocator
    keeps, and 16 MiB of buffers of direct writes, are not counted.
    """
    replica_parallel: ReplicaParallelConfig = setting(Nested(ReplicaParallelConfig), ReplicaParallelConfig())
    """How the replicas of a shard share the work."""
    storage: StorageConfig = setting(Nested(StorageConfig), StorageConfig())
    """How arrays lie in storage."""

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], section: str = "checkpoint") -> Self:
        """Reads the config from the top-level key `section` of a YAML file.

        Numbers that YAML 1.1 reads as others than they show (`010`, `1:30`) and keys that stand twice are refused.

        Raises:
            ConfigError: with the file, and the line of each problem.
        """
        file = os.fspath(path)
        found = _yaml.read_section(file, section)

        def line(key: str) -> int:
            while key not in found.lines:  # a missing key has its block's line
                key = key.rpartition(".")[0]
            return found.lines[key]

        problems = found.problems
        values: dict[str, Any] = {}
        try:
            values = _section_values(cls, found.value, section)
        except InvalidError as invalid:
            misread = {key for key, _ in problems}  # what became of such a value is not worth a second complaint
            problems = problems + [problem for problem in invalid.problems if problem[0] not in misread]
        if problems:
            problems = sorted(problems, key=lambda problem: line(problem[0]))
            raise worded(problems, lambda key: f"{file}:{line(key)}: ")
        return cls(**values)

    @classmethod
    def from_mapping(cls, m: Mapping[str, Any]) -> Self:
        """Makes the config from a mapping with the keys of the `checkpoint:` section.

        Raises:
            ConfigError: with every problem, each by its dotted key.
        """
        try:
            values = _section_values(cls, m, cls._key)
        except InvalidError as invalid:
            raise worded(invalid.problems) from None
        return cls(**values)

    @classmethod
    def _conflicts(cls, values: Mapping[Any, object]) -> Iterator[Problem]:
        if values.get("enabled", True) is not False and values.get("directory") in (None, ""):
            yield "directory", "is missing: it must be a path, gs://… or s3://… (only `enabled: false` needs none)"


def _section_values(cls: type[CheckpointConfig], value: object, section: str) -> dict[str, Any]:
    if value is None:
        raise InvalidError([(section, "is empty; it must hold at least `directory`")])
    if not isinstance(value, Mapping):
        raise InvalidError([(section, f"must be a mapping, got {shown(value)}")])
    return checked(cls, value, section)
