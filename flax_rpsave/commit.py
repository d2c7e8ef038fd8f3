"""How a step becomes visible: whole, or not at all.

On a file system a save goes into `<step>.orbax-checkpoint-tmp-<nonce>/`, a name that stock readers ignore and stock
clean-up removes. When every process has written its part, process 0 merges the databases, writes the documents, syncs
files and directories, and renames the directory to `<step>/`. Until that rename the step does not exist.

A file in it says who writes it. Another run in the same root leaves it alone while that process is alive, and renames
what is dead before it is deleted: a save that goes on all the same then finds its directory gone, and fails.

In an object store nothing can be renamed: a save goes into `<step>/`, which is a step from the moment that
`commit_success.txt` is written, last of all. Until then a file says that it is being written, and by that what an
interrupted save left is known from what others put there. A deletion takes the marker first and that file last, so that
at every instant a step is whole or none, and what is left of it is known.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from flax_rpsave import documents, identity
from flax_rpsave.directory import Directory
from flax_rpsave.errors import CorruptCheckpointError, NoCheckpointError, SaveError
from flax_rpsave.store import database, index_key, open_database

logger = logging.getLogger("flax_rpsave")

_STEP = re.compile(r"[0-9]+")
_PREFIXED = re.compile(r"[^.].*_\d+")
_TMP = ".orbax-checkpoint-tmp"
_DELETED = "deleted-"
_LEFTOVER = re.compile(rf"[0-9]+{re.escape(_TMP)}-({_DELETED})?[0-9a-f]{{8}}")
_PATIENCE_SECS = 3600
_ASIDE = ("abandoned", "damaged", "unfinished")
_WRITING = ".rpsave-writing"
PROCESS_DATABASE = "ocdbt.process_"
"""Each process's own database in an item's directory; the merged one refers to its data files."""


def committed_steps(root: Directory) -> dict[int, str]:
    """Steps that are visible in a run's directory, and the names of their directories, ascending."""
    found = {int(name): name for name in root.children() if _STEP.fullmatch(name)}
    return {step: name for step, name in sorted(found.items()) if is_committed(root / name)}


def warn_of_passed_over(root: Directory) -> None:
    """Names what is called like a step and is none: what is no directory; in an object store, what has no marker."""
    if root.renames:
        if found := [name for name in root.files() if _STEP.fullmatch(name)]:
            logger.warning(
                "%s: %s named like steps, but no directories, so passed over: move them away, or saving a step of that "
                "name will fail", root, ", ".join(found),
            )  # fmt: skip
        return
    places = [root / name for name in root.children() if _STEP.fullmatch(name)]
    if unmarked := [place.name for place in places if not is_committed(place) and not is_leftover(place)]:
        logger.warning(
            "%s: %s without %s, so passed over: not written whole, or by a version of Orbax that writes no marker",
            root, ", ".join(unmarked), documents.COMMIT,
        )  # fmt: skip


def check_unprefixed(root: Directory) -> None:
    """Refuses to begin beside the steps of a stock run with a `step_prefix`, which are not taken for steps here.

    Raises:
      NoCheckpointError: There are such.
    """
    places = [root / name for name in root.children() if _PREFIXED.fullmatch(name)]
    if found := [place.name for place in places if documents.CHECKPOINT in place.files()]:
        raise NoCheckpointError(
            f"{root} has {', '.join(found)}, steps of a run with a step_prefix, which is not read here: rename them to "
            "their numbers, or choose another directory"
        )


def is_committed(step: Directory) -> bool:
    """Whether a directory named as a step is one: a rename made it, or it has its marker."""
    return step.renames or step.read(documents.COMMIT) is not None


def step_number(name: str) -> int | None:
    """The step that a directory of this name is of, or None."""
    return int(name) if _STEP.fullmatch(name) else None


def state_of(place: Directory) -> tuple[int, str] | None:
    """(step, state) of what a run's directory has under a name: see `survey.StepRow`; None for what is no step's."""
    number, _, rest = place.name.partition(".")
    if (step := step_number(number)) is None:
        return None
    if not rest:
        return step, "committed" if is_committed(place) else "incomplete"
    if f".{rest}".startswith(_TMP):
        return step, "deleting" if rest.partition("-tmp-")[2].startswith(_DELETED) else "incomplete"
    why = rest.partition("-")[0]
    return (step, why) if why in _ASIDE else None


