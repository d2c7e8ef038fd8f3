"""Which engine a save gets.

On a local disk, where nothing compresses, chunks are written past the page cache (`direct`), unless the first save of
the run finds that the file system refuses that or is slower for it. Everything else goes through TensorStore. The
environment variable RPSAVE_ENGINE says otherwise: `tensorstore` always takes that, `direct` takes direct writes
wherever the directory is a path and nothing compresses, without asking whether they are of use; `auto` is the default.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from flax_rpsave.blocks import Buffers, Helper, new_buffers
from flax_rpsave.chunk_files import ChunkFilesEngine
from flax_rpsave.config import StorageConfig
from flax_rpsave.direct import DirectEngine
from flax_rpsave.direct_file import (
    ALIGNMENT,
    BLOCK_NBYTES,
    ENGINE_VARIABLE,
    DirectFile,
    aligned_buffer,
    is_on_local_disk,
    reports_lost_writes,
)
from flax_rpsave.directory import Directory, FileDirectory
from flax_rpsave.engine import Engine, TensorStoreEngine
from flax_rpsave.errors import ConfigError
from flax_rpsave.planner import LeafPlan

logger = logging.getLogger("flax_rpsave")

_MODES = ("auto", "direct", "tensorstore")
_TIMED_NBYTES = 256 << 20  # a save of less is not worth the time that a comparison takes
_PROBE_BLOCKS = 2
_PROBE_ROUNDS = 2
_TOLERANCE = 1.25  # such a short measurement is no more exact; direct writes need less of the processor


class Engines:
    """Makes the engine of each save of a run; keeps what direct writes need between them.

    Raises:
      ConfigError: RPSAVE_ENGINE has another value.
    """

    def __init__(self) -> None:
        self._mode = os.environ.get(ENGINE_VARIABLE, "auto")
        if self._mode not in _MODES:
            raise ConfigError(f"{ENGINE_VARIABLE} must be one of {', '.join(_MODES)}, got {self._mode!r}")
        self._direct: bool | None = None if self._mode == "auto" else self._mode == "direct"
        self._buffers: Buffers | None = None

    def helper(self, directory: Directory, storage: StorageConfig, name: str) -> Helper | None:
        """Starts the second thread of a save that may need one; the caller ends it.

        Raises:
          RuntimeError: No thread can be started.
        """
        return Helper(name) if self._direct is not False and _takes_files(directory, storage) else None

    def make(
        self,
        directory: Directory,
        plans: Sequence[LeafPlan],
        describe: bool,
        storage: StorageConfig,
        nbytes: int,
        helper: Helper | None,
        context: ts.Context,
    ) -> Engine:
        """The engine of a save.

        Args:
          directory: Where the process's database lies, or the item, where there are no databases.
          plans: Plans of the leaves.
          describe: Whether this process writes the arrays' documents.
          storage: The `storage:` block.
          nbytes: About how many bytes of chunks there will be.
          helper: The second thread; without one, TensorStore writes.
          context: TensorStore resources of the save.
        """
        if (
            isinstance(directory, FileDirectory)
            and helper is not None
            and self._writes_directly(directory, nbytes)
            and (storage.use_ocdbt or self._mode == "direct" or reports_lost_writes(str(directory)))
        ):
            self._buffers = self._buffers or new_buffers()
            engine = DirectEngine if storage.use_ocdbt else ChunkFilesEngine
            return engine(directory, plans, describe, storage.checksum, self._buffers, helper, self._refused, nbytes)
        return TensorStoreEngine(directory, plans, describe, storage, context)

    def _writes_directly(self, directory: FileDirectory, nbytes: int) -> bool:
        if self._direct is None:
            directory.make()
            self._direct = is_on_local_disk(str(directory)) and _is_worth_it(directory, nbytes)
        return self._direct

    def _refused(self) -> None:
        if self._mode == "auto":
            logger.warning("direct writes are refused: later saves of this run are written by TensorStore")
            self._direct = False


def _takes_files(directory: Directory, storage: StorageConfig) -> bool:
    return isinstance(directory, FileDirectory) and storage.compression is None


def _is_worth_it(directory: FileDirectory, nbytes: int) -> bool:
    """Whether the directory's file system takes direct writes and, where the save is large, is not slower for them."""
    timed = nbytes >= _TIMED_NBYTES
    data = aligned_buffer(BLOCK_NBYTES if timed else ALIGNMENT)
    data.view(np.int64)[:] = np.arange(len(data) // 8)  # not zeros, which some storage does not write
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for direct in (True, False) * _PROBE_ROUNDS if timed else (True,):
        took = _probe(directory, data.data, direct)
        if took is None:
            return False
        seconds[direct].append(took)
    if not timed:
        return True
    fast = min(seconds[True]) <= _TOLERANCE * min(seconds[False])
    logger.info(
        "%s: %.2f GB/s by direct writes, %.2f GB/s through the page cache: %s",
        directory, *(_PROBE_BLOCKS * len(data) / 1e9 / min(seconds[d]) for d in (True, False)),
        "direct writes are used" if fast else "TensorStore writes",
    )  # fmt: skip
    return fast


def _probe(directory: FileDirectory, data: memoryview, direct: bool) -> float | None:
    """Seconds to write the data a few times and make it durable; None where the direct writes asked for are refused."""
    path = str(directory.path / f".probe-{secrets.token_hex(4)}")  # several processes may write to one directory
    begun = time.perf_counter()
    file = DirectFile(path, direct=direct)
    try:
        file.preallocate(_PROBE_BLOCKS * len(data))
        for k in range(_PROBE_BLOCKS):
            file.write(data, k * len(data))
        file.finish(_PROBE_BLOCKS * len(data))
        return time.perf_counter() - begun if file.direct == direct else None
    finally:
        file.close()
        os.unlink(path)
