"""Blocks of files, which two threads fill from chunks, digest, and write past the page cache.

The threads take the blocks in order. Direct writes want whole pages of memory for pages of the file: what lies in
memory as it will in the file is written from where it lies, and the rest, such as the ends of a chunk, is copied to a
buffer of the thread's own. A digest has to see a chunk's bytes in order, so where a chunk goes on in the next block,
the thread that has that one waits until this part was seen; since blocks are taken in order, there is always one that
need not wait.

The second thread is a `Helper`, which is started with the save: none could be started once the interpreter exits.
"""

from __future__ import annotations

import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from flax_rpsave.chunk_bytes import ChunkBytes
from flax_rpsave.direct_file import ALIGNMENT, BLOCK_NBYTES
from flax_rpsave.directory import FileDirectory
from flax_rpsave.engine import Written, array_documents, document_digests
from flax_rpsave.host_memory import aligned_buffer
from flax_rpsave.planner import LeafPlan
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import chunk_key

IN_PLACE_NBYTES = 256 << 10
"""Values from this size on are written from where they lie: what they lose by beginning within a page is at most 1/64,
and a block is a few dozen views of memory, of which one call writes 1024."""


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


class BlockFile(Protocol):
    """What blocks are written to."""

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Writes memory, one view behind the other; called by either thread, in any order."""


@dataclass(slots=True)
class Value:
    """A value on its way to a file.

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

    @property
    def page_offset(self) -> int | None:
        """Where in a page of the file it has to begin to be written from where it lies; None if that does not pay."""
        memory = self.source.memory
        if memory is None or len(memory) < IN_PLACE_NBYTES:
            return None
        return int(memory.ctypes.data) % ALIGNMENT


def plain_value(data: bytes | bytearray | memoryview, key: str | None = None) -> Value:
    """Bytes that need no digest."""
    source = np.frombuffer(data, np.uint8)
    return Value(key, ChunkBytes(source, source.shape))


@dataclass(slots=True)
class Part:
    """The bytes [begin, end) of a value, which lie at `at` in a block."""

    value: Value
    begin: int
    end: int
    at: int

    def pages(self) -> tuple[int, np.ndarray]:
        """The pages of the block that lie in memory as they will in the file: where they begin, and their bytes."""
        memory = self.value.source.memory
        if memory is None or self.value.page_offset != (self.at - self.begin) % ALIGNMENT:
            return self.at, np.empty(0, np.uint8)
        nbytes = max(0, min(self.end, len(memory)) - self.begin)
        first = min(-self.at % ALIGNMENT, nbytes)
        last = first + (nbytes - first) // ALIGNMENT * ALIGNMENT
        return self.at + first, memory[self.begin + first : self.begin + last]


@dataclass(slots=True)
class Block:
    """A part of a file, of `BLOCK_NBYTES` at most: where it begins, and what lies in it; zeros between the parts."""

    file: BlockFile
    offset: int
    nbytes: int
    parts: list[Part]


class BlockWriter:
    """Writes blocks.

    Args:
      digests: Gets the digests of values by key, as each is complete.
      buffers: Memory for the blocks; nobody else uses it meanwhile.
      helper: The second thread.
    """

    def __init__(self, digests: dict[str, str], buffers: Buffers, helper: Helper):
        self._digests = digests
        self._buffers = buffers
        self._helper = helper
        self._taking = threading.Lock()
        self._digesting = threading.Condition()
        self._error: BaseException | None = None

    def write(self, blocks: Iterator[Block]) -> None:
        """Writes blocks that are made one after the other, by whichever thread takes one; raises what either raised."""
        mine, other = self._buffers
        self._helper.start(lambda: self._work(blocks, other))
        self._work(blocks, mine)
        self._helper.join()
        if self._error is not None:
            raise self._error

    def _work(self, blocks: Iterator[Block], buffer: np.ndarray) -> None:
        """Takes blocks and writes them until there are no more, or the other thread has failed."""
        try:
            while self._error is None:
                with self._taking:
                    block = next(blocks, None)
                if block is None:
                    return
                if (views := self._filled(block, buffer)) is None:
                    return
                block.file.write(views, block.offset)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that began
            with self._digesting:
                self._error = self._error or error
                self._digesting.notify_all()

    def _filled(self, block: Block, buffer: np.ndarray) -> list[memoryview] | None:
        """What a block is written from, in order; None where the other thread has failed."""
        views: list[np.ndarray] = []
        begin = filled = 0  # of the buffer, what is not among them yet
        for part in block.parts:
            buffer[filled : part.at] = 0
            filled = part.at + part.end - part.begin
            at, pages = part.pages()
            behind = at + len(pages)
            for first, last in ((part.at, at), (behind, filled)):
                if last > first:
                    part.value.source.copy(part.begin + first - part.at, buffer[first:last])
            if len(pages):
                views += [buffer[begin:at], pages]
                begin = behind
            if not self._digest(part, buffer[part.at : filled]):
                return None
        buffer[filled : block.nbytes] = 0
        views.append(buffer[begin : block.nbytes])
        return [view.data for view in views if len(view)]

    def _digest(self, part: Part, copied: np.ndarray) -> bool:
        """Takes the digest of a part; False where the other thread has failed."""
        value = part.value
        if value.key is None or value.hasher is None:
            return True
        if part.begin:
            with self._digesting:
                self._digesting.wait_for(lambda: value.digested == part.begin or self._error is not None)
                if self._error is not None:
                    return False
        value.source.digest(value.hasher, part.begin, copied)
        if part.end == value.source.nbytes:
            self._digests[value.key] = value.hasher.hexdigest()
        else:
            with self._digesting:
                value.digested = part.end
                self._digesting.notify_all()
        return True


class BlocksEngine(ABC):
    """What the engines that write blocks have in common.

    Args:
      directory: Where the process's database lies, or the item.
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
        nbytes: int = 0,
    ):
        self._plans = plans
        self._described = plans if describe else ()
        self._checksum = checksum
        self._on_refusal = on_refusal
        self._written = Written(digests=document_digests(self._described, checksum))
        self._writer = BlockWriter(self._written.digests, buffers, helper)
        self._open(directory, nbytes)

    @abstractmethod
    def _open(self, directory: FileDirectory, nbytes: int) -> None:
        """Makes what the blocks go to."""

    @property
    def digests(self) -> Mapping[str, str]:
        """See `Engine.digests`."""
        return self._written.digests

    def _chunk(self, piece: Piece) -> Value:
        """A chunk on its way to a file; it is counted as written."""
        plan = self._plans[piece.leaf]
        key = chunk_key(plan.layout.name, piece.chunk)
        source = ChunkBytes(piece.data, plan.chunk_shape)
        self._written.nbytes += source.nbytes
        self._written.digests[key] = ""
        return Value(key, source, xxhash.xxh3_64() if self._checksum else None)

    def _small(self, values: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """What is written last: the arrays' documents, if this process writes them, and values by their keys."""
        return itertools.chain(array_documents(self._described), values.items())