def prepare(final: Directory, nonce: str) -> Directory:
    """The directory that a step is to be written to, empty but for the file that says who writes it.

    Raises:
      FileExistsError: Something of the step's name is there already.
      SaveError: Another run is writing it (in an object store; else each has its own).
    """
    place = workplace(final, nonce)
    taken = final.exists() if final.renames else is_committed(final)
    if taken:  # on a file system the rename would find it, too late
        raise FileExistsError(f"{final} exists already and is not overwritten")
    if not final.renames:
        if (writer := final.read(_WRITING)) is not None and identity.state(writer) == "alive":
            raise SaveError(f"{final} is being written by {identity.described(writer)}: give each run its directory")
        if writer is not None:
            discard(final)  # what an interrupted save left of it
        elif final.exists():
            moved = move_aside(final, "unfinished", nonce)
            logger.warning("%s has no %s and is not this package's: moved aside to %s", final, documents.COMMIT, moved)
    place.write(_WRITING, identity.record(nonce))
    return place


def is_prepared(final: Directory, nonce: str) -> bool:
    """Whether `prepare` was called for a save, and what it made is seen from here."""
    record = workplace(final, nonce).read(_WRITING)
    return record is not None and identity.save_of(record) == nonce


def workplace(final: Directory, nonce: str) -> Directory:
    """The directory that a step is written to."""
    return final.parent / f"{final.name}{_TMP}-{nonce}" if final.renames else final


def delete_leftovers(root: Directory, nonce: str, spared: dict[str, float], now: float) -> None:
    """Removes what interrupted saves and deletions of other runs of this package left.

    What a process that is alive writes stays. Where nothing can be known of the process (it was on another machine),
    its save may be under way: it goes once this run has seen it for an hour.

    Args:
      root: The run's directory.
      nonce: Of this run's save, whose directory stays.
      spared: What stays for now, by name: the time at which this run saw it first. Brought up to date.
      now: The time, in seconds of a clock that never goes back.
    """
    before = dict(spared)
    spared.clear()
    for name in root.children():
        place = root / name
        if root.renames:
            left = _LEFTOVER.fullmatch(name) and not name.endswith(f"-{nonce}")
        else:
            left = _STEP.fullmatch(name) and is_leftover(place)
        if not left:
            continue
        writer = place.read(_WRITING)
        known = identity.state(writer)
        since = before.get(name, now)
        if known in ("own", "alive") or (known == "unknown" and now - since < _PATIENCE_SECS):
            if name not in before:
                logger.warning(
                    "%s is being written by %s, or was: left alone; give each run its directory",
                    place, identity.described(writer or b""),
                )  # fmt: skip
            spared[name] = since
            continue
        logger.info("removing %s, left by an interrupted save", place)
        if root.renames and _DELETED not in name:
            doomed = root / name.replace(f"{_TMP}-", f"{_TMP}-{_DELETED}")
            with contextlib.suppress(FileNotFoundError):  # committed or given up this moment
                place.move_to(doomed)
            place = doomed
        discard(place)


def is_leftover(place: Directory) -> bool:
    """Whether a directory in an object store is what an interrupted save or deletion of this package left."""
    return not place.renames and not is_committed(place) and _WRITING in place.files()


def give_up(place: Directory, nonce: str) -> None:
    """Removes what a save wrote that failed, unless another run has taken the directory over meanwhile.

    Writes may still be under way. In an object store they may land after this, so the file stays that says whose they
    are: by it the next run knows them.
    """
    if place.renames or place.read(_WRITING) == identity.record(nonce):
        discard(place, keep_record=True)


def discard(place: Directory, *, keep_record: bool = False) -> None:
    """Deletes a directory that is no step, or shall be none any more.

    Args:
      place: The directory.
      keep_record: Whether the file that says who wrote it stays, in an object store.
    """
    if place.renames:
        place.delete()
        return
    place.remove(documents.COMMIT)
    for name in place.children():
        (place / name).delete()
    for name in place.files():
        if name != _WRITING:
            place.remove(name)
    if not keep_record:
        place.remove(_WRITING)


def merge(item: Directory, processes: int, context: ts.Context) -> ts.KvStore:
    """Makes one database of those of the processes. One that is not there is merged without a word: see `check`.

    All are asked at once, here and in `check`: with many processes, the time in which an object store answers adds up.
    """
    merged = open_database(database(item, True), context)
    transaction = ts.Transaction(atomic=True)
    target = merged.with_transaction(transaction)
    sources = [open_database(database(item / f"{PROCESS_DATABASE}{p}", True), context) for p in range(processes)]
    for copied in [source.experimental_copy_range_to(target) for source in sources]:
        copied.result()
    transaction.commit_sync()
    return merged


