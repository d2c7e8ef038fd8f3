"""The engine for arrays that lie as files on local disks: each chunk is one, large ones written past the page cache.

Most of what a small chunk costs is its file. So files are not made durable one by one, which takes the disk's time for
each and for each directory: once all are written, the file system is asked to sync, once. What other programs have
written to it is synced as well. A small file goes through the page cache, where its few pages cost less than a direct
write's wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flax_rpsave.blocks import Block, BlocksEngine, Part, Value, plain_value
from flax_rpsave.direct_file import ALIGNMENT, BLOCK_NBYTES, DirectFile, sync_file_system
from flax_rpsave.directory import FileDirectory
from flax_rpsave.engine import Written
from flax_rpsave.snapshot import Piece

_DIRECT_NBYTES = 256 << 10  # of files from this size on; measured


class ChunkFilesEngine(BlocksEngine):
    """Writes a process's chunks to files, past the page cache where they are large."""

    def _open(self, directory: FileDirectory, nbytes: int) -> None:
        del nbytes  # each file has its own length
        directory.make()
        self._files = _Files(os.fspath(directory.path))

    def write(self, pieces: Iterable[Piece]) -> None:
        """See `Engine.write`."""
        self._writer.write(self._blocks(self._chunk(piece) for piece in pieces))

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """See `Engine.finish`."""
        self._writer.write(self._blocks(plain_value(data, key) for key, data in self._small(values)))
        self._files.sync()
        if self._files.refused:
            self._on_refusal()
        return self._written

    def close(self) -> None:
        """See `Engine.close`."""
        self._files.close()

    def _blocks(self, values: Iterable[Value]) -> Iterator[Block]:
        """The blocks of each value's file."""
        for value in values:
            assert value.key is not None
            nbytes = value.source.nbytes
            direct = nbytes >= _DIRECT_NBYTES
            file = _ChunkFile(self._files, value.key, nbytes, direct)
            for begin in range(0, nbytes, BLOCK_NBYTES):
                end = min(nbytes, begin + BLOCK_NBYTES)
                length = -(-(end - begin) // ALIGNMENT) * ALIGNMENT if direct else end - begin
                yield Block(file, begin, length, [Part(value, begin, end, 0)])


class _Files:
    """Makes the files of a save, and the directories that they lie in. Used by both threads."""

    def __init__(self, root: str):
        self._root = root
        self._folders = {root}
        self._open: set[DirectFile] = set()
        # Opened before anything is written: the system reports through it what went wrong since.
        self._file_system = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self.refused = False

    def begin(self, key: str, nbytes: int, direct: bool) -> DirectFile:
        """A new file."""
        path = f"{self._root}/{key}"
        self._make(os.path.dirname(path))
        file = DirectFile(path, direct=direct and not self.refused)
        self._open.add(file)
        if nbytes > BLOCK_NBYTES:
            file.preallocate(nbytes)  # else each of its blocks makes it longer, which no two threads can do at once
        return file

    def _make(self, folder: str) -> None:
        if folder in self._folders:
            return
        self._make(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):  # made by the other thread, or another process
            os.mkdir(folder)
        self._folders.add(folder)

    def end(self, file: DirectFile, nbytes: int) -> None:
        """All of a file is written; its length may be too much."""
        file.truncate(nbytes)
        file.close()
        self._open.discard(file)
        if file.refused:
            self.refused = True

    def sync(self) -> None:
        """Makes all files and directories durable."""
        sync_file_system(self._file_system, self._root)

    def close(self) -> None:
        """Closes what is open, after a failure files too."""
        while self._open:
            self._open.pop().close()
        if self._file_system >= 0:
            descriptor, self._file_system = self._file_system, -1
            os.close(descriptor)


class _ChunkFile:
    """A file that either thread may come to first, or last."""

    def __init__(self, files: _Files, key: str, nbytes: int, direct: bool):
        self._files = files
        self._key = key
        self._nbytes = nbytes
        self._direct = direct
        self._blocks_left = -(-nbytes // BLOCK_NBYTES)
        self._file: DirectFile | None = None
        self._changing = threading.Lock()

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """See `BlockFile.write`."""
        with self._changing:
            if self._file is None:
                self._file = self._files.begin(self._key, self._nbytes, self._direct)
        self._file.write(views, offset)
        with self._changing:
            self._blocks_left -= 1
            whole = not self._blocks_left
        if whole:
            self._files.end(self._file, self._nbytes)
