"""Where checkpoints lie: directories of documents, and TensorStore specs for the arrays in them.

`Directory` is all that the stages above know of a storage system. A directory on a file system becomes visible by
rename and is durable once it and its parent are synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flax_rpsave.config import StorageConfig
from flax_rpsave.errors import ConfigError, RPSaveError

OCDBT_MANIFEST = "manifest.ocdbt"
PRIVATE_PREFIX = ".rpsave/"
"""Keys of this package beside the arrays; stock readers do not look at them."""

_DATA_FILE_NBYTES = 100 << 20  # several files are written in parallel, and none is too large for one request
_CODECS: Mapping[str | None, list[dict[str, Any]]] = {
    None: [],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "blosc": [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}}],
}


@dataclass(frozen=True)
class Directory:
    """A directory on a file system.

    Attributes:
      path: Absolute.
    """

    path: Path

    def __truediv__(self, name: str) -> Directory:
        return Directory(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def parent(self) -> Directory:
        """The directory that has this one."""
        return Directory(self.path.parent)

    def exists(self) -> bool:
        """Whether there is such a directory."""
        return self.path.is_dir()

    def make(self) -> None:
        """Makes it and its parents, where they are not there yet."""
        self.path.mkdir(parents=True, exist_ok=True)

    def children(self) -> list[str]:
        """Names of the directories in it, sorted; none where it does not exist."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self) -> list[str]:
        """Names of the files in it, sorted; none where it does not exist."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes | None:
        """A file's bytes, or None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file and syncs it; the directory is synced by `sync`."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync(self) -> None:
        """Makes the names in it durable."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def move_to(self, other: Directory) -> None:
        """Gives it another name, at once and durably.

        Raises:
          FileExistsError: There is something of that name.
        """
        if os.path.lexists(other.path):
            raise FileExistsError(f"{other} exists")
        os.rename(self.path, other.path)
        other.parent.sync()

    def delete(self) -> None:
        """Removes it and all in it; files that go away by themselves meanwhile do no harm."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def kvstore(self) -> dict[str, Any]:
        """The TensorStore spec of its files."""
        return {"driver": "file", "path": f"{self.path}/"}


def open_directory(url: str | os.PathLike[str]) -> Directory:
    """The directory that a path names.

    Raises:
      ConfigError: The scheme is not one that can be written.
    """
    text = os.fspath(url)
    if "://" in text:
        raise ConfigError(f"directory {text!r}: only paths of file systems can be written by this version")
    return Directory(Path(os.path.abspath(os.path.expanduser(text))))


def new_context() -> ts.Context:
    """Resources that everything of one run shares: one cache, so that a process writes one database, not hundreds."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 32}})


def database(directory: Directory, use_ocdbt: bool) -> dict[str, Any]:
    """The spec of the key-value store that the arrays of a directory lie in."""
    if not use_ocdbt:
        return directory.kvstore()
    return {
        "driver": "ocdbt",
        "base": directory.kvstore(),
        "config": {"max_inline_value_bytes": 100, "compression": None},
        "target_data_file_size": _DATA_FILE_NBYTES,
    }


def open_database(spec: Mapping[str, Any], context: ts.Context) -> ts.KvStore:
    """Opens a key-value store."""
    return ts.KvStore.open(dict(spec), context=context).result()


def array_spec(
    kvstore: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunk_shape: tuple[int, ...],
    storage: StorageConfig,
) -> dict[str, Any]:
    """The spec of a zarr3 array to be created, each chunk one value of the store.

    `store_data_equal_to_fill_value`: TensorStore would drop chunks that are all zero, such as fresh Adam moments, and a
    reader could not tell them from missing ones.
    """
    return {
        "driver": "zarr3",
        "kvstore": within(kvstore, name),
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, c) for c in chunk_shape]},
            },
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *_CODECS[storage.compression]],
        },
        "store_data_equal_to_fill_value": True,
    }


def chunk_key(name: str, index: tuple[int, ...]) -> str:
    """The key of a chunk of a zarr3 array with the default chunk key encoding."""
    return "/".join([*([name] if name else []), "c", *map(str, index)])


def document_key(name: str) -> str:
    """The key of a zarr3 array's document."""
    return "/".join([*([name] if name else []), "zarr.json"])


def within(kvstore: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The spec of the part of a key-value store whose keys begin with `name/`."""
    prefix = f"{name}/" if name else ""
    return {**kvstore, "path": kvstore.get("path", "") + prefix}


@contextlib.contextmanager
def explained(doing: str, error: type[RPSaveError]) -> Iterator[None]:
    """Turns an error of the operating system or of TensorStore into `error`, with what was being done."""
    try:
        yield
    except RPSaveError:
        raise
    except (OSError, ValueError, RuntimeError, NotImplementedError) as cause:
        raise error(f"{doing}: {brief(cause)}") from cause


def brief(error: BaseException) -> str:
    """An error's message without the spec that TensorStore appends to it."""
    return str(error).partition(" [tensorstore_spec=")[0]