def check(store: ts.KvStore, index_digests: Sequence[str]) -> None:
    """Checks that a database has all that the processes wrote.

    Args:
      store: The database.
      index_digests: For each process the digest of its index, as it reported it.

    Raises:
      SaveError: An index or a chunk in it is missing.
    """
    there = set(store.list().result())
    keys = [index_key(process) for process in range(len(index_digests))]
    reads = [store.read(key) for key in keys]
    for process, (key, read, expected) in enumerate(zip(keys, reads, index_digests, strict=True)):
        index = read.result()
        if index.state != "value" or documents.digest(index.value) != expected:
            raise SaveError(
                f"what process {process} wrote is not in {store.url}: is the directory shared by all processes?"
            )
        missing = [k for k in documents.parse_index(index.value, key) if k.encode() not in there]
        if missing:
            raise SaveError(
                f"{len(missing)} chunks of process {process} are not in {store.url}, such as {missing[0]!r}"
            )


def publish(step: Directory, item: Directory, final: Directory, files: Mapping[str, bytes], nonce: str) -> None:
    """Writes the documents and makes the step visible.

    Args:
      step: The directory that it was written to.
      item: The item's directory in it; may be the same.
      final: The step's directory, which must not exist; or `step` itself, where nothing can be renamed.
      files: Documents by their path in `step`.
      nonce: Of this save.

    Raises:
      SaveError: The directory was taken away meanwhile.
    """
    for name, data in files.items():
        step.write(name, data)
    if item != step:
        item.write(documents.COMMIT, documents.build_commit({}))
    if step.read(_WRITING) != identity.record(nonce):  # what was written since would make a step of documents alone
        raise SaveError(f"{step} was taken away while it was written: does another run use {final.parent}?")
    step.write(documents.COMMIT, documents.build_commit(files))
    if step.renames:
        step.sync_all()  # TensorStore syncs the directory of each file, but not that of a directory which it makes
        step.move_to(final)  # with that file: without it the directory would be anybody's to remove, until the rename
    with contextlib.suppress(OSError):  # it is a step: the file tells nothing any more
        final.remove(_WRITING)


def move_aside(step: Directory, why: str, nonce: str) -> Directory:
    """Gives a step's directory a name under which it is no step any more, and returns it.

    Args:
      step: The directory.
      why: "abandoned", "damaged" or "unfinished".
      nonce: Of the run.
    """
    first = f"{step.name}.{why}-{nonce}"
    taken = step.parent.children()
    names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
    target = step.parent / next(name for name in names if name not in taken)
    if step.renames:
        step.move_to(target)
        return target
    marker = step.read(documents.COMMIT)
    step.remove(documents.COMMIT)  # no step any more, before its objects go one by one
    step.move_to(target)
    if marker is not None:
        target.write(documents.COMMIT, marker)
    return target


def hide_step(root: Directory, name: str, nonce: str) -> Directory:
    """A step stops being one, at once; what is returned is to be discarded."""
    if root.renames:
        doomed = workplace(root / name, f"{_DELETED}{nonce}")
        (root / name).move_to(doomed)
    else:
        doomed = root / name
        doomed.write(_WRITING, identity.record(nonce))  # should the deletion be interrupted, it is known what this is
        doomed.remove(documents.COMMIT)
    return doomed


def read_metrics(step: Directory) -> dict[str, Any]:
    """A committed step's metrics; none where their document cannot be read."""
    try:
        if (data := step.read(documents.CHECKPOINT)) is None:
            return {}
        return metrics_of(step, documents.parse_checkpoint(data, f"{step}/{documents.CHECKPOINT}"))
    except CorruptCheckpointError:
        return {}


def metrics_of(step: Directory, parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step whose `_CHECKPOINT_METADATA` has been parsed; stock Orbax has them in their own item only.

    Raises:
      CorruptCheckpointError: That cannot be read.
    """
    if parsed["metrics"] or not parsed["metrics_item"] or (data := step.read(documents.METRICS)) is None:
        return dict(parsed["metrics"])
    return documents.parse_metrics(data, f"{step}/{documents.METRICS}")
