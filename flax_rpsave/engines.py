"""Which engine a save gets.

On a local disk, where nothing compresses, chunks are written past the page cache (`direct`), unless the first save of
the run finds that the file system refuses that or is slower for it. Everything else goes through TensorStore. The
environment variable RPSAVE_ENGINE says otherwise: `tensorstore` always takes that, `direct` takes direct writes
wherever the directory is a path and nothing compresses, without asking whether they are of use; `auto` is the default.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from flax_rpsave.blocks import Block, BlockWriter, Buffers, Helper, Part, Value, new_buffers, plain_value
from flax_rpsave.chunk_files import ChunkFilesEngine
from flax_rpsave.config import StorageConfig
from flax_rpsave.direct import DirectEngine
from flax_rpsave.direct_file import (
    ALIGNMENT,
    BLOCK_NBYTES,
    ENGINE_VARIABLE,
    DirectFile,
    engine_mode,
    is_on_local_disk,
    reports_lost_writes,
)
from flax_rpsave.directory import Directory, FileDirectory
from flax_rpsave.engine import Engine, TensorStoreEngine
from flax_rpsave.errors import ConfigError
from flax_rpsave.host_memory import aligned_buffer
from flax_rpsave.planner import LeafPlan

logger = logging.getLogger("flax_rpsave")

_MODES = ("auto", "direct", "tensorstore")
_TIMED_NBYTES = 256 << 20  # a save of less is not worth the time that a comparison takes
_PROBE_BLOCKS = 2  # one for each thread
_PROBE_ROUNDS = 2  # at least, before direct writes are taken for slower
_PROBE_SECS = 0.3  # after which no further round begins
_TOLERANCE = 1.25  # such a short measurement is no more exact; direct writes need less of the processor


class Engines:
    """Makes the engine of each save of a run; keeps what direct writes need between them.

    Raises:
      ConfigError: RPSAVE_ENGINE has another value.
    """

    def __init__(self) -> None:
        self._mode = engine_mode()
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
        if isinstance(directory, FileDirectory) and helper is not None:
            buffers = self._buffers or new_buffers()
            if self._writes_directly(directory, nbytes, buffers, helper) and (
                storage.use_ocdbt or self._mode == "direct" or reports_lost_writes(str(directory))
            ):
                self._buffers = buffers
                engine = DirectEngine if storage.use_ocdbt else ChunkFilesEngine
                return engine(directory, plans, describe, storage.checksum, buffers, helper, self._refused, nbytes)
        return TensorStoreEngine(directory, plans, describe, storage, context)

    def _writes_directly(self, directory: FileDirectory, nbytes: int, buffers: Buffers, helper: Helper) -> bool:
        if self._direct is None:
            directory.make()
            self._direct = is_on_local_disk(str(directory)) and _is_worth_it(directory, nbytes, buffers, helper)
        return self._direct

    def _refused(self) -> None:
        if self._mode == "auto":
            logger.warning("direct writes are refused: later saves of this run are written by TensorStore")
            self._direct = False


def _takes_files(directory: Directory, storage: StorageConfig) -> bool:
    return isinstance(directory, FileDirectory) and storage.compression is None


def _is_worth_it(directory: FileDirectory, nbytes: int, buffers: Buffers, helper: Helper) -> bool:
    """Whether the directory's file system takes direct writes and, where the save is large, is not slower for them.

    Whatever else uses the disk, other processes that probe it at the same time among them, may fall on either of two
    measurements: one round in which direct writes were no slower is enough, and it takes all of them to say otherwise.
    """
    if nbytes < _TIMED_NBYTES:
        return _probe(directory, _content(ALIGNMENT), True, buffers, helper) < math.inf
    content = _content(BLOCK_NBYTES)
    spent, rounds, fast = 0.0, 0, False
    while not fast and (rounds < _PROBE_ROUNDS or spent < _PROBE_SECS):
        direct = _probe(directory, content, True, buffers, helper)
        if direct == math.inf:
            return False
        cached = _probe(directory, content, False, buffers, helper)
        rounds, spent = rounds + 1, spent + direct + cached
        fast = direct <= _TOLERANCE * cached
    logger.info(
        "%s: %.2f GB/s by direct writes, %.2f GB/s through the page cache in round %d: %s",
        directory, *(_PROBE_BLOCKS * BLOCK_NBYTES / 1e9 / secs for secs in (direct, cached)), rounds,
        "direct writes are used" if fast else "TensorStore writes",
    )  # fmt: skip
    return fast


def _content(nbytes: int) -> Value:
    """Of a block of a probe, where it is written from: not zeros, which some storage does not write."""
    content = aligned_buffer(nbytes)
    content.view(np.int64)[:] = np.arange(nbytes // 8)
    return plain_value(content.data)


def _probe(directory: FileDirectory, content: Value, direct: bool, buffers: Buffers, helper: Helper) -> float:
    """Seconds to write by two threads, as engines do, and make it durable; infinity where direct writes are refused."""
    path = str(directory.path / f".probe-{secrets.token_hex(4)}")  # several processes may write to one directory
    nbytes = content.source.nbytes
    begun = time.perf_counter()
    file = DirectFile(path, direct=direct)
    try:
        file.preallocate(_PROBE_BLOCKS * nbytes)
        blocks = (Block(file, k * nbytes, nbytes, [Part(content, 0, nbytes, 0)]) for k in range(_PROBE_BLOCKS))
        BlockWriter({}, buffers, helper).write(blocks)
        file.finish(_PROBE_BLOCKS * nbytes)
        return time.perf_counter() - begun if file.direct == direct else math.inf
    finally:
        file.close()
        os.unlink(path)
