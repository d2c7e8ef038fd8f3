"""What goes wrong while a checkpoint is read, told apart: its content, or the storage that it lies in."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from flax_rpsave.directory import TENSORSTORE_ERRORS, brief
from flax_rpsave.errors import CorruptCheckpointError, RPSaveError, StorageError

# TensorStore's status codes that speak of the content; the others (denied, unavailable, …) speak of the storage.
# A database's nodes that were read and make no sense carry none.
_CORRUPT = re.compile(
    r"(?:^|\s)(NOT_FOUND|DATA_LOSS|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE|UNIMPLEMENTED):|Error decoding "
)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what goes wrong while reading into the error that says whether the content or the storage is at fault."""
    try:
        yield
    except RPSaveError:
        raise
    except OSError as error:
        wrong = CorruptCheckpointError if error.errno == errno.ELOOP else StorageError  # a link that leads to itself
        raise wrong(f"{what} cannot be read: {error}") from error
    except TENSORSTORE_ERRORS as error:
        wrong = CorruptCheckpointError if _CORRUPT.search(str(error)) else StorageError
        raise wrong(f"{what} cannot be read: {brief(error)}") from error
