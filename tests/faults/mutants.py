"""Damaged checkpoints, each made from a whole one by one or two random changes, and what becomes of reading them.

    changed bytes    flipped, overwritten, cut off, added, left out, of another file, deleted, of another step's file
    documents        JSON whose values, keys and nesting are others
    values           of the database, written by TensorStore, so that its own checks find nothing wrong: another key's,
                     cut off, flipped, missing; arrays' documents with other values, such as huge shapes

What must come of it: an error of this package, or the values that were saved. Where nothing in the checkpoint can tell
(`Mutant.defined` is False) the values may be others, but every other promise holds: no foreign exception, no hang, no
crash, no memory without bound. That is so for documents and arrays' documents of what has no digests, which is stock
Orbax's and `checksum: false`, and for documents of ours whose digests were brought in line. The bytes of chunks without
digests are not changed at all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import math
import os
import pathlib
import random
import resource
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import flax_rpsave as rps
from flax_rpsave import cli, documents
from flax_rpsave.directory import open_directory
from flax_rpsave.nodes import walk
from flax_rpsave.store import database, new_context, open_database

LAYOUTS = ("direct", "tensorstore", "files", "direct files", "unchecked", "stock", "stock files")
"""Ours by engine, without a database (files), without digests of chunks (unchecked); those of stock Orbax."""
_WITHOUT_DIGESTS = ("unchecked", "stock", "stock files")
_WITHOUT_DATABASE = ("files", "direct files", "stock files")
HANG_SECS = 60
ROOM_NBYTES = 1 << 30  # address space for one read of a checkpoint of some kilobytes

_DOCUMENTS = ("_METADATA", "_sharding", "_strings.json", "_CHECKPOINT_METADATA", "commit_success.txt", "process_0")
_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**62, 2**64, -(2**63), 10**400, 0.5, 1e308, math.inf, math.nan),
    *("", "x", "\ud800", "\0", "../x", "a" * 5000, "int8", "float64"),
    *([], {}, [None], [[]], {"x": {}}, [2**40], [2**20, 2**20], [2**14, 2**14], [-1], [0]),
)
_DEEP = b"[" * 100_000
_TELLING = (
    "shape",
    "chunk_shape",
    "data_type",
    "codecs",
    "fill_value",
    "value_type",
    "processes",
    "chunks",
    "use_ocdbt",
)


def tree_of(number: int) -> dict[str, Any]:
    """Values in nodes, in data files, in several chunks, and in documents."""
    return {
        "params": {"w": np.arange(700, dtype=np.float32).reshape(100, 7) + number, "b": np.arange(5.0) + number},
        "list": [np.full(40, number, np.int32), {"flag": np.array(True)}],
        "count": number,
        "note": f"checkpoint {number}",
        "empty": {},
    }


def save(directory: pathlib.Path, layout: str, number: int) -> None:
    """Writes a checkpoint; the engine is that of the layout."""
    if layout.startswith("stock"):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=layout == "stock", use_zarr3=True)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, ocp.args.PyTreeSave(tree_of(number)))
        return
    os.environ["RPSAVE_ENGINE"] = "tensorstore" if layout in ("tensorstore", "files") else "direct"
    storage = {"use_ocdbt": layout not in _WITHOUT_DATABASE, "checksum": layout != "unchecked"}
    keys = {"storage": storage, "replica_parallel": {"min_slice_bytes": 100}}
    rps.save(directory, tree_of(number), config=keys)


@dataclass
class Mutant:
    """A checkpoint's files with something changed.

    Attributes:
      files: Bytes by path within the checkpoint.
      others: Those of another checkpoint of the same layout.
      layout: One of `LAYOUTS`.
      chance: Where what is random comes from.
      chunks: Bytes [begin, end) of a file that are a chunk's, by path, where these must stay.
      place: A directory for it.
      done: What was changed.
      defined: Whether the values that are read, if any, must be those that were saved.
    """

    files: dict[str, bytes]
    others: dict[str, bytes]
    layout: str
    chance: random.Random
    chunks: dict[str, list[tuple[int, int]]]
    place: pathlib.Path
    done: list[str] = field(default_factory=list)
    defined: bool = True

    @property
    def without_digests(self) -> bool:
        return self.layout in _WITHOUT_DIGESTS

    def change(self) -> None:
        """Changes something."""
        kinds = [self._bytes] * 3 + [self._document] * 2
        if self.layout not in _WITHOUT_DATABASE:
            kinds.append(self._value)
        self.chance.choice(kinds)()

    def _bytes(self) -> None:
        path = self.chance.choice(sorted(self.files))
        data = self.files[path]
        ways = ["delete", "cut", "append"]
        if not self._has_chunks_without_digests(path):
            ways += ["flip", "overwrite", "insert", "leave out", "other file", "other step"]
        elif self.chunks.get(path):
            ways += ["flip", "overwrite"]
        way = self.chance.choice(ways)
        self.done.append(f"{way} in {path}")
        if self.without_digests and not self._is_of_database(path) and way not in ("delete", "cut"):
            self.defined = False
        if way == "delete":
            del self.files[path]
            return
        if way == "other file":
            data = self.files[self.chance.choice(sorted(self.files))]
        elif way == "other step":
            data = self.others.get(path, b"")
        else:
            data = self._changed(data, way, self.chunks.get(path, []) if self.without_digests else [])
        self.files[path] = data

    def _changed(self, data: bytes, way: str, kept: list[tuple[int, int]]) -> bytes:
        places = [at for at in range(len(data)) if not any(begin <= at < end for begin, end in kept)]
        at = self.chance.choice(places) if places else 0
        some = self.chance.randbytes(self.chance.choice([1, 1, 4, 40, 400]))
        if way == "cut":
            return data[: self.chance.randrange(len(data))] if data else b""
        if way == "append":
            return data + some
        if way == "insert":
            return data[:at] + some + data[at:]
        if way == "leave out":
            return data[:at] + data[at + len(some) :]
        changed = bytearray(data)
        for place in [at] if way == "flip" else range(at, min(len(data), at + len(some))):
            if place < len(data) and (way == "flip" or not any(begin <= place < end for begin, end in kept)):
                changed[place] ^= 1 << self.chance.randrange(8) if way == "flip" else some[place - at]
        return bytes(changed)

    def _has_chunks_without_digests(self, path: str) -> bool:
        return self.without_digests and (bool(self.chunks.get(path)) or "/c/" in path or path.endswith("/c"))

    def _is_of_database(self, path: str) -> bool:
        return path.endswith("manifest.ocdbt") or "/d/" in f"/{path}" or "/c/" in f"/{path}"

    def _document(self) -> None:
        names = [path for path in sorted(self.files) if path.rpartition("/")[2] in (*_DOCUMENTS, "zarr.json")]
        if not names:
            return
        path = self.chance.choice(names)
        before = self.files[path]
        sealed = b"\nxxh3_64:" in before
        text = before.rpartition(b"\nxxh3_64:")[0] if sealed else before
        changed = self._other_json(text)
        if sealed and self.chance.random() < 0.5:
            changed = documents.seal(changed)
        self.files[path] = changed
        self.done.append(f"JSON of {path}")
        if self.without_digests:
            self.defined = False
        elif self.chance.random() < 0.4 and path != documents.COMMIT and documents.COMMIT in self.files:
            marker = self.files[documents.COMMIT]
            old, new = (documents.digest(data).encode() for data in (before, changed))
            if old in marker:
                self.files[documents.COMMIT] = documents.seal(marker.rpartition(b"\nxxh3_64:")[0].replace(old, new))
                self.done.append("its digest brought in line")
                self.defined = False

    def _other_json(self, text: bytes) -> bytes:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # changed before, or no JSON
            return self._changed(text, "flip", [])
        if self.chance.random() < 0.05:
            return self.chance.choice([_DEEP, b'{"tree_metadata": ' + _DEEP, b"", b"null", b"\xff\xfe"])
        places = list(_places(value))
        if not places:
            return json.dumps(self.chance.choice(_ODD)).encode()
        holder, key = self.chance.choice(places)
        if self.chance.random() < 0.3:  # where arrays and trees are large, what decides about them is rarely hit
            telling = [place for place in places if place[1] in _TELLING]
            holder, key = self.chance.choice(telling or places)
        way = self.chance.choice(["odd", "odd", "odd", "missing", "moved", "nested"])
        if way == "missing":
            del holder[key]
        elif way == "moved" and isinstance(holder, dict):
            holder[self.chance.choice(["", "x", "0", key + "x"])] = holder.pop(key)
        elif way == "nested":
            holder[key] = [holder[key]]
        else:
            holder[key] = self.chance.choice(_ODD)
        return json.dumps(value).encode()

    def _value(self) -> None:
        """One value of the database; everything in it then has right checksums again."""
        if "manifest.ocdbt" not in self.files:
            return
        with _placed(self.files, self.place):
            try:
                store = open_database(database(open_directory(self.place, new_context()), True), new_context())
                keys = sorted(store.list().result())
                key = self.chance.choice(keys)
                data = bytes(store.read(key).result().value)
                way = self.chance.choice(["delete", "cut", "flip", "append", "other key", "JSON"])
                is_chunk = not key.endswith((b"zarr.json", b"/index", b"/data"))
                if way == "JSON" or (self.without_digests and is_chunk and way != "delete"):
                    way, key = "JSON", self.chance.choice([key for key in keys if key.endswith(b"zarr.json")])
                    new = self._other_json(bytes(store.read(key).result().value))
                elif way == "other key":
                    new = bytes(store.read(self.chance.choice(keys)).result().value)
                else:
                    new = None if way == "delete" else self._changed(data, way, [])
                store.write(key, new).result()
            except (ValueError, IndexError):  # the database was damaged before
                return
            self.files = _files(self.place)
            self.done.append(f"{way} of {key.decode()} in the database")
            self.defined = self.defined and (not self.without_digests or way == "delete")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _files(directory: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


@contextlib.contextmanager
def _placed(files: dict[str, bytes], directory: pathlib.Path) -> Iterator[None]:
    """The files lie in a directory while the block runs."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # a mutant may have no file


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        )  # fmt: skip
    return type(found) is type(expected) and bool(found == expected)


