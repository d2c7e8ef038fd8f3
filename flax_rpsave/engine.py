"""What puts a process's chunks into storage.

An engine takes chunks by reference, in one or more batches, and small values of its own; `finish` returns what was
written. `TensorStoreEngine` is the one for every store and codec: each batch is one transaction on one database.
`direct` and `chunk_files` have those for local disks, `engines` says which one a save gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from flax_rpsave.config import StorageConfig
from flax_rpsave.directory import Directory
from flax_rpsave.documents import array_digest, digest
from flax_rpsave.planner import LeafPlan
from flax_rpsave.snapshot import Piece
from flax_rpsave.store import array_document, array_spec, chunk_key, database, document_key, open_database


@dataclass
class Written:
    """What an engine wrote.

    Attributes:
      nbytes: Bytes of chunk data, padding included.
      digests: Of each chunk by its key, of the values without padding, and of each array's shape, dtype and chunk shape
        by the key of its document; "" where none was taken.
    """

    nbytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Writes one process's part of one step."""

    name: str

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of the chunks written so far, by key."""

    def write(self, pieces: Iterable[Piece]) -> None:
        """Writes a batch; on return, no piece is referred to any more."""

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """Writes small values beside the arrays, by key; on return, all that was written is durable."""

    def close(self) -> None:
        """Lets go of what it holds, whether or not it has finished."""


class TensorStoreEngine:
    """Writes through TensorStore.

    Args:
      directory: Where the database lies.
      plans: Plans of the leaves.
      describe: Whether to write the arrays' documents, of all leaves: one process does.
      storage: The `storage:` block.
      context: Shared by the run.
    """

    name = "tensorstore"

    def __init__(
        self,
        directory: Directory,
        plans: Sequence[LeafPlan],
        describe: bool,
        storage: StorageConfig,
        context: ts.Context,
    ):
        self._database = database(directory, storage.use_ocdbt)
        self._plans = plans
        self._storage = storage
        self._context = context
        self._written = Written()
        self._describe = describe
        self._undescribed = frozenset(range(len(plans))) if describe else frozenset()
        if describe:
            self._written.digests.update(document_digests(plans, storage.checksum))

    @property
    def digests(self) -> Mapping[str, str]:
        """See `Engine.digests`."""
        return self._written.digests

    def write(self, pieces: Iterable[Piece]) -> None:
        """See `Engine.write`."""
        transaction = ts.Transaction()
        pieces = list(pieces)
        arrays = self._create({piece.leaf for piece in pieces}, transaction)
        pending = []
        for piece in pieces:
            plan = self._plans[piece.leaf]
            key = chunk_key(plan.layout.name, piece.chunk)
            data = piece.data
            self._written.digests[key] = digest(np.ascontiguousarray(data)) if self._storage.checksum else ""
            self._written.nbytes += plan.slice_nbytes
            target = arrays[piece.leaf][plan.chunk_box(piece.chunk)]
            pending.append(target.write(data, can_reference_source_data_indefinitely=True).copy)
        for future in pending:
            future.result()
        transaction.commit_sync()

    def finish(self, values: Mapping[str, bytes]) -> Written:
        """See `Engine.finish`."""
        transaction = ts.Transaction()
        self._create(self._undescribed, transaction)
        store = open_database(self._database, self._context).with_transaction(transaction)
        for future in [store.write(key, value) for key, value in values.items()]:
            future.result()
        transaction.commit_sync()
        return self._written

    def close(self) -> None:
        """Does nothing: nothing is held. See `Engine.close`."""

    def _create(self, leaves: Set[int], transaction: ts.Transaction) -> dict[int, Any]:
        """Opens leaves' arrays for writing; the first time their documents are written, if this process writes them.

        All at once: each asks the store whether there is something, and those that ask together share one request.
        """
        futures = {}
        for leaf in sorted(leaves):
            plan = self._plans[leaf]
            layout = plan.layout
            futures[leaf] = ts.open(
                array_spec(self._database, layout.name, layout.shape, layout.dtype, plan.chunk_shape, self._storage),
                open=True,
                create=self._describe,
                assume_metadata=not self._describe,
                context=self._context,
                transaction=transaction,
            )
        self._undescribed = self._undescribed - leaves
        return {leaf: future.result() for leaf, future in futures.items()}


def document_digests(plans: Sequence[LeafPlan], checksum: bool) -> dict[str, str]:
    """Digests of what the arrays' documents must say, by their keys; "" without checksums."""
    return {
        document_key(plan.layout.name): (
            array_digest(plan.layout.shape, plan.layout.dtype.name, plan.chunk_shape) if checksum else ""
        )
        for plan in plans
    }


def array_documents(plans: Sequence[LeafPlan]) -> Iterator[tuple[str, bytes]]:
    """The arrays' documents by their keys, as TensorStore writes them without compression."""
    for plan in plans:
        layout = plan.layout
        yield document_key(layout.name), array_document(layout.shape, layout.dtype, plan.chunk_shape)
