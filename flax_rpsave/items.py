"""The item of a step that holds its state, and the documents of both as they lie there.

A step's directory is its item, or has items in directories of their own: `default` in what this package writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flax_rpsave import documents
from flax_rpsave.directory import Directory
from flax_rpsave.errors import CorruptCheckpointError, NoCheckpointError
from flax_rpsave.reading import reading


@dataclass(frozen=True)
class Documents:
    """The documents of a checkpoint, as they lie there.

    Attributes:
      directory: The step's directory.
      item: The item's directory, which may be the same.
      marker: `commit_success.txt`, or None where there is none.
      found: The others by their path in the step's directory; None for one that is not there.
    """

    directory: Directory
    item: Directory
    marker: bytes | None
    found: Mapping[str, bytes | None]

    def faults(self) -> Iterator[tuple[str, str]]:
        """(name, what is wrong) of each document that is not what was written."""
        if self.marker is not None:
            yield from documents.commit_faults(self.marker, self.found, str(self.directory))

    @property
    def digested(self) -> bool:
        """Whether the marker has digests of the others; that of stock Orbax has none."""
        return self.marker is not None and not documents.is_stock_marker(self.marker)

    def of_item(self, name: str) -> bytes | None:
        """A document of the item."""
        return self.found.get(f"{self.item.name}/{name}" if self.item != self.directory else name)


def read_documents(directory: Directory, item: str | None) -> Documents:
    """Reads the documents of a checkpoint, unchecked.

    Args:
      directory: The step's directory.
      item: Name of the item; None takes the directory itself, `default`, or the only item there is.

    Raises:
      NoCheckpointError: There is no such item, or several and none is named.
      CorruptCheckpointError: There is no item at all, or something in it that is no file.
    """
    with reading(str(directory)):
        place = _find_item(directory, item)
        prefix = f"{place.name}/" if place != directory else ""
        if odd := place.irregular():  # TensorStore would wait for who writes to a pipe
            raise CorruptCheckpointError(f"{place}/{odd[0]} is no regular file")
        marker = directory.read(documents.COMMIT)
        found: dict[str, bytes | None] = {
            name: directory.read(name)
            for name in (
                documents.CHECKPOINT,
                *([documents.METRICS] if prefix else []),  # an item beside this one
                *(f"{prefix}{n}" for n in (documents.TREE, documents.SHARDINGS, documents.STRINGS)),
                *(f"{prefix}{documents.ARRAY_METADATAS}/{n}" for n in (place / documents.ARRAY_METADATAS).files()),
            )
        }
    return Documents(directory, place, marker, found)


def is_checkpoint(directory: Directory) -> bool:
    """Whether a directory is one checkpoint, and not a run's directory of steps."""
    files = directory.files()
    return documents.TREE in files or documents.CHECKPOINT in files


def has_checkpoint(step: Directory) -> bool:
    """Whether a step's directory has a checkpoint in it, and not something else that is named by a number."""
    return is_checkpoint(step) or bool(_items(step))


def _items(directory: Directory) -> list[str]:
    return [name for name in directory.children() if documents.TREE in (directory / name).files()]


def _find_item(directory: Directory, item: str | None) -> Directory:
    if not directory.exists():
        raise NoCheckpointError(f"{directory} does not exist")
    if item is None and documents.TREE in directory.files():
        return directory
    items = _items(directory)
    if item is not None:
        if item not in directory.children() or item == documents.METRICS_ITEM:
            raise NoCheckpointError(f"{directory} has no item {item!r}; it has {items or 'none'}")
        return directory / item
    if "default" in directory.children():
        return directory / "default"
    if len(items) > 1:
        raise NoCheckpointError(f"{directory} has several items, {items}: say which one (item)")
    if not items:
        raise CorruptCheckpointError(f"{directory} has no {documents.TREE}: it is no checkpoint, or a damaged one")
    return directory / items[0]