def _outcome(directory: pathlib.Path, expected: Any, with_target: bool) -> str:
    """ "right", "wrong", or the name of the error; raises every other."""
    try:
        found = rps.load(directory, tree_of(0)) if with_target else rps.load(directory)
    except rps.RPSaveError as error:
        return type(error).__name__
    return "right" if _same(found, expected) else "wrong"


def _looked_at(directory: pathlib.Path) -> int:
    """The exit code of `flax-rpsave verify`; the other commands must end with one, too."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        codes = [
            cli.main([*command, str(place)])
            for command in (
                ["ls"],
                ["ls", "--json"],
                ["inspect"],
                ["inspect", "--json"],
                ["verify", "--json"],
                ["verify"],
            )
            for place in (directory, directory.parent)
        ]
    assert set(codes) <= {0, 1, 2, 3}
    return codes[-2]


def main(folder: pathlib.Path, layout: str, seed: int, first: int, count: int) -> None:
    """Tries mutants of a layout, and prints a JSON line of each; an odd outcome is told, and the next one tried."""
    place = folder / "run" / "7"  # always the same, as a damaged step keeps its name
    originals = []
    for number in (1, 2):
        save(folder / str(number), layout, number)
        originals.append(_files(folder / str(number)))
    files, others = originals
    chunks: dict[str, list[tuple[int, int]]] = {}
    if layout in _WITHOUT_DIGESTS and layout not in _WITHOUT_DATABASE:
        for node in walk(open_directory(folder / "1", new_context()), new_context(), _refuse):
            for value in node.places.values():
                if value is not None:
                    chunks.setdefault(value.file, []).append((value.offset, value.offset + value.nbytes))
    with _placed(files, place):
        expected = {True: rps.load(place, tree_of(0)), False: rps.load(place)}
        assert _same(expected[True], tree_of(1))
        assert _outcome(place, expected[False], False) == "right"
        assert _looked_at(place) == 0
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_NBYTES,) * 2)
    for number in range(first, first + count):
        mutant = Mutant(dict(files), others, layout, random.Random(f"{seed} {layout} {number}"), chunks, place)
        for _ in range(mutant.chance.choice([1, 1, 1, 1, 2])):
            mutant.change()
        with_target = mutant.chance.random() < 0.5
        row = {"number": number, "done": mutant.done, "defined": mutant.defined, "with target": with_target}
        print(json.dumps(row), flush=True)
        faulthandler.dump_traceback_later(HANG_SECS, exit=True)
        with _placed(mutant.files, place):
            try:
                outcome = _outcome(place, expected[with_target], with_target)
                code = _looked_at(place) if number % 4 == 0 else None
            except BaseException:  # noqa: BLE001 - this is what is looked for
                outcome, code = traceback.format_exc(), None
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"number": number, "outcome": outcome, "verified": code}), flush=True)


def _refuse(name: str, error: Exception) -> None:
    raise error
