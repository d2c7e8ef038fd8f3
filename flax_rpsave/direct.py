"""The engine for local disks: one data file a process, written past the page cache by two threads.

Chunks lie in the data file one after the other. The threads take the file's blocks in order: each copies what belongs
into its block to a buffer of its own, aligned as direct writes want it, takes the digests from there, and writes. A
digest has to see a chunk's bytes in order, so where a chunk goes on in the next block, the thread that has that one
waits until this part was seen; since blocks are taken in order, there is always one that need not wait.

The second thread is a `Helper`, which is started with the save: none could be started once the interpreter exits.
"""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from flax_rpsave import ocdbt
from flax_rpsave.chunk_bytes import ChunkBytes
from flax_rpsave.direct_file import ALIGNMENT, BLOCK_NBYTES, LARGE_NBYTES, DirectFile, aligned_buffer
from flax_rpsave.directory import FileDirectory
from flax_rpsave.documents import digest
from flax_rpsave.engine import Written, document_digests
from flax_rpsave.planner import LeafPlan
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import MAX_INLINE_NBYTES, OCDBT_MANIFEST, array_document, chunk_key, document_key

_SMALL_ALIGNMENT = 64  # of values of less than `LARGE_NBYTES`


class Helper:
    """A thread that runs what another one gives it. Start it where threads can be started, and end it.

    Args:
      name: The thread's.
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name)
        self._thread.start()

    def start(self, task: Callable[[], None]) -> None:
        """Begins with a task, which must not raise."""
        self._tasks.put(task)

    def join(self) -> None:
        """Waits until it is done."""
        self._done.get()

    def end(self) -> None:
        """Ends the thread, once it is done with what it was given; returns when it has ended."""
        self._tasks.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                del task  # refers to staging memory, which could then not be reused
                self._done.put(None)


Buffers = tuple[np.ndarray, np.ndarray]
"""The memory that blocks go through, of each thread."""


def new_buffers() -> Buffers:
    """Memory for an engine; it can be used again by the next one."""
    return aligned_buffer(BLOCK_NBYTES), aligned_buffer(BLOCK_NBYTES)


@dataclass(slots=True)
class _Value:
    """A value on its way to the data file.

    Attributes:
      key: Its key; None for what has no entry of its own.
      source: Its bytes.
      hasher: What digests the bytes; None where no digest is taken.
      digested: How many bytes it has seen, those of zeros behind the values included.
    """

    key: str | None
    source: ChunkBytes
    hasher: Any = None
    digested: int = 0


@dataclass(slots=True)
class _Part:
    """The bytes [begin, end) of a value, which lie at `at` in a block."""

    value: _Value
    begin: int
    end: int
    at: int


@dataclass(slots=True)
class _Block:
    """A part of the data file: where it begins, and what lies in it."""

    offset: int
    nbytes: int
    parts: list[_Part]


class DirectEngine:
    """Writes a process's database past the page cache.

    Args:
      directory: Where the database lies.
      plans: Plans of the leaves.
      describe: Whether to write the arrays' documents, of all leaves: one process does.
      checksum: Whether to take digests.
      nbytes: About how many bytes of chunks there will be.
      buffers: Memory for the blocks; no other engine uses it meanwhile.
      helper: The second thread.
      on_refusal: Called where the file system takes no direct writes: these then went through the page cache.
    """

    name = "direct"

    def __init__(
        self,
        directory: FileDirectory,
        plans: Sequence[LeafPlan],
        describe: bool,
        checksum: bool,
        nbytes: int,
        buffers: Buffers,
        helper: Helper,
        on_refusal: Callable[[], None],
    ):
        self._directory = directory
        self._plans = plans
        self._describe = describe
        self._checksum = checksum
        self._buffers = buffers
        self._helper = helper
        self._on_refusal = on_refusal
        self._written = Written()
        if describe:
            self._written.digests.update(document_digests(plans, checksum))
        self._entries: list[ocdbt.Entry] = []
        self._end = 0
        self._taking = threading.Lock()
        self._digesting = threading.Condition()
        self._error: BaseException | None = None
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
        self._write(self._chunks(pieces))

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """See `Engine.finish`."""
        tail = bytearray()
        for key, value in itertools.chain(self._documents(), values.items()):
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
        self._write(iter([_Value(None, ChunkBytes(source, source.shape))]))
        self._file.finish(self._end)
        if not self._file.direct:
            self._on_refusal()
        self._directory.write(OCDBT_MANIFEST, manifest)
        for directory in (self._directory / "d", self._directory, self._directory.parent):
            directory.sync()
        return self._written

    def close(self) -> None:
        """See `Engine.close`."""
        self._file.close()

    def _chunks(self, pieces: Iterable[Piece]) -> Iterator[_Value]:
        """The chunks that go to the data file; those that are small enough become entries here."""
        for piece in pieces:
            plan = self._plans[piece.leaf]
            key = chunk_key(plan.layout.name, piece.chunk)
            source = ChunkBytes(piece.data, plan.chunk_shape)
            self._written.nbytes += source.nbytes
            self._written.digests[key] = ""
            if source.nbytes > MAX_INLINE_NBYTES:
                yield _Value(key, source, xxhash.xxh3_64() if self._checksum else None)
                continue
            inline = np.empty(source.nbytes, np.uint8)
            source.copy(0, inline)
            self._entries.append((key.encode(), inline.tobytes()))
            if self._checksum:
                self._written.digests[key] = digest(np.ascontiguousarray(piece.data))

    def _documents(self) -> Iterator[tuple[str, bytes]]:
        """The arrays' documents, if this process writes them."""
        for plan in self._plans if self._describe else ():
            layout = plan.layout
            yield document_key(layout.name), array_document(layout.shape, layout.dtype, plan.chunk_shape)

    def _write(self, values: Iterator[_Value]) -> None:
        """Appends values to the data file."""
        blocks = self._blocks(values)
        mine, other = self._buffers
        self._helper.start(lambda: self._work(blocks, other))
        self._work(blocks, mine)
        self._helper.join()
        if self._error is not None:
            raise self._error

    def _blocks(self, values: Iterator[_Value]) -> Iterator[_Block]:
        """Gives each value its place in the data file; the blocks are in order and without gaps."""
        block = _Block(self._end, BLOCK_NBYTES, [])
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
                    block, fill = _Block(block.offset + BLOCK_NBYTES, BLOCK_NBYTES, []), 0
                end = min(nbytes, begin + BLOCK_NBYTES - fill)
                block.parts.append(_Part(value, begin, end, fill))
                fill, begin = fill + end - begin, end
        block.nbytes = -(-fill // ALIGNMENT) * ALIGNMENT
        self._end = block.offset + block.nbytes
        if block.parts:
            yield block

    def _work(self, blocks: Iterator[_Block], buffer: np.ndarray) -> None:
        """Takes blocks and writes them until there are no more, or the other thread has failed."""
        try:
            while self._error is None:
                with self._taking:
                    block = next(blocks, None)
                if block is None:
                    return
                filled = 0
                for part in block.parts:
                    buffer[filled : part.at] = 0
                    filled = part.at + part.end - part.begin
                    if not self._fill(part, buffer[part.at : filled]):
                        return
                buffer[filled : block.nbytes] = 0
                self._file.write(buffer[: block.nbytes].data, block.offset)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that began
            with self._digesting:
                self._error = self._error or error
                self._digesting.notify_all()

    def _fill(self, part: _Part, out: np.ndarray) -> bool:
        """Copies a part of a value to a buffer and takes its digest; False where the other thread has failed."""
        value = part.value
        if value.key is None or value.hasher is None:
            value.source.copy(part.begin, out)
            return True
        if part.begin:
            with self._digesting:
                self._digesting.wait_for(lambda: value.digested == part.begin or self._error is not None)
                if self._error is not None:
                    return False
        value.source.copy(part.begin, out)
        value.source.digest(value.hasher, part.begin, out)
        if part.end == value.source.nbytes:
            self._written.digests[value.key] = value.hasher.hexdigest()
        else:
            with self._digesting:
                value.digested = part.end
                self._digesting.notify_all()
        return True
