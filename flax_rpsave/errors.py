"""Every error this package raises.

RPSaveError
├── ConfigError            a `checkpoint:` block that cannot be meant (also a ValueError)
├── SaveError              a step that was not saved; earlier ones are untouched
│   ├── UnsupportedLeafError   a leaf that cannot be stored, found before anything is written
│   ├── StepOrderError         a step that goes backwards, or exists already
│   ├── CommitTimeoutError     a step that some process did not finish in time
│   └── DivergenceError        replicas of the state that should be equal and are not
├── NoCheckpointError      nothing to resume from or load (also a FileNotFoundError)
├── TreeMismatchError      what is stored does not fit the target (also a ValueError)
├── DataStateError         data-iterator state that is missing, unexpected or of another process count
├── StorageError           storage that cannot be read now (also an OSError)
└── CorruptCheckpointError bytes of a committed step that are missing or changed
"""


class RPSaveError(Exception):
    """Base of every error of this package."""


class ConfigError(RPSaveError, ValueError):
    """The configuration is wrong; the message names the key and what was probably meant."""


class SaveError(RPSaveError):
    """A step was not saved. Steps committed before it are untouched and restorable."""


class UnsupportedLeafError(SaveError, TypeError):
    """A leaf of the state cannot be stored; raised before anything is written."""


class StepOrderError(SaveError, ValueError):
    """A step lies before the last one, or is there already."""


class CommitTimeoutError(SaveError, TimeoutError):
    """A process did not report in time, so the step was not committed."""


class DivergenceError(SaveError):
    """Replicas have drifted apart, so the step was not committed (`check_divergence: fail`)."""


class NoCheckpointError(RPSaveError, FileNotFoundError):
    """There is no committed checkpoint where one is required."""


class TreeMismatchError(RPSaveError, ValueError):
    """The stored tree and the target differ; the message lists every difference."""


class DataStateError(RPSaveError, ValueError):
    """The checkpoint's data-iterator state and the callback's `data` do not go together."""


class CorruptCheckpointError(RPSaveError, ValueError):
    """Bytes of a committed checkpoint are missing or changed."""


class StorageError(RPSaveError, OSError):
    """Storage could not be read: access denied, a network or device error. Nothing is said about what lies there."""
