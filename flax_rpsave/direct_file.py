"""A file that is written past the page cache.

Writing through the page cache costs a copy into memory that the kernel must first find, and a second pass of its own
threads over it; on a machine whose cores all compute, that is most of what a save costs. O_DIRECT asks for aligned
memory, offsets and lengths in return. Some file systems refuse it, when the file is opened or only when it is written:
then the same writes go through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

logger = logging.getLogger("flax_rpsave")

ALIGNMENT = 4096  # of memory, offsets and lengths; devices ask for 512 or 4096
BLOCK_NBYTES = 8 << 20
"""What is read or written at once."""
ENGINE_VARIABLE = "RPSAVE_ENGINE"
"""Environment variable: `auto`, `direct` or `tensorstore`."""

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_FALLOCATE = (*_REFUSED, errno.ENOSYS)
# Magic numbers of file systems (statfs(2)) that are on this machine, on a disk.
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlay",
}
_STATFS_NBYTES = 256  # more than any platform's structure

_libc = ctypes.CDLL(None, use_errno=True)


class DirectFile:
    """A new file, written in aligned blocks by any number of threads.

    Args:
      path: Where it lies; must not exist.
      direct: Whether to write past the page cache.

    Attributes:
      direct: Whether writes go past the page cache: False as soon as the file system has refused that.
      refused: Whether it has.

    Raises:
      OSError: It cannot be opened; as every error of a method, it names the path.
    """

    def __init__(self, path: str, *, direct: bool = True):
        self.path = path
        self.direct = direct
        self.refused = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = open_direct(path, flags, self._fall_back) if direct else os.open(path, flags, 0o666)

    def preallocate(self, nbytes: int) -> None:
        """Reserves room, where the file system can; `finish` gives back what was not written.

        Not `posix_fallocate`: where the file system cannot, that writes a byte to each block.
        """
        while nbytes and _libc.fallocate(self._descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
            code = ctypes.get_errno()
            if code in _NO_FALLOCATE:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), self.path)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Writes memory, one view behind the other.

        Args:
          views: At most 1024. Where `direct`, address and length of each are multiples of `ALIGNMENT`.
          offset: Where the first goes; then a multiple as well.
        """
        left = list(views)
        while left:
            direct = self.direct
            try:
                done = os.pwritev(self._descriptor, left, offset)
            except OSError as error:
                if not direct or error.errno not in _REFUSED:
                    raise OSError(error.errno, error.strerror, self.path) from None
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._fall_back(error)  # after that: the other thread may look at any time
                continue
            if not done:
                raise OSError(errno.EIO, "Nothing was written", self.path)
            offset += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def finish(self, nbytes: int) -> None:
        """Makes what was written durable, and the file as long as that."""
        self.truncate(nbytes)
        with self._named():
            os.fsync(self._descriptor)

    def truncate(self, nbytes: int) -> None:
        """Makes the file as long as that; what was written is padded to a multiple of `ALIGNMENT`."""
        with self._named():
            os.ftruncate(self._descriptor, nbytes)

    def close(self) -> None:
        """Closes it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _fall_back(self, error: OSError) -> None:
        if self.direct:
            self.direct, self.refused = False, True
            logger.info("%s is written through the page cache: direct writes are refused (%s)", self.path, error)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None


def engine_mode() -> str:
    """What `RPSAVE_ENGINE` says; `auto` where it is not set, or empty."""
    return os.environ.get(ENGINE_VARIABLE) or "auto"


def open_direct(path: str, flags: int, refused: Callable[[OSError], None] = lambda error: None) -> int:
    """A descriptor with O_DIRECT, or without it where the file system refuses that; `refused` is then told."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        refused(error)
    if flags & os.O_EXCL:
        with contextlib.suppress(FileNotFoundError):  # some file systems make the file, then refuse
            os.unlink(path)
    return os.open(path, flags, 0o666)


def sync_file_system(descriptor: int, path: str) -> None:
    """Makes durable all that was written to a file system, whoever wrote it.

    Args:
      descriptor: Of a file or directory there; what went wrong since it was opened is reported, where
        `reports_lost_writes`.
      path: Its path.

    Raises:
      OSError: Something could not be written.
    """
    if _libc.syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def is_on_local_disk(path: str) -> bool:
    """Whether a directory is on a file system of this machine's disks, not in memory or on a network."""
    return _file_system(path) is not None


def reports_lost_writes(path: str) -> bool:
    """Whether `sync_file_system` says when what was written to the page cache did not reach the disk.

    Linux does so since 5.8, and overlays do not pass on what the file system below them says.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return version >= (5, 8) and _file_system(path) not in (None, "overlay")


def _file_system(path: str) -> str | None:
    """Name of a directory's file system; None for those that are not on a disk of this machine."""
    statfs = ctypes.create_string_buffer(_STATFS_NBYTES)
    if _libc.statfs(os.fsencode(path), statfs):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    magic = int.from_bytes(statfs.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return _LOCAL.get(magic)
