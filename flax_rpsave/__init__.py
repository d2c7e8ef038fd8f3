"""Replica-parallel, asynchronous checkpoints for Flax and Optax training loops, in the format of Orbax."""

from flax_rpsave._version import __version__ as __version__
from flax_rpsave.api import load, plan, save
from flax_rpsave.callback import CheckpointCallback
from flax_rpsave.config import CheckpointConfig, KeepBestConfig, ReplicaParallelConfig, StorageConfig
from flax_rpsave.errors import (
    CommitTimeoutError,
    ConfigError,
    CorruptCheckpointError,
    DataStateError,
    DivergenceError,
    NoCheckpointError,
    RPSaveError,
    SaveError,
    StepOrderError,
    StorageError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from flax_rpsave.planner import LeafPlan, SavePlan
from flax_rpsave.writer import SaveStats

__all__ = [
    "CheckpointCallback",
    "CheckpointConfig",
    "CommitTimeoutError",
    "ConfigError",
    "CorruptCheckpointError",
    "DataStateError",
    "DivergenceError",
    "KeepBestConfig",
    "LeafPlan",
    "NoCheckpointError",
    "RPSaveError",
    "ReplicaParallelConfig",
    "SaveError",
    "SavePlan",
    "SaveStats",
    "StepOrderError",
    "StorageConfig",
    "StorageError",
    "TreeMismatchError",
    "UnsupportedLeafError",
    "load",
    "plan",
    "save",
]
