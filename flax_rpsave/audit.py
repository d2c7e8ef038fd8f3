"""Every byte of a checkpoint that has a digest, compared with it. Needs no device; reads only.

A restore stops at the first thing that is wrong; here all of it is listed, each with the file that it is in: documents,
the nodes of the database (which carry checksums of their own), every chunk of every array, data-iterator states. What
is wrong with the storage rather than with the content (denied, unreachable) ends the audit with its `StorageError`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import tensorstore as ts

from flax_rpsave import commit, documents
from flax_rpsave.directory import Directory
from flax_rpsave.documents import TreeEntry
from flax_rpsave.errors import CorruptCheckpointError
from flax_rpsave.items import Documents, read_documents
from flax_rpsave.nodes import walk
from flax_rpsave.reading import reading
from flax_rpsave.store import (
    OCDBT_MANIFEST,
    chunk_key,
    data_key,
    document_key,
    index_key,
    open_database,
    stored_database,
)
from flax_rpsave.stored import Stored, open_documents


@dataclass(frozen=True)
class Fault:
    """Something in a checkpoint that is not what was written.

    Attributes:
      file: Where it is, below the step's directory.
      leaf: The leaf that it concerns, `/` between the keys; None for what concerns all.
      reason: What is wrong.
    """

    file: str
    leaf: str | None
    reason: str


@dataclass(frozen=True)
class Audit:
    """What was found in one checkpoint.

    Attributes:
      directory: The step's directory.
      step: Its number, if it is a step.
      faults: What is damaged; empty for a sound checkpoint.
      checked: How many "documents", "nodes" (of databases), "leaves", "chunks" and "bytes" (of values) were read and
        found good.
      unverified: How many chunks were read that have no digest: other bytes would not be noticed in them. All, where
        stock Orbax or `checksum: false` wrote them.
    """

    directory: str
    step: int | None
    faults: tuple[Fault, ...]
    checked: Mapping[str, int]
    unverified: int


def audit(directory: Directory, step: int | None, item: str | None, context: ts.Context) -> Audit:
    """Reads and verifies a whole checkpoint.

    Args:
      directory: The step's directory.
      step: Its number.
      item: Name of the item; None takes the only one.
      context: TensorStore resources.

    Raises:
      NoCheckpointError: There is no such item, or several and none is named.
      StorageError: Something cannot be read for a reason other than its content.
    """
    found = _Audit(directory, context)
    found.run(step, item)
    return Audit(str(directory), step, tuple(found.faults), dict(found.checked), found.unverified)


class _Audit:
    def __init__(self, directory: Directory, context: ts.Context):
        self._directory = directory
        self._context = context
        self._files: dict[str, str] = {}  # of each key of the database: where its value is
        self.faults: list[Fault] = []
        self.checked: Counter[str] = Counter(documents=0, nodes=0, leaves=0, chunks=0, bytes=0)
        self.unverified = 0

    def run(self, step: int | None, item: str | None) -> None:
        with reading(str(self._directory)):
            irregular = self._directory.irregular()
        for name in irregular:
            self._add(name, f"{self._directory}/{name} is no regular file")
        if irregular:  # a pipe that is opened waits for who writes to it
            return
        try:
            there = read_documents(self._directory, item)
        except CorruptCheckpointError as error:
            self._add(documents.TREE, error)
            return
        self._prefix = f"{there.item.name}/" if there.item != self._directory else ""
        sound = self._check_documents(there)
        before = len(self.faults)
        self._check_database(there.item, "")
        if len(self.faults) == before:
            self._check_indices(there.item)
        for name in there.item.children():
            if name.startswith(commit.PROCESS_DATABASE):
                self._check_database(there.item / name, name)
        try:
            stored = open_documents(sound, self._context)
        except CorruptCheckpointError as error:
            if not self.faults:  # else that is why
                self._add(self._prefix.rstrip("/"), error)
            return
        if there.marker is None and stored.ours:
            self._add(documents.COMMIT, f"{self._directory}/{documents.COMMIT} is missing")
        if step is not None:
            try:
                stored.check_step(step)
            except CorruptCheckpointError as error:
                self._add(documents.CHECKPOINT, error)
        self._check_data(stored)
        self._check_arrays(stored, self._check_leaves(stored))

    def _add(self, file: str, reason: object, leaf: str | None = None) -> None:
        self.faults.append(Fault(file, leaf, str(reason)))

    def _check_documents(self, there: Documents) -> Documents:
        """Returns the documents that are what was written."""
        damaged = dict(there.faults())
        for name, what in damaged.items():
            self._add(name, what)
        found = {name: data for name, data in there.found.items() if name not in damaged}
        if there.digested:
            self.checked["documents"] += 1 + sum(data is not None for data in found.values())
        if there.item != self._directory and (marker := there.item.read(documents.COMMIT)) is not None:
            for name, what in documents.commit_faults(marker, {}, str(there.item)):
                self._add(f"{self._prefix}{name}", what)
        return dataclasses.replace(there, found=found)

    def _check_database(self, place: Directory, name: str) -> None:
        """Reads every node of a database that the newest version of it has; notes where values are."""
        if OCDBT_MANIFEST not in place.files():
            return
        base = f"{self._prefix}{name}/" if name else self._prefix
        for node in walk(place, self._context, lambda file, error: self._add(base + file, error)):
            self.checked["nodes"] += 1
            if not name:
                for key, value in node.places.items():
                    self._files[key] = base + (node.file if value is None else value.file)

    def _check_indices(self, item: Directory) -> None:
        """The digests themselves, which are sealed. Without those of one process nothing can be verified."""
        store = open_database(stored_database(item, OCDBT_MANIFEST in item.files()), self._context)
        for process in itertools.count():
            try:
                with reading(f"{item}/{index_key(process)}"):
                    found = store.read(index_key(process)).result()
                if found.state != "value":
                    return
                documents.parse_index(found.value, f"{item}/{index_key(process)}")
            except CorruptCheckpointError as error:
                self._add(self._file(index_key(process)), error)
                return

    def _check_data(self, stored: Stored) -> None:
        for process in range(stored.own.get("processes", 0)):
            try:
                stored.data_state(process)
            except CorruptCheckpointError as error:
                self._add(self._file(data_key(process)), error)

    def _check_leaves(self, stored: Stored) -> dict[str, ts.TensorStore]:
        """Opens every array, and looks whether its document and the texts are there."""
        arrays: dict[str, ts.TensorStore] = {}
        for entry in stored.tree.entries:
            try:
                if entry.kind == "string":
                    stored.string(entry)
                elif entry.is_array:
                    arrays.update(stored.open_arrays([entry]))
            except CorruptCheckpointError as error:
                self._add(self._document_file(stored, entry), error, "/".join(entry.path) or "(the root)")
            else:
                self.checked["leaves"] += 1
        return arrays

    def _check_arrays(self, stored: Stored, arrays: Mapping[str, ts.TensorStore]) -> None:
        labels = {entry.name: "/".join(entry.path) or "(the root)" for entry in stored.tree.entries}
        for name, index, nbytes, error in stored.chunk_faults(arrays):
            key = chunk_key(name, index) if stored.tree.use_zarr3 else _zarr2_key(name, index)
            if error is not None:
                self._add(self._file(key), error, labels[name])
            elif stored.digests is None or not stored.digests[key]:
                self.unverified += 1
            else:
                self.checked["chunks"] += 1
                self.checked["bytes"] += nbytes

    def _document_file(self, stored: Stored, entry: TreeEntry) -> str:
        if entry.kind == "string":
            return f"{self._prefix}{documents.STRINGS}"
        if stored.tree.use_zarr3:
            return self._file(document_key(entry.name))
        return self._file("/".join([*([entry.name] if entry.name else []), ".zarray"]))

    def _file(self, key: str) -> str:
        """The file with a key's value: where the database has it, or, where each value is a file, that."""
        return self._files.get(key, f"{self._prefix}{key}")


def _zarr2_key(name: str, index: tuple[int, ...]) -> str:
    return "/".join([*([name] if name else []), ".".join(map(str, index)) or "0"])
