"""Directories of documents, on file systems and in object stores: all that the stages above know of a storage system.

On a file system (`renames`) a directory becomes visible by rename, and is durable once it and its parent are synced. In
an object store there is no rename and no directory: a prefix that has a marker object counts as a directory that is
complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tensorstore as ts

from flax_rpsave.errors import ConfigError, CorruptCheckpointError, RPSaveError, StorageError


class Directory(ABC):
    """A directory; `/` gives one in it."""

    renames: bool
    """Whether a directory can be given another name at once."""

    @abstractmethod
    def __truediv__(self, name: str) -> Self: ...

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its path."""

    @property
    @abstractmethod
    def parent(self) -> Self:
        """The directory that has this one."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is something of this name."""

    @abstractmethod
    def make(self) -> None:
        """Makes it and its parents, where they are not there yet."""

    @abstractmethod
    def children(self) -> list[str]:
        """Names of the directories in it, sorted; none where it does not exist."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files in it, sorted; none where it does not exist."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A file's bytes, or None where there is none.

        Raises:
          CorruptCheckpointError: What has that name in a file system is no file, or larger than any document.
        """

    @abstractmethod
    def irregular(self) -> list[str]:
        """Paths in it, at any depth, of what is neither file nor directory: pipes, links to nothing.

        Lists every directory below, which are two for each array that is files of its own.
        """

    @abstractmethod
    def nbytes(self) -> int | None:
        """Bytes of all files in it and below; None where the storage does not tell."""

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """Room for more, in bytes; None where the storage has no end. Quotas may leave less."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes a file durably; its name is durable after `sync`."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    @abstractmethod
    def sync(self) -> None:
        """Makes the names in it durable."""

    @abstractmethod
    def sync_all(self) -> None:
        """Makes the names in it and in all directories below durable."""

    @abstractmethod
    def move_to(self, other: Self) -> None:
        """Gives it another name.

        Raises:
          FileExistsError: There is something of that name.
        """

    @abstractmethod
    def delete(self) -> None:
        """Removes it and all in it; files that go away by themselves meanwhile do no harm."""

    @abstractmethod
    def kvstore(self) -> dict[str, Any]:
        """The TensorStore spec of its files."""


_MOST_NBYTES = 2**30  # of a document: those of a million leaves have less


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file, and a pipe without waiting for who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _leads_to_files(path: str) -> bool:
    """Whether a link leads to a file or a directory."""
    return os.path.isfile(path) or os.path.isdir(path)


@dataclass(frozen=True)
class FileDirectory(Directory):
    """A directory on a file system.

    Attributes:
      path: Absolute.
    """

    path: Path
    renames = True

    def __truediv__(self, name: str) -> FileDirectory:
        return FileDirectory(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:  # noqa: D102 - see Directory
        return self.path.name

    @property
    def parent(self) -> FileDirectory:  # noqa: D102
        return FileDirectory(self.path.parent)

    def exists(self) -> bool:  # noqa: D102
        return os.path.lexists(self.path)

    def make(self) -> None:  # noqa: D102
        self.path.mkdir(parents=True, exist_ok=True)

    def children(self) -> list[str]:  # noqa: D102
        return self._names(directories=True)

    def files(self) -> list[str]:  # noqa: D102
        return self._names(directories=False)

    def _names(self, *, directories: bool) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir() == directories)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes | None:  # noqa: D102
        path = self.path / name
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                if status.st_size > _MOST_NBYTES:
                    raise CorruptCheckpointError(f"{path} has {status.st_size:,} bytes, more than any document")
                if stat.S_ISREG(status.st_mode):
                    return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            pass
        raise CorruptCheckpointError(f"{path} is no regular file")

    def irregular(self) -> list[str]:  # noqa: D102
        found = []
        waiting = [self.path]
        while waiting:
            with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry))
                    elif not entry.is_file(follow_symlinks=False) and not _leads_to_files(entry.path):
                        found.append(str(Path(entry).relative_to(self.path)))
        return sorted(found)

    def nbytes(self) -> int:  # noqa: D102
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a save or a deletion is under way
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def free_nbytes(self) -> int:  # noqa: D102
        return shutil.disk_usage(self.path).free

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:  # noqa: D102
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:  # noqa: D102
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self) -> None:  # noqa: D102
        for folder, _, _ in os.walk(self.path, topdown=False):
            FileDirectory(Path(folder)).sync()

    def move_to(self, other: FileDirectory) -> None:  # noqa: D102
        if other.exists():
            raise FileExistsError(f"{other} exists")
        os.rename(self.path, other.path)
        try:
            other.parent.sync()
        except OSError:  # whoever is told that it failed must not find it there
            os.rename(other.path, self.path)
            raise

    def delete(self) -> None:  # noqa: D102
        if self.path.is_symlink():  # what it leads to is not ours to remove
            self.path.unlink()
        while self.exists():  # a file that vanishes meanwhile ends rmtree: go on with the rest
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)

    def kvstore(self) -> dict[str, Any]:  # noqa: D102
        return {"driver": "file", "path": f"{self.path}/"}


_STALLED = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "256"}
_DENIED = re.compile(r"\b(PERMISSION_DENIED|UNAUTHENTICATED)\b")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, else the AWS profile or the instance's role",
    "gcs": "Google's application default credentials",
}


@dataclass(frozen=True)
class ObjectDirectory(Directory):
    """The objects below a prefix of a bucket.

    Attributes:
      spec: TensorStore's spec of the bucket: driver, bucket, end point.
      prefix: Without slashes around it.
      context: TensorStore resources (credentials, retries).
    """

    spec: dict[str, Any]
    prefix: str
    context: ts.Context = field(compare=False, repr=False)
    renames = False

    def __truediv__(self, name: str) -> ObjectDirectory:
        return ObjectDirectory(self.spec, f"{self.prefix}/{name}".lstrip("/"), self.context)

    def __str__(self) -> str:
        scheme = {"s3": "s3", "gcs": "gs"}[self.spec["driver"]]
        return f"{scheme}://{self.spec['bucket']}/{self.prefix}"

    @property
    def name(self) -> str:  # noqa: D102 - see Directory
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> ObjectDirectory:  # noqa: D102
        return ObjectDirectory(self.spec, self.prefix.rpartition("/")[0], self.context)

    def exists(self) -> bool:  # noqa: D102
        return bool(self._keys())

    def make(self) -> None:
        """Does nothing: a prefix needs no making."""

    def children(self) -> list[str]:  # noqa: D102
        return sorted({key.partition("/")[0] for key in self._keys() if "/" in key})

    def files(self) -> list[str]:  # noqa: D102
        return sorted(key for key in self._keys() if "/" not in key)

    def read(self, name: str) -> bytes | None:  # noqa: D102
        with self._explained(f"{self}/{name} cannot be read"):
            found = self._store().read(name).result()
        return bytes(found.value) if found.state == "value" else None

    def irregular(self) -> list[str]:
        """None: an object is an object."""
        return []

    def nbytes(self) -> None:
        """TensorStore lists objects without their sizes."""

    def free_nbytes(self) -> None:
        """A bucket has no end."""

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        with self._explained(f"{self}/{name} cannot be written"):
            self._store().write(name, data).result()

    def remove(self, name: str) -> None:  # noqa: D102
        with self._explained(f"{self}/{name} cannot be removed"):
            self._store().write(name, None).result()

    def sync(self) -> None:
        """Does nothing: an object is durable once it is written."""

    def sync_all(self) -> None:
        """Does nothing, likewise."""

    def move_to(self, other: ObjectDirectory) -> None:
        """Copies every object and deletes the originals: not at once."""
        if other.exists():
            raise FileExistsError(f"{other} exists")
        for key in self._keys():
            if (data := self.read(key)) is not None:
                other.write(key, data)
        self.delete()

    def delete(self) -> None:  # noqa: D102
        with self._explained(f"{self} cannot be deleted"):
            self._store().delete_range(ts.KvStore.KeyRange()).result()

    def kvstore(self) -> dict[str, Any]:  # noqa: D102
        return {**self.spec, "path": f"{self.prefix}/" if self.prefix else ""}

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turns an error of TensorStore into a `StorageError` that says where credentials come from, if that is it."""
        try:
            with explained(doing, StorageError):
                yield
        except StorageError as error:
            if not _DENIED.search(str(error)):
                raise
            source = _CREDENTIALS[self.spec["driver"]]
            raise StorageError(f"{error} (credentials and their rights come from {source})") from error.__cause__

    def _store(self) -> ts.KvStore:
        return ts.KvStore.open(self.kvstore(), context=self.context).result()

    def _keys(self) -> list[str]:
        with self._explained(f"{self} cannot be listed"):
            return [key.decode() for key in self._store().list().result()]


