"""Where values lie: the nodes of an OCDBT database, read one by one, and which is damaged; or files of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from flax_rpsave.directory import Directory
from flax_rpsave.errors import CorruptCheckpointError
from flax_rpsave.reading import reading
from flax_rpsave.store import OCDBT_MANIFEST


@dataclass(frozen=True)
class Place:
    """Where a value lies: in a file, relative to the database's directory, from `offset` on."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Node:
    """What a node says: the file that it lies in itself, and the places of values by key; None: in the node."""

    file: str
    places: Mapping[str, Place | None]


def walk(
    directory: Directory, context: ts.Context, damaged: Callable[[str, CorruptCheckpointError], None]
) -> Iterator[Node]:
    """Reads the manifest and every node of a database that its newest version has; their own checksums are compared.

    Args:
      directory: The database's.
      context: TensorStore resources.
      damaged: Told the file and the error of each that cannot be read; what is below such a node is not reached.

    Raises:
      StorageError: The storage is at fault.
    """
    store = ts.KvStore.open(directory.kvstore(), context=context).result()
    try:
        with _parsing(f"{directory}/{OCDBT_MANIFEST}"):
            root = ts.ocdbt.dump(store, context=context).result()["versions"][-1]["root"]
            waiting = [(_place(root["location"]), str(root["location"]), b"")] if "location" in root else []
    except CorruptCheckpointError as error:
        damaged(OCDBT_MANIFEST, error)
        return
    yield Node(OCDBT_MANIFEST, {})
    while waiting:
        place, location, prefix = waiting.pop()
        places: dict[str, Place | None] = {}
        try:
            with _parsing(f"{directory}/{place.file}: a node of the database"):
                for entry in ts.ocdbt.dump(store, location, context=context).result()["entries"]:
                    if "location" in entry:
                        child = entry["location"]
                        waiting.append((_place(child), str(child), prefix + entry["subtree_common_prefix"]))
                    else:
                        value = entry.get("indirect_value")
                        places[(prefix + entry["key"]).decode()] = None if value is None else _place(value)
        except CorruptCheckpointError as error:
            damaged(place.file, error)
            continue
        yield Node(place.file, places)


def file_of(directory: Directory, key: str) -> Place | None:
    """Where a value lies that is a file of its own in a directory of the file system; None where it cannot be seen."""
    try:
        return Place(key, 0, os.stat(f"{directory}/{key}").st_size)
    except OSError:
        return None


@contextlib.contextmanager
def _parsing(what: str) -> Iterator[None]:
    with reading(what):
        try:
            yield
        except (LookupError, UnicodeDecodeError) as error:
            raise CorruptCheckpointError(f"{what} makes no sense: {error!r}") from error


def _place(location: Any) -> Place:
    """Of a reference as TensorStore prints it: `type:directory:file:offset:length`, its parts quoted."""
    _, directory, file, offset, nbytes = str(location).split(":")
    return Place(unquote(directory) + unquote(file), int(offset), int(nbytes))
