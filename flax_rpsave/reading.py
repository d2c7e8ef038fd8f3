"""What goes wrong while a checkpoint is read, told apart: its content, or the storage that it lies in."""

from __future__ import annotations

import re
from typing import Any

from flax_rpsave.directory import brief
from flax_rpsave.errors import CorruptCheckpointError, RPSaveError, StorageError

# TensorStore's status codes that speak of the content; the others (denied, unavailable, …) speak of the storage.
# A database's nodes that were read and make no sense carry none.
_CORRUPT = re.compile(
    r"(?:^|\s)(NOT_FOUND|DATA_LOSS|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE|UNIMPLEMENTED):|Error decoding "
)


class Reading:
    """Turns what goes wrong while reading into the error that says whether the content or the storage is at fault."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RPSaveError):
            return
        if isinstance(error, OSError):
            raise StorageError(f"{self._what} cannot be read: {error}") from error
        if isinstance(error, (ValueError, NotImplementedError, RuntimeError)):
            wrong = CorruptCheckpointError if _CORRUPT.search(str(error)) else StorageError
            raise wrong(f"{self._what} cannot be read: {brief(error)}") from error