def open_directory(url: str | os.PathLike[str], context: ts.Context) -> Directory:
    """The directory of a path, or of a URL gs://bucket/… or s3://bucket/….

    The end point and region of s3:// come from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, and AWS_REGION or
    AWS_DEFAULT_REGION; that of gs:// from TENSORSTORE_GCS_HTTP_URL, which TensorStore reads itself. A request that
    stalls is given up, and tried again, as TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS and …_LIMIT_BYTES say; where nobody
    set them, they are set as JAX does on a Cloud TPU, since TensorStore would wait for ever.

    Raises:
      ConfigError: The scheme is another.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FileDirectory(Path(os.path.abspath(os.path.expanduser(text))))
    bucket, _, prefix = rest.partition("/")
    if not bucket or scheme not in ("gs", "s3"):
        raise ConfigError(f"directory {text!r} must be a path, gs://bucket/… or s3://bucket/…")
    for name, value in _STALLED.items():
        os.environ.setdefault(name, value)
    spec: dict[str, Any] = {"driver": "gcs" if scheme == "gs" else "s3", "bucket": bucket}
    if scheme == "s3":
        env = os.environ
        if endpoint := env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"):
            spec["endpoint"] = endpoint.rstrip("/")
        if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"):
            spec["aws_region"] = region
        elif endpoint:
            spec["aws_region"] = "us-east-1"
    return ObjectDirectory(spec, prefix.strip("/"), context)


TENSORSTORE_ERRORS = (ValueError, RuntimeError, NotImplementedError)
"""What TensorStore raises."""


@contextlib.contextmanager
def explained(doing: str, error: type[RPSaveError]) -> Iterator[None]:
    """Turns an error of the operating system, of TensorStore or of storage into `error`, with what was being done."""
    try:
        yield
    except StorageError as cause:
        raise error(f"{doing}: {cause}") from cause
    except RPSaveError:
        raise
    except (OSError, *TENSORSTORE_ERRORS) as cause:
        raise error(f"{doing}: {brief(cause)}") from cause


def brief(error: BaseException) -> str:
    """An error's message without the details (specs, responses) that TensorStore appends to it."""
    return re.split(r" \[\w+='", str(error), maxsplit=1)[0]
