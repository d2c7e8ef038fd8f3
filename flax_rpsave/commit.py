"""How a step becomes visible: whole, or not at all.

A save goes into `<step>.orbax-checkpoint-tmp-<nonce>/`, a name that stock readers ignore and stock clean-up removes.
When every process has written its part, process 0 merges the databases, writes the documents, syncs files and
directories, and renames the directory to `<step>/`. Until that rename the step does not exist.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorstore as ts

from flax_rpsave import documents
from flax_rpsave.errors import CorruptCheckpointError, SaveError
from flax_rpsave.store import Directory, database, open_database

logger = logging.getLogger(__name__)

_STEP = re.compile(r"\d+")
_TMP = ".orbax-checkpoint-tmp"
PROCESS_DATABASE = "ocdbt.process_"
"""Each process's own database in an item's directory; the merged one refers to its data files."""


def committed_steps(root: Directory) -> dict[int, str]:
    """Steps that are visible in a run's directory, and the names of their directories, ascending."""
    found = {int(name): name for name in root.children() if _STEP.fullmatch(name)}
    return dict(sorted(found.items()))


def temporary(root: Directory, step: int | str, nonce: str) -> Directory:
    """The directory that a step is written to."""
    return root / f"{step}{_TMP}-{nonce}"


def delete_leftovers(root: Directory, nonce: str) -> None:
    """Removes what interrupted saves and deletions of earlier runs left. Its own run's directories stay."""
    for name in root.children():
        if re.match(rf"\d+{_TMP}", name) and not name.endswith(f"-{nonce}"):
            logger.info("removing %s, left by an interrupted save", root / name)
            (root / name).delete()


def merge(item: Directory, expected: Iterable[str], processes: int, context: ts.Context) -> None:
    """Makes one database of those of the processes, and checks that it has all that they reported.

    Raises:
      SaveError: A key is missing.
    """
    merged = open_database(database(item, True), context)
    transaction = ts.Transaction(atomic=True)
    target = merged.with_transaction(transaction)
    for process in range(processes):
        source = open_database(database(item / f"{PROCESS_DATABASE}{process}", True), context)
        source.experimental_copy_range_to(target).result()
    transaction.commit_sync()
    check_keys(merged, expected)


def check_keys(store: ts.KvStore, expected: Iterable[str]) -> None:
    """Checks that keys are there.

    Raises:
      SaveError: One is missing.
    """
    there = set(store.list().result())
    missing = sorted(key for key in expected if key.encode() not in there)
    if missing:
        raise SaveError(
            f"{len(missing)} of the reported chunks are not in {store.url}, the first is {missing[0]!r}: "
            "is the directory shared by all processes?"
        )


def publish(step: Directory, item: Directory, final: Directory, files: Mapping[str, bytes]) -> None:
    """Writes the documents and makes the step visible.

    Args:
      step: The temporary directory.
      item: The item's directory in it; may be the same.
      final: The step's directory; must not exist.
      files: Documents by their path in `step`.
    """
    for name, data in files.items():
        step.write(name, data)
    if item != step:
        item.write(documents.COMMIT, documents.build_commit({}))
    step.write(documents.COMMIT, documents.build_commit(files))
    for directory in dict.fromkeys([item / documents.ARRAY_METADATAS, item, step]):
        if directory.exists():
            directory.sync()
    step.move_to(final)


def move_aside(step: Directory, why: str, nonce: str) -> Directory:
    """Gives a step's directory a name under which it is no step any more, and returns it."""
    first = f"{step.name}.{why}-{nonce}"
    taken = step.parent.children()
    names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
    target = step.parent / next(name for name in names if name not in taken)
    step.move_to(target)
    return target


def delete_step(root: Directory, name: str, nonce: str) -> None:
    """Deletes a step: it stops being one at once, its files go after that."""
    doomed = temporary(root, name, f"deleted-{nonce}")
    (root / name).move_to(doomed)
    doomed.delete()


def read_metrics(step: Directory) -> dict[str, Any]:
    """A committed step's metrics; none where its document cannot be read."""
    data = step.read(documents.CHECKPOINT)
    if data is None:
        return {}
    try:
        return dict(documents.parse_checkpoint(data, f"{step}/{documents.CHECKPOINT}")["metrics"])
    except CorruptCheckpointError:
        return {}
