"""The engine for databases on local disks: one data file a process, in which chunks lie one after the other."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from flax_rpsave import ocdbt
from flax_rpsave.blocks import IN_PLACE_NBYTES, Block, BlocksEngine, Part, Value, plain_value
from flax_rpsave.direct_file import ALIGNMENT, BLOCK_NBYTES, DirectFile
from flax_rpsave.directory import FileDirectory
from flax_rpsave.documents import digest
from flax_rpsave.engine import Written
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import MAX_INLINE_NBYTES, OCDBT_MANIFEST

_VALUE_ALIGNMENT = 64  # of values that are not written from where they lie


class DirectEngine(BlocksEngine):
    """Writes a process's database past the page cache."""

    def _open(self, directory: FileDirectory, nbytes: int) -> None:
        self._directory = directory
        self._entries: list[ocdbt.Entry] = []
        self._end = 0
        self._name = f"d/{secrets.token_hex(16)}"
        (directory / "d").make()
        self._file = DirectFile(os.fspath(directory.path / self._name))
        try:
            room = nbytes + nbytes // (IN_PLACE_NBYTES // ALIGNMENT)  # chunks may begin anywhere in a page
            self._file.preallocate(-(-room // ALIGNMENT) * ALIGNMENT)
        except OSError:
            self._file.close()
            raise

    def write(self, pieces: Iterable[Piece]) -> None:
        """See `Engine.write`."""
        self._writer.write(self._blocks(self._chunks(pieces)))

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """See `Engine.finish`."""
        tail = bytearray()
        for key, value in self._small(values):
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
        self._writer.write(self._blocks(iter([plain_value(tail + nodes)])))
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
            value = self._chunk(piece)
            assert value.key is not None
            if value.source.nbytes > MAX_INLINE_NBYTES:
                yield value
                continue
            inline = np.empty(value.source.nbytes, np.uint8)
            value.source.copy(0, inline)
            self._entries.append((value.key.encode(), inline.tobytes()))
            if self._checksum:
                self._written.digests[value.key] = digest(np.ascontiguousarray(piece.data))

    def _blocks(self, values: Iterator[Value]) -> Iterator[Block]:
        """Gives each value its place in the data file; the blocks are in order and without gaps."""
        block = Block(self._file, self._end, BLOCK_NBYTES, [])
        fill = 0
        for value in values:
            nbytes = value.source.nbytes
            if value.key is not None:
                if (wanted := value.page_offset) is not None:
                    fill += (wanted - fill) % ALIGNMENT  # in the next block where this one ends before
                else:
                    fill = -(-fill // _VALUE_ALIGNMENT) * _VALUE_ALIGNMENT
                place = ocdbt.Location(self._name, block.offset + fill, nbytes)
                self._entries.append((value.key.encode(), place))
            begin = 0
            while begin < nbytes:
                if fill >= BLOCK_NBYTES:
                    yield block
                    block, fill = Block(self._file, block.offset + BLOCK_NBYTES, BLOCK_NBYTES, []), fill - BLOCK_NBYTES
                end = min(nbytes, begin + BLOCK_NBYTES - fill)
                block.parts.append(Part(value, begin, end, fill))
                fill, begin = fill + end - begin, end
        block.nbytes = -(-fill // ALIGNMENT) * ALIGNMENT
        self._end = block.offset + block.nbytes
        if block.parts:
            yield block
