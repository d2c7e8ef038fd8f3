"""The engine for databases on local disks: one data file a process, in which chunks lie one after the other."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from flax_rpsave import ocdbt
from flax_rpsave.blocks import Block, BlockWriter, Buffers, Helper, Part, Value, chunk_value
from flax_rpsave.chunk_bytes import ChunkBytes
from flax_rpsave.direct_file import ALIGNMENT, BLOCK_NBYTES, LARGE_NBYTES, DirectFile
from flax_rpsave.directory import FileDirectory
from flax_rpsave.documents import digest
from flax_rpsave.engine import Written, array_documents, document_digests
from flax_rpsave.planner import LeafPlan
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import MAX_INLINE_NBYTES, OCDBT_MANIFEST

_SMALL_ALIGNMENT = 64  # of values of less than `LARGE_NBYTES`


class DirectEngine:
    """Writes a process's database past the page cache.

    Args:
      directory: Where the database lies.
      plans: Plans of the leaves.
      describe: Whether to write the arrays' documents, of all leaves: one process does.
      checksum: Whether to take digests.
      buffers: Memory for the blocks; no other engine uses it meanwhile.
      helper: The second thread.
      on_refusal: Called where the file system takes no direct writes: these then went through the page cache.
      nbytes: About how many bytes of chunks there will be.
    """

    name = "direct"

    def __init__(
        self,
        directory: FileDirectory,
        plans: Sequence[LeafPlan],
        describe: bool,
        checksum: bool,
        buffers: Buffers,
        helper: Helper,
        on_refusal: Callable[[], None],
        nbytes: int,
    ):
        self._directory = directory
        self._plans = plans
        self._describe = describe
        self._checksum = checksum
        self._on_refusal = on_refusal
        self._written = Written()
        if describe:
            self._written.digests.update(document_digests(plans, checksum))
        self._entries: list[ocdbt.Entry] = []
        self._end = 0
        self._writer = BlockWriter(self._written.digests, buffers, helper)
        self._name = f"d/{secrets.token_hex(16)}"
        (directory / "d").make()
        self._file = DirectFile(os.fspath(directory.path / self._name))
        try:
            self._file.preallocate(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        except OSError:
            self._file.close()
            raise

    @property
    def digests(self) -> Mapping[str, str]:
        """See `Engine.digests`."""
        return self._written.digests

    def write(self, pieces: Iterable[Piece]) -> None:
        """See `Engine.write`."""
        self._writer.write(self._blocks(self._chunks(pieces)))

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """See `Engine.finish`."""
        tail = bytearray()
        documents = array_documents(self._plans) if self._describe else ()
        for key, value in itertools.chain(documents, values.items()):
            if len(value) > MAX_INLINE_NBYTES:
                self._entries.append((key.encode(), ocdbt.Location(self._name, self._end + len(tail), len(value))))
                tail += value
            else:
                self._entries.append((key.encode(), value))
        self._entries.sort(key=lambda entry: entry[0])
        nodes, manifest = ocdbt.encode(
            self._entries,
            self._name,
            self._end + len(tail),
            uuid=secrets.token_bytes(16),
            commit_ns=time.time_ns(),
            max_inline_nbytes=MAX_INLINE_NBYTES,
        )
        source = np.frombuffer(tail + nodes, np.uint8)
        self._writer.write(self._blocks(iter([Value(None, ChunkBytes(source, source.shape))])))
        self._file.finish(self._end)
        if self._file.refused:
            self._on_refusal()
        self._directory.write(OCDBT_MANIFEST, manifest)
        for directory in (self._directory / "d", self._directory, self._directory.parent):
            directory.sync()
        return self._written

    def close(self) -> None:
        """See `Engine.close`."""
        self._file.close()

    def _chunks(self, pieces: Iterable[Piece]) -> Iterator[Value]:
        """The chunks that go to the data file; those that are small enough become entries here."""
        for piece in pieces:
            key, value = chunk_value(piece, self._plans[piece.leaf], self._checksum, self._written)
            if value.source.nbytes > MAX_INLINE_NBYTES:
                yield value
                continue
            inline = np.empty(value.source.nbytes, np.uint8)
            value.source.copy(0, inline)
            self._entries.append((key.encode(), inline.tobytes()))
            if self._checksum:
                self._written.digests[key] = digest(np.ascontiguousarray(piece.data))

    def _blocks(self, values: Iterator[Value]) -> Iterator[Block]:
        """Gives each value its place in the data file; the blocks are in order and without gaps."""
        block = Block(self._file, self._end, BLOCK_NBYTES, [])
        fill = 0
        for value in values:
            nbytes = value.source.nbytes
            alignment = ALIGNMENT if nbytes >= LARGE_NBYTES else _SMALL_ALIGNMENT
            fill = -(-fill // alignment) * alignment
            if value.key is not None:
                place = ocdbt.Location(self._name, block.offset + fill, nbytes)
                self._entries.append((value.key.encode(), place))
            begin = 0
            while begin < nbytes:
                if fill == BLOCK_NBYTES:
                    yield block
                    block, fill = Block(self._file, block.offset + BLOCK_NBYTES, BLOCK_NBYTES, []), 0
                end = min(nbytes, begin + BLOCK_NBYTES - fill)
                block.parts.append(Part(value, begin, end, fill))
                fill, begin = fill + end - begin, end
        block.nbytes = -(-fill // ALIGNMENT) * ALIGNMENT
        self._end = block.offset + block.nbytes
        if block.parts:
            yield block
